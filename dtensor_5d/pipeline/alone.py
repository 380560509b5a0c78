"""The `.step` of a model that only the pipeline axis has cut: all its ranks agree before the first message is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.stand_in import Zeros
from dtensor_5d.agree import Agreement
from dtensor_5d.batch import BatchRules, MicroBatch, cut_window, fingerprint
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.loss import LossFunction, nothing, own_loss_sum, token_loss_sum
from dtensor_5d.ops import WeightGradients
from dtensor_5d.ops.staged_units import StagedUnits
from dtensor_5d.options import Options
from dtensor_5d.pipeline.runtime import Runtime, Unsharded, without_idle_gathers
from dtensor_5d.pipeline.settings import check_same, numbered, settings_of, unfit_violations
from dtensor_5d.pipeline.sharded import (
    agreed_on_all,
    data_groups,
    leaving_dtype,
    logits_dtype,
    sharding_violations,
    tie_layout,
)
from dtensor_5d.pipeline.split import StageView
from dtensor_5d.pipeline.stage import Forward, Stage
from dtensor_5d.pipeline.staging import Staging
from dtensor_5d.pipeline.ties import summed_ties
from dtensor_5d.pipeline.transport import Transport
from dtensor_5d.schedule import Schedule, lower
from dtensor_5d.schedule.chosen import schedule_of

__all__ = ["Batches", "Steps"]

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_UNITS = "fully_shard (its units, reshard_after_forward, mp_policy, requires_grad)"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Window:
    """What the ranks of the pipeline have agreed to run. dtype: of messages. own_loss: whether any rank has a loss."""

    micro: list[MicroBatch]
    dtype: torch.dtype
    own_loss: bool


class Steps:
    """The `.step` of a model that is cut. device_type: of its mesh."""

    def __init__(
        self, model: nn.Module, decoder: Decoder, staging: Staging, store: WeightGradients, options: Options,
        rules: BatchRules, device_type: str,
    ) -> None:  # fmt: skip
        self.model, self.decoder, self.staging, self.store = model, decoder, staging, store
        self.options, self.rules, self.device_type = options, rules, device_type
        # Settled now: what a config says later is not what the model was cut by.
        self._settings = numbered(settings_of(model, decoder, staging, options))
        self._transport: tuple[torch.device, Transport] | None = None
        self._units: StagedUnits | None = None
        self._has_run = False  # what styles make of the logits shows in the first window

    def __call__(self, batch: Batches, loss: LossFunction | None = None, tokens: int | None = None) -> Tensor:
        # Device and dtype are looked up anew: a model may be cut on meta, or moved afterwards.
        parameter = next(self.model.parameters())
        device = torch.device(self.device_type) if parameter.is_meta else parameter.device
        agreement = Agreement(self.staging.group, self.staging.group.size(), device)
        window = self._agreed(agreement, device, batch, loss, tokens)
        count = sum(micro.tokens for micro in window.micro) if tokens is None else tokens
        problems: list[Exception] = []
        measured = _measured(loss, max(count, 1), problems, self._whole)
        schedule = self._schedule(len(window.micro))
        runtime = Runtime(
            rank=self.staging.rank,
            stages={view.number: self._stage(view, window, measured) for view in self.staging.views},
            transport=self._transport_of(device),
            parameters=self._units or Unsharded(),
            shape=lambda at: (*window.micro[at].runnable()["input_ids"].shape, *self.decoder.hidden),  # type: ignore[arg-type]
            dtype=window.dtype,
            sends_gradient=self.staging.sends_gradient,
        )
        with self._around():
            results = runtime.run(schedule)
        if window.own_loss or not self._has_run:
            self._check_all(agreement, device, problems[0] if problems else None)
        self._has_run = True
        if problems:
            raise problems[0]
        wide = torch.promote_types(window.dtype, torch.float32)
        total = sum(results.values(), torch.zeros((), dtype=wide, device=device))
        dist.all_reduce(total, group=self.staging.group)
        return total

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Around a window. Outside in: ties sum what the data axis has reduced."""
        units = self._units
        try:
            if units is not None:
                units.reshard()
            inside = nullcontext() if units is None else units.window()
            with summed_ties(self.staging.ties, self.staging.group), inside:
                yield
        except BaseException:
            self.store.clear()
            raise

    def _schedule(self, count: int) -> Schedule:
        units = self._units
        built = schedule_of(self.options, ranks=self.staging.group.size(), microbatches=count)
        if units is None:
            return lower(built, None, None)
        lowered = lower(built, "visit" if units.visits else "window", "window")
        return lowered.with_table(without_idle_gathers(row) for row in lowered.table)

    def _agreed(
        self, agreement: Agreement, device: torch.device, batch: Batches, loss: LossFunction | None,
        tokens: int | None,
    ) -> _Window:  # fmt: skip
        """The window that this rank runs, as long as that of every other. Errors: `PlanError` on every rank of the
        pipeline and of the data axis."""
        window = _Window([], torch.float32, False)
        error: Exception | None = None
        try:
            window = self._agreed_in_pipeline(agreement, device, batch, loss, tokens)
        except Exception as problem:
            error = problem
        groups, whole = data_groups(self.model), error is None
        values = len(window.micro), int(window.own_loss)
        try:
            most, own_loss = agreed_on_all(groups, device, error, *values, same=self._same_over_data())
        except Exception as problem:
            error = problem
        if whole and groups:  # what the data ranks of one stage found is news to other stages
            agreement.check(error)
        if error is not None:
            raise error
        if most == 0:
            asked, needs = "step of a window without a batch", "must hold at least 1"
            raise PlanError(Violation(asked, needs, "give step a batch, or leave the step out on all ranks"))
        missing = [MicroBatch.missing(device)] * (most - len(window.micro))
        return _Window(window.micro + missing, window.dtype, bool(own_loss))

    def _agreed_in_pipeline(
        self, agreement: Agreement, device: torch.device, batch: Batches, loss: LossFunction | None,
        tokens: int | None,
    ) -> _Window:  # fmt: skip
        micro: list[MicroBatch] = []
        error: Exception | None = None
        kind = 0
        try:
            self._check(loss, tokens)
            micro = cut_window(batch, self.options.microbatches, self.rules, device)
            kind = self._dtype_number()
        except Exception as problem:
            error = problem
        trained = sum(self.staging.is_trained(view.number) for view in self.staging.views)
        given = -1 if tokens is None or error is not None else tokens
        sharded, cut = int(isinstance(self.model, FSDPModule)), 0 if error else tie_layout(self.staging)
        values = len(micro), fingerprint(micro), given, kind, trained, int(loss is not None), sharded, cut
        every = agreement.check(error, *values, *self._settings.values())
        check_same([*self._settings], [row[len(values) :] for row in every], "the pipeline")
        other = next((rank for rank, row in enumerate(every) if row[:3] != every[0][:3]), None)
        if other is not None:
            asked = f"another batch or another `tokens` on rank {other} of the pipeline than on rank 0"
            raise PlanError(Violation(asked, f"all {len(every)} ranks must give step the same", "read the same rows"))
        if not any(row[4] for row in every):
            asked = "step of a model whose parameters are all frozen"
            raise PlanError(Violation(asked, "1 trainable parameter is required", "set requires_grad=True"))
        own, owned = sum(part.tokens for part in micro), any(row[5] for row in every)
        if tokens is not None and tokens < own and not owned:  # what a loss of the user's is divided by is theirs
            asked, needs = f"tokens={tokens}", f"this pipeline alone has {own} supervised tokens"
            raise PlanError(Violation(asked, needs, "sum them over the data ranks, or leave tokens out"))
        kinds = [row[3] for row in every]
        first = kinds[self.staging.cut.rank_of[0]]
        self._check_alike("fully_shard", [row[6] for row in every], "shard it on all ranks, or on none")
        self._check_alike("tied weights cut", [row[7] for row in every if row[7]], "shard both copies alike")
        self._check_alike("an mp_policy", [k for k in kinds if k >= 0], "give all layers the same mp_policy")
        return _Window(micro, _DTYPES[first], owned)

    def _same_over_data(self) -> dict[str, int]:
        """What ranks with the same stages must have alike."""
        same = {name: number for name, number in self._settings.items() if name != "microbatches"}
        return same | numbered({_UNITS: None if self._units is None else self._units.described()})

    def _check_alike(self, what: str, values: Sequence[int], change: str) -> None:
        """Errors: `PlanError` where stages differ."""
        if len(set(values)) > 1:
            asked = f"{what} on some stages that is not that of others"
            raise PlanError(Violation(asked, f"all {self.staging.group.size()} ranks must do the same", change))

    def _check_all(self, agreement: Agreement, device: torch.device, error: Exception | None) -> None:
        """Errors: on every rank, where any has one."""
        try:
            agreement.check(error)
        except Exception as problem:
            error = problem
        agreed_on_all(data_groups(self.model), device, error, 0)

    def _check(self, loss: LossFunction | None, tokens: int | None) -> None:
        """Errors: `PlanError` where this rank cannot run a window."""
        bad = sharding_violations(self.model, self.staging) + unfit_violations(self.model)
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
        if self._units is None and isinstance(self.model, FSDPModule):
            # A parameter that this rank's rows do not use takes part too, or data ranks would disagree on it.
            self.model.set_reduce_scatter_unused_params(True)
            self._units = StagedUnits(self.model, self.staging.owners, resharding=None)

    def _whole(self, logits: Tensor) -> PlanError | None:
        """What is wrong with logits of a head that a style has cut: the loss takes plain tensors with all columns."""
        head = None if self.decoder.head is None else self.model.get_submodule(self.decoder.head).weight
        if isinstance(logits, DTensor):
            asked = "logits that are a DTensor"
        elif isinstance(head, DTensor) and logits.shape[-1] < head.shape[0]:
            asked = f"logits with {logits.shape[-1]} of {head.shape[0]} columns"
        else:
            return None
        needs = "the loss needs all columns in a plain tensor"
        return PlanError(Violation(asked, needs, "use HeadParallel for the head, or let its style gather"))

    def _dtype_number(self) -> int:
        """That of the dtype of messages: what the units of this rank's layers make of them, or what stage 0 starts
        with; -1 where others must say."""
        dtype = leaving_dtype(self.model, self.decoder, self.staging)
        if dtype is None and self.staging.rank != self.staging.cut.rank_of[0]:
            return -1
        if dtype is None:
            dtype = self.model.get_submodule(self.decoder.embedding).weight.dtype  # type: ignore[assignment]
        if dtype not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise PlanError(Violation(f"a model in {dtype}", f"must be one of {known}", "convert it"))
        return _DTYPES.index(dtype)

    def _transport_of(self, device: torch.device) -> Transport:
        if self._transport is None or self._transport[0] != device:
            self._transport = device, Transport(self.staging.group, device)
        return self._transport[1]

    def _stage(self, view: StageView, window: _Window, measured: Callable[[Tensor, MicroBatch], Tensor]) -> Stage:
        view.refresh()
        for module in view.module.modules():
            if isinstance(module, Zeros):  # without weights that `model.to` would convert
                module.dtype = window.dtype
        ends, wide = view.number + 1 == self.staging.cut.stages, logits_dtype(self.model)

        def forward(at: int, received: Tensor | None) -> Tensor:
            out = view(window.micro[at].runnable(), received)
            return measured(out.logits if wide is None else out.logits.to(wide), window.micro[at]) if ends else out

        made: Forward = forward
        return Stage(view.number, made, self.store, sends_gradient=self.staging.sends_gradient[view.number])


def _measured(
    loss: LossFunction | None, count: int, problems: list[Exception], whole: Callable[[Tensor], PlanError | None]
) -> Callable[[Tensor, MicroBatch], Tensor]:
    """A micro-batch's part of the loss. problems: noted there, since other stages wait for the rest of the window."""

    def measured(logits: Tensor, micro: MicroBatch) -> Tensor:
        problem = whole(logits) if loss is None else None
        if problem is not None:
            problems.append(problem)
            return nothing(_local(logits))
        if micro.tokens == 0 or micro.labels is None:
            return nothing(logits)
        if loss is None:
            return token_loss_sum(logits, micro.labels) / count
        return own_loss_sum(loss, logits, micro.labels, problems) / count

    return measured


def _local(logits: Tensor) -> Tensor:
    return logits.to_local(grad_placements=logits.placements) if isinstance(logits, DTensor) else logits
