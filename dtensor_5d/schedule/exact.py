"""The shortest schedule of a problem small enough for best-first search, if it is found in time.

A node is the beginning of a schedule: actions in the order of their starts. Its bound is the span that no schedule
that begins so can beat. A node that has done the same work as another, and is nowhere ahead of it, is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from dtensor_5d.schedule.lanes import EPSILON, Cell, Problem
from dtensor_5d.schedule.polish import Rows, replay
from dtensor_5d.schedule.search import Search

__all__ = ["exact"]

LARGEST = 60
"""Actions."""
NODES = 12_000
"""Nodes to open before giving up: under a second."""

Times = tuple[float, ...]


class _Node(NamedTuple):
    counts: tuple[tuple[int, int, int], ...]
    """F, I and W done on each rank."""
    clock: Times
    first: Times
    """Start of each rank; below 0: not yet."""
    made_f: tuple[Times, ...]
    made_i: tuple[Times, ...]
    """Ends of what the next rank, or the one before, has not read yet."""
    last: tuple[float, int]
    path: tuple | None
    """(path before, rank, cell)."""


def exact(search: Search) -> None:
    """Offer the optimum if it beats the best so far and `NODES` suffice to find it. One chunk a rank."""
    problem = search.problem
    if problem.size > LARGEST or search.best is None or search.perfect:
        return
    known = search.best.span - 1e-6
    ranks, empty = problem.ranks, ((),) * problem.ranks
    start = _Node(((0, 0, 0),) * ranks, (0.0,) * ranks, (-1.0,) * ranks, empty, empty, (0.0, 0), None)
    heap: list[tuple[float, int, int, _Node]] = [(0.0, 0, 0, start)]
    seen: dict[tuple[tuple[int, int, int], ...], list[Times]] = {}
    serial = 0
    for _ in range(NODES):
        if not heap:
            return
        bound, depth, _, node = heapq.heappop(heap)
        if -depth == problem.size:
            search.offer(replay(problem, _rows(problem, node)))
            return
        for child in _children(problem, node):
            value = max(bound, max(_bound(problem, child, rank) for rank in range(ranks)))
            if value < known and not _dominated(seen, child):
                serial += 1
                # Of equal bounds the deepest first: it may be complete soon.
                heapq.heappush(heap, (round(value, 9), depth - 1, serial, child))


def _children(problem: Problem, node: _Node) -> Iterator[_Node]:
    last = problem.ranks - 1
    for rank, (f, i, w) in enumerate(node.counts):
        release = problem.release[rank]
        held = f - i * release - w * (1.0 - release)
        options: list[tuple[str, float, float]] = []
        if f < problem.microbatches and held + 1.0 <= problem.limit + EPSILON:
            if rank == 0:
                options.append(("F", 0.0, problem.forward[0]))
            elif node.made_f[rank - 1]:
                options.append(("F", node.made_f[rank - 1][0] + problem.latency[rank - 1], problem.forward[rank]))
        if i < f and held - release <= problem.limit + EPSILON:
            if rank == last:
                options.append(("I", 0.0, problem.input[rank]))
            elif node.made_i[rank + 1]:
                options.append(("I", node.made_i[rank + 1][0] + problem.latency[rank], problem.input[rank]))
        if w < i:
            options.append(("W", 0.0, problem.weight[rank]))
        for kind, arrival, time in options:
            begin = max(node.clock[rank], arrival)
            if (begin, rank) >= node.last:
                yield _put(node, rank, kind, begin, begin + time, last)


def _put(node: _Node, rank: int, kind: str, begin: float, end: float, last: int) -> _Node:
    at = "FIW".index(kind)
    done = node.counts[rank]
    counts = _set(node.counts, rank, (done[0] + (at == 0), done[1] + (at == 1), done[2] + (at == 2)))
    first = node.first if node.first[rank] >= 0 else _set(node.first, rank, begin)
    made_f, made_i = node.made_f, node.made_i
    if kind == "F":
        made_f = _set(made_f, rank - 1, made_f[rank - 1][1:]) if rank else made_f
        made_f = _set(made_f, rank, (*made_f[rank], end)) if rank < last else made_f
    elif kind == "I":
        made_i = _set(made_i, rank + 1, made_i[rank + 1][1:]) if rank < last else made_i
        made_i = _set(made_i, rank, (*made_i[rank], end)) if rank else made_i
    cell: Cell = (kind, rank, done[at])
    clock = _set(node.clock, rank, end)
    return _Node(counts, clock, first, made_f, made_i, (begin, rank), (node.path, rank, cell))


def _set(values: tuple, at: int, value: object) -> tuple:
    return (*values[:at], value, *values[at + 1 :])


def _bound(problem: Problem, node: _Node, rank: int) -> float:
    """The work that a rank still has; and the way of its last F down to the last rank and back."""
    if node.first[rank] < 0:
        return 0.0
    count, (f, i, w) = problem.microbatches, node.counts[rank]
    forward, backward, weight = problem.forward[rank], problem.input[rank], problem.weight[rank]
    since = node.clock[rank] - node.first[rank]
    work = since + forward * (count - f) + backward * (count - i) + weight * (count - w)
    if f == count:
        return work
    below = range(rank + 1, problem.ranks)
    way = sum(problem.forward[s] + problem.input[s] + 2.0 * problem.latency[s - 1] for s in below)
    return max(work, since + forward * (count - f) + way + backward + weight)


def _dominated(seen: dict[tuple[tuple[int, int, int], ...], list[Times]], node: _Node) -> bool:
    """Whether a node with the same work is nowhere behind this one. A late first start is an advantage."""
    unread = (x for made in node.made_f + node.made_i for x in made)
    vector = (*node.clock, *(-x for x in node.first), *unread, *node.last)
    front = seen.setdefault(node.counts, [])
    if any(all(a <= b for a, b in zip(other, vector)) for other in front):
        return True
    front[:] = [other for other in front if not all(a <= b for a, b in zip(vector, other))]
    front.append(vector)
    return False


def _rows(problem: Problem, node: _Node) -> Rows:
    rows: list[list[Cell]] = [[] for _ in range(problem.ranks)]
    path = node.path
    while path is not None:
        path, rank, cell = path
        rows[rank].append(cell)
    return tuple(tuple(reversed(row)) for row in rows)
