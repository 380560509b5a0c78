"""ZB-H1 and ZB-H2, the two schedules of the Zero Bubble paper that are written by hand.

The weight gradients of a rank wait until enough of them have gathered to fill its bubble at the end.
Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", sections 2.2 and 2.3.
"""

from __future__ import annotations

from dtensor_5d.schedule.actions import Action

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(ranks: int, microbatches: int) -> list[list[Action]]:
    """The memory of 1F1B, a third of its bubble: (p - 1) (F + I - W).

    Example, p = 3, m = 4:
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    return [_row(rank, microbatches, ranks - 1 - rank, rank) for rank in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> list[list[Action]]:
    """No bubble where F = I = W, for the memory of 2p - 1 micro-batches: (p - 1) (F + I - 2W)."""
    return [_row(rank, microbatches, 2 * (ranks - 1 - rank), 2 * rank) for rank in range(ranks)]


def _row(rank: int, microbatches: int, ahead: int, behind: int) -> list[Action]:
    """`ahead` forwards, then F and I in turn, and W once more than `behind` of them wait."""
    ahead = min(ahead, microbatches)
    row = [Action(rank, "F", i) for i in range(ahead)]
    weights = 0
    for i in range(microbatches):
        if ahead + i < microbatches:
            row.append(Action(rank, "F", ahead + i))
        row.append(Action(rank, "I", i))
        # In the cool-down (no F left) I and W take turns whatever the backlog.
        if i + 1 - weights > behind or ahead + i >= microbatches:
            row.append(Action(rank, "W", weights))
            weights += 1
    return row + [Action(rank, "W", i) for i in range(weights, microbatches)]
