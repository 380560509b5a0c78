"""From rules to styles: every module that the expert axis cuts, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_5d.expert.check import styled_experts
from dtensor_5d.expert.style import ExpertParallel
from dtensor_5d.ops import WeightGradients

__all__ = ["ExpertState", "apply_rules"]


@dataclass
class ExpertState:
    """What the experts of a model share with its `Run`. problems: what was wrong with the routing of a window."""

    problems: list[Exception] = field(default_factory=list)

    def taken(self) -> Exception | None:
        """The first problem since the last call, or None."""
        first = self.problems[0] if self.problems else None
        self.problems.clear()
        return first


def apply_rules(
    model: nn.Module, rules: Mapping[str, Any], mesh: DeviceMesh, *, dispatch: str, capacity: float | None,
    same_tokens: DeviceMesh | None, lanes: int | None, store: WeightGradients | None = None,
) -> ExpertState:  # fmt: skip
    """Puts the experts of `model` on the ranks of `mesh` (ep, or ep x etp); rules passed `expert_violations`.

    same_tokens: the ranks that hold the same tokens. lanes: neighbouring ranks of ep that share a node; None: all.
    store: where weight gradients wait.
    """
    state = ExpertState()
    plain = ExpertParallel(
        dispatch=dispatch if lanes is not None or dispatch != "two_step" else "all_to_all",
        capacity=capacity, ranks_per_node=lanes, same_tokens=same_tokens, store=store,
        problems=state.problems,
    )  # fmt: skip
    for name, style in styled_experts(model, rules).items():
        made = plain if isinstance(style, str) else style
        made._apply(model.get_submodule(name), mesh)
    return state
