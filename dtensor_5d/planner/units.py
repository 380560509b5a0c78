"""Which parameters are gathered and reduced together: the units of the data axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtensor_5d.degrees import Degrees
from dtensor_5d.families.blocks import Param
from dtensor_5d.plan.patterns import matches, specificity
from dtensor_5d.planner.stages import Stage
from dtensor_5d.planner.state import whole_numel

__all__ = ["Unit", "units_of_stage"]


@dataclass(frozen=True)
class Unit:
    """One unit: numbers it has once gathered, and whether it stays gathered from forward to backward.

    is_experts: it lies over the ranks that the expert axes leave (efsdp).
    """

    name: str
    numel: int
    stays: bool
    is_experts: bool


def units_of_stage(
    stage: Stage, rules: Mapping[str, Any], degrees: Degrees, tied: bool, layer_prefix: str
) -> tuple[Unit, ...]:
    """The units of a stage, in order. Rules of the data axis decide where there are any; otherwise every layer, the
    embedding and the head are units, tied tables stay in the root, and experts that are cut on their own axis or over
    other ranks are units of their own.
    """
    groups: dict[str, list[Param]] = {}
    for param in stage.params:
        groups.setdefault(_unit_name(param, rules, degrees, tied, layer_prefix), []).append(param)
    return tuple(
        Unit(
            name,
            whole_numel(params, degrees),
            stays=name == "root" or any(p.part == "head" for p in params),
            is_experts=all(p.is_expert for p in params),
        )
        for name, params in groups.items()
    )


def _unit_name(param: Param, rules: Mapping[str, Any], degrees: Degrees, tied: bool, layer_prefix: str) -> str:
    if param.is_expert and (degrees.ep > 1 or degrees.etp > 1 or degrees.efsdp != degrees.fsdp):
        return param.name.rpartition(".")[0]
    pieces = param.name.split(".")
    if rules:
        # The innermost module that a rule makes a unit owns the parameter.
        for end in range(len(pieces) - 1, 0, -1):
            module = ".".join(pieces[:end])
            fitting = [pattern for pattern in rules if matches(pattern, module)]
            if fitting:
                style = str(rules[max(fitting, key=specificity)])
                if style.startswith("unit:"):
                    return style
                if style != "root":
                    return module
        return "root"
    if param.name.startswith(layer_prefix):
        return ".".join(pieces[: layer_prefix.count(".") + 1])
    if tied:
        return "root"
    return "unit:head" if param.part in ("head", "norm") else "unit:embedding"
