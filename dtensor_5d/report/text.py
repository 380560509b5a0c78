"""Styled text without a terminal: lines of spans, tables and stacked bars.

A report is made of plain data, so that it can be tested, printed without colour, or handed to rich (`cli.console`).
Style names are roles, not colours: "head", "dim", "good", "bad", "F", "I", "W", "B", ... (see `cli.console`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dtensor_5d.errors import PlanError, Violation

__all__ = [
    "Line", "Part", "Span", "bar", "checked_width", "flowed", "human_bytes", "joined", "number", "percent", "plain",
    "styled", "table", "wrapped",
]  # fmt: skip


class Span(NamedTuple):
    """A piece of a line and the role it is printed in."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


def styled(text: str, style: str = "") -> Line:
    """A line of one span."""
    return (Span(text, style),)


def plain(lines: Iterable[Line]) -> str:
    """The text of lines without their styles, no blanks at line ends."""
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def checked_width(width: int, least: int) -> int:
    """A width, if something can be drawn in it. Errors: `PlanError`."""
    if isinstance(width, bool) or not isinstance(width, int) or width < least:
        raise PlanError(Violation(f"width={width!r}", f"must be an integer, at least {least}", f"use {least} or more"))
    return width


def wrapped(line: Line, width: int, indent: str = "  ") -> list[Line]:
    """A line in as many lines of `width` columns as it needs, broken at blanks; a longer word stays whole.

    Example:
        >>> print(plain(wrapped(styled("fits below the line"), 12)))
        fits below
          the line
    """
    if sum(len(span.text) for span in line) <= width and not any("\n" in span.text for span in line):
        return [line]
    lines: list[list[Span]] = [[]]
    used = start = 0
    for text, style in line:
        for word in re.findall(r"\n|[^\S\n]+|\S+", text):
            blank = not word.strip()
            if word == "\n" or (used + len(word) > width and used > start and not blank):
                lines.append([] if word == "\n" else [Span(indent)])
                used = start = 0 if word == "\n" else len(indent)
            if word != "\n" and not (blank and len(lines) > 1 and used + len(word) > width):
                lines[-1].append(Span(word, style))
                used += len(word)
    return [joined(spans) for spans in lines]


def table(
    head: Sequence[str], rows: Sequence[Sequence[str | Span]], *, left: int = 1, width: int | None = None
) -> list[Line]:
    """A table with aligned columns: the first `left` to the left, the others to the right.

    A table wider than `width` comes in blocks of columns, each with the first column.

    Example:
        >>> print(plain(table(["schedule", "bubble"], [["1f1b", "27.3 %"], ["zbv", "0.0 %"]])))
        schedule  bubble
        1f1b      27.3 %
        zbv        0.0 %
    """
    cells = [[Span(cell, "head") for cell in head]]
    cells += [[cell if isinstance(cell, Span) else Span(cell) for cell in row] for row in rows]
    widths = [max(len(row[i].text) for row in cells) for i in range(len(head))]
    lines: list[Line] = []
    for columns in _blocks(widths, width):
        lines += [()] if lines else []
        for row in cells:
            line: list[Span] = []
            for i in columns:
                text = row[i].text.ljust(widths[i]) if i < left else row[i].text.rjust(widths[i])
                line += [Span("  " if i else ""), Span(text, row[i].style)]
            lines.append(tuple(line))
    return lines


def _blocks(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Which columns stand side by side, so that none of the blocks is wider than `width` (if it has a choice)."""
    blocks, used = [[0]], widths[0]
    for i, own in enumerate(widths[1:], 1):
        if width is not None and used + 2 + own > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(i)
        used += 2 + own
    return blocks


class Part(NamedTuple):
    """One part of a stacked bar: its letter, its style, how much."""

    letter: str
    style: str
    amount: float


def bar(
    parts: Sequence[Part], *, scale: float, width: int, marks: Sequence[float] = (), letters: bool = True
) -> Line:
    """A bar of stacked parts; `scale`, at least their sum, is the amount that fills `width` columns.

    Parts are drawn in their letters (or blanks, for paper that has colours); `|` stands at each mark, for instance
    where the memory of a device ends.

    Example:
        >>> print(plain([bar([Part("p", "", 4), Part("g", "", 2)], scale=10, width=10, marks=[8])]))
        ppppgg  |
    """
    columns: list[Span] = []
    total = 0.0
    for letter, style, amount in parts:
        total += amount
        columns += [Span(letter if letters else " ", style)] * (round(total / scale * width) - len(columns))
    columns += [Span(" ")] * (width + 1 - len(columns))
    for mark in marks:
        at = round(mark / scale * width)
        columns[at] = Span("|", f"mark {columns[at].style}".strip())
    return joined(columns)


def joined(spans: Iterable[Span]) -> Line:
    """Neighbours of one style made one span."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].style == span.style:
            out[-1] = Span(out[-1].text + span.text, span.style)
        elif span.text:
            out.append(span)
    return tuple(out)


def number(value: float, digits: int = 4) -> str:
    """A number in about `digits` digits and no exponent.

    Example:
        >>> number(10.0), number(0.27273), number(12345.6)
        ('10', '0.2727', '12346')
    """
    if value and abs(value) < 1:
        return f"{value:.{digits}f}".rstrip("0").rstrip(".")
    whole = len(str(int(abs(value))))
    text = f"{value:.{max(digits - whole, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def flowed(items: Iterable[Line], width: int) -> list[Line]:
    """Items one behind the other, in as many lines of `width` columns as they need; none is broken."""
    lines: list[Line] = []
    used = width
    for item in items:
        length = sum(len(span.text) for span in item)
        if used + length > width:
            lines.append(())
            used = 0
        lines[-1] = (*lines[-1], *item)
        used += length
    return lines


def percent(share: float) -> str:
    """A share as a percentage with one digit behind the point."""
    return f"{100 * share:.1f} %"


def human_bytes(count: float) -> str:
    """Bytes in binary units, three digits or so.

    Example:
        >>> human_bytes(0), human_bytes(512), human_bytes(17 * 2**30 + 2**29)
        ('0', '512 B', '17.5 GiB')
    """
    if not count:
        return "0"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        size = count / 1024**power
        if size >= 0.9995:
            digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
            return f"{size:.{digits}f} {unit}"
    return f"{count:.0f} B"
