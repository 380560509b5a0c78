"""The bookkeeping of a search: the best schedule so far, and how much work is left. No clock: all ranks agree."""

from __future__ import annotations

from collections.abc import Callable

from dtensor_5d.schedule.lanes import EPSILON, Found, Problem

__all__ = ["Search"]


class Search:
    """Keeps the best of what is tried, within `budget` laid actions."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.left = problem, budget
        self.best: Found | None = None
        self.kept: list[Found] = []
        """The best of every attempt."""
        busy = [0.0] * problem.ranks
        for stage, rank in enumerate(problem.rank_of):
            busy[rank] += problem.forward[stage] + problem.input[stage] + problem.weight[stage]
        self.bound = max(busy) * problem.microbatches

    @property
    def perfect(self) -> bool:
        """Whether the longest span is the busiest rank's work: there is nothing left to gain."""
        return self.best is not None and self.best.span <= self.bound + EPSILON

    @property
    def over(self) -> bool:
        """Whether to stop: nothing left to gain or to spend."""
        return self.left <= 0 or self.perfect

    def offer(self, found: Found | None) -> bool:
        """Take a schedule in if it is the best so far; whether it is."""
        if found is None or (self.best is not None and found.key >= self.best.key):
            return False
        self.best = found
        return True

    def attempt(self, grow: Callable[[tuple[float, ...] | None], Found | None]) -> Found | None:
        """Grow a schedule; then again, letting each rank idle as long as the most idle one did, while that helps."""
        best: Found | None = None
        allowed: tuple[float, ...] | None = None
        while not self.over:
            self.left -= self.problem.size
            found = grow(allowed)
            if found is None or (best is not None and max(found.idle) >= max(best.idle) - EPSILON):
                break
            best, allowed = found, found.idle
            self.offer(found)
        if best is not None:
            self.kept.append(best)
        return best
