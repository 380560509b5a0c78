"""zb-auto against the exhaustive oracle, and as good as what is written by hand."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.schedule import Costs, build, check, simulate
from dtensor_5d.schedule.build import MemoryLimitError

from .oracle import shortest_span

# (p, m, F, I, W, latency, memory limit): balanced and lopsided costs, tight and loose memory.
SMALL = [
    (2, 4, 1, 1, 1, 0, 2),
    (2, 6, 3, 4, 2, 1, 2.5),
    (2, 8, 1, 7, 5, 2, 2),
    (2, 8, 7, 6, 7, 0, 6),
    (3, 3, 8, 2, 7, 1, 3),
    (3, 4, 5, 6, 4, 0, 3),
    (3, 4, 5, 6, 4, 0, 6),
    (3, 4, 9, 9, 1, 0, 1.5),
    (3, 5, 6, 7, 8, 0, 2.5),
    (3, 5, 7, 7, 3, 1, 2.5),
    (3, 6, 5, 6, 4, 1, 3),
    (3, 6, 2, 8, 4, 1, 4),
    (3, 6, 9, 4, 7, 0, 2.5),
    (3, 3, 2, 5, 9, 2, 2),
    (4, 3, 9, 1, 7, 1, 4),
    (4, 4, 5, 3, 9, 0, 2),
    (4, 4, 1, 1, 1, 0, 4),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_equals_the_optimum(case):
    p, m, f, i, w, c, limit = case
    costs = Costs(f, i, w, c)
    timeline = simulate(build("zb-auto", ranks=p, microbatches=m, costs=costs, memory_limit=limit), costs)
    assert max(timeline.peak_activations) <= limit
    found = max(timeline.spans)
    # The oracle need not look at what is not better: if nothing is, it returns `found`.
    assert shortest_span(p, m, f, i, w, c, limit, known=found) == found


# (p, m, F, I, W, latency, memory limit, share of an activation that I lets go).
I_STORES_MORE = [
    (2, 4, 1, 1, 1, 0, 1.5, -0.5),
    (2, 4, 3, 6, 3, 0, 2, -0.25),
    (2, 5, 3, 4, 2, 1, 2.25, -0.25),
    (3, 3, 5, 6, 4, 0, 2.6, -0.6),
    (3, 4, 2, 8, 4, 1, 3, -1.5),
]


@pytest.mark.parametrize("case", I_STORES_MORE, ids=str)
def test_equals_the_optimum_where_i_stores_more_than_it_frees(case):
    p, m, f, i, w, c, limit, release = case
    costs = Costs(f, i, w, c, input_release=release)
    timeline = simulate(build("zb-auto", ranks=p, microbatches=m, costs=costs, memory_limit=limit), costs)
    assert max(timeline.peak_activations) <= limit
    found = max(timeline.spans)
    assert shortest_span(p, m, f, i, w, c, limit, release=release, known=found) == found


def test_the_optimum_of_uneven_stages_where_i_stores_more():
    """Found by brute force by the tester of issue 3; once refused."""
    costs = Costs(3, 6, [3, 2], 0, input_release=-0.25)
    timeline = simulate(build("zb-auto", ranks=2, microbatches=2, costs=costs, memory_limit=2), costs)
    assert max(timeline.spans) == 42 and max(timeline.peak_activations) <= 2


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["zb-auto", "zbv"]), st.integers(1, 3), st.integers(1, 5), st.data(), st.sampled_from([0, 0.7, 2.2])
)
def test_every_limit_that_one_microbatch_alone_keeps_is_kept(name, p, m, data, more):
    stages = p * (2 if name == "zbv" else 1)
    shares = st.lists(st.sampled_from([-1.5, -0.25, 0, 0.5, 1]), min_size=stages, max_size=stages)
    costs = Costs(3, 4, 2, 0.5, input_release=data.draw(shares))
    with pytest.raises(MemoryLimitError) as error:
        build(name, ranks=p, microbatches=m, costs=costs, memory_limit=0.5)
    limit = error.value.needed + more
    schedule = build(name, ranks=p, microbatches=m, costs=costs, memory_limit=limit)
    check(schedule)
    assert max(simulate(schedule, costs).peak_activations) <= limit + 1e-9
    # Nothing less will do: a single micro-batch needs as much.
    alone = build(name, ranks=p, microbatches=1, costs=costs, memory_limit=error.value.needed)
    assert max(simulate(alone, costs).peak_activations) == pytest.approx(error.value.needed)


def test_the_oracle_finds_the_published_optimum_by_itself():
    assert shortest_span(2, 4, 1, 1, 1, 0, 2) == 13
    assert shortest_span(3, 4, 1, 1, 1, 0, 3) == 14
    assert shortest_span(3, 4, 5, 6, 4, 0, 3) == 74


COSTS = st.tuples(st.integers(3, 9), st.integers(3, 9), st.integers(2, 6), st.sampled_from([0, 0.1, 0.5]))


@settings(max_examples=4, deadline=None)
@given(st.integers(2, 6), st.integers(1, 16), COSTS, st.sampled_from(["tight", "p", "2p"]))
def test_never_worse_than_the_handwritten(p, m, times, memory):
    costs = Costs(*times)
    limit = {"tight": 1, "p": p, "2p": 2 * p}[memory]
    schedule = build("zb-auto", ranks=p, microbatches=m, costs=costs, memory_limit=limit)
    check(schedule)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_activations) <= limit
    for name in ("1f1b", "zb-h1", "zb-h2"):
        other = simulate(build(name, ranks=p, microbatches=m), costs)
        if max(other.peak_activations) <= limit:
            assert max(timeline.spans) <= max(other.spans) + 1e-9


def test_uneven_stages():
    """A heavy last stage (the head): the busiest rank alone bounds the span, and memory buys it."""
    costs = Costs([4, 4, 4, 6], [4, 4, 4, 6], [3, 3, 3, 5], 0.1)
    spans = {}
    for limit in (2, 4, 8):
        schedule = build("zb-auto", ranks=4, microbatches=12, costs=costs, memory_limit=limit)
        check(schedule)
        timeline = simulate(schedule, costs)
        assert max(timeline.peak_activations) <= limit
        spans[limit] = max(timeline.spans)
    assert spans[2] > spans[4] >= spans[8] >= 12 * 17
    assert spans[8] <= 12 * 17 * 1.01


def test_more_that_i_releases_never_costs_time():
    spans = []
    for release in (0.0, 0.5, 0.75):
        costs = Costs(5, 6, 4, 0.2, input_release=release)
        timeline = simulate(build("zb-auto", ranks=3, microbatches=5, costs=costs, memory_limit=3), costs)
        assert max(timeline.peak_activations) <= 3
        spans.append(max(timeline.spans))
    assert spans == sorted(spans, reverse=True)


def test_same_schedule_every_time():
    costs = Costs(29.8, 29.4, 19.5, 0.6)
    once, twice = (build("zb-auto", ranks=3, microbatches=8, costs=costs) for _ in range(2))
    assert once == twice


def test_speed():
    """Eight ranks and 32 micro-batches in under 2 s (issue 3); CPU time, as other work may share the machine."""
    start = time.process_time()
    build("zb-auto", ranks=8, microbatches=32, costs=Costs(29.8, 29.4, 19.5, 0.6), memory_limit=16)
    assert time.process_time() - start < 2
