"""How long a schedule takes and what it keeps in memory: from costs and dependencies, without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dtensor_5d.errors import PlanError
from dtensor_5d.schedule.actions import Action, leaves
from dtensor_5d.schedule.costs import Costs, StageCosts, costs_violation
from dtensor_5d.schedule.data import Schedule

__all__ = ["TimedAction", "Timeline", "simulate"]


class TimedAction(NamedTuple):
    """One bar of a Gantt chart."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule starts and ends, each as early as it can (times in the unit of `costs`).

    Tuples have one entry a rank. Sources: Zero Bubble Pipeline Parallelism, section 5 (span, bubble rate);
    definitions in `published-vectors.json`.
    """

    schedule: Schedule
    costs: Costs
    rows: tuple[tuple[TimedAction, ...], ...]
    peak_activations: tuple[float, ...]
    """Most activations held at once, in units of one micro-batch on one chunk: F adds 1, I and W release it."""
    peak_stash: tuple[int, ...]
    """Most (micro-batch, chunk) pairs between their I and their W: what deferred weight gradients keep."""

    @cached_property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last, over all ranks."""
        return max(row[-1].end for row in self.rows) - min(row[0].start for row in self.rows)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """From the start of a rank's first action to the end of its last."""
        return tuple(row[-1].end - row[0].start for row in self.rows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time a rank computes."""
        return tuple(sum(timed.end - timed.start for timed in row) for row in self.rows)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Time a rank waits between its first and its last action."""
        return tuple(span - busy for span, busy in zip(self.spans, self.busy))

    @property
    def idle(self) -> tuple[float, ...]:
        """Time a rank does not compute within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_rate(self) -> float:
        """(longest span - longest busy time) / longest span: what the order costs beyond the busiest rank's work."""
        longest = max(self.spans)
        return (longest - max(self.busy)) / longest

    def activations(self, rank: int) -> tuple[tuple[float, float], ...]:
        """(time, activations held from then on) of a rank, in the unit of `peak_activations`; ends at 0."""
        release = self.costs.for_stages(self.schedule.stages).input_release
        held, curve = 0.0, []
        for _, action, start, end in self.rows[rank]:
            for leaf in leaves(action):
                held += _delta(leaf.kind, release[leaf.stage])
                curve.append((start if leaf.kind == "F" else end, round(held, 9)))
        return tuple(sorted(curve, key=lambda point: point[0]))

    @cached_property
    def critical_path(self) -> tuple[TimedAction, ...]:
        """A chain of actions without slack, from a start to the end of the makespan: shorten one of these to gain."""
        made: dict[tuple[bool, int, int | None], TimedAction] = {}
        before: dict[TimedAction, TimedAction] = {}
        for row in self.rows:
            for i, timed in enumerate(row):
                if i:
                    before[timed] = row[i - 1]
                made.update({(leaf.kind == "F", leaf.stage, leaf.microbatch): timed for leaf in leaves(timed.action)
                             if leaf.kind != "W"})  # fmt: skip
        comm = self.costs.for_stages(self.schedule.stages).comm
        at = max((row[-1] for row in self.rows), key=lambda timed: timed.end)
        path = [at]
        while True:
            # Of all that this action waited for, the latest arrival held it up.
            causes = [(before[at].end, before[at])] if at in before else []
            for leaf in leaves(at.action):
                if (need := self._needs(leaf)) is not None:
                    cause = made[need[0], need[1], leaf.microbatch]
                    latency = 0.0 if cause.rank == at.rank else comm[min(leaf.stage, need[1])]
                    causes.append((cause.end + latency, cause))
            causes = [cause for cause in causes if cause[1] is not at]
            if not causes:
                return tuple(reversed(path))
            at = max(causes, key=lambda cause: cause[0])[1]
            path.append(at)

    def _needs(self, leaf: Action) -> tuple[bool, int] | None:
        """What an action reads: (whether of a forward, stage)."""
        if leaf.kind == "W":
            return False, leaf.stage
        forward = leaf.kind == "F"
        stage = self.schedule.before(leaf.stage) if forward else self.schedule.after(leaf.stage)
        if stage is None:
            return None if forward else (True, leaf.stage)
        return forward, stage


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule: each action starts when its rank is free and its input has arrived.

    Example:
        >>> simulate(build("1f1b", ranks=4, microbatches=8), Costs(1, 1, 1)).bubble_rate    # 3 / (8 + 3)
        0.2727...

    Communication is a latency on every edge between ranks. The communication and parameter actions of a lowered
    schedule take no time of their own. Errors: `PlanError` for costs that list another number of stages, and for a
    table that cannot run (the message of `check`).
    """
    if problem := costs_violation(costs):
        raise PlanError(problem)
    cost = costs.for_stages(schedule.stages)
    plain = schedule.compute_only() if schedule.lowered else schedule
    starts, ends, stuck = run(plain, cost)
    if stuck:
        from dtensor_5d.schedule.check import check

        check(schedule)
        raise AssertionError("a schedule that cannot run passed its check")
    rows = tuple(
        tuple(TimedAction(rank, *timed) for timed in zip(row, starts[rank], ends[rank]))
        for rank, row in enumerate(plain.table)
    )
    peaks, stashes = zip(*(_memory(row, cost) for row in plain.table))
    return Timeline(schedule, costs, rows, peaks, stashes)


def run(schedule: Schedule, cost: StageCosts) -> tuple[list[list[float]], list[list[float]], dict[int, int]]:
    """Starts and ends of every action of a table without communication, and {rank: cell} that can never start.

    Plain lists of numbers: tens of thousands of small objects would wake the garbage collector.
    """
    table, count, rank_of = schedule.table, schedule.microbatches, schedule.rank_of
    forward, backward, weight, comm = cost.forward, cost.backward_input, cost.backward_weight, cost.comm
    # Results are numbered: activation of (stage, micro-batch), then gradients. For each stage: where what it reads
    # starts (-1: reads nothing), and the latency from there.
    gradients = schedule.stages * count
    reads_f: list[tuple[int, float]] = []
    reads_i: list[tuple[int, float]] = []
    for stage in range(schedule.stages):
        source, sink = schedule.before(stage), schedule.after(stage)
        latency = 0.0 if source is None or rank_of[source] == rank_of[stage] else comm[source]
        reads_f.append((-1 if source is None else source * count, latency))
        latency = 0.0 if sink is None or rank_of[sink] == rank_of[stage] else comm[stage]
        reads_i.append((stage * count if sink is None else gradients + sink * count, latency))
    done: list[float] = [-1.0] * (2 * gradients)
    waiting: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in table]
    ends: list[list[float]] = [[] for _ in table]
    clock = [0.0] * len(table)
    ready = list(range(len(table)))
    while ready:
        rank = ready.pop()
        row, began, ended, now = table[rank], starts[rank], ends[rank], clock[rank]
        for i in range(len(began), len(row)):
            action = row[i]
            start, duration, blocked = now, 0.0, -1
            for stage, kind, mb, _ in action.parts or (action,):
                assert mb is not None
                if kind == "F":
                    need, latency = reads_f[stage]
                    duration += forward[stage]
                    if need < 0:
                        continue
                elif kind == "W":
                    need, latency = gradients + stage * count, 0.0
                    duration += weight[stage]
                else:
                    need, latency = reads_i[stage]
                    duration += backward[stage] + (weight[stage] if kind == "B" else 0.0)
                arrived = done[need + mb]
                if arrived < 0:
                    blocked = need + mb
                    break
                if arrived + latency > start:
                    start = arrived + latency
            if blocked >= 0:
                waiting.setdefault(blocked, []).append(rank)
                break
            if action.parts and cost.overlapped is not None:
                duration = cost.overlapped[action.parts[0].stage]
            now = start + duration
            began.append(start)
            ended.append(now)
            for stage, kind, mb, _ in action.parts or (action,):
                if kind != "W":
                    assert mb is not None
                    key = stage * count + mb + (0 if kind == "F" else gradients)
                    done[key] = now
                    if key in waiting:
                        ready += waiting.pop(key)
        clock[rank] = now
    stuck = {rank: len(row) for rank, row in enumerate(starts) if len(row) < len(table[rank])}
    return starts, ends, stuck


def _memory(row: tuple[Action, ...], cost: StageCosts) -> tuple[float, int]:
    """Peak activations and peak stash of one rank: they depend on the order alone, not on time."""
    held = peak = 0.0
    stash = most = 0
    release = cost.input_release
    for action in row:
        for stage, kind, _, _ in action.parts or (action,):
            held += _delta(kind, release[stage])
            stash += (kind == "I") - (kind == "W")
            peak, most = max(peak, held), max(most, stash)
    # A release such as 0.5676 is no binary fraction: rounding takes away what the sums gathered.
    return round(peak, 9), most


def _delta(kind: str, release: float) -> float:
    """What an action adds to the activations held: 1 for F; what I and W take away sums to 1."""
    if kind == "F":
        return 1.0
    if kind == "B":
        return -1.0
    return -release if kind == "I" else release - 1.0
