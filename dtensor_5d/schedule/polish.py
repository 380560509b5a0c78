"""The last unit: a schedule made a little better by swapping neighbours, for problems small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator

from dtensor_5d.schedule.lanes import EPSILON, Cell, Found, Problem
from dtensor_5d.schedule.search import Search

__all__ = ["polish"]

LARGEST = 160
"""Actions: beyond this a round of swaps costs more than it finds."""
STEPS = 40
"""Rounds without a better schedule after which to give up."""

REACH = 4
"""How many places an action moves at most."""

Rows = tuple[tuple[Cell, ...], ...]


def polish(search: Search, start: Found) -> None:
    """From one schedule, take the best swap of two neighbours on a rank that leads to a new one, again and again.

    Swaps that do not help by themselves are taken too, since two or three of them may.
    """
    problem = search.problem
    if problem.size > LARGEST:
        return
    at, patience, tried = start.rows, STEPS, {start.rows}
    while patience and not search.over:
        found = [new for rows in _moves(at) if rows not in tried and (new := replay(problem, rows))]
        search.left -= problem.size * sum(map(len, at)) // 2
        if not found:
            return
        best = min(found, key=lambda f: (f.key[0], f.key[2], f.key[1], f.rows))
        tried.add(best.rows)
        at, patience = best.rows, STEPS if search.offer(best) else patience - 1


def _moves(rows: Rows) -> Iterator[Rows]:
    """One action a few places earlier, past what it neither follows nor needs."""
    for rank, row in enumerate(rows):
        for i in range(1, len(row)):
            kind, _, mb = row[i]
            for to in range(i - 1, max(-1, i - 1 - REACH), -1):
                passed, _, passed_mb = row[to]
                if kind == passed or (mb == passed_mb and passed + kind in ("FI", "IW")):
                    break
                changed = (*row[:to], row[i], *row[to:i], *row[i + 1 :])
                yield (*rows[:rank], changed, *rows[rank + 1 :])


def replay(problem: Problem, rows: Rows) -> Found | None:
    """Play complete rows as early as they can; None if they get stuck or hold too much. One chunk a rank."""
    ranks, last = problem.ranks, problem.stages - 1
    ends_f: list[list[float]] = [[] for _ in rows]
    ends_i: list[list[float]] = [[] for _ in rows]
    clock, first, idle = [0.0] * ranks, [-1.0] * ranks, [0.0] * ranks
    position = [0] * ranks
    for row, release in zip(rows, problem.release):
        held = 0.0
        for kind, _, _ in row:
            held += 1.0 if kind == "F" else -release if kind == "I" else release - 1.0
            if held > problem.limit + EPSILON:
                return None
    ready = list(range(ranks))
    while ready:
        r = ready.pop()
        row, now = rows[r], clock[r]
        for i in range(position[r], len(row)):
            kind, _, mb = row[i]
            if kind == "W":
                now += problem.weight[r]
                position[r] += 1
                continue
            arrival = 0.0
            if kind == "F" and r:
                if len(ends_f[r - 1]) <= mb:
                    break
                arrival = ends_f[r - 1][mb] + problem.latency[r - 1]
            elif kind == "I" and r < last:
                if len(ends_i[r + 1]) <= mb:
                    break
                arrival = ends_i[r + 1][mb] + problem.latency[r]
            if first[r] < 0:
                first[r] = now = arrival
            elif arrival > now:
                idle[r] += arrival - now
                now = arrival
            position[r] += 1
            if kind == "F":
                now += problem.forward[r]
                ends_f[r].append(now)
                if r < last:
                    ready.append(r + 1)
            else:
                now += problem.input[r]
                ends_i[r].append(now)
                if r:
                    ready.append(r - 1)
        clock[r] = now
    if any(at < len(row) for at, row in zip(position, rows)):
        return None
    return Found(max(c - f for c, f in zip(clock, first)), max(clock), sum(idle), tuple(idle), rows)
