"""Which layers a pipeline rank holds, and which parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.blocks import LayerShape, Param
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.plan import Plan
from dtensor_5d.planner.cut import cut_layers, split_layers

if TYPE_CHECKING:
    from dtensor_5d.schedule import Schedule

__all__ = ["Stage", "stages_by_rank"]


@dataclass(frozen=True)
class Stage:
    """One chunk of the model on a rank: its layers, and the embedding or the head where it has them."""

    number: int
    layers: tuple[LayerShape, ...]
    first: tuple[Param, ...]
    last: tuple[Param, ...]
    is_first: bool
    is_last: bool

    @property
    def params(self) -> tuple[Param, ...]:
        return (*self.first, *(p for layer in self.layers for p in layer.params), *self.last)


def stages_by_rank(shape: ModelShape, plan: Plan) -> tuple[tuple[tuple[Stage, ...], ...], Schedule | None]:
    """For every pipeline rank its stages; and the schedule, where there is a pipeline.

    Errors: `PlanError` for layers_per_stage that do not add up, and all that the schedule refuses.
    """
    if plan.degrees.pp == 1:
        counts = plan.options.layers_per_stage or (len(shape.layers),)
        return (tuple(_cut(shape, _checked(shape, counts, 1))),), None
    from dtensor_5d.schedule.chosen import schedule_of

    options = plan.options
    schedule = schedule_of(options, ranks=plan.degrees.pp)
    counts = options.layers_per_stage or cut_layers(shape, schedule.depth)
    cut = _cut(shape, _checked(shape, counts, schedule.depth))
    ranks = tuple(_held(cut, schedule.stages_of(rank)) for rank in range(schedule.ranks))
    return ranks, schedule


def _held(cut: Sequence[Stage], numbers: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of one rank. A parameter that two of them share (a tied embedding under a V schedule) is held once, by
    the first; the second copy of the model that `dualpipe` runs has parameters of its own.
    """
    made: list[Stage] = []
    seen: set[tuple[int, str]] = set()
    for number in numbers:
        copy, place = divmod(number, len(cut))
        stage = cut[place]
        made.append(replace(stage, last=tuple(p for p in stage.last if (copy, p.name) not in seen)))
        seen |= {(copy, p.name) for p in stage.params}
    return tuple(made)


def _checked(shape: ModelShape, counts: Sequence[int], stages: int) -> Sequence[int]:
    if len(counts) == stages and sum(counts) == len(shape.layers):
        return counts
    raise PlanError(
        Violation(
            f"layers_per_stage={list(counts)} (sum {sum(counts)})",
            f"must be {stages} numbers that add up to the {len(shape.layers)} layers",
            f"for example {list(split_layers(len(shape.layers), stages))}",
        )
    )


def _cut(shape: ModelShape, counts: Sequence[int]) -> list[Stage]:
    made, start = [], 0
    for number, count in enumerate(counts):
        first, last = number == 0, number == len(counts) - 1
        tail = shape.last if last else ()
        if last and not first and shape.tied:
            # A tied embedding lives on both ends of the pipeline (once where one rank has both: see `_held`).
            tail = (next(p for p in shape.first if p.part == "embedding"), *tail)
        made.append(
            Stage(number, shape.layers[start : start + count], shape.first if first else (), tail, first, last)
        )
        start += count
    return made
