"""A timeline as a Gantt chart of characters, and several schedules side by side in one table.

    rank 0  F0ffF1ff........B0bbbbbbB1bbbbbb
    rank 1  ....F0ffB0bbbbbbF1ffB1bbbbbb....
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from dtensor_5d.report.text import Line, Span, checked_width, flowed, joined, number, percent, styled, table
from dtensor_5d.schedule import Action, Schedule, TimedAction, Timeline
from dtensor_5d.schedule.actions import leaves

__all__ = ["KIND_NAMES", "actions_table", "caption", "gantt", "legend", "per_rank", "share_of_rank", "summary"]

_LEAST_COLUMNS = 24

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "X": "forward and backward at once",
}


def share_of_rank(timeline: Timeline) -> float:
    """How much of a rank's layers one chunk is: peaks in chunks times this are peaks in whole micro-batches.

    DualPipe keeps two copies of the model, so its two chunks are all of a rank's layers each.
    """
    return timeline.schedule.ranks / timeline.schedule.depth


def kind_of(action: Action) -> str:
    """The letter that an action is drawn with."""
    return "X" if action.parts else action.kind


def label_of(action: Action) -> str:
    """What is written into a bar: the micro-batch, kind and stage being left to colour, tone and tooltip."""
    return "/".join(str(leaf.microbatch) for leaf in leaves(action))


def tone_of(timeline: Timeline, rank: int, action: Action) -> int:
    """Which of a rank's chunks an action belongs to, so that two chunks are drawn in two tones."""
    stage = action.parts[0].stage if action.parts else action.stage
    return timeline.schedule.stages_of(rank).index(stage)


def gantt(timeline: Timeline, *, width: int, until: float | None = None, letters: bool = True) -> list[Line]:
    """One line a rank over `width` columns, and a line of times; `until` puts several charts on one time axis.

    A column shows what runs at its middle. With `letters` a bar begins with kind and micro-batch if it has room, goes
    on in its small letter, and `.` is idle; without, it carries the micro-batch alone, for paper that has colours.
    Styles: kind, tone of the chunk, and whether the micro-batch is even or odd ("F0e", "B1o").
    """
    longest = until or timeline.makespan
    name_width = len(f"rank {timeline.schedule.ranks - 1}")
    columns = checked_width(width, name_width + 2 + _LEAST_COLUMNS) - name_width - 2
    step = longest / columns
    lines = []
    for rank, row in enumerate(timeline.rows):
        spans = [Span(f"rank {rank}".ljust(name_width) + "  ", "dim")]
        spans += _row(timeline, rank, row, step, columns, letters)
        lines.append(joined(spans))
    lines.append(_axis(" " * (name_width + 2), longest, columns))
    return lines


def _row(
    timeline: Timeline, rank: int, row: Sequence[TimedAction], step: float, columns: int, letters: bool
) -> list[Span]:
    starts = [timed.start for timed in row]
    spans: list[Span] = []
    column = 0
    while column < columns:
        at = bisect_right(starts, (column + 0.5) * step) - 1
        runs = at >= 0 and row[at].end > (column + 0.5) * step
        # The last column whose middle still lies in this bar, or in this gap.
        until = row[at].end if runs else row[at + 1].start if at + 1 < len(row) else columns * step
        end = min(columns, max(column + 1, int(until / step + 0.5)))
        if runs:
            action = row[at].action
            parity = "eo"[(leaves(action)[0].microbatch or 0) % 2]
            style = f"{kind_of(action)}{tone_of(timeline, rank, action) % 2}{parity}"
            spans.append(Span(_bar_text(action, end - column, letters), style))
        else:
            spans.append(Span(("." if letters else " ") * (end - column), "idle"))
        column = end
    return spans


def _bar_text(action: Action, width: int, letters: bool) -> str:
    letter = kind_of(action)
    numbers = label_of(action)
    if not letters:
        return (numbers if len(numbers) <= width else "").ljust(width)
    head = letter + numbers if len(numbers) < width else letter
    return head + letter.lower() * (width - len(head))


def _axis(indent: str, longest: float, columns: int) -> Line:
    """0, the half and the end under the columns they belong to."""
    middle, end = number(longest / 2), number(longest)
    text = "0".ljust(columns // 2 - len(middle) // 2) + middle
    text = text.ljust(max(columns - len(end), len(text) + 1)) + end
    return styled(indent + text, "dim")


def legend(timelines: Sequence[Timeline], *, width: int, letters: bool = True) -> list[Line]:
    """What the letters, or the colours, of these charts stand for."""
    used = {kind_of(timed.action) for timeline in timelines for row in timeline.rows for timed in row}
    items: list[Line] = []
    for kind, name in KIND_NAMES.items():
        if kind in used:
            items.append((Span(f" {kind} ", f"{kind}0e"), Span(f" {name}   ")))
    if letters:
        items.append(styled(" .  idle"))
    elif any(len(t.schedule.stages_of(0)) > 1 for t in timelines):
        items.append(styled("dark: second chunk of a rank", "dim"))
    return flowed(items, width)


def caption(timeline: Timeline) -> str:
    """One line that says what a chart shows."""
    s = timeline.schedule
    share = share_of_rank(timeline)
    return (
        f"{s.name}: {s.ranks} ranks, {s.microbatches} micro-batches, {s.chunks} chunk{'s' * (s.chunks > 1)} a rank | "
        f"makespan {number(timeline.makespan)} | bubble {percent(timeline.bubble_rate)} | "
        f"peak {number(max(timeline.peak_activations) * share)} micro-batches"
    )


def summary(timelines: Sequence[Timeline], *, width: int | None = None) -> list[Line]:
    """Schedules side by side; the best of each column stands out.

    The unit of memory is the activations of one micro-batch on all layers of a rank, so that schedules with different
    numbers of chunks can be compared.
    """
    head = ["schedule", "chunks", "makespan", "vs best", "bubble", "idle", "peak memory", "lowest rank", "stash"]
    best = min(t.makespan for t in timelines)
    best_bubble = min(t.bubble_rate for t in timelines)
    peaks = [max(t.peak_activations) * share_of_rank(t) for t in timelines]
    several = len(timelines) > 1
    rows: list[list[str | Span]] = []
    for t, peak in zip(timelines, peaks):
        share = share_of_rank(t)
        idle = sum(t.idle) / (t.makespan * len(t.rows))
        rows.append(
            [
                t.schedule.name,
                str(t.schedule.chunks),
                _marked(number(t.makespan, 5), several and t.makespan == best),
                f"{t.makespan / best:.3f}",
                _marked(percent(t.bubble_rate), several and t.bubble_rate == best_bubble),
                percent(idle),
                _marked(number(peak), several and peak == min(peaks)),
                number(min(t.peak_activations) * share),
                number(max(t.peak_stash) * share),
            ]
        )
    return table(head, rows, width=width)


def per_rank(timeline: Timeline, *, width: int | None = None) -> list[Line]:
    """What each rank holds, how long it works and waits, and what it keeps at most."""
    share = share_of_rank(timeline)
    rows = [
        [
            f"rank {rank}",
            " ".join(map(str, timeline.schedule.stages_of(rank))),
            number(timeline.busy[rank], 5),
            number(timeline.bubbles[rank], 5),
            percent(timeline.idle[rank] / timeline.makespan),
            number(timeline.peak_activations[rank] * share),
            number(timeline.peak_stash[rank] * share),
        ]
        for rank in range(timeline.schedule.ranks)
    ]
    return table(["", "stages", "busy", "bubble", "idle", "peak memory", "stash"], rows, width=width)


def actions_table(schedule: Schedule, *, width: int | None = None) -> list[Line]:
    """The actions of each rank in order, as torch spells them; in blocks that are no wider than `width`."""
    rows = schedule.table
    widths = [max(len(str(row[i])) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    name_width = len(f"rank {len(rows) - 1}")
    # Where each block starts: at the first action that does not fit into the one before.
    starts, used = [0], name_width + 2
    for i, own in enumerate(widths):
        used += own + 1
        if width is not None and used > width and i > starts[-1]:
            starts.append(i)
            used = name_width + 2 + own + 1
    lines: list[Line] = []
    for first, last in zip(starts, [*starts[1:], len(widths)]):
        lines += [()] if lines else []
        for rank, row in enumerate(rows):
            spans = [Span(f"rank {rank}".ljust(name_width) + "  ", "dim")]
            for action, own in zip(row[first:last], widths[first:last]):
                spans.append(Span(str(action).ljust(own + 1), f"{kind_of(action)} text"))
            lines.append(tuple(spans))
    return lines


def _marked(text: str, best: bool) -> Span:
    return Span(text, "good" if best else "")
