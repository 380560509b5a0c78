"""From rules to styles: every module that the expert axis cuts, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_5d.expert.check import styled_experts
from dtensor_5d.expert.problems import Problems
from dtensor_5d.expert.style import ExpertParallel
from dtensor_5d.ops import WeightGradients

__all__ = ["apply_rules"]


def apply_rules(
    model: nn.Module, rules: Mapping[str, Any], mesh: DeviceMesh, *, dispatch: str, capacity: float | None,
    same_tokens: DeviceMesh | None, alike: Callable[[], bool], lanes: int | None,
    store: WeightGradients | None = None, overlap: str = "",
) -> Problems:  # fmt: skip
    """Puts the experts of `model` on the ranks of `mesh` (ep, or ep x etp); rules passed `expert_violations`.

    same_tokens: the ranks that hold the same tokens, in forwards of which `alike` says so. lanes: neighbouring ranks of
    ep that share a node; None: all. store: where weight gradients wait. overlap: the child of the blocks around the
    experts that may run while tokens travel, "" for none. Returns where wrong routings are noted. A style of the user's
    says how tokens travel; what it cannot know, of the model's ranks and its `Run`, a copy of it gets.
    """
    problems = Problems()
    plain = ExpertParallel(
        dispatch=dispatch if lanes is not None or dispatch != "two_step" else "all_to_all",
        capacity=capacity, ranks_per_node=lanes,
    )  # fmt: skip
    for name, style in styled_experts(model, rules).items():
        module, child = model.get_submodule(name), None
        block = model.get_submodule(name.rpartition(".")[0])
        if overlap and block._modules.get("experts") is module and block._modules.get(overlap) is not None:
            module, child = block, overlap
        made = (plain if isinstance(style, str) else style).bound(same_tokens, alike, store, problems, child)
        made._apply(module, mesh)
    return problems
