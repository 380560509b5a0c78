"""Our schedules against the numbers printed in the papers they come from (tests/data/published_schedules.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtensor_5d.schedule import Costs, build, check, simulate

DATA = json.loads((Path(__file__).parent.parent / "data" / "published_schedules.json").read_text())


def row_id(row):
    return f"p{row['p']}m{row['m']}"


def release(row):
    """(M_B - M_W) / M_B, with M_B = 34h + 5as and M_W = 32h."""
    whole = 34 * row["h"] + 5 * row["a"] * row["s"]
    return (whole - 32 * row["h"]) / whole


def table5(row, **more):
    return Costs(row["T_F"], row["T_B"], row["T_W"], row["T_comm"], **more)


def table8(row, parts=1, **more):
    """Costs of Table 8 where a rank's layers are `parts` chunks: 2 is the table's own, 1 a full stage."""
    scale = 2 / parts
    return Costs(row["T_F_chunk"] * scale, row["T_B_chunk"] * scale, row["T_W_chunk"] * scale, row["T_comm"], **more)


def measure(name, row, costs, **more):
    schedule = build(name, ranks=row["p"], microbatches=row["m"], costs=costs, **more)
    return simulate(schedule, costs)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
@pytest.mark.parametrize("row", DATA["zb_table5"], ids=row_id)
def test_table5_handwritten(name, row):
    assert round(measure(name.lower(), row, table5(row)).bubble_rate, 4) == row["expect"][name]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
@pytest.mark.parametrize("row", DATA["zb_table8"], ids=row_id)
def test_table8_handwritten(name, row):
    assert round(measure(name.lower(), row, table8(row)).bubble_rate, 4) == row["expect"][name]


@pytest.mark.parametrize("row", DATA["zb_table5"], ids=row_id)
def test_table5_interleaved(row):
    v = row["v_interleave"]
    costs = Costs(row["T_F"] / v, row["T_B"] / v, row["T_W"] / v, row["T_comm"])
    assert measure("interleaved", row, costs, chunks=v).bubble_rate == pytest.approx(
        row["expect"]["1F1B-I(paper)"], abs=0.004
    )


@pytest.mark.parametrize("row", DATA["zb_table5"], ids=row_id)
def test_table5_interleaved_is_the_paper_plus_p_c(row):
    """Megatron's order costs exactly p c more than the paper's table (published-numbers.md, 2.3)."""
    v, p, m = row["v_interleave"], row["p"], row["m"]
    costs = Costs(row["T_F"] / v, row["T_B"] / v, row["T_W"] / v, row["T_comm"])
    timeline = measure("interleaved", row, costs, chunks=v)
    ideal = m * (row["T_F"] + row["T_B"] + row["T_W"])
    bubble = max(timeline.spans) - ideal - p * row["T_comm"]
    assert round(bubble / (bubble + ideal), 4) == pytest.approx(row["expect"]["1F1B-I(paper)"], abs=1.01e-4)


@pytest.mark.parametrize("share", ["default", pytest.param("paper", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=[pytest.mark.slow] * (r["p"] > 8 or r["m"] > 24)) for r in DATA["zb_table5"]],
    ids=row_id,
)
def test_table5_auto(row, share):
    costs = table5(row, **({} if share == "default" else {"input_release": release(row)}))
    for name, limit in (("ZB-1p", row["p"]), ("ZB-2p", 2 * row["p"])):
        timeline = measure("zb-auto", row, costs, memory_limit=limit)
        assert timeline.bubble_rate <= row["expect"][name] + 1e-4
        assert max(timeline.peak_activations) <= limit


@pytest.mark.parametrize("row", DATA["zb_table8"], ids=row_id)
def test_table8_zbv(row):
    timeline = measure("zbv", row, table8(row, 2, input_release=release(row)))
    assert timeline.bubble_rate <= row["expect"]["ZB-V"] + 1e-4
    assert max(timeline.peak_activations) <= 2 * row["p"]


def test_zbv_has_no_bubble_with_equal_costs():
    for p in (2, 4, 8, 16):
        timeline = simulate(build("zbv", ranks=p, microbatches=3 * p), Costs(1, 1, 1))
        assert timeline.bubble_rate == 0
        assert max(timeline.peak_activations) <= 2 * p


@pytest.mark.parametrize("row", DATA["small_optimum"], ids=str)
def test_auto_reaches_the_published_optimum(row):
    costs = Costs(row["F"], row["I"], row["W"], row["c"])
    timeline = measure("zb-auto", row, costs, memory_limit=row["limit"])
    assert max(timeline.spans) == row["span"]
    assert max(timeline.peak_activations) <= row["limit"]


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=[pytest.mark.slow] * (r["p"] not in (4, 9, 16))) for r in DATA["v_unit_cost"]],
    ids=lambda r: f"{r['name']}-p{r['p']}",
)
def test_controllable_memory(row):
    schedule = build(row["name"], ranks=row["p"], microbatches=row["m"])
    check(schedule)
    timeline = simulate(schedule, Costs(1, 1, 1))
    assert timeline.makespan <= row["makespan"]
    assert max(timeline.peak_activations) <= row["peak"]


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min"])
def test_v_with_uneven_costs(name):
    row = DATA["v_uneven"]
    timeline = measure(name, row, Costs(row["F"], row["I"], row["W"], row["c"]))
    assert timeline.bubble_rate <= row["bubble_rate"][name] + 1e-4


@pytest.mark.parametrize("row", DATA["dualpipe"], ids=str)
def test_dualpipe(row):
    costs = Costs(row["F"], row["I"], row["W"], overlapped=row["overlapped"])
    schedule = build("dualpipe", ranks=row["p"], microbatches=row["m"], costs=costs)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(row["makespan"], rel=1e-12)
    assert timeline.peak_activations == (row["p"] + 1,) * row["p"]


def test_bubbles_of_one_f_one_b_at_four_ranks():
    rates = [simulate(build("1f1b", ranks=4, microbatches=m), Costs(1, 1, 1)).bubble_rate for m in (4, 8, 16)]
    assert [round(rate, 4) for rate in rates] == [0.4286, 0.2727, 0.1579]
