"""`PipelineParallel`: the pipeline axis alone, through torch's own `parallelize_module`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_5d.adapters.decoder import find_decoder
from dtensor_5d.adapters.pipeline_rules import pipeline_violations
from dtensor_5d.batch import BatchRules, MicroBatch, cut_window
from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.loss import LossFunction, nothing, token_loss_sum
from dtensor_5d.ops import WeightGradients, make_deferrable
from dtensor_5d.options import Options
from dtensor_5d.pipeline.runtime import Runtime, Unsharded
from dtensor_5d.pipeline.split import StageView
from dtensor_5d.pipeline.stage import Forward, Stage
from dtensor_5d.pipeline.staging import Staging, stage_model
from dtensor_5d.pipeline.ties import summed_ties
from dtensor_5d.pipeline.transport import Transport
from dtensor_5d.plan import built_violations
from dtensor_5d.schedule import build, lower

__all__ = ["PipelineParallel"]


class PipelineParallel(ParallelStyle):
    """Cuts a Hugging Face causal language model into stages and gives it a `.step`.

    Example:
        >>> model = parallelize_module(model, mesh["pp"], PipelineParallel(schedule="zbv", microbatches=8))
        >>> loss = model.step({"input_ids": ids, "labels": ids})     # the same batch on every rank of the axis
        >>> optimizer.step()                                         # of model.parameters(), this rank's own

    `step(batch, loss=None, tokens=None)`: forward and backward of the batch in `microbatches` parts; the loss on every
    rank, divided by `tokens` (None: the supervised tokens of this batch). Adds to `.grad`; with other ranks around
    this axis, reducing gradients is the caller's part, and `tokens` the sum over all of them. With FSDP2 use
    `dtensor_5d.parallelize`, whose schedule gathers and reduces too.
    Errors: `PlanError` for a model or a schedule that cannot run, before the model is changed.
    """

    def __init__(
        self, *, schedule: str = "1f1b", microbatches: int = 1, chunks: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        counts = None if layers_per_stage is None else tuple(layers_per_stage)
        self.options = Options(schedule=schedule, microbatches=microbatches, chunks=chunks, layers_per_stage=counts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        degrees = Degrees(pp=device_mesh.size())
        if any(isinstance(part, FSDPModule) for part in module.modules()):
            raise PlanError(Violation("PipelineParallel on a model with fully_shard", "its schedule must gather and "
                                      "reduce", "use dtensor_5d.parallelize with pp and dp_shard"))  # fmt: skip
        decoder = find_decoder(module)
        if degrees.pp == 1:
            asked, needs = "PipelineParallel on a mesh of 1 rank", "stages need at least 2"
            raise PlanError(Violation(asked, needs, "leave it out"))
        bad = built_violations(degrees, self.options) + pipeline_violations(module, decoder, degrees, self.options)
        if bad:
            raise PlanError(bad)
        embedding = module.get_submodule(decoder.embedding)
        dtype, vocabulary = embedding.weight.dtype, embedding.num_embeddings
        staging = stage_model(module, decoder, self.options, device_mesh)
        store = WeightGradients()
        make_deferrable(module, store)
        rules = BatchRules(vocab=int(vocabulary))  # type: ignore[arg-type]
        steps = _Steps(module, staging, store, self.options, rules, decoder.hidden, dtype)  # type: ignore[arg-type]
        module.step = steps  # type: ignore[assignment]
        return module


class _Steps:
    """The `.step` of a model that is cut."""

    def __init__(
        self, model: nn.Module, staging: Staging, store: WeightGradients, options: Options, rules: BatchRules,
        hidden: tuple[int, ...], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.model, self.staging, self.store, self.options = model, staging, store, options
        self.rules, self.hidden, self.dtype = rules, hidden, dtype
        self.device = next(model.parameters()).device
        self.transport = Transport(staging.group, self.device)

    def __call__(
        self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], loss: LossFunction | None = None,
        tokens: int | None = None,
    ) -> Tensor:  # fmt: skip
        window = cut_window(batch, self.options.microbatches, self.rules, self.device)
        count = sum(micro.tokens for micro in window) if tokens is None else tokens
        options, ranks = self.options, self.staging.group.size()
        schedule = build(options.schedule, ranks=ranks, microbatches=len(window), chunks=options.chunks)
        runtime = Runtime(
            rank=self.staging.rank,
            stages={view.number: self._stage(view, window, loss, max(count, 1)) for view in self.staging.views},
            transport=self.transport,
            parameters=Unsharded(),
            shape=lambda at: (*window[at].runnable()["input_ids"].shape, *self.hidden),
            dtype=self.dtype,
            sends_gradient=self.staging.sends_gradient,
        )
        try:
            with summed_ties(self.staging.ties, self.staging.group):
                results = runtime.run(lower(schedule, None, None))
        except BaseException:
            self.store.clear()
            raise
        total = sum(results.values(), torch.zeros((), dtype=torch.float32, device=self.device))
        dist.all_reduce(total, group=self.staging.group)
        return total

    def _stage(self, view: StageView, window: list[MicroBatch], loss: LossFunction | None, count: int) -> Stage:
        view.refresh()
        ends = view.number + 1 == self.staging.cut.stages
        measured = _measured(loss or token_loss_sum, count)

        def forward(at: int, received: Tensor | None) -> Tensor:
            out = view(window[at].runnable(), received)
            return measured(out.logits, window[at]) if ends else out

        made: Forward = forward
        return Stage(view.number, made, self.store, sends_gradient=self.staging.sends_gradient[view.number])


def _measured(loss: LossFunction, count: int) -> Callable[[Tensor, MicroBatch], Tensor]:
    def measured(logits: Tensor, micro: MicroBatch) -> Tensor:
        if micro.tokens == 0 or micro.labels is None:
            return nothing(logits)
        return loss(logits, micro.labels) / count

    return measured
