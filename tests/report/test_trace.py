"""The Chrome trace: the times of the timeline, and a counter that agrees with the simulator."""

from __future__ import annotations

import json

import pytest

from dtensor_5d.report.trace import chrome_trace
from dtensor_5d.schedule import Costs, build, simulate


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h2", "zbv", "dualpipe"])
def test_events_are_the_actions_and_the_counter_peaks_where_the_simulator_does(name):
    costs = Costs(1, 1.1, 0.9, 0.1, input_release=0.6)
    made = simulate(build(name, ranks=4, microbatches=8), costs)
    events = json.loads(chrome_trace([made], microseconds=10))["traceEvents"]
    for rank, row in enumerate(made.rows):
        mine = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        assert [e["name"] for e in mine] == [str(timed.action) for timed in row]
        assert [e["ts"] for e in mine] == pytest.approx([10 * timed.start for timed in row])
        assert [e["dur"] for e in mine] == pytest.approx([10 * (timed.end - timed.start) for timed in row])
        held = [e["args"]["micro-batches"] for e in events if e["ph"] == "C" and e["name"].endswith(f"rank {rank}")]
        share = made.schedule.ranks / made.schedule.depth
        assert max(held) == pytest.approx(made.peak_activations[rank] * share)
        assert min(held) >= 0 and held[-1] == 0


def test_schedules_are_processes_and_ranks_are_threads_with_names():
    made = [simulate(build(n, ranks=2, microbatches=2), Costs(1, 1, 1)) for n in ("gpipe", "1f1b")]
    events = json.loads(chrome_trace(made))["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert names == {(0, None): "gpipe", (1, None): "1f1b", (0, 0): "rank 0", (0, 1): "rank 1", (1, 0): "rank 0",
                     (1, 1): "rank 1"}  # fmt: skip
