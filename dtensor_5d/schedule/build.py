"""One entry for all schedules: names, rules, and the refusals that name them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.options import SCHEDULES
from dtensor_5d.schedule.actions import Action
from dtensor_5d.schedule.costs import Costs
from dtensor_5d.schedule.data import Schedule, loop_map, v_map
from dtensor_5d.schedule.simulate import simulate

__all__ = ["build"]


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
    | zb-auto | 1 | any | `memory_limit`, by default 2p |
    | interleaved | v, by default 2 | any | vp + p - 1 |
    | zbv | 2, in a V | any | `memory_limit`, by default 2p |
    | v-half, v-min | 2, in a V | any | 2 floor((p + 2) / 2), 2 floor((p + 4) / 3) |
    | dualpipe | 2 copies of 1; p even | even, at least 2p | p + 1 |
    | dualpipev | 2, in a V | at least 2p | 2p + 1 |

    `costs` (of one chunk; by default all 1) and `memory_limit` (in units of one micro-batch on one chunk) shape
    zb-auto, zbv, v-half and v-min; the others are what they are, and are refused if they need more than the limit.
    Errors: `PlanError` for everything that the table does not allow, with the nearest legal value.
    """
    _check_request(name, ranks, microbatches, chunks, memory_limit)
    shape = _SHAPES[name]
    chunks = chunks or shape.chunks or 2
    rank_of = v_map(ranks) if shape.v else loop_map(ranks, chunks)
    asked, costs = memory_limit, costs or Costs(1, 1, 1)
    costs.for_stages(len(rank_of))
    table = _table(name, ranks, microbatches, chunks, rank_of, costs, memory_limit)
    rows = tuple(tuple(row) for row in table)
    schedule = Schedule(name, ranks, chunks, microbatches, rank_of, rows, shape.copies)
    if asked is not None:
        peaks = simulate(schedule, costs).peak_activations
        if max(peaks) > asked + 1e-6:
            raise PlanError(_over_limit(name, asked, max(peaks), peaks.index(max(peaks))))
    return schedule


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
    from dtensor_5d.schedule.lanes import Problem

    if name == "zb-auto":
        from dtensor_5d.schedule.auto import zb_auto

        limit = 2.0 * ranks if memory_limit is None else memory_limit
        return zb_auto(Problem(rank_of, microbatches, costs, limit))
    from dtensor_5d.schedule import vshape

    own = {"zbv": vshape.zbv_limit, "v-half": vshape.v_half_limit, "v-min": vshape.v_min_limit}[name](ranks)
    limit = float(own) if memory_limit is None or name != "zbv" else memory_limit
    table = vshape.v_schedule(Problem(rank_of, microbatches, costs, limit))
    if table is None:
        raise PlanError(
            Violation(
                f"memory_limit={limit} with schedule={name!r} on {ranks} ranks",
                f"no {name} schedule keeps within {limit} chunks",
                f"use memory_limit={own}, or schedule='v-min' ({vshape.v_min_limit(ranks)} chunks)",
            )
        )
    return table


def _check_request(
    name: str, ranks: int, microbatches: int, chunks: int | None, memory_limit: float | None
) -> None:
    """Refuse what no schedule, or not this one, can be built from."""
    bad: list[Violation] = []
    if name not in _SHAPES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1) if isinstance(name, str) else []
        change = f"did you mean {near[0]!r}?" if near else "choose one of these"
        bad.append(Violation(f"schedule={name!r}", f"must be one of {', '.join(SCHEDULES)}", change))
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value is None and what == "chunks":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            bad.append(Violation(f"{what}={value!r}", "must be an integer >= 1", f"use {what}=1 or more"))
    if memory_limit is not None and not (
        isinstance(memory_limit, (int, float)) and not isinstance(memory_limit, bool) and memory_limit >= 1
    ):
        required = "must be at least 1, the activations of one micro-batch on one chunk"
        bad.append(Violation(f"memory_limit={memory_limit!r}", required, "give at least 1, or None"))
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


def _over_limit(name: str, limit: float, peak: float, rank: int) -> Violation:
    change = {
        "gpipe": "use '1f1b' or 'zb-auto', which keeps any limit",
        "1f1b": "use 'zb-auto', which keeps any limit",
        "zb-h1": "use 'zb-auto', which keeps any limit",
        "zb-h2": "use 'zb-h1' or 'zb-auto', which keeps any limit",
        "interleaved": "use fewer chunks, or 'zbv', 'v-half', 'v-min', which need less",
        "zbv": "use 'v-half' or 'v-min'",
        "v-half": "use 'v-min'",
    }.get(name, "raise the limit or use fewer ranks")
    return Violation(
        f"memory_limit={limit} with schedule={name!r}",
        f"it holds up to {peak:g} micro-batches of one chunk (rank {rank})",
        f"raise the limit to {peak:g}, or {change}",
    )
