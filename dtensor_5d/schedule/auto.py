"""zb-auto: a schedule made from measured costs under a memory limit, one chunk a rank.

A few greedy strategies from several head starts, then small changes to the head start that won; small problems are
polished action by action, and the smallest searched through. Nothing is random and nothing depends on the clock, so
every rank finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from dtensor_5d.schedule.actions import Action
from dtensor_5d.schedule.data import Schedule
from dtensor_5d.schedule.exact import exact
from dtensor_5d.schedule.lanes import EPSILON, Found, Problem, one_by_one
from dtensor_5d.schedule.listing import Policy, list_schedule
from dtensor_5d.schedule.polish import polish
from dtensor_5d.schedule.rounds import straight_rounds
from dtensor_5d.schedule.search import Search
from dtensor_5d.schedule.simulate import simulate
from dtensor_5d.schedule.zero_bubble import zb_h1, zb_h2

__all__ = ["zb_auto"]

BUDGET = 1_000_000, 600, 4_000_000
"""Actions laid in one search: at least, schedules' worth, at most. About a second for 8 ranks, 32 micro-batches."""

KEPT = 6
"""How many of the best schedules to polish."""

_FILLS = ((True, True), (True, False), (False, True), (False, False))
_POLICIES = tuple(
    Policy(order, hold, fill)
    for order in ((("I", 0), ("F", 0)), (("F", 0), ("I", 0)))
    for hold in (0.0, 0.5)
    for fill in (None, 0.0, 0.5, 1.0)
)


def zb_auto(problem: Problem) -> list[list[Action]]:
    """The schedule with the shortest span that the search comes upon; `problem.limit` is at least `problem.least`."""
    search = Search(problem, min(max(BUDGET[0], BUDGET[1] * problem.size), BUDGET[2]))
    for table in (zb_h1(problem.ranks, problem.microbatches), zb_h2(problem.ranks, problem.microbatches)):
        search.offer(_measured(problem, table))
    starts: list[tuple[tuple[float, float, float], tuple[int, ...]]] = []
    for ahead in _head_starts(problem):
        if found := _try_rounds(search, ahead):
            starts.append((found.key, ahead))
    for _, ahead in sorted(starts)[:2]:
        _descend(search, ahead)
    for policy in _POLICIES:
        for ahead in _head_starts(problem):
            search.attempt(partial(list_schedule, problem, ahead, policy))
    if search.best is None:
        search.offer(one_by_one(problem))
    assert search.best is not None
    distinct = {found.rows: found for found in search.kept or [search.best]}.values()
    for found in sorted(distinct, key=lambda f: f.key)[:KEPT]:
        polish(search, found)
    exact(search)
    return search.best.table()


def _try_rounds(search: Search, ahead: Sequence[int]) -> Found | None:
    best: Found | None = None
    for fill in _FILLS:
        found = search.attempt(partial(straight_rounds, search.problem, ahead, fill))
        if found and (best is None or found.key < best.key):
            best = found
    return best


def _descend(search: Search, ahead: tuple[int, ...]) -> None:
    """Move the head starts by one, of one rank or of all on one side of it, while that helps."""
    problem = search.problem
    most = _longest(problem)
    found = _try_rounds(search, ahead)
    best, tried, moved = (found.key if found else None), {ahead}, True
    while moved and not search.over:
        moved = False
        for rank in range(problem.ranks):
            for changed in _changes(ahead, rank, most):
                if changed in tried or search.over:
                    continue
                tried.add(changed)
                found = _try_rounds(search, changed)
                if found and (best is None or found.key < best):
                    best, ahead, moved = found.key, changed, True


def _changes(ahead: tuple[int, ...], rank: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Head starts near `ahead`; no rank may have a longer one than the rank before it."""
    for step in (1, -1):
        to = max(1, min(most[rank], ahead[rank] + step))
        side = range(rank + 1) if step > 0 else range(rank, len(ahead))
        yield tuple(max(1, min(most[r], x + step)) if r in side else x for r, x in enumerate(ahead))
        yield tuple((max(x, to) if step > 0 else min(x, to)) if r in side else x for r, x in enumerate(ahead))


def _longest(problem: Problem) -> list[int]:
    """The longest head start that each rank has memory for, with room for its first I."""
    return [max(1, min(problem.microbatches, int(problem.limit - more + EPSILON))) for more in problem.reserve]


def _head_starts(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Forwards before the first I, for each rank: as 1F1B, as ZB-H2, as many as there is time for, as many as fit."""
    ranks = problem.ranks
    most = _longest(problem)
    first = [0.0] * ranks
    """When a rank's first F can begin, and when its first gradient arrives."""
    for r in range(1, ranks):
        first[r] = first[r - 1] + problem.forward[r - 1] + problem.latency[r - 1]
    arrival = [first[-1] + problem.forward[-1]] * ranks
    for r in reversed(range(ranks - 1)):
        arrival[r] = arrival[r + 1] + problem.input[r + 1] + problem.latency[r]
    timely = [int((arrival[r] - first[r]) / problem.forward[r] + EPSILON) for r in range(ranks)]
    for wanted in (
        [ranks - r for r in range(ranks)],
        [2 * (ranks - r) - 1 for r in range(ranks)],
        timely,
        [x + 1 for x in timely],
        most,
    ):
        ahead = [max(1, min(m, x)) for m, x in zip(most, wanted)]
        # No rank may run further ahead than the one before it; that one is to catch up, if its memory allows.
        ahead = [min(most[r], max(ahead[r:])) for r in range(ranks)]
        yield tuple(min(ahead[: r + 1]) for r in range(ranks))


def _measured(problem: Problem, table: list[list[Action]]) -> Found | None:
    """A schedule written by hand, if memory suffices for it."""
    rows = tuple(tuple(row) for row in table)
    schedule = Schedule("", problem.ranks, 1, problem.microbatches, problem.rank_of, rows)
    timeline = simulate(schedule, problem.costs)
    if max(timeline.peak_activations) > problem.limit + EPSILON:
        return None
    cells = tuple(tuple((a.kind, a.stage, a.microbatch or 0) for a in row) for row in rows)
    idle = tuple(x / problem.unit for x in timeline.bubbles)
    return Found(max(timeline.spans) / problem.unit, timeline.makespan / problem.unit, sum(idle), idle, cells)
