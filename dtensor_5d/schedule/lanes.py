"""The table on which the searches lay their actions: one lane a rank, every action as early as it can start."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dtensor_5d.schedule.actions import Action
from dtensor_5d.schedule.costs import Costs

__all__ = ["Found", "Lanes", "Problem", "one_by_one"]

EPSILON = 1e-9

Cell = tuple[str, int, int]
"""An action before it becomes one: kind, stage, micro-batch."""


class Problem:
    """What a search is given: where the stages live, what actions cost, and how much a rank may hold.

    `limit` is in units of one micro-batch on one chunk (`inf`: as much as there is); `release[stage]` the share of it
    that I lets go, below 0 where I stores more than it frees. Times are scaled so that the mean action takes 1 unit,
    which makes one tolerance fit all.
    """

    def __init__(
        self,
        rank_of: tuple[int, ...],
        microbatches: int,
        costs: Costs,
        limit: float,
        release: tuple[float, ...] | None = None,
    ) -> None:
        cost = costs.for_stages(len(rank_of))
        self.rank_of, self.microbatches, self.costs = rank_of, microbatches, costs
        self.ranks, self.stages = max(rank_of) + 1, len(rank_of)
        self.release = cost.input_release if release is None else release
        self.unit = unit = sum(cost.forward + cost.backward_input + cost.backward_weight) / (3 * self.stages)
        self.forward = [x / unit for x in cost.forward]
        self.input = [x / unit for x in cost.backward_input]
        self.weight = [x / unit for x in cost.backward_weight]
        self.held_by = [tuple(s for s in range(self.stages) if rank_of[s] == r) for r in range(self.ranks)]
        self.reserve = [max(0.0, *(-self.release[s] for s in held)) for held in self.held_by]
        """What a rank must have free before an I, beyond what its F hold: without it nothing could go on."""
        # More than a rank could ever hold, and than any rule of ours asks for.
        most = microbatches * max(len(held) * (1 + more) for held, more in zip(self.held_by, self.reserve))
        self.limit = min(limit, max(most, 2.0 * self.ranks))
        crosses = [rank_of[s] != rank_of[s + 1] for s in range(self.stages - 1)]
        self.latency = [x / unit if far else 0.0 for x, far in zip(cost.comm, crosses)]
        """Of the edge between a stage and the next."""

    @property
    def least(self) -> float:
        """The smallest limit that any schedule keeps: one micro-batch alone, each chunk's W right behind its I.

        One micro-batch has all its F before its first I, and the last chunk of a rank has its I first.
        """
        peaks = [1.0]
        for held in self.held_by:
            for left, stage in enumerate(held, 1):
                peaks += [left, left - self.release[stage]]
        return max(peaks)

    @property
    def size(self) -> int:
        """How many actions a schedule has."""
        return 3 * self.stages * self.microbatches


@dataclass(frozen=True)
class Found:
    """A schedule that a search has come upon. `span` is the longest of all ranks, what the searches minimise."""

    span: float
    makespan: float
    waited: float
    idle: tuple[float, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def key(self) -> tuple[float, float, float]:
        """Smaller is better."""
        return round(self.span, 7), round(self.makespan, 7), round(self.waited, 7)

    def table(self) -> list[list[Action]]:
        """The rows as actions."""
        return [[Action(stage, kind, mb) for kind, stage, mb in row] for row in self.rows]


class Lanes:
    """The state of all ranks while a schedule grows.

    Micro-batches pass every stage in the order of their numbers, and W follows I in order: within one rank and one
    kind nothing is gained by another order. `ends_f[stage]` and `ends_i[stage]` list when they ended.
    """

    def __init__(self, problem: Problem, allowed: tuple[float, ...] | None = None) -> None:
        self.problem = problem
        ranks, stages = problem.ranks, problem.stages
        self.clock = [0.0] * ranks
        self.first: list[float | None] = [None] * ranks
        self.idle = [0.0] * ranks
        self.held = [0.0] * ranks
        self.ends_f: list[list[float]] = [[] for _ in range(stages)]
        self.ends_i: list[list[float]] = [[] for _ in range(stages)]
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
        self.rows: list[list[Cell]] = [[] for _ in range(ranks)]
        self.most_idle = 0.0
        self.over = False
        """Whether some I found no room for what it stores."""
        # How much longer than the last time a rank may idle, when the most idle rank of the last time is the measure.
        self.slack = [max(allowed) - x for x in allowed] if allowed else [0.0] * ranks

    def arrival_f(self, stage: int) -> float | None:
        """When the input of the next F of a stage is there; None while nobody has begun to make it."""
        if stage == 0:
            return 0.0
        made, k = self.ends_f[stage - 1], len(self.ends_f[stage])
        return made[k] + self.problem.latency[stage - 1] if k < len(made) else None

    def arrival_i(self, stage: int) -> float | None:
        """The same for the next I."""
        k = len(self.ends_i[stage])
        if stage == self.problem.stages - 1:
            return self.ends_f[stage][k] if k < len(self.ends_f[stage]) else None
        made = self.ends_i[stage + 1]
        return made[k] + self.problem.latency[stage] if k < len(made) else None

    def room(self, rank: int) -> float:
        """How long a rank may idle without becoming the one that all wait for."""
        return max(self.most_idle, self.slack[rank]) - self.idle[rank]

    def wait(self, rank: int, until: float) -> None:
        """Let a rank idle. Time before its first action does not count."""
        if self.first[rank] is not None and until > self.clock[rank]:
            self.idle[rank] += until - self.clock[rank]
            self.most_idle = max(self.most_idle, self.idle[rank])
        self.clock[rank] = max(self.clock[rank], until)

    def put_f(self, stage: int, start: float) -> None:
        rank, ends = self.problem.rank_of[stage], self.ends_f[stage]
        if start > self.clock[rank] or self.first[rank] is None:
            self._begin(rank, start)
        self.rows[rank].append(("F", stage, len(ends)))
        self.clock[rank] = end = self.clock[rank] + self.problem.forward[stage]
        ends.append(end)
        self.held[rank] += 1.0

    def put_i(self, stage: int, start: float) -> None:
        rank, ends = self.problem.rank_of[stage], self.ends_i[stage]
        if self.problem.release[stage] < 0:
            more = -self.problem.release[stage] - EPSILON
            while self.held[rank] + more > self.problem.limit and self.pending[rank]:
                self.put_w(rank)
            self.over = self.over or self.held[rank] + more > self.problem.limit
        if start > self.clock[rank]:
            self._begin(rank, start)
        k = len(ends)
        self.rows[rank].append(("I", stage, k))
        self.clock[rank] = end = self.clock[rank] + self.problem.input[stage]
        ends.append(end)
        self.held[rank] -= self.problem.release[stage]
        self.pending[rank].append((stage, k))

    def put_w(self, rank: int) -> None:
        stage, k = self.pending[rank].popleft()
        self.rows[rank].append(("W", stage, k))
        self.clock[rank] += self.problem.weight[stage]
        self.held[rank] -= 1.0 - self.problem.release[stage]

    def fill(self, rank: int, until: float, more: bool) -> None:
        """Use the time until something arrives for W.

        Those that fit go in. With `more`, one that does not fit goes in too, unless the rank has room to idle.
        """
        if until <= self.clock[rank]:
            return
        pending, weight = self.pending[rank], self.problem.weight
        while pending and until - self.clock[rank] >= weight[pending[0][0]] - EPSILON:
            self.put_w(rank)
        gap = until - self.clock[rank]
        if more and pending and gap > EPSILON and gap > self.room(rank) + EPSILON:
            self.put_w(rank)

    def fits(self, rank: int) -> bool:
        """Whether a rank may hold one more activation, and still do an I when every W is done."""
        problem = self.problem
        if self.held[rank] + 1.0 > problem.limit + EPSILON:
            return False
        if not problem.reserve[rank]:
            return True
        forwards = sum(len(self.ends_f[s]) - len(self.ends_i[s]) for s in problem.held_by[rank])
        return forwards + 1 + problem.reserve[rank] <= problem.limit + EPSILON

    def make_room(self, rank: int) -> bool:
        """Do as many W as it takes to hold one more activation; False if all do not suffice."""
        while not self.fits(rank) and self.pending[rank]:
            self.put_w(rank)
        return self.fits(rank)

    def finish(self) -> Found | None:
        """What has come of it; None if something is left undone, or a rank held too much."""
        if self.over or any(len(ends) < self.problem.microbatches for ends in self.ends_i):
            return None
        for rank, pending in enumerate(self.pending):
            while pending:
                self.put_w(rank)
        spans = [end - (start or 0.0) for start, end in zip(self.first, self.clock)]
        rows = tuple(tuple(row) for row in self.rows)
        return Found(max(spans), max(self.clock), sum(self.idle), tuple(self.idle), rows)

    def _begin(self, rank: int, start: float) -> None:
        self.wait(rank, start)
        if self.first[rank] is None:
            self.first[rank] = self.clock[rank]


def one_by_one(problem: Problem) -> Found | None:
    """One micro-batch after the other on every rank, W right behind I: what keeps every limit that can be kept."""
    lanes = Lanes(problem)
    for _ in range(problem.microbatches):
        for stage in range(problem.stages):
            arrival = lanes.arrival_f(stage)
            assert arrival is not None
            lanes.put_f(stage, arrival)
        for stage in reversed(range(problem.stages)):
            arrival = lanes.arrival_i(stage)
            assert arrival is not None
            lanes.put_i(stage, arrival)
            lanes.put_w(problem.rank_of[stage])
    return lanes.finish()
