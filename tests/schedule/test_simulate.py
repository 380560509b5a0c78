"""The timeline: idle times, stash, critical path, uneven costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.schedule import Costs, build, simulate

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"]


def test_a_timeline_by_hand():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Costs(1, 2, 3, 0.5))
    starts = [{str(a): (s, e) for _, a, s, e in row} for row in timeline.rows]
    assert starts[0] == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (8, 13), "0B1": (14, 19)}
    assert starts[1] == {"1F0": (1.5, 2.5), "1B0": (2.5, 7.5), "1F1": (7.5, 8.5), "1B1": (8.5, 13.5)}
    assert timeline.makespan == 19
    assert timeline.spans == (19, 12)
    assert timeline.busy == (12, 12)
    assert timeline.bubbles == (7, 0)
    assert timeline.idle == (7, 7)
    assert timeline.bubble_rate == 7 / 19
    assert [str(t.action) for t in timeline.critical_path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(0, 3), st.integers(8, 11))
def test_every_action_waits_for_its_input_and_its_rank(name, times, comm, m):
    """A slow reference: recompute from the rows alone that nothing starts early, and nothing late without reason."""
    m += m % 2
    schedule = build(name, ranks=4, microbatches=m)
    f, i, w = times
    rows = simulate(schedule, Costs(f, i, w, comm)).rows
    end = {}
    for row in rows:
        for _, action, _, stop in row:
            for leaf in action.parts or (action,):
                end["F" if leaf.kind == "F" else "W" if leaf.kind == "W" else "I", leaf.stage, leaf.microbatch] = stop
    for row in rows:
        free = 0.0
        for rank, action, start, stop in row:
            reasons = [free]
            length = 0
            for leaf in action.parts or (action,):
                length += {"F": f, "I": i, "W": w, "B": i + w}[leaf.kind]
                if leaf.kind == "W":
                    reasons.append(end["I", leaf.stage, leaf.microbatch])
                    continue
                source = schedule.before(leaf.stage) if leaf.kind == "F" else schedule.after(leaf.stage)
                if source is not None:
                    far = schedule.rank_of[source] != rank
                    kind = "F" if leaf.kind == "F" else "I"
                    reasons.append(end[kind, source, leaf.microbatch] + comm * far)
            assert start == max(reasons)
            assert stop - start == length
            free = stop


@pytest.mark.parametrize("name", NAMES)
def test_the_critical_path_has_no_slack(name):
    """Each action begins when the one before it on the path, and the latency between them, are over."""
    timeline = simulate(build(name, ranks=4, microbatches=8), Costs(3, 2, 1, 0.25))
    path = timeline.critical_path
    assert path[0].start == 0 and path[-1].end == timeline.makespan
    for before, after in itertools.pairwise(path):
        assert after.start - before.end == (0.25 if before.rank != after.rank else 0)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_shortening_what_is_critical_shortens_all(name):
    schedule = build(name, ranks=4, microbatches=8)
    timeline = simulate(schedule, Costs(3, 2, 1))
    stages = {timed.action.stage for timed in timeline.critical_path}
    faster = [2.0 if s in stages else 3.0 for s in range(schedule.stages)]
    assert simulate(schedule, Costs(faster, 2, 1)).makespan < timeline.makespan


def test_one_slow_stage_bounds_the_pipeline():
    schedule = build("1f1b", ranks=4, microbatches=32)
    timeline = simulate(schedule, Costs([1, 1, 3, 1], 1, 1))
    assert timeline.busy == (96, 96, 160, 96)
    assert max(timeline.spans) >= 160
    # What the order loses, not what the split of the layers does.
    assert timeline.bubble_rate == (max(timeline.spans) - 160) / max(timeline.spans)


def test_latency_of_one_edge():
    schedule = build("1f1b", ranks=3, microbatches=1)
    assert simulate(schedule, Costs(1, 1, 1, [5, 0, 0])).makespan == 9 + 10
    assert simulate(schedule, Costs(1, 1, 1, [0, 5, 0])).makespan == 9 + 10
    assert simulate(schedule, Costs(1, 1, 1, [0, 0, 5])).makespan == 9


def test_latency_only_between_ranks():
    """The turn of the V stays on one rank: 2p - 2 hops each way instead of 2p - 1."""
    assert simulate(build("zbv", ranks=4, microbatches=1), Costs(1, 1, 1, 0.5)).critical_path[-1].end == 17 + 12 * 0.5


def test_weight_gradient_stash():
    assert simulate(build("1f1b", ranks=4, microbatches=8), Costs(1, 1, 1)).peak_stash == (0, 0, 0, 0)
    assert simulate(build("zb-h1", ranks=4, microbatches=8), Costs(1, 1, 1)).peak_stash == (1, 2, 3, 4)
    assert simulate(build("zb-h2", ranks=4, microbatches=8), Costs(1, 1, 1)).peak_stash == (1, 3, 5, 7)


def test_input_release_below_zero_raises_the_peak():
    """Torch's own split keeps more after I than before: the peak is then after an I."""
    schedule = build("zb-h1", ranks=4, microbatches=8)
    usual = simulate(schedule, Costs(1, 1, 1)).peak_activations
    more = simulate(schedule, Costs(1, 1, 1, input_release=-0.37)).peak_activations
    assert all(b > a for a, b in zip(usual, more))


def test_an_overlapped_pair_takes_its_own_time():
    schedule = build("dualpipev", ranks=2, microbatches=8)
    apart, together = Costs(1, 1, 1), Costs(1, 1, 1, overlapped=2.4)
    assert simulate(schedule, together).makespan < simulate(schedule, apart).makespan
    pairs = [t for row in simulate(schedule, together).rows for t in row if t.action.parts]
    assert pairs and all(t.end - t.start == pytest.approx(2.4) for t in pairs)
