"""What a rank executes: where sends, gathers and reductions stand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d import PlanError
from dtensor_5d.schedule import Costs, build, check, lower, simulate

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"]


def texts(schedule):
    return [[str(a) for a in row] for row in schedule.table]


def test_the_example_of_the_docstring():
    assert texts(lower(build("1f1b", ranks=2, microbatches=1), "window")) == [
        ["0UNSHARD", "0F0", "0SEND_F0", "0RECV_B0", "0I0", "0RESHARD", "0W0", "0REDUCE_GRAD"],
        ["1UNSHARD", "1RECV_F0", "1F0", "1I0", "1SEND_B0", "1RESHARD", "1W0", "1REDUCE_GRAD"],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_the_input_leaves_before_the_weights_are_done(name):
    """The stage before waits for it: between an I and its SEND_B a rank does nothing but receive."""
    schedule = lower(build(name, ranks=4, microbatches=8))
    for row in texts(schedule):
        for i, text in enumerate(row):
            if "SEND_B" in text:
                done = row.index(text.replace("SEND_B", "I"))
                assert all("RECV" in between or "RESHARD" in between for between in row[done + 1 : i])
                assert text.replace("SEND_B", "W") in row[i:]
    assert not any(a.kind in ("B", "OVERLAP_F_B") for row in schedule.table for a in row)


def test_backward_in_one_piece_sends_behind_it():
    rows = texts(lower(build("1f1b", ranks=2, microbatches=2), None, None, split_backward=False))
    # The second F of rank 0 is done before rank 1 begins its first B, so it is received there.
    assert rows[1] == ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"]


@pytest.mark.parametrize("name", NAMES)
def test_one_message_for_each_edge_between_ranks(name):
    schedule = build(name, ranks=4, microbatches=8)
    kinds = Counter(a.kind for row in lower(schedule).table for a in row)
    edges = sum(
        len(schedule.microbatches_of(s))
        for s in range(schedule.stages)
        if (after := schedule.after(s)) is not None and schedule.rank_of[after] != schedule.rank_of[s]
    )
    assert {kinds[k] for k in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")} == {edges}


@pytest.mark.parametrize("name", NAMES)
def test_gathers_and_reductions_are_counted(name):
    """Field fault P28: how often parameters are gathered is the schedule's choice, and can be counted."""
    plain = build(name, ranks=4, microbatches=8)
    passes = sum(len(plain.microbatches_of(s)) for s in range(plain.stages))
    for regather, gathers in (("visit", 2 * passes), ("window", plain.stages), (None, 0)):
        for reduce, reductions in (("window", plain.stages), ("microbatch", passes), (None, 0)):
            schedule = lower(plain, regather, reduce)
            check(schedule)
            kinds = Counter(a.kind for row in schedule.table for a in row)
            assert (kinds["UNSHARD"], kinds["RESHARD"], kinds["REDUCE_GRAD"]) == (gathers, gathers, reductions)


def test_visit_holds_one_stage_at_a_time_and_w_holds_none():
    schedule = lower(build("zbv", ranks=4, microbatches=8), "visit")
    for row in schedule.table:
        gathered = set()
        for action in row:
            if action.kind == "UNSHARD":
                gathered.add(action.stage)
            elif action.kind == "RESHARD":
                gathered.remove(action.stage)
            elif action.kind in ("F", "I"):
                assert gathered == {action.stage}
            elif action.kind == "W":
                assert not gathered


@pytest.mark.parametrize("name", NAMES)
def test_lowering_keeps_the_order_of_computation(name):
    plain = build(name, ranks=4, microbatches=8)
    lowered = lower(plain, split_backward=False)
    assert lowered.lowered and not plain.lowered
    assert lowered.compute_only() == plain
    assert lower(lowered, split_backward=False) == lowered
    costs = Costs(3, 2, 1, 0.5)
    assert simulate(lowered, costs).rows == simulate(plain, costs).rows


def test_splitting_backward_shortens_one_f_one_b():
    """(p - 1) (F + I) instead of (p - 1) (F + I + W): 27 % to 20 % at p = 4, m = 8."""
    schedule = build("1f1b", ranks=4, microbatches=8)
    assert simulate(schedule, Costs(1, 1, 1)).bubble_rate == pytest.approx(9 / 33)
    assert simulate(lower(schedule), Costs(1, 1, 1)).bubble_rate == pytest.approx(6 / 30)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-h2"]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    st.floats(0, 5),
)
def test_any_costs_give_an_order_without_deadlock(name, p, m, times, comm):
    check(lower(build(name, ranks=p, microbatches=m), costs=Costs(*times, comm)))


def test_unknown_policies():
    with pytest.raises(PlanError, match=r"regather='always'.*must be one of 'visit', 'window', None"):
        lower(build("1f1b", ranks=2, microbatches=2), "always")
    with pytest.raises(PlanError, match="2 things to change"):
        lower(build("1f1b", ranks=2, microbatches=2), "always", "never")
