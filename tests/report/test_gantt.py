"""The Gantt chart of characters and the tables beside it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.report.gantt import actions_table, caption, gantt, legend, per_rank, summary
from dtensor_5d.report.text import plain
from dtensor_5d.schedule import Costs, build, simulate


def timeline(name="1f1b", ranks=2, microbatches=2, costs=None, **more):
    return simulate(build(name, ranks=ranks, microbatches=microbatches, **more), costs or Costs(1, 1, 1))


def test_a_chart_of_1f1b():
    assert plain(gantt(timeline(), width=8 + 36)) == (
        "rank 0  F0ffF1ff........B0bbbbbb....B1bbbbbb"
        "\nrank 1  ....F0ffB0bbbbbbF1ffB1bbbbbb........"
        "\n        0                4.5               9"
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"])
@settings(deadline=None, max_examples=8)
@given(width=st.integers(40, 200), forward=st.floats(0.3, 3), microbatches=st.sampled_from([8, 16]))
def test_every_kind_has_its_share_of_the_columns(name, width, forward, microbatches):
    made = timeline(name, 4, microbatches, Costs(forward, 1, 0.7))
    columns = width - 8
    for rank, (line, row) in enumerate(zip(gantt(made, width=width), made.rows)):
        cells = [(char, span.style[:1]) for span in line for char in span.text][8:]
        assert len(cells) == columns
        drawn = sum(style != "i" for _, style in cells) / columns
        # Each bar may gain or lose one column.
        assert abs(drawn - made.busy[rank] / made.makespan) <= len(row) / columns
        assert {style for _, style in cells} <= set("FIWBXi")


def test_bars_carry_the_micro_batch_alone_where_there_are_colours():
    (first, *_) = gantt(timeline(), width=44, letters=False)
    assert [span.text for span in first[1:]] == ["0   ", "1   ", "        ", "0       ", "    ", "1       "]
    assert [span.style for span in first[1:]] == ["F0e", "F0o", "idle", "B0e", "idle", "B0o"]


def test_the_second_chunk_has_another_tone():
    styles = {span.style for line in gantt(timeline("zbv", 2, 4), width=120) for span in line}
    assert {"F0e", "F1e", "I0e", "I1e", "W0o", "W1o"} <= styles


def test_charts_share_a_time_axis():
    """At twice the time a chart takes half of the columns."""
    made = timeline()
    assert len(plain(gantt(made, width=44, until=2 * made.makespan)[1:2]).rstrip(".")) == 8 + 14
    assert plain(gantt(made, width=44, until=2 * made.makespan)[-1:]).split() == ["0", "9", "18"]


def test_schedules_side_by_side():
    """Bubbles of 9 and 3 units: (p - 1)(F + I + W) and (p - 1)(F + I - W)."""
    rows = plain(summary([timeline("1f1b", 4, 8), timeline("zb-h1", 4, 8), timeline("interleaved", 4, 8)])).splitlines()
    assert rows[0].split()[:4] == ["schedule", "chunks", "makespan", "vs"]
    assert rows[1].split() == ["1f1b", "1", "33", "1.222", "27.3", "%", "27.3", "%", "4", "1", "0"]
    assert rows[2].split()[:6] == ["zb-h1", "1", "27", "1.000", "11.1", "%"]
    # Interleaved: warm-up of 2 (p - 1) + (v - 1) p + 1 = 11 chunks of half a rank's layers.
    assert rows[3].split()[-3] == "5.5"


def test_dualpipe_counts_whole_micro_batches_as_each_chunk_is_all_of_a_ranks_layers():
    made = timeline("dualpipe", 4, 8)
    assert f"peak {max(made.peak_activations):g} micro-batches" in caption(made)


def test_tables_of_one_schedule():
    made = timeline("1f1b", 2, 2)
    assert plain(actions_table(made.schedule)) == "rank 0  0F0 0F1 0B0 0B1\nrank 1  1F0 1B0 1F1 1B1"
    first = plain(per_rank(made)).splitlines()[1].split()
    assert first == ["rank", "0", "0", "6", "3", "33.3", "%", "2", "0"]
    assert plain(legend([made], width=80)) == " F  forward    B  backward    .  idle"
    assert len(legend([timeline("dualpipe", 4, 8)], width=40)) == 5
