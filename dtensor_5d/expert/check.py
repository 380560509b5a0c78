"""What the rules of the expert axis ask of a model, and where its sizes do not allow it, before any change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.compute import form_of
from dtensor_5d.expert.place import expert_violations_of
from dtensor_5d.expert.style import ExpertParallel, experts_in
from dtensor_5d.options import Options
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


def expert_violations(
    model: nn.Module, rules: Mapping[str, Any], degrees: Degrees, options: Options
) -> list[Violation]:
    """Everything that keeps `model` from having its experts on ep x etp ranks by these rules; layers are told once."""
    found: dict[Violation, None] = {}
    alone = degrees.ep == degrees.etp == 1
    asked = f"tp={degrees.tp}" if alone else f"ep={degrees.ep}, etp={degrees.etp}"
    styled = styled_experts(model, rules)
    for name, style in styled.items():
        generic = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        if type(style) is ExpertParallel:
            found |= dict.fromkeys(_style_violations(style, generic, degrees, options))
        elif style != "dispatch":
            needs = "must be 'dispatch' or an ExpertParallel"
            found[Violation(f"style {style!r} for {name} on the expert axis", needs, "use 'dispatch'")] = None
            continue
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


def _style_violations(style: ExpertParallel, name: str, degrees: Degrees, options: Options) -> list[Violation]:
    """What a user's style says that the plan says otherwise, or that only a `Run` can know."""
    asked = f"rules['ep'][{name!r}] = {style!r}"
    bad = []
    for own in ("dispatch", "capacity"):
        said = options.changed().get(own)
        if said is not None and said != getattr(style, own):
            needs = f"the style has {own}={getattr(style, own)!r}, the plan {own}={said!r}: 1 of them must count"
            change = f"give {own} to the ExpertParallel, and leave the option {own} at its default"
            bad.append(Violation(asked, needs, change))
    for given in ("same_tokens", "store", "problems", "overlap"):
        if getattr(style, given) is not None:
            needs = f"{given} is what the model's own ranks, run and family say, in a plan"
            bad.append(Violation(f"{asked} with {given}", needs, f"leave {given} at None"))
    lanes = style.ranks_per_node
    if style.dispatch == "two_step" and lanes and degrees.ep > 0 and degrees.ep % lanes:
        needs = f"ranks_per_node={lanes} must divide ep={degrees.ep}"
        bad.append(Violation(asked, needs, "use a ranks_per_node that divides ep, or dispatch='all_to_all'"))
    return bad


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
