"""A memory report as bars and tables: what each pipeline rank holds at its fullest moment, by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtensor_5d.planner import CAUSES, MemoryReport, RankMemory
from dtensor_5d.report.text import Line, Part, Span, bar, checked_width, flowed, human_bytes, styled, table

__all__ = ["cause_legend", "cause_table", "phase_bars", "rank_bars", "verdict"]

_LETTERS = {
    "parameters": "p", "gradients": "g", "master": "m", "optimizer": "o", "activations": "a", "stash": "s",
    "recompute": "r", "logits": "l", "working": "w", "gathered": "u", "reduce buffer": "b", "buffers": "c",
    "temporary": "t", "context": "x",
}  # fmt: skip
assert set(_LETTERS) == set(CAUSES) and len(set(_LETTERS.values())) == len(CAUSES), CAUSES

# Widths in the table of causes: the names of its rows, and a column with the gap before it.
_NAMES, _COLUMN = 17, 18
_LEAST_WIDTH = 40


def rank_bars(report: MemoryReport, *, width: int, letters: bool = True) -> list[Line]:
    """One bar a pipeline rank at its peak, against the device: `|` at the 80 % line and at the end of its memory."""
    names = [f"rank {rank.rank}" for rank in report]
    return _bars(report, names, [rank.causes for rank in report], width, letters)


def phase_bars(report: MemoryReport, rank: RankMemory, *, width: int, letters: bool = True) -> list[Line]:
    """One bar a phase of one rank: how memory comes and goes in the first two steps."""
    return _bars(report, list(rank.phases), list(rank.phases.values()), width, letters)


def _bars(
    report: MemoryReport, names: Sequence[str], rows: Sequence[Mapping[str, int]], width: int, letters: bool
) -> list[Line]:
    totals = [sum(row.values()) for row in rows]
    name_width, total_width = max(map(len, names)), 10
    columns = max(checked_width(width, _LEAST_WIDTH) - name_width - total_width - 4, 8)
    marks = (report.line, report.device.memory)
    scale = float(max(report.device.memory, *totals))
    lines = []
    for name, row, total in zip(names, rows, totals):
        parts = [Part(_LETTERS[cause], f"cause {i}", row.get(cause, 0)) for i, cause in enumerate(CAUSES)]
        drawn = bar(parts, scale=scale, width=columns, marks=marks, letters=letters)
        style = "bad" if total > report.device.memory else ""
        amount = Span(human_bytes(total).rjust(total_width), style)
        lines.append((Span(name.ljust(name_width) + "  ", "dim"), *drawn, amount))
    return lines


def cause_legend(
    report: MemoryReport, *, width: int, phases: bool = False, letters: bool = True
) -> list[Line]:
    """Which letter, or colour, is which cause, for the causes that the bars (of all `phases`) show."""
    shown = [causes for rank in report for causes in (rank.phases.values() if phases else [rank.causes])]
    items: list[Line] = []
    for i, cause in enumerate(CAUSES):
        if any(causes.get(cause) for causes in shown):
            items.append((Span(f" {_LETTERS[cause]} " if letters else "   ", f"cause {i}"), Span(f" {cause}  ")))
    items.append(styled(f" |  {_share(report)} line, end of the memory", "dim"))
    return flowed(items, width)


def _share(report: MemoryReport) -> str:
    return f"{100 * report.device.line:.0f} %"


def cause_table(report: MemoryReport, *, width: int) -> list[Line]:
    """Bytes by cause for each rank at its peak, and the peaks of the first two steps.

    With more ranks than fit into `width` columns: the first ones, the fullest and the last.
    """
    ranks = _chosen(report, most=max((width - _NAMES) // _COLUMN, 3))
    head = ["", *(f"rank {r.rank}" for r in ranks)]
    rows: list[list[str | Span]] = []
    rows.append(["stages", *(" ".join(str(s.number) for s in r.stages) for r in ranks)])
    rows.append(["layers", *(_layers(r) for r in ranks)])
    for cause in CAUSES:
        if any(r.causes.get(cause) for r in ranks):
            rows.append([cause, *(human_bytes(r.causes.get(cause, 0)) for r in ranks)])
    rows.append([Span("peak", "head"), *(Span(human_bytes(r.active), "head") for r in ranks)])
    rows.append(["when", *(r.peak_phase for r in ranks)])
    rows.append(["peak of step 1", *(human_bytes(r.peak(1)) for r in ranks)])
    rows.append(["peak of step 2", *(human_bytes(r.peak(2)) for r in ranks)])
    if any(any(r.experts.values()) for r in ranks):
        rows.append(["states of dense", *(human_bytes(sum(r.dense.values())) for r in ranks)])
        rows.append(["states of experts", *(human_bytes(sum(r.experts.values())) for r in ranks)])
    return table(head, rows, width=width)


def _chosen(report: MemoryReport, most: int) -> Sequence[RankMemory]:
    if len(report.ranks) <= most:
        return report.ranks
    kept = {r.rank: r for r in (*report.ranks[: most - 2], report.fullest, report.ranks[-1])}
    return [kept[rank] for rank in sorted(kept)]


def _layers(rank: RankMemory) -> str:
    """The layers of a rank as ranges: `0-3 28-31`."""
    out: list[list[int]] = []
    for layer in (layer for stage in rank.stages for layer in stage.layers):
        if out and layer == out[-1][1] + 1:
            out[-1][1] = layer
        else:
            out.append([layer, layer])
    return " ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in out)


def verdict(report: MemoryReport) -> Line:
    """Whether it fits, in one line."""
    numbers = f"{human_bytes(report.active)} in use, {human_bytes(report.reserved)} with what the allocator reserves"
    device = f"of {human_bytes(report.device.memory)}"
    line = f"the {_share(report)} line of {human_bytes(report.line)}"
    if not report.fits:
        return styled(f"DOES NOT FIT: {numbers}, {device}", "bad")
    if not report.below_line:
        return styled(f"fits, but above {line}, so uneven batches may break it: {numbers}, {device}", "bad")
    return styled(f"fits below {line}: {numbers}, {device}", "good")
