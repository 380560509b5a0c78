"""What a window cost, and when everything in it ran: in the form in which schedules are simulated and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from dtensor_5d.pipeline.runtime import Record
from dtensor_5d.schedule import Costs, Schedule, TimedAction, Timeline, simulate

__all__ = ["measured_costs", "measured_timeline"]

_KINDS = ("F", "I", "W")
_LEAST = 1e-9  # an action without work (a frozen stage has no W); costs must be above 0


def measured_costs(records: Sequence[Record], stages: int, group: dist.ProcessGroup, device: torch.device) -> Costs:
    """Seconds of F, I and W of every stage: the median of a rank, the slowest of all ranks of `group` that have the
    stage. The same on all of them (a collective)."""
    table = torch.zeros(len(_KINDS), stages, dtype=torch.float64, device=device)
    for k, kind in enumerate(_KINDS):
        for stage in range(stages):
            times = [r.end - r.start for r in records if (r.action.kind, r.action.stage) == (kind, stage)]
            table[k, stage] = median(times) if times else 0.0
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    forward, backward_input, backward_weight = table.clamp_min(_LEAST).tolist()
    return Costs(forward, backward_input, backward_weight)


def measured_timeline(
    schedule: Schedule, records: Sequence[Record], costs: Costs, group: dist.ProcessGroup
) -> Timeline:
    """When every action of a window ran on every rank of the pipeline, in seconds from the start of the window.

    Each rank counts from its own start, which follows an exchange between all of them. Its peaks are those of the
    order of actions. Beside it stands `simulate(timeline.schedule, timeline.costs)`. A collective.
    """
    every: list[list[Record]] = [[] for _ in range(schedule.ranks)]
    dist.all_gather_object(every, list(records), group=group)
    rows = tuple(tuple(TimedAction(rank, r.action, r.start, r.end) for r in row) for rank, row in enumerate(every))
    ran = schedule.with_table([r.action for r in row] for row in every)
    return replace(simulate(ran, costs), rows=rows)
