"""Greedy schedules that grow in rounds: in each, every rank takes one I and one F, and W fills the gaps.

Sources: the heuristics of Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 3.1 (one chunk a rank) and
section 6 (ZB-V); the choice of the head start is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor_5d.schedule.lanes import EPSILON, Found, Lanes, Problem

__all__ = ["Fill", "straight_rounds", "v_rounds"]

Fill = tuple[bool, bool]
"""Whether a W that does not fit may go before an F, and before an I, when the rank has no room to idle."""


def straight_rounds(
    problem: Problem, ahead: Sequence[int], fill: Fill, allowed: tuple[float, ...] | None
) -> Found | None:
    """One chunk a rank; rank r starts with `ahead[r]` forwards (at least 1, never more than the rank before)."""
    lanes = Lanes(problem, allowed)
    for stage, count in enumerate(ahead):
        for _ in range(count):
            arrival = lanes.arrival_f(stage)
            if arrival is None or not lanes.fits(stage):
                return None
            lanes.put_f(stage, arrival)
    for _ in range(problem.microbatches):
        for stage in reversed(range(problem.stages)):
            arrival = lanes.arrival_i(stage)
            if arrival is None:
                return None
            lanes.fill(stage, arrival, fill[1])
            lanes.put_i(stage, arrival)
        for stage in range(problem.stages):
            arrival = lanes.arrival_f(stage)
            if len(lanes.ends_f[stage]) == problem.microbatches or arrival is None or not lanes.make_room(stage):
                continue
            lanes.fill(stage, arrival, fill[0])
            lanes.put_f(stage, arrival)
    return lanes.finish()


def v_rounds(problem: Problem, fill: Fill, allowed: tuple[float, ...] | None) -> Found | None:
    """Two chunks a rank in a V. None where the memory or the micro-batches do not suffice for its warm-up."""
    growing = _V(problem, fill, allowed)
    if growing.warm_up() and all(growing.round() for _ in range(2 * problem.microbatches)):
        return growing.lanes.finish()
    return None


class _V:
    """Rank r holds stage r (`down`, towards the turn) and stage 2p - 1 - r (`up`, from the turn)."""

    def __init__(self, problem: Problem, fill: Fill, allowed: tuple[float, ...] | None) -> None:
        self.problem, self.fill, self.lanes = problem, fill, Lanes(problem, allowed)
        self.ranks, self.count = problem.ranks, problem.microbatches

    def stage(self, rank: int, up: bool) -> int:
        return self.problem.stages - 1 - rank if up else rank

    def forward(self, rank: int, up: bool, more: bool = False) -> bool:
        stage = self.stage(rank, up)
        arrival = self.lanes.arrival_f(stage)
        if arrival is None:
            return False
        self.lanes.fill(rank, arrival, more)
        self.lanes.put_f(stage, arrival)
        return True

    def forwards(self, rank: int, up: bool) -> int:
        return len(self.lanes.ends_f[self.stage(rank, up)])

    def inputs(self, rank: int, up: bool) -> int:
        return len(self.lanes.ends_i[self.stage(rank, up)])

    def warm_up(self) -> bool:
        """The first micro-batch goes down and up; on its way up, each rank takes as many others as it has time for."""
        lanes, limit = self.lanes, self.problem.limit
        for rank in range(self.ranks):
            self.forward(rank, False)
        for rank in reversed(range(self.ranks)):
            if rank < self.ranks - 1:
                arrival = lanes.arrival_f(self.stage(rank, True))
                assert arrival is not None
                while (
                    lanes.held[rank] + 2 + 2 * rank <= limit + EPSILON
                    and lanes.clock[rank] + self.problem.forward[rank] <= arrival + EPSILON
                    and self.forwards(rank, False) < self.count
                ):
                    for above in range(rank + 1):
                        self.forward(above, False)
            self.forward(rank, True)
        # Then each rank catches up with the one before it, both ways in turn.
        up = False
        for rank in range(1, self.ranks):
            while self._behind(rank):
                before = sum(len(ends) for ends in lanes.ends_f)
                for below in reversed(range(rank, self.ranks)):
                    if self.forwards(below, up) < self.count:
                        self.forward(below, up)
                up = not up
                if sum(len(ends) for ends in lanes.ends_f) == before and not self._behind_can_move(rank):
                    return False
        return all(held <= limit + EPSILON for held in lanes.held)

    def _behind(self, rank: int) -> bool:
        mine = self.forwards(rank, False) + self.forwards(rank, True)
        theirs = self.forwards(rank - 1, False) + self.forwards(rank - 1, True)
        return mine < theirs or self.forwards(rank, True) <= self.forwards(rank - 1, True) < self.count

    def _behind_can_move(self, rank: int) -> bool:
        stages = [self.stage(below, up) for below in range(rank, self.ranks) for up in (False, True)]
        return any(len(self.lanes.ends_f[s]) < self.count and self.lanes.arrival_f(s) is not None for s in stages)

    def round(self) -> bool:
        """One I on every rank, then one F on every rank that has one to do."""
        lanes = self.lanes
        up_first = [rank for rank in range(self.ranks) if self._takes_up(rank)]
        for rank in reversed(range(self.ranks)):
            if rank not in up_first and not self._input(rank, False):
                return False
        for rank in up_first:
            if not self._input(rank, True):
                return False
        for rank in range(self.ranks):
            up = self._next_forward(rank)
            if up is None:
                continue
            if not lanes.make_room(rank):
                return False
            self.forward(rank, up, self.fill[0])
        return True

    def _takes_up(self, rank: int) -> bool:
        """Whether a rank's next I is of the chunk from the turn (which the backward passes first)."""
        down = self.inputs(rank, False)
        if down >= self.inputs(rank, True):
            return True
        if rank == self.ranks - 1:
            return False
        return not (self.inputs(rank + 1, False) > down or self.inputs(rank, True) >= self.count)

    def _input(self, rank: int, up: bool) -> bool:
        stage = self.stage(rank, up)
        arrival = self.lanes.arrival_i(stage)
        if arrival is None or self.inputs(rank, up) >= self.count:
            return False
        self.lanes.fill(rank, arrival, self.fill[1] if up else True)
        self.lanes.put_i(stage, arrival)
        return True

    def _next_forward(self, rank: int) -> bool | None:
        if self.forwards(rank, True) >= self.count:
            return None
        if self.forwards(rank, True) >= self.forwards(rank, False):
            return False
        if self.lanes.arrival_f(self.stage(rank, True)) is not None:
            return True
        if self.forwards(rank, False) < self.count and self.lanes.arrival_f(rank) is not None:
            return False
        return None
