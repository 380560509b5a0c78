"""The closed forms of the literature, for any number of ranks and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.schedule import Costs, build, simulate

P = st.integers(2, 16)
SOME = settings(max_examples=25, deadline=None)


@st.composite
def sizes(draw, multiple=False):
    """p in 2..16 and m in p..64, where asked for a multiple of p."""
    p = draw(P)
    m = p * draw(st.integers(1, 64 // p)) if multiple else draw(st.integers(p, 64))
    return p, m


TIME = st.integers(1, 20)
# W no longer than F and I: what the papers assume where they fill bubbles with W.
ORDERED = st.tuples(TIME, TIME, TIME).map(lambda t: (max(t), sorted(t)[1], min(t)))


def bubble(name, p, m, costs, chunks=None):
    timeline = simulate(build(name, ranks=p, microbatches=m, chunks=chunks), costs)
    return max(timeline.spans) - m * (chunks or 1) * (costs.forward + costs.backward_input + costs.backward_weight)


@SOME
@given(sizes(), TIME, TIME, TIME)
def test_gpipe_and_one_f_one_b(size, f, i, w):
    p, m = size
    for name in ("gpipe", "1f1b"):
        assert bubble(name, p, m, Costs(f, i, w)) == (p - 1) * (f + i + w)


@SOME
@given(P, st.integers(1, 64), TIME, TIME, TIME)
def test_fewer_microbatches_than_ranks(p, m, f, i, w):
    m = min(m, p)
    timeline = simulate(build("1f1b", ranks=p, microbatches=m), Costs(f, i, w))
    assert timeline.makespan == (m + p - 1) * (f + i + w)


@settings(max_examples=4, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), TIME, TIME, TIME)
def test_zb_auto_with_few_microbatches(p, m, f, i, w):
    """(m + p - 1) (F + I) + W on the rank that starts first, if all W but the last find a gap."""
    m, w = min(m, p), min(f, i, w)
    costs = Costs(f, i, w)
    timeline = simulate(build("zb-auto", ranks=p, microbatches=m, costs=costs), costs)
    assert max(timeline.spans) <= (m + p - 1) * (f + i) + w


@SOME
@given(sizes(multiple=True), st.integers(20, 40), st.integers(20, 40), st.integers(10, 20), st.integers(0, 4))
def test_one_f_one_b_with_latency(size, f, i, w, c):
    p, m = size
    expected = (p - 1) * (f + i + w) + (2 * (p - 1) * m // p + 2 * (p - 2)) * c
    assert bubble("1f1b", p, m, Costs(f, i, w, c)) == expected


@SOME
@given(sizes(multiple=True), st.integers(2, 4), st.integers(20, 40), st.integers(20, 40), st.integers(10, 20))
def test_interleaved(size, v, f, i, w):
    p, m = size
    assert bubble("interleaved", p, m, Costs(f, i, w), v) == (p - 1) * (f + i + w)


@SOME
@given(sizes(), ORDERED)
def test_zb_h1(size, times):
    p, m = size
    f, i, w = times
    assert bubble("zb-h1", p, m, Costs(f, i, w)) == (p - 1) * (f + i - w)


@SOME
@given(P, st.integers(0, 30), ORDERED)
def test_zb_h2(p, more, times):
    f, i, w = times
    assert bubble("zb-h2", p, 2 * p + more, Costs(f, i, w)) == (p - 1) * (f + i - 2 * w)


@SOME
@given(st.integers(1, 8), st.integers(0, 24), TIME, TIME)
def test_dualpipe(half, more, f, w):
    """(PP / 2 - 1) (F&B + B - 3 W), with F = I as the formula assumes, and W no longer than they are."""
    w = min(f, w)
    p, m = 2 * half, 4 * half + 2 * more
    costs = Costs(f, f, w)
    timeline = simulate(build("dualpipe", ranks=p, microbatches=m), costs)
    assert max(timeline.spans) - m * (2 * f + w) == (half - 1) * ((2 * f + w) + (f + w) - 3 * w)
    timeline = simulate(build("dualpipev", ranks=half, microbatches=m), costs)
    assert max(timeline.spans) - 2 * m * (2 * f + w) == (half - 1) * ((2 * f + w) + (f + w) - 3 * w)


@SOME
@given(P, st.integers(1, 64), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_peak_activations(p, m, release):
    costs = Costs(1, 1, 1, input_release=release)

    def peaks(name, **more):
        return simulate(build(name, ranks=p, microbatches=m, **more), costs).peak_activations

    assert peaks("gpipe") == (m,) * p
    assert peaks("1f1b") == tuple(min(m, p - r) for r in range(p))
    if m >= 2 * p:
        # Rank r: p - r whole activations and r of which only what W needs is left.
        assert peaks("zb-h1") == tuple(max(p - r + r * (1 - release), p - r) for r in range(p))
        assert max(peaks("zb-h2")) == 2 * p - 1
    if m % p == 0:
        assert peaks("interleaved", chunks=2)[0] == min(3 * p - 1, 2 * m)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dualpipe_peaks(p):
    costs = Costs(1, 1, 1)
    assert max(simulate(build("dualpipe", ranks=p, microbatches=4 * p), costs).peak_activations) == p + 1
    assert max(simulate(build("dualpipev", ranks=p, microbatches=4 * p), costs).peak_activations) == 2 * p + 1


@SOME
@given(sizes(), st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"]), st.floats(0, 1))
def test_what_f_stores_i_and_w_release(size, name, release):
    p, m = size
    timeline = simulate(build(name, ranks=p, microbatches=m), Costs(1, 1, 1, input_release=release))
    for rank in range(p):
        curve = timeline.activations(rank)
        assert abs(curve[-1][1]) < 1e-6
        assert max(held for _, held in curve) == pytest.approx(timeline.peak_activations[rank])
