"""Draw, compare and export pipeline schedules.

NAME is a schedule, a CSV file of one (as this command or torch writes it), or `all`. A file says itself how many
ranks, micro-batches and chunks it has; flags that say something else are refused.

Times of forward, input gradient and weight gradient are those of one micro-batch on all layers of a rank; a schedule
that cuts them into v chunks gets 1/v for each. Lists give each stage its own time, as they stand. The bubble is the
one of the Zero Bubble paper: (longest span - longest busy time) / longest span. Memory is counted in activations of
one micro-batch on all layers of a rank."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtensor_5d.cli.console import Console
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.options import SCHEDULES
from dtensor_5d.report.gantt import actions_table, caption, gantt, legend, per_rank, share_of_rank, summary
from dtensor_5d.report.svg import schedule_svg
from dtensor_5d.report.text import Line, Span, styled
from dtensor_5d.report.trace import chrome_trace
from dtensor_5d.schedule import Costs, Schedule, Timeline, build, lower, simulate
from dtensor_5d.schedule.build import MemoryLimitError, rounded_up

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """examples:
  dtensor-5d schedule zbv --ranks 4 --microbatches 8
  dtensor-5d schedule 1f1b zb-h1 zb-auto zbv --ranks 8 --microbatches 32 --forward 1 --backward-input 1.1 --comm 0.05
  dtensor-5d schedule all -p 4 -m 8 --svg all.svg --trace all.json
  dtensor-5d schedule interleaved --chunks 3 -p 4 -m 8 --lower visit --csv run.csv
  dtensor-5d schedule mine.csv --forward 1,1,1,2
"""

# Schedules whose ranks hold two chunks of half their layers each: a V.
_CUT_IN_TWO = ("zbv", "v-half", "v-min", "dualpipev")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(SCHEDULES)}; a .csv file; or all")
    add = parser.add_argument_group("shape").add_argument
    add("-p", "--ranks", type=int, help="ranks of the pipeline (pp)")
    add("-m", "--microbatches", type=int, help="micro-batches between two optimizer steps")
    add("-v", "--chunks", type=int, help="chunks a rank, for interleaved (default 2)")
    limit = "most activations a rank may hold, in micro-batches on all its layers"
    add("--memory-limit", type=_limit, metavar="N", help=limit)
    title = "times, in any unit: a number, or a comma-separated list with one for each stage"
    add = parser.add_argument_group(title).add_argument
    add("--forward", type=_times, default=1.0, metavar="T", help="default 1")
    add("--backward-input", type=_times, default=1.0, metavar="T", help="default 1")
    add("--backward-weight", type=_times, default=1.0, metavar="T", help="default 1")
    add("--comm", type=_times, default=0.0, metavar="T", help="latency between two ranks; default 0")
    both = "a forward and a backward run as one (dualpipe, dualpipev); default: their sum"
    add("--overlapped", type=_times, metavar="T", help=both)
    add = parser.add_argument_group("what to show and write").add_argument
    add("--table", action="store_true", help="print the actions of every rank")
    add("--no-gantt", action="store_true", help="print the numbers only")
    lowered = "add sends, receives, gathers (visit or window) and reductions to --table and --csv"
    add("--lower", choices=("visit", "window"), metavar="REGATHER", help=lowered)
    add("--svg", type=Path, metavar="FILE", help="write the charts as a picture")
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace (ui.perfetto.dev)")
    add("--csv", type=Path, metavar="FILE", help="write the actions as torch reads them (1 schedule)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Answer the command line; the exit code."""
    if unused := [*_unused(arguments), *_one_file_for_two(arguments)]:
        raise PlanError(unused)
    timelines, refused = _timelines(arguments)
    for path, text in _files(arguments, timelines):
        path.write_text(text)
        console.note(f"wrote {path}")
    if console.json:
        console.data({"schedules": [_data(t) for t in timelines], "refused": refused})
        return 0
    console.print(_page(arguments, console, timelines, refused))
    return 0


def _times(text: str) -> float | tuple[float, ...]:
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list of numbers such as 1,1,2") from None
    return numbers[0] if len(numbers) == 1 else numbers


def _limit(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of micro-batches above 0 (inf: no limit)")
    return number


def _unused(arguments: argparse.Namespace) -> list[Violation]:
    """Flags that would change nothing."""
    names, bad = set(arguments.names), []
    files = {name for name in names if _is_file(name)}
    if arguments.chunks is not None and len(names) > 1 and not names & {"interleaved", "all"} | files:
        required = "only interleaved has a number of chunks to choose"
        bad.append(Violation(f"--chunks {arguments.chunks}", required, "leave out --chunks, or add interleaved"))
    if arguments.overlapped is not None and not names & {"dualpipe", "dualpipev", "all"} | files:
        required = "only dualpipe and dualpipev overlap a forward with a backward"
        bad.append(Violation("--overlapped", required, "leave it out, or add one of them"))
    if arguments.lower is not None and arguments.csv is None and not arguments.table:
        required = "changes what --table prints and --csv writes"
        bad.append(Violation(f"--lower {arguments.lower}", required, "add --table or --csv FILE, or leave it out"))
    return bad


def _one_file_for_two(arguments: argparse.Namespace) -> list[Violation]:
    """Files that would be written over each other, or over what is read; and `-`, which is none."""
    uses: dict[Path, list[str]] = {}
    bad = []
    for name in dict.fromkeys(arguments.names):
        if _is_file(name):
            uses.setdefault(Path(name).resolve(), []).append(name)
    for flag in ("svg", "trace", "csv"):
        path = getattr(arguments, flag)
        if str(path) == "-":
            bad.append(Violation(f"--{flag} -", "must be a file", "name one; /dev/stdout is the standard output"))
        elif path is not None and (path.is_file() or not path.exists()):
            uses.setdefault(path.resolve(), []).append(f"--{flag}")
    for path, users in uses.items():
        if any(user.startswith("--") for user in users) and len(users) > 1:
            bad.append(Violation(f"{path} for {' and '.join(users)}", "each needs a file of its own", "name another"))
    return bad


def _is_file(name: str) -> bool:
    return name.lower().endswith(".csv")


def _timelines(arguments: argparse.Namespace) -> tuple[list[Timeline], dict[str, str]]:
    """A timeline for each name, and why there is none for a name that `all` stands for."""
    names = [n for name in arguments.names for n in (SCHEDULES if name == "all" else (name,))]
    found: list[Timeline] = []
    refused: dict[str, str] = {}
    bad: list[Violation] = []
    for name in dict.fromkeys(names):
        try:
            schedule = _schedule(name, arguments)
            # What one chunk is of a rank's layers; DualPipe's two chunks are two copies, each of all of them.
            timeline = simulate(schedule, _costs(arguments, share := schedule.ranks / schedule.depth))
            _keeps_limit(name, timeline, share, arguments.memory_limit)
            found.append(timeline)
        except PlanError as error:
            if name in arguments.names:
                bad += error.violations or [Violation(name, str(error), "choose another schedule")]
            else:
                refused[name] = str(error)
    if bad:
        # Several names often break one rule (no --ranks): say it once.
        raise PlanError(list(dict.fromkeys(bad)))
    if not found:
        raise PlanError("no schedule is possible here:\n" + "\n".join(f"  {n}: {why}" for n, why in refused.items()))
    return found, refused


def _schedule(name: str, arguments: argparse.Namespace) -> Schedule:
    if _is_file(name):
        return _from_file(name, arguments)
    missing = [f"--{flag}" for flag in ("ranks", "microbatches") if getattr(arguments, flag) is None]
    if missing:
        raise PlanError(
            Violation("a schedule of unknown size", f"needs {' and '.join(missing)}", "for example -p 4 -m 8")
        )
    chunks = arguments.chunks if name == "interleaved" or len(arguments.names) == 1 else None
    share = 1 / (chunks or 2) if name == "interleaved" else 0.5 if name in _CUT_IN_TWO else 1.0
    limit = arguments.memory_limit
    try:
        return build(
            name,
            ranks=arguments.ranks,
            microbatches=arguments.microbatches,
            chunks=chunks,
            costs=_costs(arguments, share),
            memory_limit=None if limit is None else limit / share,
        )
    except MemoryLimitError as error:
        raise PlanError(_over_limit(name, limit, error.needed * share, error.others)) from None


def _from_file(name: str, arguments: argparse.Namespace) -> Schedule:
    schedule = Schedule.from_csv(Path(name), name=Path(name).stem)
    own = {"ranks": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
    if {"interleaved", "all"} & set(arguments.names):
        del own["chunks"]  # it is meant for that one
    bad = [
        Violation(f"--{flag} {asked} with {name}", f"the file has {has}", f"leave out --{flag}, or give {has}")
        for flag, has in own.items()
        if (asked := getattr(arguments, flag)) not in (None, has)
    ]
    if bad:
        raise PlanError(bad)
    return schedule


def _keeps_limit(name: str, timeline: Timeline, share: float, limit: float | None) -> None:
    """What `build` has seen to already, except for files."""
    peak = max(timeline.peak_activations) * share
    if limit is not None and peak > limit + 1e-6:
        raise PlanError(_over_limit(name, limit, peak, ()))


def _over_limit(name: str, limit: float, needed: float, others: Sequence[str]) -> Violation:
    """The refusal in the unit of --memory-limit."""
    instead = f", or use {' or '.join(others)}" if others else ""
    return Violation(
        f"--memory-limit {limit:g} with {name}",
        f"it needs at least {rounded_up(needed)} micro-batches on all layers of a rank",
        f"raise --memory-limit to {rounded_up(needed)}{instead}",
    )


def _costs(arguments: argparse.Namespace, share: float) -> Costs:
    """The times of one chunk that is `share` of a rank's layers."""

    def of_chunk(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        return value if isinstance(value, tuple) else value * share

    overlapped = arguments.overlapped
    return Costs(
        of_chunk(arguments.forward),
        of_chunk(arguments.backward_input),
        of_chunk(arguments.backward_weight),
        comm=arguments.comm,
        overlapped=None if overlapped is None else of_chunk(overlapped),
    )


def _files(arguments: argparse.Namespace, timelines: Sequence[Timeline]) -> list[tuple[Path, str]]:
    files = []
    if arguments.csv:
        if len(timelines) != 1:
            raise PlanError(
                Violation(f"--csv with {len(timelines)} schedules", "a CSV holds 1 schedule", "name one schedule")
            )
        files.append((arguments.csv, _written(arguments, timelines[0]).to_csv()))
    if arguments.svg:
        files.append((arguments.svg, schedule_svg(timelines)))
    if arguments.trace:
        files.append((arguments.trace, chrome_trace(timelines)))
    return files


def _written(arguments: argparse.Namespace, timeline: Timeline) -> Schedule:
    if arguments.lower is None:
        return timeline.schedule
    return lower(timeline.schedule, arguments.lower, costs=timeline.costs)


def _page(
    arguments: argparse.Namespace, console: Console, timelines: Sequence[Timeline], refused: dict[str, str]
) -> list[Line]:
    lines: list[Line] = []
    if len(timelines) > 1:
        lines += [*summary(timelines, width=console.width), ()]
    longest = max(t.makespan for t in timelines)
    for timeline in timelines:
        if len(timelines) > 1 and arguments.no_gantt and not arguments.table:
            continue  # the comparison has said it all
        lines.append(styled(caption(timeline), "head"))
        if not arguments.no_gantt:
            lines += gantt(timeline, width=console.width, until=longest, letters=console.letters)
        if len(timelines) == 1:
            lines += [(), *per_rank(timeline, width=console.width)]
        if arguments.table:
            lines += [(), *actions_table(_written(arguments, timeline), width=console.width)]
        lines.append(())
    if not arguments.no_gantt:
        lines += legend(timelines, width=console.width, letters=console.letters)
    for name, why in refused.items():
        lines.append((Span(f"{name}: ", "head"), Span(f"not possible here: {why}", "dim")))
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _data(timeline: Timeline) -> dict[str, Any]:
    s, share = timeline.schedule, share_of_rank(timeline)
    return {
        "name": s.name,
        "ranks": s.ranks,
        "microbatches": s.microbatches,
        "chunks": s.chunks,
        "rank_of_stage": list(s.rank_of),
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "busy": list(timeline.busy),
        "bubbles": list(timeline.bubbles),
        "idle": list(timeline.idle),
        "peak_activations": [peak * share for peak in timeline.peak_activations],
        "peak_stash": [stash * share for stash in timeline.peak_stash],
        "actions": [
            [{"action": str(t.action), "start": t.start, "end": t.end} for t in row] for row in timeline.rows
        ],
    }
