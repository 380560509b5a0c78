"""ZB-V, V-Half and V-Min: two chunks a rank in a V, so that every rank holds an early and a late stage.

What a rank keeps of its early stage for long it keeps of its late stage only shortly, so memory is even over the ranks.
Sources: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6; Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory", section 4 (the memory of V-Half and V-Min). The search is ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

from dtensor_5d.schedule.actions import Action
from dtensor_5d.schedule.lanes import EPSILON, Problem, one_by_one
from dtensor_5d.schedule.listing import Policy, list_schedule
from dtensor_5d.schedule.periodic import blocks, follow, wave
from dtensor_5d.schedule.rounds import v_rounds
from dtensor_5d.schedule.search import Search

__all__ = ["v_half_limit", "v_min_limit", "v_schedule", "zbv_limit"]

BUDGET = 150_000, 60
"""Actions laid in one search: so many, or so many schedules' worth. Half a second for 8 ranks, 24 micro-batches."""

_FILLS = ((True, True), (True, False), (False, True), (False, False))
# What is urgent, in the order in which the orders have won.
_ORDERS = tuple(
    tuple((text[i], int(text[i + 1])) for i in range(0, 8, 2))
    for text in ("F1F0I1I0", "I0F1I1F0", "I1F1F0I0", "F1I0I1F0", "F1I1I0F0", "F1I1F0I0")
)


def zbv_limit(ranks: int) -> int:
    """The memory of 1F1B, counted in chunks."""
    return 2 * ranks


def v_half_limit(ranks: int) -> int:
    """About half of it."""
    return 2 * ((ranks + 2) // 2)


def v_min_limit(ranks: int) -> int:
    """About a third of it."""
    return 2 * ((ranks + 4) // 3)


def v_schedule(problem: Problem) -> list[list[Action]]:
    """The V with the shortest span that the search comes upon; `problem.limit` is at least `problem.least`."""
    search = Search(problem, max(BUDGET[0], BUDGET[1] * problem.size))
    for fill in _FILLS:
        search.attempt(partial(v_rounds, problem, fill))
    by_hand = wave(problem.ranks, problem.microbatches)
    for eager in (False, True):
        for fill in _FILLS:
            search.attempt(partial(follow, problem, by_hand, fill, eager))
    if search.best and problem.limit >= zbv_limit(problem.ranks):
        return search.best.table()
    for hops in (2, 3):
        for orders in itertools.islice(blocks(problem.ranks, problem.microbatches, hops), 2):
            for fill in _FILLS:
                search.attempt(partial(follow, problem, orders, fill, False))
    # A schedule that keeps the limit even if only W lets go keeps it for any share that I lets go, and greedy choices
    # are not always better for having more memory: try both.
    strict = Problem(problem.rank_of, problem.microbatches, problem.costs, problem.limit, (0.0,) * problem.stages)
    kinds = (strict, problem) if min(problem.release) >= 0 else (problem,)
    for hold, share in ((0.3, None), (0.0, None), (0.6, None), (0.3, 1.0), (0.0, 1.0), (0.0, 0.0)):
        for order in _ORDERS:
            policy = Policy(order, hold, share)
            for caps in _caps(problem):
                for kind in kinds:
                    search.attempt(partial(list_schedule, kind, caps, policy))
    if search.best is None:
        search.offer(one_by_one(problem))
    assert search.best is not None
    return search.best.table()


def _caps(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Shares of the late chunk, from few on rank 0 to half of the memory on the last; the early chunk has the rest."""
    ranks, limit = problem.ranks, int(problem.limit + EPSILON)
    seen = set()
    for low, high in ((1.0, -0.5), (1.5, 0.0), (1.5, -0.5), (1.0, 0.0), (0.9, 0.0), (1.0, 0.5), (2.0, 0.0)):
        last = limit / 2 + high
        late = [int(low + (last - low) * r / max(1, ranks - 1) + 0.5) for r in range(ranks)]
        late = [max(1, min(limit - 1, x)) for x in late]
        caps = (*(limit - x for x in late), *reversed(late))
        if caps not in seen:
            seen.add(caps)
            yield caps
