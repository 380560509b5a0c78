"""Timelines as one SVG picture: charts below one another on one time axis, with tooltips, for a browser or a paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dtensor_5d.report.gantt import KIND_NAMES, caption, kind_of, label_of, tone_of
from dtensor_5d.report.text import checked_width, number
from dtensor_5d.schedule import TimedAction, Timeline

__all__ = ["FILLS", "schedule_svg"]

# kind -> (first chunk, other chunks): pairs of one hue; dark text reads on the first, white on the second.
FILLS = {
    "F": ("#8ab6f9", "#2f6fd0"),
    "B": ("#8fd694", "#2d8a3e"),
    "I": ("#7fd8d4", "#17807c"),
    "W": ("#f7bd7a", "#c06a10"),
    "X": ("#d3a8ec", "#7d3fa6"),
}
_LEAST_WIDTH = 200
_LEFT, _TOP, _ROW, _GAP, _CAPTION = 64, 40, 22, 26, 22


def schedule_svg(timelines: Sequence[Timeline], *, width: int = 1200) -> str:
    """The picture as text of a file. Bars wide enough carry the micro-batch; every bar has a tooltip."""
    checked_width(width, _LEAST_WIDTH)
    longest = max(t.makespan for t in timelines)
    scale = (width - _LEFT - 16) / longest
    body: list[str] = []
    y = _TOP
    for timeline in timelines:
        y = _chart(body, timeline, y, scale, width)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{y}" fill="white"/>',
        *_legend(timelines),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _legend(timelines: Sequence[Timeline]) -> list[str]:
    used = {kind_of(timed.action) for t in timelines for row in t.rows for timed in row}
    two = any(len(t.schedule.stages_of(0)) > 1 for t in timelines)
    out, x = [], _LEFT
    for kind, name in KIND_NAMES.items():
        if kind not in used:
            continue
        first, second = FILLS[kind]
        out.append(f'<rect x="{x}" y="12" width="16" height="14" fill="{first}"/>')
        if two:
            out.append(f'<rect x="{x + 16}" y="12" width="16" height="14" fill="{second}"/>')
        x += 38 if two else 22
        out.append(f'<text x="{x}" y="23">{kind if kind != "X" else "F+B"} {name}</text>')
        x += 6 * len(name) + 34
    if two:
        out.append(f'<text x="{x}" y="23" fill="#666">dark: second chunk of a rank</text>')
    return out


def _chart(body: list[str], timeline: Timeline, y: int, scale: float, width: int) -> int:
    """Draws one chart from y on; the y below it."""
    body.append(f'<text x="{_LEFT}" y="{y + 13}" font-weight="bold">{escape(caption(timeline))}</text>')
    y += _CAPTION
    right = _LEFT + timeline.makespan * scale
    for rank, row in enumerate(timeline.rows):
        body.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end" fill="#444">rank {rank}</text>')
        body.append(
            f'<rect x="{_LEFT}" y="{y}" width="{right - _LEFT:.2f}" height="{_ROW - 2}" fill="#eeeeee">'
            f"<title>rank {rank}: busy {number(timeline.busy[rank])}, idle {number(timeline.idle[rank])}</title></rect>"
        )
        body += [_bar(timeline, timed, y, scale) for timed in row]
        y += _ROW
    for share in (0, 0.25, 0.5, 0.75, 1):
        at, text = _LEFT + (right - _LEFT) * share, number(timeline.makespan * share)
        body.append(f'<line x1="{at:.2f}" y1="{y}" x2="{at:.2f}" y2="{y + 4}" stroke="#999"/>')
        anchor = "end" if share == 1 else "middle"
        body.append(f'<text x="{at:.2f}" y="{y + 15}" text-anchor="{anchor}" fill="#666">{text}</text>')
    return y + _GAP


def _bar(timeline: Timeline, timed: TimedAction, y: int, scale: float) -> str:
    action, length = timed.action, (timed.end - timed.start) * scale
    x = _LEFT + timed.start * scale
    kind, dark = kind_of(action), tone_of(timeline, timed.rank, action) > 0
    label = label_of(action)
    text = ""
    if length > 7 * len(label) + 2:
        fill = "white" if dark else "#111"
        text = f'<text x="{x + length / 2:.2f}" y="{y + 14}" text-anchor="middle" fill="{fill}">{label}</text>'
    tip = f"{action}: {number(timed.start)} to {number(timed.end)}"
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y}" width="{length:.2f}" height="{_ROW - 2}" '
        f'fill="{FILLS[kind][dark]}" stroke="white" stroke-width="0.7"/>{text}</g>'
    )
