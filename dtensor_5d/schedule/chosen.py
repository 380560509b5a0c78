"""The schedule that the options of a plan ask for: built by name, or the table that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.schedule.actions import format_table
from dtensor_5d.schedule.build import build, stage_ranks
from dtensor_5d.schedule.costs import Costs
from dtensor_5d.schedule.data import Schedule

if TYPE_CHECKING:
    from dtensor_5d.options import Options

__all__ = ["as_option", "schedule_of", "stage_ranks_of"]

_SHOWN = 12
"""Cells of a rank that an error shows."""


def as_option(schedule: Any) -> Any:
    """What the option `schedule` keeps: a name as it is, a table as its CSV text, so that a plan stays plain text.

    schedule: a name, a `Schedule`, CSV text, or a path that ends in .csv. What a table says of messages, gathers and
    reductions is left out: the other options decide on them.
    Errors: `PlanError` for a file that cannot be read and a table that is incomplete or would deadlock, showing it.
    """
    if isinstance(schedule, str) and not ("\n" in schedule or schedule.lower().endswith(".csv")):
        return schedule
    if isinstance(schedule, Schedule):
        from dtensor_5d.schedule.check import check

        check(schedule)
        return schedule.compute_only().to_csv()
    if isinstance(schedule, (str, Path)):
        return Schedule.from_csv(schedule).compute_only().to_csv()
    return schedule


def stage_ranks_of(options: Options, *, ranks: int) -> tuple[int, ...]:
    """The rank that holds each stage. Errors: `PlanError` for a table that is not of `ranks` ranks and these chunks."""
    if "\n" not in options.schedule:
        return stage_ranks(options.schedule, ranks=ranks, chunks=options.chunks)
    return _fitting(options, ranks).rank_of


def schedule_of(
    options: Options, *, ranks: int, microbatches: int | None = None, costs: Costs | None = None
) -> Schedule:
    """The schedule of a window. microbatches: in it; None: those of one batch, or of a table that has several batches.

    Errors: `PlanError` for all that `build` refuses, and for a table that does not fit.
    """
    count = options.microbatches if microbatches is None else microbatches
    if "\n" not in options.schedule:
        return build(options.schedule, ranks=ranks, microbatches=count, chunks=options.chunks, costs=costs)
    schedule = _fitting(options, ranks)
    has = schedule.microbatches
    if has % count if microbatches is None else has != count:
        raise PlanError(
            _misfit(schedule, f"{count} micro-batches with a schedule of {has}",
                    f"a window must have its {has} micro-batches",
                    f"use microbatches={has} and one batch, or batches that make {has}")
        )  # fmt: skip
    return schedule


def _fitting(options: Options, ranks: int) -> Schedule:
    """The table, for so many ranks."""
    schedule = Schedule.from_csv(options.schedule)
    held = {len(schedule.stages_of(rank)) for rank in range(schedule.ranks)}
    bad = []
    if schedule.ranks != ranks:
        asked, needs = f"pp={ranks} with a schedule of {schedule.ranks} ranks", "it has one line for each rank of pp"
        bad.append(_misfit(schedule, asked, needs, f"use pp={schedule.ranks}, or a schedule of {ranks} ranks"))
    if schedule.copies > 1:
        asked, needs = f"a schedule of {schedule.copies} copies of the model", "1 copy can be run"
        bad.append(_misfit(schedule, asked, needs, "use schedule='dualpipev'"))
    if min(held) == 0:
        asked, needs = "a schedule with a rank that does nothing", "every rank must hold at least 1 stage"
        bad.append(_misfit(schedule, asked, needs, "use as many ranks as do something"))
    if options.chunks is not None and held != {options.chunks}:
        asked = f"chunks={options.chunks} with a schedule of {' or '.join(map(str, sorted(held)))} stages a rank"
        bad.append(_misfit(schedule, asked, "chunks is the number of stages of every rank", "leave chunks out"))
    if bad:
        raise PlanError(bad)
    return schedule


def _misfit(schedule: Schedule, asked: str, required: str, change: str) -> Violation:
    rows = [row[:_SHOWN] for row in schedule.table]
    more = " ..." if any(len(row) > _SHOWN for row in schedule.table) else ""
    return Violation(asked, required, f"{change}\n{format_table(rows)}{more}")
