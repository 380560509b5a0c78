"""The `.step` of a model that only the pipeline axis has cut: all its ranks agree before the first message is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.stand_in import Zeros
from dtensor_5d.agree import Agreement
from dtensor_5d.batch import BatchRules, MicroBatch, cut_window, fingerprint
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.loss import LossFunction, nothing, token_loss_sum
from dtensor_5d.ops import WeightGradients
from dtensor_5d.options import Options
from dtensor_5d.pipeline.runtime import Runtime, Unsharded
from dtensor_5d.pipeline.split import StageView
from dtensor_5d.pipeline.stage import Forward, Stage
from dtensor_5d.pipeline.staging import Staging
from dtensor_5d.pipeline.ties import summed_ties
from dtensor_5d.pipeline.transport import Transport
from dtensor_5d.schedule import build, lower

__all__ = ["Batches", "Steps"]

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Steps:
    """The `.step` of a model that is cut. device_type: of its mesh."""

    def __init__(
        self, model: nn.Module, decoder: Decoder, staging: Staging, store: WeightGradients, options: Options,
        rules: BatchRules, device_type: str,
    ) -> None:  # fmt: skip
        self.model, self.decoder, self.staging, self.store = model, decoder, staging, store
        self.options, self.rules, self.device_type = options, rules, device_type
        self._transport: tuple[torch.device, Transport] | None = None

    def __call__(self, batch: Batches, loss: LossFunction | None = None, tokens: int | None = None) -> Tensor:
        # Device and dtype are looked up anew: a model may be cut on meta, or moved afterwards.
        parameter = next(self.model.parameters())
        device = torch.device(self.device_type) if parameter.is_meta else parameter.device
        agreement = Agreement(self.staging.group, self.staging.group.size(), device)
        window, dtype, own_loss = self._agreed(agreement, device, batch, loss, tokens)
        count = sum(micro.tokens for micro in window) if tokens is None else tokens
        options, ranks = self.options, self.staging.group.size()
        schedule = build(options.schedule, ranks=ranks, microbatches=len(window), chunks=options.chunks)
        problems: list[Exception] = []
        measured = _measured(loss, max(count, 1), problems)
        runtime = Runtime(
            rank=self.staging.rank,
            stages={view.number: self._stage(view, window, measured, dtype) for view in self.staging.views},
            transport=self._transport_of(device),
            parameters=Unsharded(),
            shape=lambda at: (*window[at].runnable()["input_ids"].shape, *self.decoder.hidden),  # type: ignore[arg-type]
            dtype=dtype,
            sends_gradient=self.staging.sends_gradient,
        )
        try:
            with summed_ties(self.staging.ties, self.staging.group):
                results = runtime.run(lower(schedule, None, None))
        except BaseException:
            self.store.clear()
            raise
        if own_loss:
            agreement.check(problems[0] if problems else None)
        total = sum(results.values(), torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=device))
        dist.all_reduce(total, group=self.staging.group)
        return total

    def _agreed(
        self, agreement: Agreement, device: torch.device, batch: Batches, loss: LossFunction | None,
        tokens: int | None,
    ) -> tuple[list[MicroBatch], torch.dtype, bool]:  # fmt: skip
        """The window, the dtype of messages, and whether any rank has a loss function. Errors: `PlanError` on every
        rank."""
        window: list[MicroBatch] = []
        error: Exception | None = None
        kind = 0
        try:
            self._check(loss, tokens)
            window = cut_window(batch, self.options.microbatches, self.rules, device)
            kind = self._dtype_number()
        except Exception as problem:
            error = problem
        trained = sum(self.staging.is_trained(view.number) for view in self.staging.views)
        given = -1 if tokens is None or error is not None else tokens
        own_loss = int(loss is not None)
        every = agreement.check(error, len(window), fingerprint(window), given, kind, trained, own_loss)
        other = next((rank for rank, row in enumerate(every) if row[:3] != every[0][:3]), None)
        if other is not None:
            asked = f"another batch or another `tokens` on rank {other} of the pipeline than on rank 0"
            raise PlanError(Violation(asked, f"all {len(every)} ranks must give step the same", "read the same rows"))
        if not any(row[4] for row in every):
            asked = "step of a model whose parameters are all frozen"
            raise PlanError(Violation(asked, "1 trainable parameter is required", "set requires_grad=True"))
        dtype = _DTYPES[every[self.staging.cut.rank_of[0]][3]]
        return window, dtype, any(row[5] for row in every)

    def _check(self, loss: LossFunction | None, tokens: int | None) -> None:
        """Errors: `PlanError` where this rank cannot run a window."""
        bad: list[Violation] = []
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            bad.append(Violation("fully_shard on a model that PipelineParallel has cut", "its schedule must gather and "
                                 "reduce", "use dtensor_5d.parallelize with pp and dp_shard"))  # fmt: skip
        if any(p.is_meta for p in self.model.parameters()):
            bad.append(Violation("step of a model on meta", "weights must be there first", "use to_empty and load"))
        if not torch.is_grad_enabled():
            bad.append(Violation("step under torch.no_grad()", "gradients are required", "call it with gradients on"))
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            bad.append(Violation(f"tokens={tokens!r}", "must be a whole number >= 0", "sum it over the data ranks"))
        if loss is not None and not callable(loss):
            bad.append(Violation(f"loss={loss!r}", "must be a function of (logits, labels)", "or leave it out"))
        if bad:
            raise PlanError(bad)
        self.staging.check_trained()

    def _dtype_number(self) -> int:
        """That of the dtype that stage 0 computes in; others do not know it."""
        if self.staging.rank != self.staging.cut.rank_of[0]:
            return 0
        dtype = self.model.get_submodule(self.decoder.embedding).weight.dtype
        if dtype not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise PlanError(Violation(f"a model in {dtype}", f"must be one of {known}", "convert it"))
        return _DTYPES.index(dtype)  # type: ignore[arg-type]

    def _transport_of(self, device: torch.device) -> Transport:
        if self._transport is None or self._transport[0] != device:
            self._transport = device, Transport(self.staging.group, device)
        return self._transport[1]

    def _stage(
        self, view: StageView, window: list[MicroBatch], measured: Callable[[Tensor, MicroBatch], Tensor],
        dtype: torch.dtype,
    ) -> Stage:  # fmt: skip
        view.refresh()
        for module in view.module.modules():
            if isinstance(module, Zeros):  # without weights that `model.to` would convert
                module.dtype = dtype
        ends = view.number + 1 == self.staging.cut.stages

        def forward(at: int, received: Tensor | None) -> Tensor:
            out = view(window[at].runnable(), received)
            return measured(out.logits, window[at]) if ends else out

        made: Forward = forward
        return Stage(view.number, made, self.store, sends_gradient=self.staging.sends_gradient[view.number])


def _measured(
    loss: LossFunction | None, count: int, problems: list[Exception]
) -> Callable[[Tensor, MicroBatch], Tensor]:
    """A micro-batch's part of the loss; what the user's function raises is put into `problems`, and the window goes on,
    since other ranks wait for its messages."""

    def measured(logits: Tensor, micro: MicroBatch) -> Tensor:
        if micro.tokens == 0 or micro.labels is None:
            return nothing(logits)
        if loss is None:
            return token_loss_sum(logits, micro.labels) / count
        try:
            value = loss(logits, micro.labels)
            if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
                asked = f"a loss function that returned {value!r}"
                needs = "must return a 0-dim tensor that depends on the logits"
                raise PlanError(Violation(asked, needs, "return the sum over supervised tokens"))
            return value / count
        except Exception as problem:
            problems.append(problem)
            return nothing(logits)

    return measured
