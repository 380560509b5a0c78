"""A schedule as data: who does what in which order. Built, checked, simulated and run from the same object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.schedule.actions import COMPUTE, Action, Table, format_csv, format_table, leaves, parse_csv

__all__ = ["Schedule", "loop_map", "v_map"]


def loop_map(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage -> rank where chunks go round and round: stages 0 1 2 3 4 5 on ranks 0 1 2 0 1 2."""
    return tuple(range(ranks)) * chunks


def v_map(ranks: int) -> tuple[int, ...]:
    """Stage -> rank of a V: stages 0 1 2 3 4 5 on ranks 0 1 2 2 1 0, so rank 0 holds the first and the last."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class Schedule:
    """The order of actions on every rank of the pipeline.

    Example:
        >>> schedule = build("1f1b", ranks=2, microbatches=3)
        >>> print(schedule)
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    `rank_of[stage]` is the rank that holds a stage, `table[rank]` its actions in order. `copies` is 2 for DualPipe,
    which keeps two copies of the model: stages 0..depth-1 are one, depth..2 depth-1 the other, and each takes half
    of the micro-batches. A lowered schedule (`lower`) also holds communication and parameter actions.
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    rank_of: tuple[int, ...]
    table: tuple[tuple[Action, ...], ...]
    copies: int = 1

    def __str__(self) -> str:
        return format_table(self.table)

    @property
    def stages(self) -> int:
        """How many stages there are, over all copies of the model."""
        return len(self.rank_of)

    @property
    def depth(self) -> int:
        """How many stages one copy of the model is cut into."""
        return len(self.rank_of) // self.copies

    def before(self, stage: int) -> int | None:
        """The stage whose output this stage reads; None for a first one."""
        return stage - 1 if stage % self.depth else None

    def after(self, stage: int) -> int | None:
        """The stage that reads this stage's output; None for a last one."""
        return stage + 1 if (stage + 1) % self.depth else None

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, in the order of the model."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def microbatches_of(self, stage: int) -> range:
        """The micro-batches that pass through a stage: all of them, or one half where there are two copies."""
        share = self.microbatches // self.copies
        first = stage // self.depth * share
        return range(first, first + share)

    @cached_property
    def lowered(self) -> bool:
        """Whether the table holds more than computation."""
        return any(action.kind not in COMPUTE for row in self.table for action in row)

    def compute_only(self) -> Schedule:
        """This schedule without communication and parameter actions."""
        return replace(self, table=tuple(tuple(a for a in row if a.kind in COMPUTE) for row in self.table))

    def with_table(self, table: Iterable[Iterable[Action]]) -> Schedule:
        """This schedule with other actions."""
        return replace(self, table=tuple(tuple(row) for row in table))

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table in torch's CSV form, also written to `path` if there is one."""
        text = format_csv(self.table)
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_csv(cls, source: str | Path, *, name: str = "csv", copies: int | None = None) -> Schedule:
        """A schedule from CSV text or a file of it, checked.

        The map from stages to ranks is read off the table, and so is the number of copies of the model unless it is
        given: two, where the first half of the stages sees the first half of the micro-batches and the second half
        the rest. Errors: `PlanError` for text that is no schedule, a file that cannot be read, and all that `check`
        refuses.
        """
        from dtensor_5d.schedule.check import check

        schedule = from_table(_read(source), name)
        schedule = replace(schedule, copies=_copies(schedule) if copies is None else copies)
        check(schedule)
        return schedule


def from_table(table: Table, name: str) -> Schedule:
    """A schedule whose ranks, stages and micro-batches are those that a table speaks of (not checked)."""
    home: dict[int, int] = {}
    numbers: set[int] = set()
    for rank, row in enumerate(table):
        for cell, action in enumerate(row):
            for leaf in leaves(action):
                if home.setdefault(leaf.stage, rank) != rank:
                    raise PlanError(
                        Violation(
                            f"stage {leaf.stage} on ranks {home[leaf.stage]} and {rank}",
                            "a stage lives on one rank",
                            f"move {leaf} to rank {home[leaf.stage]}\n{format_table(table, (rank, cell))}",
                        )
                    )
                if leaf.microbatch is not None:
                    numbers.add(leaf.microbatch)
    if not home or not numbers:
        raise PlanError(Violation("a table without actions", "a schedule has at least one F and one B", "add them"))
    for what, seen, where in (("stage", home.keys(), "on no rank"), ("micro-batch", numbers, "nowhere")):
        if (highest := max(seen)) >= len(seen):
            # Never a list of all that is missing: the highest number may be a slip of the pen with nine digits.
            gap = next(i for i in range(len(seen) + 1) if i not in seen)
            asked = f"{what} {highest} is there and {what} {gap} {where}"
            change = f"add {what} {gap}, or use the numbers 0 to {len(seen) - 1}"
            raise PlanError(Violation(asked, f"{what} numbers go from 0 without gaps", change))
    stages, microbatches = len(home), len(numbers)
    chunks = max(sum(r == rank for r in home.values()) for rank in range(len(table)))
    rank_of = tuple(home[s] for s in range(stages))
    return Schedule(name, len(table), chunks, microbatches, rank_of, tuple(tuple(row) for row in table))


def _copies(schedule: Schedule) -> int:
    """2 where a table is one of two copies of the model (no table of one copy can look so), otherwise 1."""
    if schedule.stages % 2 or schedule.microbatches % 2:
        return 1
    two = replace(schedule, copies=2)
    in_its_half = all(
        leaf.microbatch is None or leaf.microbatch in two.microbatches_of(leaf.stage)
        for row in schedule.table
        for action in row
        for leaf in leaves(action)
    )
    return 2 if in_its_half else 1


def _read(source: str | Path) -> tuple[tuple[Action, ...], ...]:
    if not isinstance(source, (str, Path)):
        asked = f"a CSV given as {type(source).__name__}"
        raise PlanError(Violation(asked, "must be text, or a path to a file", "decode bytes, read a stream"))
    # Text of a schedule always holds a comma or a line end, or is a single action; a path to a file is neither.
    if isinstance(source, Path) or (source.lower().endswith(".csv") and "\n" not in source):
        try:
            source = Path(source).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(Violation(f"file {source}", f"cannot be read: {error}", "give a CSV file")) from None
    return parse_csv(source)
