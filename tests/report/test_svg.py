"""The picture: well-formed, one bar an action, nothing over another, everything inside."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest

from dtensor_5d.report.svg import FILLS, schedule_svg
from dtensor_5d.schedule import Costs, build, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timelines(*names, ranks=4, microbatches=8):
    return [simulate(build(n, ranks=ranks, microbatches=microbatches), Costs(1, 1.1, 0.9, 0.1)) for n in names]


@pytest.mark.parametrize("names", [("1f1b",), ("1f1b", "zbv", "dualpipe")])
def test_bars_are_the_actions(names):
    made = timelines(*names)
    root = ElementTree.fromstring(schedule_svg(made, width=1000))
    width, height = float(root.get("width")), float(root.get("height"))
    bars = root.findall(f"{SVG}g/{SVG}rect")
    assert len(bars) == sum(len(row) for t in made for row in t.rows)
    rows: dict[str, list[tuple[float, float]]] = {}
    for bar in bars:
        x, length = float(bar.get("x")), float(bar.get("width"))
        assert x >= 0 and x + length <= width
        assert float(bar.get("y")) + float(bar.get("height")) <= height
        rows.setdefault(bar.get("y"), []).append((x, x + length))
    assert len(rows) == sum(len(t.rows) for t in made)
    for row in rows.values():
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(row))
    # One time axis: lengths are in proportion to times.
    scale = (width - 80) / max(t.makespan for t in made)
    first = made[0].rows[0][0]
    assert float(bars[0].get("width")) == pytest.approx((first.end - first.start) * scale, abs=0.01)


def test_every_bar_says_what_it_is_and_text_stays_inside():
    root = ElementTree.fromstring(schedule_svg(timelines("zbv")))
    tips = [title.text for title in root.findall(f"{SVG}g/{SVG}title")]
    assert "0F0: 0 to 0.5" not in tips and any(tip.startswith("7I0: ") for tip in tips)
    for bar in root.findall(f"{SVG}g"):
        if (text := bar.find(f"{SVG}text")) is not None:
            assert 7 * len(text.text) + 2 < float(bar.find(f"{SVG}rect").get("width"))
    fills = {rect.get("fill") for rect in root.findall(f"{SVG}g/{SVG}rect")}
    assert fills == {tone for kind in "FIW" for tone in FILLS[kind]}, "two tones of the three kinds"


def test_a_name_from_a_file_cannot_break_the_picture():
    (made,) = timelines("1f1b")
    odd = simulate(replace(made.schedule, name="a<b&c"), made.costs)
    assert "a<b&c: 4 ranks" in "".join(ElementTree.fromstring(schedule_svg([odd])).itertext())
