"""Tables, bars and numbers of reports, without colour."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dtensor_5d.report.text as text
from dtensor_5d import PlanError
from dtensor_5d.report.gantt import gantt
from dtensor_5d.report.svg import schedule_svg
from dtensor_5d.report.text import Part, Span, bar, flowed, human_bytes, number, plain, styled, table, wrapped
from dtensor_5d.schedule import Costs, build, simulate


def test_examples_of_the_docstrings():
    assert doctest.testmod(text).failed == 0


def test_columns_line_up_and_styles_stay_with_their_cells():
    lines = table(["name", "n"], [["a", Span("10", "good")], ["long name", "7"]])
    assert plain(lines) == "name        n\na          10\nlong name   7"
    assert [span for span in lines[1] if span.style] == [Span("10", "good")]
    assert all(span.style == "head" for span in lines[0] if span.text.strip())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.integers(5, 80))
def test_parts_of_a_bar_are_in_proportion_to_half_a_column(amounts, width):
    scale = max(sum(amounts), 1.0)
    drawn = plain([bar([Part("abcdef"[i], "", a) for i, a in enumerate(amounts)], scale=scale, width=width)])
    for i, amount in enumerate(amounts):
        assert abs(drawn.count("abcdef"[i]) - amount / scale * width) <= 1
    assert len(drawn) <= width


def test_marks_are_drawn_over_a_bar_and_keep_its_style():
    line = bar([Part("p", "cause 0", 10)], scale=10, width=10, marks=[5, 10])
    assert plain([line]) == "ppppp|pppp|"
    assert line[1] == Span("|", "mark cause 0")
    assert line[3] == Span("|", "mark")
    assert plain([bar([Part("p", "x", 5)], scale=10, width=10, letters=False)]) == ""


@pytest.mark.parametrize(
    "value, shown",
    [(0, "0"), (33, "33"), (28.5, "28.5"), (1 / 3, "0.3333"), (14.2857, "14.29"), (123456, "123456"), (-2.5, "-2.5")],
)
def test_numbers(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    "count, shown",
    [(1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (80 * 2**30, "80.0 GiB"), (2**40, "1.00 TiB"),
     (2**30 - 1, "1.00 GiB"), (160 * 2**20, "160 MiB")],
)  # fmt: skip
def test_bytes(count, shown):
    assert human_bytes(count) == shown


def test_items_flow_into_lines_and_none_is_broken():
    assert plain(flowed([styled("aaaa "), styled("bbbb "), styled("cccc ")], 10)) == "aaaa bbbb\ncccc"
    assert plain(flowed([styled("a" * 12), styled("b")], 10)) == "aaaaaaaaaaaa\nb"


def test_a_long_line_goes_on_in_the_next_without_losing_a_style():
    line = (Span("name: ", "head"), Span("one two three\nfour five six seven", "dim"))
    lines = wrapped(line, 12)
    assert plain(lines).splitlines() == ["name: one", "  two three", "four five", "  six seven"]
    assert {s.style for piece in lines for s in piece if s.text.strip()} == {"head", "dim"}
    assert wrapped(line[:1], 6) == [line[:1]]
    assert plain(wrapped(styled("a " + "b" * 20 + " c"), 10)).splitlines() == ["a", "  " + "b" * 20, "  c"]


@given(st.lists(st.text("ab", min_size=1, max_size=8), min_size=1), st.integers(10, 30))
def test_wrapping_keeps_every_word_and_the_width(words, width):
    lines = plain(wrapped(styled(" ".join(words)), width)).splitlines()
    assert " ".join(lines).split() == words and max(map(len, lines)) <= width


def test_a_table_too_wide_comes_in_blocks_with_the_first_column():
    lines = plain(table(["x", "aaaa", "bbbb", "cccc"], [["r", "1", "2", "3"]], width=13)).splitlines()
    assert lines == ["x  aaaa  bbbb", "r     1     2", "", "x  cccc", "r     3"]


@pytest.mark.parametrize("width", [0, -5, 10, 2.5, True, None])
def test_nothing_is_drawn_where_there_is_no_room(width):
    made = simulate(build("1f1b", ranks=2, microbatches=2), Costs(1, 1, 1))
    for draw in (lambda: gantt(made, width=width), lambda: schedule_svg([made], width=width)):
        with pytest.raises(PlanError, match=r"width=.* must be an integer, at least"):
            draw()
