"""Where reports meet the terminal: rich and colour if there is one, plain text or JSON if there is not."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dtensor_5d.errors import PlanError
from dtensor_5d.report.text import Line, plain, wrapped

__all__ = ["Console", "add_output_arguments"]

_PIPE_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 120, 40, 10_000

# Role -> rich style. Bars: kind, tone (0 first chunk, 1 second), even or odd micro-batch.
_ROLES = {"head": "bold", "dim": "dim", "good": "bold green", "bad": "bold red", "mark": "bold red"}
_CAUSES = ("#8ab6f9", "#8fd694", "#f7bd7a", "#d3a8ec", "#7fd8d4", "#f6a6b2", "#d9c97c", "#b8b8b8", "#c39b83", "#b0b4f0")
_STYLES = {
    **_ROLES,
    "F0e": "black on #8ab6f9", "F0o": "black on #a9c9fb", "F1e": "white on #2f6fd0", "F1o": "white on #245bb0",
    "B0e": "black on #8fd694", "B0o": "black on #aee3b1", "B1e": "white on #2d8a3e", "B1o": "white on #237032",
    "I0e": "black on #7fd8d4", "I0o": "black on #a2e4e1", "I1e": "white on #17807c", "I1o": "white on #116763",
    "W0e": "black on #f7bd7a", "W0o": "black on #f9cf9f", "W1e": "white on #c06a10", "W1o": "white on #9d560b",
    "X0e": "black on #d3a8ec", "X0o": "black on #dfc0f2", "X1e": "white on #7d3fa6", "X1o": "white on #693489",
    "F text": "#2f6fd0", "B text": "#2d8a3e", "I text": "#17807c", "W text": "#c06a10", "X text": "#7d3fa6",
    **{f"cause {i}": f"black on {colour}" for i, colour in enumerate(_CAUSES)},
}  # fmt: skip
# A terminal of 16 colours: left to itself, rich would map several of the above to one.
_HUES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow", "X": "magenta"}
_FEW = ("blue", "green", "yellow", "magenta", "cyan", "red", "bright_yellow", "white", "bright_black", "bright_blue")
_STYLES_OF_16 = {
    **_ROLES,
    **{f"{kind}0{parity}": f"black on bright_{hue}" for kind, hue in _HUES.items() for parity in "eo"},
    **{f"{kind}1{parity}": f"white on {hue}" for kind, hue in _HUES.items() for parity in "eo"},
    **{f"{kind} text": hue for kind, hue in _HUES.items()},
    **{f"cause {i}": f"black on {hue}" for i, hue in enumerate(_FEW)},
}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every command has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print data instead of pictures (errors as well)")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto",
                       help="auto: in a terminal, if rich is installed")  # fmt: skip
    group.add_argument("--width", type=_width, metavar="COLUMNS", help="from 40 on; default: that of the terminal")
    group.add_argument("--traceback", action="store_true", help="show where in dtensor-5d a fault (exit code 3) arose")


def _width(text: str) -> int:
    if not text.isdecimal() or not _LEAST_WIDTH <= int(text) <= _MOST_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of columns from {_LEAST_WIDTH} to {_MOST_WIDTH}")
    return int(text)


@dataclass(frozen=True)
class Console:
    """Prints lines of a report. `colours`: rich's name for what the terminal can, "" for plain text."""

    colours: str
    width: int
    json: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Console:
        wanted = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
        width = arguments.width or max(_LEAST_WIDTH, shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns)
        return cls(_colours(force=arguments.color == "always") if wanted else "", width, arguments.json)

    @property
    def letters(self) -> bool:
        """Whether charts must tell their parts by letters."""
        return not self.colours

    def print(self, lines: Iterable[Line]) -> None:
        """Lines of a report; one longer than the width goes on, indented, in the next."""
        lines = [piece for line in lines for piece in wrapped(line, self.width)]
        if not self.colours:
            sys.stdout.write(plain(lines) + "\n")
            return
        from rich.console import Console as RichConsole
        from rich.text import Text

        styles = _STYLES_OF_16 if self.colours == "standard" else _STYLES
        out = RichConsole(
            force_terminal=True,
            color_system=self.colours,  # type: ignore[arg-type]  # a name that rich itself gave
            no_color=False,
            width=self.width,
            highlight=False,
        )
        for line in lines:
            text = Text()
            for span in line:
                mark, _, rest = span.style.partition(" ")
                style = styles.get(rest, "") + " bold" if mark == "mark" and rest else styles.get(span.style)
                text.append(span.text, style)
            out.print(text, soft_wrap=True)

    def data(self, value: Any) -> None:
        """A value as JSON."""
        sys.stdout.write(json.dumps(value, indent=2) + "\n")

    def note(self, text: str) -> None:
        """What happened beside the answer, for people only: to the standard error."""
        sys.stderr.write(text + "\n")

    def error(self, error: Exception, *, fault: bool = False) -> None:
        """One message: to the standard error, and in JSON to the standard output as well."""
        text = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        if fault:
            text = f"{type(error).__name__}: {text} (a fault of dtensor-5d: see it with --traceback)"
        if self.json:
            violations = error.violations if isinstance(error, PlanError) else ()
            listed = [{"asked": v.asked, "required": v.required, "change": v.change} for v in violations]
            self.data({"error": text, "violations": listed})
        sys.stderr.write(f"dtensor-5d: error: {text}\n")


def _colours(*, force: bool) -> str:
    """What colours the terminal has, as rich sees it: its name for them, or "" for none (and without rich)."""
    try:
        from rich.console import Console as RichConsole
    except ImportError:
        return ""
    seen = RichConsole(force_terminal=True)
    if force:
        return seen.color_system or "256"
    return "" if seen.no_color else seen.color_system or ""
