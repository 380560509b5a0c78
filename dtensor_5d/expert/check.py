"""What the rules of the expert axis ask of a model, and where its sizes do not allow it, before any change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.compute import form_of
from dtensor_5d.expert.place import expert_violations_of
from dtensor_5d.expert.style import experts_in
from dtensor_5d.plan import matches
from dtensor_5d.plan.patterns import specificity

__all__ = ["expert_violations", "node_violations", "styled_experts"]


def styled_experts(model: nn.Module, rules: Mapping[str, Any]) -> dict[str, Any]:
    """Module name -> its style: that of the most specific pattern that fits."""
    found = {}
    for name, _ in model.named_modules():
        fitting = [pattern for pattern in rules if matches(pattern, name)]
        if fitting:
            found[name] = rules[max(fitting, key=specificity)]
    return found


def expert_violations(model: nn.Module, rules: Mapping[str, Any], degrees: Degrees) -> list[Violation]:
    """Everything that keeps `model` from having its experts on ep x etp ranks by these rules; layers are told once."""
    found: dict[Violation, None] = {}
    asked = f"ep={degrees.ep}, etp={degrees.etp}"
    styled = styled_experts(model, rules)
    for name, style in styled.items():
        if style != "dispatch" and not isinstance(style, ParallelStyle):
            needs = "must be 'dispatch' or a ParallelStyle"
            found[Violation(f"style {style!r} for {name} on the expert axis", needs, "use 'dispatch'")] = None
            continue
        generic = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        try:
            experts, _ = experts_in(model.get_submodule(name))
            form = form_of(experts, generic)
        except PlanError as error:
            found |= dict.fromkeys(Violation(f"{asked}: {v.asked}", v.required, v.change) for v in error.violations)
            continue
        found |= dict.fromkeys(expert_violations_of(experts, form, degrees.ep, degrees.etp, generic))
    if not styled:
        kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        needs = "experts are needed to put on the ranks of ep, and this model is dense: it has 0"
        found[Violation(f"{asked} for {kind}", needs, "use ep=1 and etp=1; dp_shard shards a dense model")] = None
    return list(found)


def node_violations(ranks_per_node: int | None, lanes: int | None, ep: int) -> list[Violation]:
    """Why tokens cannot go to their experts in two steps; lanes: ranks of ep that share a node, None: all."""
    asked, change = "dispatch='two_step'", "use dispatch='all_to_all'"
    if ranks_per_node is None:
        needs = "the mesh must know how many ranks share a node"
        return [Violation(asked, needs, f"give build_mesh(..., ranks_per_node=n), or {change}")]
    if lanes is not None and ep % lanes:
        needs = f"the {lanes} ranks of ep on a node must divide ep={ep}"
        return [Violation(f"{asked} on nodes of {ranks_per_node} ranks", needs, change)]
    return []
