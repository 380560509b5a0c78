"""One entry for all schedules: names, rules, and the refusals that name them."""

from __future__ import annotations

import difflib
import math
import reprlib
from dataclasses import dataclass
from typing import Any

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.options import SCHEDULES
from dtensor_5d.schedule.actions import Action
from dtensor_5d.schedule.costs import LARGEST, Costs, costs_violation, plain
from dtensor_5d.schedule.data import Schedule, loop_map, v_map
from dtensor_5d.schedule.simulate import simulate

__all__ = ["MemoryLimitError", "build", "rounded_up", "stage_ranks"]


class MemoryLimitError(PlanError):
    """A schedule holds more than `memory_limit`; its numbers as data, for those who count in another unit.

    `needed`: the smallest limit that this schedule keeps, in units of one micro-batch on one chunk. `others`: the
    schedules that keep the limit which was asked for.
    """

    def __init__(self, name: str, limit: float, needed: float, others: tuple[str, ...]) -> None:
        self.name, self.limit, self.needed, self.others = name, limit, needed, others
        instead = f", or use {' or '.join(map(repr, others))}" if others else ""
        super().__init__(
            Violation(
                f"memory_limit={limit} with schedule={name!r}",
                f"it needs at least {rounded_up(needed)} micro-batches of one chunk",
                f"raise the limit to {rounded_up(needed)}{instead}",
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.limit, self.needed, self.others)


def rounded_up(value: float) -> str:
    """A number with at most four digits behind the point that is never below `value`: what it asks for suffices."""
    return f"{math.ceil(round(value * 1e4, 3)) / 1e4:.4f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class _Shape:
    """What a schedule asks for. `chunks`: the number it needs, or None for any, by default 2."""

    chunks: int | None = 1
    v: bool = False
    copies: int = 1
    least_per_rank: int = 0
    even: bool = False


_SHAPES = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto"), _Shape()),
    **dict.fromkeys(("zbv", "v-half", "v-min"), _Shape(chunks=2, v=True)),
    "interleaved": _Shape(chunks=None),
    "dualpipe": _Shape(chunks=2, v=True, copies=2, least_per_rank=2, even=True),
    "dualpipev": _Shape(chunks=2, v=True, least_per_rank=2),
}


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """A schedule by name.

    Example:
        >>> build("zb-auto", ranks=8, microbatches=32, costs=Costs(29.8, 29.4, 19.5, 0.6), memory_limit=16)

    | name | chunks a rank | micro-batches | peak in chunks (rank 0) |
    | gpipe | 1 | any | m |
    | 1f1b, zb-h1 | 1 | any | p |
    | zb-h2 | 1 | any | 2p - 1 |
    | zb-auto | 1 | any | `memory_limit`, by default 2p; from 1 on |
    | interleaved | v, by default 2 | any | vp + p - 1 |
    | zbv | 2, in a V | any | `memory_limit`, by default 2p; from 2 on |
    | v-half, v-min | 2, in a V | any | 2 floor((p + 2) / 2), 2 floor((p + 4) / 3) |
    | dualpipe | 2 copies of 1; p even | even, at least 2p | p + 1 |
    | dualpipev | 2, in a V | at least 2p | 2p + 1 |

    `costs` (of one chunk; by default all 1) shape zb-auto, zbv, v-half and v-min; `memory_limit` (in units of one
    micro-batch on one chunk; `inf` for no limit) shapes zb-auto and zbv. The others are what they are, and are refused
    if they need more than the limit. Where I stores more than it frees (`Costs.input_release` below 0) even one
    micro-batch needs that much more.
    Errors: `PlanError` for everything that the table does not allow, with the nearest legal value.
    """
    memory_limit = plain(memory_limit)
    _check_request(name, ranks, microbatches, chunks, costs, memory_limit)
    shape = _SHAPES[name]
    chunks = chunks or shape.chunks or 2
    rank_of = stage_ranks(name, ranks=ranks, chunks=chunks)
    costs = costs or Costs(1, 1, 1)
    memory_limit = memory_limit if memory_limit is None else min(memory_limit, LARGEST)
    costs.for_stages(len(rank_of))
    table = _table(name, ranks, microbatches, chunks, rank_of, costs, memory_limit)
    rows = tuple(tuple(row) for row in table)
    schedule = Schedule(name, ranks, chunks, microbatches, rank_of, rows, shape.copies)
    if memory_limit is not None:
        peak = max(simulate(schedule, costs).peak_activations)
        if peak > memory_limit + 1e-6:
            raise _over_limit(schedule, costs, memory_limit, peak)
    return schedule


def stage_ranks(name: str, *, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank that holds each stage under a schedule, whatever the number of micro-batches.

    Example:
        >>> stage_ranks("zbv", ranks=2)
        (0, 1, 1, 0)
    """
    shape = _SHAPES[name]
    return v_map(ranks) if shape.v else loop_map(ranks, chunks or shape.chunks or 2)


def _table(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    rank_of: tuple[int, ...],
    costs: Costs,
    memory_limit: float | None,
) -> list[list[Action]]:
    # Each family is loaded when it is asked for: importing the package stays quick.
    if name in ("gpipe", "1f1b") or (name == "interleaved" and chunks == 1):
        from dtensor_5d.schedule import simple

        return (simple.gpipe if name == "gpipe" else simple.one_f_one_b)(ranks, microbatches)
    if name == "interleaved":
        from dtensor_5d.schedule.interleaved import interleaved

        return interleaved(ranks, microbatches, chunks)
    if name in ("zb-h1", "zb-h2"):
        from dtensor_5d.schedule import zero_bubble

        return (zero_bubble.zb_h1 if name == "zb-h1" else zero_bubble.zb_h2)(ranks, microbatches)
    if name in ("dualpipe", "dualpipev"):
        from dtensor_5d.schedule import dualpipe

        return (dualpipe.dualpipe if name == "dualpipe" else dualpipe.dualpipev)(ranks, microbatches)
    from dtensor_5d.schedule import vshape
    from dtensor_5d.schedule.lanes import EPSILON, Problem

    least = Problem(rank_of, microbatches, costs, math.inf).least
    if memory_limit is not None and name in ("zb-auto", "zbv"):
        if memory_limit < least - EPSILON:
            raise MemoryLimitError(name, memory_limit, least, ())
        limit = float(memory_limit)
    else:
        own = {"v-half": vshape.v_half_limit, "v-min": vshape.v_min_limit}.get(name, vshape.zbv_limit)(ranks)
        limit = max(float(own), least)
    problem = Problem(rank_of, microbatches, costs, limit)
    if name == "zb-auto":
        from dtensor_5d.schedule.auto import zb_auto

        return zb_auto(problem)
    return vshape.v_schedule(problem)


def _check_request(
    name: str, ranks: int, microbatches: int, chunks: int | None, costs: Costs | None, memory_limit: float | None
) -> None:
    """Refuse what no schedule, or not this one, can be built from."""
    bad: list[Violation] = []
    if not isinstance(name, str) or name not in _SHAPES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1) if isinstance(name, str) else []
        change = f"did you mean {near[0]!r}?" if near else "choose one of these"
        bad.append(Violation(f"schedule={reprlib.repr(name)}", f"must be one of {', '.join(SCHEDULES)}", change))
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value is None and what == "chunks":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            bad.append(Violation(f"{what}={value!r}", "must be an integer >= 1", f"use {what}=1 or more"))
    if costs is not None and (problem := costs_violation(costs)):
        bad.append(problem)
    if memory_limit is not None and not (
        isinstance(memory_limit, (int, float)) and not isinstance(memory_limit, bool) and memory_limit > 0
    ):
        required = "must be a number above 0: activations of so many micro-batches on one chunk"
        bad.append(Violation(f"memory_limit={reprlib.repr(memory_limit)}", required, "give at least 1, or None"))
    if bad:
        raise PlanError(bad)
    shape = _SHAPES[name]
    if chunks is not None and shape.chunks is not None and chunks != shape.chunks:
        change = f"use chunks={shape.chunks}" + (", or schedule='interleaved'" if shape.chunks == 1 else "")
        bad.append(Violation(f"chunks={chunks} with schedule={name!r}", f"it has {shape.chunks} a rank", change))
    step = 2 if shape.even else 1
    if shape.even and ranks % 2:
        change = f"use ranks={ranks + 1}" + (f" or {ranks - 1}" if ranks > 1 else "")
        bad.append(Violation(f"ranks={ranks} with schedule={name!r}", "ranks must be even: they work in pairs", change))
    least = shape.least_per_rank * (ranks + ranks % step)
    if microbatches < least:
        required = f"needs at least 2 for each rank: {least}"
        bad.append(Violation(f"microbatches={microbatches} with schedule={name!r}", required, f"use {least} or more"))
    elif microbatches % step:
        required = "must be even: one half enters at each end"
        change = f"use {max(least, microbatches - 1)} or {microbatches + 1}"
        bad.append(Violation(f"microbatches={microbatches} with schedule={name!r}", required, change))
    if bad:
        raise PlanError(bad)


def _over_limit(schedule: Schedule, costs: Costs, limit: float, peak: float) -> MemoryLimitError:
    """The refusal, and of the other schedules with chunks of the same size those that keep the limit."""
    from dtensor_5d.schedule import vshape

    ranks, depth = schedule.ranks, schedule.depth
    more = max(0.0, *(-x for x in costs.for_stages(schedule.stages).input_release))
    if depth == ranks:
        needs = {"zb-h1": min(ranks, schedule.microbatches), "zb-auto": 1}
    elif depth == 2 * ranks:
        needs = {"v-half": vshape.v_half_limit(ranks), "v-min": vshape.v_min_limit(ranks), "zbv": 2}
    else:
        needs = {}
    # `more` for each micro-batch is more than enough: with releases below 0, rather too few names than a wrong one.
    others = tuple(name for name, need in needs.items() if name != schedule.name and need * (1 + more) <= limit)
    return MemoryLimitError(schedule.name, limit, peak, others)
