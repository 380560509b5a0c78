"""How a model is cut and what of it is on this rank: made once, before anything else touches the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.pipeline_rules import cut_for
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.options import Options
from dtensor_5d.pipeline.split import Cut, StageView, keep_stages, view_of
from dtensor_5d.pipeline.ties import Tie

__all__ = ["Staging", "stage_model"]


@dataclass(frozen=True)
class Staging:
    """How a model is cut, and what of it this rank has.

    rank: on the pipeline axis. views: of this rank's stages. owners: by stage of this rank, the modules with its
    parameters. ties: weights of which another rank has a copy. sends_gradient: by stage, whether anything before it is
    trained. trained: whether anything is.
    """

    cut: Cut
    rank: int
    group: dist.ProcessGroup
    views: tuple[StageView, ...]
    owners: dict[int, set[nn.Module]]
    ties: tuple[Tie, ...]
    sends_gradient: tuple[bool, ...]
    trained: bool

    @property
    def last_rank(self) -> int:
        """The rank of the pipeline axis that has the last stage."""
        return self.cut.rank_of[-1]

    def is_trained(self, stage: int) -> bool:
        """Whether a stage of this rank has a trainable parameter now."""
        return any(p.requires_grad for module in self.owners[stage] for p in module.parameters(recurse=False))

    def check_trained(self) -> None:
        """Errors: `PlanError` where a stage of this rank is trained now whose gradient no other stage would send."""
        for stage in self.owners:
            silent = stage + 1 < self.cut.stages and not self.sends_gradient[stage + 1]
            if (silent or not self.trained) and self.is_trained(stage):
                asked = f"a trainable parameter in stage {stage}, which was frozen when the model was cut"
                needs = "which gradients stages send is settled then"
                raise PlanError(Violation(asked, needs, "set requires_grad=True before the model is cut"))


def stage_model(
    model: nn.Module, decoder: Decoder, options: Options, mesh: DeviceMesh,
    instead: str = "run.step, run.evaluate or run.logits",
) -> Staging:  # fmt: skip
    """Leaves in `model`, in place, what the stages of this rank have. mesh: of the pipeline axis. instead: what to call
    in place of the model."""
    rank = mesh.get_local_rank()
    cut = cut_for(model, decoder, options, mesh.size())
    named = list(model.named_parameters(remove_duplicate=False))
    training = {cut.owner(decoder, name) for name, p in named if p.requires_grad}
    keep_stages(model, decoder, cut, rank)
    _refuse_whole(model, instead)
    mine = cut.of(rank)
    return Staging(
        cut=cut,
        rank=rank,
        group=mesh.get_group(),
        views=tuple(view_of(model, decoder, cut, stage) for stage in mine),
        owners={stage: _owners(model, decoder, cut, stage) for stage in mine},
        ties=tuple(_ties(model, decoder, cut, rank)),
        sends_gradient=tuple(any(s < stage for s in training) for stage in range(cut.stages)),
        trained=bool(training),
    )


def _refuse_whole(model: nn.Module, instead: str) -> None:
    """Lets nobody run what is left of the model as if it were all of it; views of it share its hooks."""

    def refuse(called: nn.Module, _: object) -> None:
        if called is model:
            asked = "a forward of a model that is cut into pipeline stages"
            raise PlanError(Violation(asked, "no rank has all layers", f"use {instead}"))

    model.register_forward_pre_hook(refuse)


def _owners(model: nn.Module, decoder: Decoder, cut: Cut, stage: int) -> set[nn.Module]:
    outside = {*decoder.before, *decoder.after, *decoder.other}
    return {
        module
        for name, module in model.named_modules()
        if (name in outside or name.startswith(decoder.layers + ".")) and cut.owner(decoder, name) == stage
    }


def _ties(model: nn.Module, decoder: Decoder, cut: Cut, rank: int) -> Iterator[Tie]:
    for group in decoder.ties:
        ranks = {cut.rank_of[cut.owner(decoder, name)]: name for name in reversed(group)}
        if rank in ranks and len(ranks) == 2:
            (peer,) = ranks.keys() - {rank}
            owner, _, leaf = ranks[rank].rpartition(".")
            yield Tie(model.get_submodule(owner), leaf, peer)
