"""GPipe and 1F1B: one chunk a rank, backward in one piece."""

from __future__ import annotations

from dtensor_5d.schedule.actions import Action

__all__ = ["gpipe", "one_f_one_b"]


def gpipe(ranks: int, microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards. Source: Huang et al. 2019."""
    return [
        [Action(rank, "F", i) for i in range(microbatches)] + [Action(rank, "B", i) for i in range(microbatches)]
        for rank in range(ranks)
    ]


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """Rank r runs p - 1 - r forwards ahead, then one forward and one backward in turn. Source: PipeDream-flush.

    Example, p = 3, m = 4:
        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    table = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        row = [Action(rank, "F", i) for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                row.append(Action(rank, "F", ahead + i))
            row.append(Action(rank, "B", i))
        table.append(row)
    return table
