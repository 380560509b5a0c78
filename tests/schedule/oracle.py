"""The shortest possible longest span of a small pipeline, by exhaustive search: slow, obvious, and nothing shared
with the package.

One chunk a rank. A node is a partial schedule; its children put one more F, I or W on one rank as early as it can
start, in the order of starts. A node is dropped if its bound reaches what is already known, or if another node that
has done the same work is at least as good in every number that matters for the rest.
"""

from __future__ import annotations

import heapq
import itertools


def shortest_span(ranks, microbatches, forward, backward_input, weight, comm, limit, *, release=0.5, known=None):
    """The minimum over all schedules of max over ranks of (last end - first start), holding at most `limit`."""
    time = {"F": forward, "I": backward_input, "W": weight}
    work = forward + backward_input + weight
    best = known if known is not None else float("inf")
    tie = itertools.count()
    start = (((0, 0, 0),) * ranks, (0.0,) * ranks, (None,) * ranks, ((),) * ranks, ((),) * ranks, (0.0, 0))
    heap = [(work * microbatches, next(tie), start)]
    seen: dict[tuple, list[tuple]] = {}
    while heap:
        bound, _, node = heapq.heappop(heap)
        if bound >= best - 1e-9:
            return best
        counts, clocks, _, done_f, done_i, last = node
        if all(c == (microbatches,) * 3 for c in counts):
            return bound
        for r in range(ranks):
            f, i, w = counts[r]
            held = f - i * release - w * (1 - release)
            options = []
            if f < microbatches and held + 1 <= limit + 1e-9:
                if r == 0:
                    options.append(("F", 0.0))
                elif done_f[r - 1]:
                    options.append(("F", done_f[r - 1][0] + comm))
            if i < f and held - release <= limit + 1e-9:
                if r == ranks - 1:
                    options.append(("I", 0.0))
                elif done_i[r + 1]:
                    options.append(("I", done_i[r + 1][0] + comm))
            if w < i:
                options.append(("W", 0.0))
            for kind, arrival in options:
                begin = max(clocks[r], arrival)
                if (begin, r) < last:
                    continue
                end = begin + time[kind]
                child = _put(node, r, kind, begin, end, ranks)
                c_counts, c_clocks, c_firsts = child[:3]
                remaining = [
                    forward * (microbatches - a) + backward_input * (microbatches - b) + weight * (microbatches - c)
                    for a, b, c in c_counts
                ]
                value = max(
                    (c_clocks[q] - c_firsts[q] if c_firsts[q] is not None else 0) + remaining[q] for q in range(ranks)
                )
                if value >= best - 1e-9:
                    continue
                if _dominated(seen, child):
                    continue
                heapq.heappush(heap, (max(value, bound), next(tie), child))
    return best


def _put(node, r, kind, begin, end, ranks):
    counts, clocks, firsts, done_f, done_i, _ = node
    at = "FIW".index(kind)
    counts = _replace(counts, r, tuple(n + (j == at) for j, n in enumerate(counts[r])))
    clocks = _replace(clocks, r, end)
    if firsts[r] is None:
        firsts = _replace(firsts, r, begin)
    if kind == "F":
        if r:
            done_f = _replace(done_f, r - 1, done_f[r - 1][1:])
        if r < ranks - 1:
            done_f = _replace(done_f, r, (*done_f[r], end))
    elif kind == "I":
        if r < ranks - 1:
            done_i = _replace(done_i, r + 1, done_i[r + 1][1:])
        if r:
            done_i = _replace(done_i, r, (*done_i[r], end))
    return counts, clocks, firsts, done_f, done_i, (begin, r)


def _replace(values, at, value):
    return (*values[:at], value, *values[at + 1 :])


def _dominated(seen, node):
    counts, clocks, firsts, done_f, done_i, (begin, rank) = node
    started = tuple(-1e9 if x is None else -x for x in firsts)
    vector = (*clocks, *started, *itertools.chain(*done_f), *itertools.chain(*done_i), begin + rank * 1e-7)
    front = seen.setdefault(counts, [])
    if any(all(a <= b for a, b in zip(other, vector)) for other in front):
        return True
    front[:] = [other for other in front if not all(a <= b for a, b in zip(vector, other))]
    front.append(vector)
    return False
