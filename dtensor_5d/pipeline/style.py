"""`PipelineParallel`: the pipeline axis alone, through torch's own `parallelize_module`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_5d.adapters.decoder import find_decoder
from dtensor_5d.adapters.pipeline_rules import pipeline_violations
from dtensor_5d.batch import BatchRules
from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.ops import WeightGradients, make_deferrable
from dtensor_5d.options import Options
from dtensor_5d.pipeline.alone import Steps
from dtensor_5d.pipeline.settings import unfit_violations
from dtensor_5d.pipeline.staging import stage_model
from dtensor_5d.plan import built_violations
from dtensor_5d.schedule import Schedule

__all__ = ["PipelineParallel"]


class PipelineParallel(ParallelStyle):
    """Cuts a Hugging Face causal language model into stages and gives it a `.step`.

    Example:
        >>> model = parallelize_module(model, mesh["pp"], PipelineParallel(schedule="zbv", microbatches=8))
        >>> loss = model.step({"input_ids": ids, "labels": ids})     # the same batch on every rank of the axis
        >>> optimizer.step()                                         # of model.parameters(), this rank's own

    `step(batch, loss=None, tokens=None)`: forward and backward of the batch in `microbatches` parts; the loss on every
    rank, divided by `tokens` (None: the supervised tokens of this batch). Adds to `.grad`. Styles of other axes come
    after this one, and `fully_shard` last: layers, then the model. The schedule steers its units then:
    `reshard_after_forward=True` gathers for each visit, False keeps for the window, each is reduced once, and averaged
    over the data ranks as FSDP2 does (see the README for one mean over the tokens of all). Without it, reducing
    gradients over other ranks is the caller's part.
    Errors: `PlanError` for a model or a schedule that cannot run, before the model is changed; from `step`, on every
    rank before the first message, for a batch that is wrong or not the same on all; after the window for a `loss` that
    failed (drop the gradients then).
    """

    def __init__(
        self, *, schedule: str | Path | Schedule = "1f1b", microbatches: int = 1, chunks: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        counts = None if layers_per_stage is None else tuple(layers_per_stage)
        self.options = Options.of(schedule=schedule, microbatches=microbatches, chunks=chunks, layers_per_stage=counts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        degrees = Degrees(pp=device_mesh.size())
        if any(isinstance(part, FSDPModule) for part in module.modules()):
            raise PlanError(Violation("PipelineParallel on a model with fully_shard", "stages are cut first",
                                      "apply PipelineParallel first, then fully_shard"))  # fmt: skip
        cut = next((name for name, p in module.named_parameters() if isinstance(p, DTensor)), None)
        if cut is not None:
            asked, needs = f"PipelineParallel on a model whose {cut} is a DTensor", "stages are cut first"
            raise PlanError(Violation(asked, needs, "apply PipelineParallel first, then the styles of other axes"))
        if unfit := unfit_violations(module):
            raise PlanError(unfit)
        decoder = find_decoder(module)
        if degrees.pp == 1:
            asked, needs = "PipelineParallel on a mesh of 1 rank", "stages need at least 2"
            raise PlanError(Violation(asked, needs, "leave it out"))
        bad = built_violations(degrees, self.options) + pipeline_violations(module, decoder, degrees, self.options)
        if bad:
            raise PlanError(bad)
        vocabulary: Any = module.get_submodule(decoder.embedding).num_embeddings
        staging = stage_model(module, decoder, self.options, device_mesh, instead="model.step")
        store = WeightGradients()
        make_deferrable(module, store)
        rules = BatchRules(vocab=int(vocabulary))
        steps = Steps(module, decoder, staging, store, self.options, rules, device_mesh.device_type)
        module.step = steps  # type: ignore[assignment]
        return module
