"""Interleaved 1F1B: v chunks a rank, going round the ranks v times."""

from __future__ import annotations

from dtensor_5d.schedule.actions import Action

__all__ = ["interleaved"]


def interleaved(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """Micro-batches in groups of p; each group passes all chunks of a rank before the next group starts.

    Rank r runs 2 (p - 1 - r) + (v - 1) p forwards ahead, then one forward and one backward in turn. Where p does not
    divide m, the groups are as even as they can be and at least p long, the longer ones first.

    Example, p = 2, v = 2, m = 2:
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.
    """
    rounds = max(1, microbatches // ranks)
    sizes = [microbatches // rounds + (i < microbatches % rounds) for i in range(rounds)]
    forward = _order(sizes, range(chunks))
    backward = _order(sizes, range(chunks - 1, -1, -1))
    table = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * sizes[0], len(forward))
        row = [Action(c * ranks + rank, "F", i) for c, i in forward[:ahead]]
        for k, (c, i) in enumerate(backward):
            if ahead + k < len(forward):
                chunk, mb = forward[ahead + k]
                row.append(Action(chunk * ranks + rank, "F", mb))
            row.append(Action(c * ranks + rank, "B", i))
        table.append(row)
    return table


def _order(sizes: list[int], chunks: range) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of a rank: group by group, and in a group chunk by chunk."""
    order, first = [], 0
    for size in sizes:
        order += [(chunk, mb) for chunk in chunks for mb in range(first, first + size)]
        first += size
    return order
