"""V schedules that repeat one building block every six slots, as in the Controllable Memory paper.

A block says when a rank runs the four F and I of one micro-batch: each hop from rank to rank costs a number of slots,
each turn of the V another. Two W fill the slots that are left over. The block repeated for all micro-batches gives each
rank an order; played as early as the real costs allow, it closes up at both ends.
Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from dtensor_5d.schedule.lanes import Found, Lanes, Problem
from dtensor_5d.schedule.rounds import Fill

__all__ = ["blocks", "follow", "wave"]

Order = Sequence[tuple[str, int]]
"""The F and I of a rank as (kind, stage); micro-batches go by number."""

SLOTS = 6


def blocks(ranks: int, microbatches: int, hops: int) -> Iterator[list[Order]]:
    """Orders from blocks in which a hop out and the hop back take `hops` slots together: 2 is V-Min, 3 is V-Half.

    Only blocks whose four actions never meet in one slot; shorter turns first.
    """
    turns = sorted(itertools.product(range(1, SLOTS), repeat=3), key=lambda t: (sum(t), t))
    for first, second, third in turns:
        for out in range(1, hops):
            times = []
            for r in range(ranks):
                back = ranks - 1 - r
                down = out * r
                up = out * (ranks - 1) + first + (hops - out) * back
                input_up = hops * (ranks - 1) + first + second + out * r
                input_down = (hops + out) * (ranks - 1) + first + second + third + (hops - out) * back
                times.append((down, up, input_up, input_down))
            if all(len({t % SLOTS for t in row}) == 4 for row in times):
                yield [_repeat(row, r, ranks, microbatches) for r, row in enumerate(times)]


def _repeat(times: tuple[int, ...], rank: int, ranks: int, microbatches: int) -> Order:
    mirror = 2 * ranks - 1 - rank
    actions = zip(times, (("F", rank), ("F", mirror), ("I", mirror), ("I", rank)))
    slots = [(at + SLOTS * k, what) for at, what in actions for k in range(microbatches)]
    return [what for _, what in sorted(slots)]


def wave(ranks: int, microbatches: int) -> list[Order]:
    """ZB-V by hand, W left out: fill, then F and I of the two chunks in turn, then drain."""
    orders = []
    # It fills 2p - 1 micro-batches; where there are fewer, the others are taken out again.
    count = max(microbatches, 2 * ranks - 1)
    for r in range(ranks):
        down, up = r, 2 * ranks - 1 - r
        order = [("F", down)] * (2 * (ranks - r) - 1)
        order += [("F", up), ("F", down)] * r
        order += [("F", up), ("I", up)] * (ranks - r)
        order += [("F", down), ("I", down), ("F", up), ("I", up)] * (count - (2 * ranks - 1 - r))
        order += [("I", down), ("F", up), ("I", up)] * (ranks - 1 - r)
        order += [("I", down), ("I", up)] * r
        order += [("I", down)] * (ranks - r)
        orders.append(_first(order, microbatches))
    return orders


def _first(order: Order, microbatches: int) -> Order:
    """Only the micro-batches that there are."""
    left = {what: microbatches for what in set(order)}
    kept = []
    for what in order:
        if left[what]:
            left[what] -= 1
            kept.append(what)
    return kept


def follow(
    problem: Problem, orders: Sequence[Order], fill: Fill, eager: bool, allowed: tuple[float, ...] | None
) -> Found | None:
    """Play an order of F and I on every rank, W in between; None if memory does not suffice for it.

    `eager`: W comes right behind its I as long as a rank has an F to do; otherwise it waits for a gap.
    """
    last_f = [max(i for i, (kind, _) in enumerate(order) if kind == "F") for order in orders]
    lanes = Lanes(problem, allowed)
    position = [0] * problem.ranks
    waiting: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    agenda: list[tuple[float, int, float]] = []

    def look(rank: int) -> None:
        if position[rank] < len(orders[rank]):
            kind, stage = orders[rank][position[rank]]
            arrival = lanes.arrival_f(stage) if kind == "F" else lanes.arrival_i(stage)
            if arrival is None:
                waiting[kind, stage].append(rank)
            else:
                heapq.heappush(agenda, (max(arrival, lanes.clock[rank]), rank, arrival))

    for rank in range(problem.ranks):
        look(rank)
    while agenda:
        _, rank, arrival = heapq.heappop(agenda)
        kind, stage = orders[rank][position[rank]]
        if kind == "F" and not lanes.make_room(rank):
            return None
        lanes.fill(rank, arrival, fill[0] if kind == "F" else fill[1])
        (lanes.put_f if kind == "F" else lanes.put_i)(stage, arrival)
        if kind == "I" and eager and position[rank] < last_f[rank]:
            lanes.put_w(rank)
        position[rank] += 1
        for other in waiting.pop((kind, stage + 1 if kind == "F" else stage - 1), ()):
            look(other)
        look(rank)
    return lanes.finish()
