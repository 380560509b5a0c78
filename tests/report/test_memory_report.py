"""Bars and tables of a memory report, made by hand so that every number is known."""

from __future__ import annotations

import pytest

from dtensor_5d.planner import CAUSES, Device, MemoryReport, RankMemory, StageMemory
from dtensor_5d.report.memory import cause_legend, cause_table, phase_bars, rank_bars, verdict
from dtensor_5d.report.text import plain

GIB = 2**30


def rank(number, **gib):
    """A rank with one layer a rank, whose second step needs what is given and whose first does without optimizer."""
    causes = {c: int(gib.get(c.replace(" ", "_"), 0) * GIB) for c in CAUSES}
    first = {**causes, "optimizer": 0}
    experts = {"parameters": int(gib.get("experts", 0) * GIB)}
    return RankMemory(
        number,
        (StageMemory(number, (number,), 1, 1, 1), StageMemory(9 - number, (9 - number,), 1, 1, 1)),
        {"step 1: backward": first, "step 2: backward": causes},
        {"parameters": 2 * GIB},
        experts,
    )


def report(*ranks, memory=80):
    return MemoryReport(ranks, Device(memory=memory * GIB))


def test_bars_are_in_proportion_to_the_device_and_marks_stand_at_the_line_and_the_end():
    made = report(rank(0, parameters=20, optimizer=10), rank(1, parameters=10))
    assert plain(rank_bars(made, width=100)).splitlines() == [
        "rank 0  " + "p" * 20 + "o" * 10 + " " * 34 + "|" + " " * 15 + "|" + "30.0 GiB".rjust(10),
        "rank 1  " + "p" * 10 + " " * 54 + "|" + " " * 15 + "|" + "10.0 GiB".rjust(10),
    ]


def test_what_does_not_fit_is_drawn_beyond_the_end_of_the_memory():
    (line,) = plain(rank_bars(report(rank(0, activations=160)), width=100)).splitlines()
    assert line.index("|") == 8 + 32 and line[8 + 40] == "|"
    assert line.count("a") == 80 + 1 - 2, "the name has an a as well; two columns are marks"
    assert line.endswith("160 GiB")


def test_the_legend_names_what_the_bars_show():
    made = report(rank(0, parameters=20, reduce_buffer=1))
    assert plain(cause_legend(made, width=100)) == " p  parameters   b  reduce buffer   |  80 % line, end of the memory"
    with_step = report(rank(0, parameters=20, optimizer=1))
    assert "optimizer" in plain(cause_legend(with_step, width=100, phases=True))
    assert all(len(line) <= 40 for line in plain(cause_legend(with_step, width=40)).splitlines())


def test_phases_show_that_the_optimizer_comes_with_the_second_step():
    one = rank(0, parameters=20, optimizer=10)
    first, second = plain(phase_bars(report(one), one, width=100)).splitlines()
    assert first.startswith("step 1: backward  pp") and first.count("o") == 0
    assert second.startswith("step 2: backward  pp") and second.count("o") == 8
    assert first.endswith("20.0 GiB") and second.endswith("30.0 GiB")


def test_the_table_has_a_column_a_rank_and_peaks_of_both_steps():
    made = report(rank(0, parameters=20, optimizer=10), rank(1, parameters=10, logits=2, experts=4))
    rows = {line.split("  ")[0]: line.split()[-4:] for line in plain(cause_table(made, width=100)).splitlines()}
    assert rows["stages"][-4:] == ["0", "9", "1", "8"]
    assert rows["parameters"] == ["20.0", "GiB", "10.0", "GiB"]
    assert rows["logits"][-3:] == ["0", "2.00", "GiB"]
    assert rows["peak"] == ["30.0", "GiB", "12.0", "GiB"]
    assert rows["peak of step 1"] == ["20.0", "GiB", "12.0", "GiB"]
    assert rows["states of experts"][-3:] == ["0", "4.00", "GiB"]


def test_of_many_ranks_the_fullest_is_always_shown():
    ranks = [rank(i, parameters=30 if i == 9 else 10) for i in range(16)]
    head = plain(cause_table(report(*ranks), width=100)).splitlines()[0].split()
    assert [int(n) for n in head if n.isdigit()] == [0, 1, 9, 15]


@pytest.mark.parametrize(
    "used, words",
    [(60, "fits below the 80 % line of 64.0 GiB: 60.0 GiB in use"), (70, "fits, but above the 80 % line"),
     (79, "DOES NOT FIT: 79.0 GiB in use, 85.3 GiB with what the allocator reserves, of 80.0 GiB")],
)  # fmt: skip
def test_the_verdict(used, words):
    assert plain([verdict(report(rank(0, activations=used)))]).startswith(words)
