"""A greedy schedule that grows in time: whenever a rank is free it takes the most urgent of what is there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dtensor_5d.schedule.lanes import EPSILON, Found, Lanes, Problem

__all__ = ["Policy", "list_schedule"]


@dataclass(frozen=True)
class Policy:
    """What is urgent.

    `order` lists (kind, chunk of the rank), most urgent first. `hold`: a rank lets something lie for what is more
    urgent and arrives within this share of its time. `fill`: a W that does not fit goes into a gap longer than this
    share of its time; None asks for room to idle instead (`Lanes.room`).
    """

    order: tuple[tuple[str, int], ...]
    hold: float = 0.0
    fill: float | None = 0.0


def list_schedule(
    problem: Problem, caps: Sequence[int], policy: Policy, allowed: tuple[float, ...] | None = None
) -> Found | None:
    """Grow a schedule with at most `caps[stage]` micro-batches between their F and their I on a stage.

    The caps share a rank's memory out among its chunks: without them the first chunk takes all of it and nothing can
    move any more. None if that happens, or memory does not suffice otherwise.
    """
    return _Listing(problem, caps, policy, allowed).run()


class _Listing:
    def __init__(
        self, problem: Problem, caps: Sequence[int], policy: Policy, allowed: tuple[float, ...] | None
    ) -> None:
        self.problem, self.caps, self.policy = problem, caps, policy
        self.lanes = Lanes(problem, allowed)
        urgency = {what: i for i, what in enumerate(policy.order)}
        self.choices = [
            [(stage, urgency["F", i], urgency["I", i]) for i, stage in enumerate(held)] for held in problem.held_by
        ]
        # (when to look at a rank again, rank). A rank without an entry waits for another to begin something.
        self.agenda = [(0.0, rank) for rank in range(problem.ranks)]
        self.now = [0.0] * problem.ranks

    def run(self) -> Found | None:
        agenda, now = self.agenda, self.now
        while agenda:
            time, rank = heapq.heappop(agenda)
            if time > self.lanes.clock[rank] - EPSILON:
                now[rank] = max(now[rank], time)
                self.step(rank)
        return self.lanes.finish()

    def step(self, rank: int) -> None:
        lanes, now = self.lanes, self.now[rank]
        ready, coming = self.candidates(rank, now)
        pick = min(ready, default=None)
        if pick is not None and self.policy.hold:
            urgency, stage, forward = pick
            time = (self.problem.forward if forward else self.problem.input)[stage]
            if any(u < urgency and at - now <= self.policy.hold * time for at, u, _, _ in coming):
                pick = None
                coming = [c for c in coming if c[1] < urgency]
        if pick is not None:
            self.begin(rank, pick[1], pick[2], now)
        elif not coming:
            if lanes.pending[rank]:
                self.weight(rank, now)
        else:
            at = min(coming)[0]
            if lanes.pending[rank] and self.fills(rank, now, at - now):
                self.weight(rank, now)
            else:
                heapq.heappush(self.agenda, (at, rank))

    def candidates(
        self, rank: int, now: float
    ) -> tuple[list[tuple[int, int, bool]], list[tuple[float, int, int, bool]]]:
        """What could begin now: (urgency, stage, whether F), and later: (when, urgency, stage, whether F)."""
        lanes, count = self.lanes, self.problem.microbatches
        possible = lanes.fits(rank) or bool(lanes.pending[rank])
        ready: list[tuple[int, int, bool]] = []
        coming: list[tuple[float, int, int, bool]] = []
        for stage, urgency_f, urgency_i in self.choices[rank]:
            forwards, inputs = len(lanes.ends_f[stage]), len(lanes.ends_i[stage])
            if possible and forwards < count and forwards - inputs < self.caps[stage]:
                at = lanes.arrival_f(stage)
                if at is not None:
                    if at <= now + EPSILON:
                        ready.append((urgency_f, stage, True))
                    else:
                        coming.append((at, urgency_f, stage, True))
            if inputs < forwards:
                at = lanes.arrival_i(stage)
                if at is not None:
                    if at <= now + EPSILON:
                        ready.append((urgency_i, stage, False))
                    else:
                        coming.append((at, urgency_i, stage, False))
        return ready, coming

    def fills(self, rank: int, now: float, gap: float) -> bool:
        """Whether a W goes into a gap."""
        time = self.problem.weight[self.lanes.pending[rank][0][0]]
        if gap >= time - EPSILON:
            return True
        if self.policy.fill is None:
            waited = now - self.lanes.clock[rank]
            return gap + waited > self.lanes.room(rank) + EPSILON
        return gap > self.policy.fill * time

    def weight(self, rank: int, now: float) -> None:
        self.lanes.wait(rank, now)
        self.lanes.put_w(rank)
        self.again(rank)

    def begin(self, rank: int, stage: int, forward: bool, now: float) -> None:
        lanes = self.lanes
        if forward and not lanes.fits(rank):
            self.weight(rank, now)
            return
        if forward:
            lanes.put_f(stage, now)
            reader = stage + 1 if stage + 1 < self.problem.stages else None
        else:
            lanes.put_i(stage, now)
            reader = stage - 1 if stage else None
        self.again(rank)
        if reader is not None and self.problem.rank_of[reader] != rank:
            other = self.problem.rank_of[reader]
            if lanes.clock[other] <= now + EPSILON:
                heapq.heappush(self.agenda, (now, other))

    def again(self, rank: int) -> None:
        self.now[rank] = self.lanes.clock[rank]
        heapq.heappush(self.agenda, (self.lanes.clock[rank], rank))
