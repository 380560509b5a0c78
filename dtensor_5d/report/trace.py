"""Timelines as a Chrome trace, for chrome://tracing and ui.perfetto.dev: a process a schedule, a thread a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dtensor_5d.report.gantt import KIND_NAMES, kind_of, share_of_rank
from dtensor_5d.schedule import Timeline
from dtensor_5d.schedule.actions import leaves

__all__ = ["chrome_trace"]

# Names that the trace viewers know as colours.
_COLOURS = {"F": "thread_state_running", "B": "good", "I": "rail_response", "W": "rail_animation", "X": "yellow"}


def chrome_trace(timelines: Sequence[Timeline], *, microseconds: float = 1000.0) -> str:
    """The JSON text of a trace; `microseconds` is the length of one unit of the costs.

    Beside its actions, every rank has a counter: activations held, in micro-batches on all of its layers.
    """
    events = [event for pid, t in enumerate(timelines) for event in _events(pid, t, microseconds)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(pid: int, timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": timeline.schedule.name}}
    release = timeline.costs.for_stages(timeline.schedule.stages).input_release
    share = share_of_rank(timeline)
    for rank, row in enumerate(timeline.rows):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": rank, "args": {"sort_index": rank}}
        held = 0.0
        for timed in row:
            kind = kind_of(timed.action)
            yield {
                "ph": "X", "name": str(timed.action), "cat": KIND_NAMES[kind], "cname": _COLOURS[kind],
                "pid": pid, "tid": rank, "ts": timed.start * unit, "dur": (timed.end - timed.start) * unit,
                "args": {"stage": [p.stage for p in leaves(timed.action)],
                         "micro-batch": [p.microbatch for p in leaves(timed.action)]},
            }  # fmt: skip
            for leaf in leaves(timed.action):
                # A forward holds its activation from its start, a backward lets go at its end.
                freed = {"F": -1.0, "B": 1.0, "I": release[leaf.stage], "W": 1.0 - release[leaf.stage]}[leaf.kind]
                held -= freed
                at = timed.start if leaf.kind == "F" else timed.end
                yield {"ph": "C", "name": f"activations held by rank {rank}", "pid": pid, "ts": at * unit,
                       "args": {"micro-batches": round(held * share, 9)}}  # fmt: skip
