"""One cell of a schedule and its text form, spelled as in `torch.distributed.pipelining.schedules`.

    F  forward                       SEND_F RECV_F   the activation of a micro-batch, to and from the next stage
    I  gradient of the input         SEND_B RECV_B   the gradient of an activation, to and from the stage before
    W  gradient of the weights       UNSHARD RESHARD gather the parameters of a stage, and let them go
    B  I and W as one action         REDUCE_GRAD     sum the gradients of a stage over the data ranks
    OVERLAP_F_B  an F and a B run as one, their communication and products overlapped (DualPipe)
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dtensor_5d.errors import PlanError, Violation

__all__ = ["COMMUNICATION", "COMPUTE", "Action", "Table", "format_csv", "format_table", "leaves", "parse_csv"]

COMPUTE = frozenset(("F", "I", "W", "B", "OVERLAP_F_B"))
COMMUNICATION = frozenset(("SEND_F", "RECV_F", "SEND_B", "RECV_B"))
_PARAMETERS = frozenset(("UNSHARD", "RESHARD", "REDUCE_GRAD"))

# Nine digits are more than any pipeline has, and never too many for a list or for `int`.
_TEXT = re.compile(r"([0-9]{1,9})(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{0,9})")
_MOST_NAMED = 8
"""Bad cells of a CSV that an error lists."""
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """What a rank does next: `kind` for one stage and, except for parameters, one micro-batch.

    Example:
        >>> Action.parse("2F0")
        Action(stage=2, kind='F', microbatch=0, parts=())
        >>> print(Action(0, "SEND_F", 1), Action(3, "UNSHARD"))
        0SEND_F1 3UNSHARD

    `parts` is set for OVERLAP_F_B only: its F and its B, and `stage` is then -1 as in torch.
    A named tuple, not a dataclass: schedules hold tens of thousands, and these hash and compare in C.
    """

    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @staticmethod
    def pair(forward: Action, backward: Action) -> Action:
        """An F and a B overlapped into one action."""
        return Action(-1, "OVERLAP_F_B", None, (forward, backward))

    @staticmethod
    def parse(text: str) -> Action:
        """The action of a text form. Errors: `PlanError` for text that is none."""
        text = text.strip()
        if pair := _PAIR.fullmatch(text):
            parts = [Action.parse(part) for part in pair.groups()]
            if [p.kind for p in parts] == ["F", "B"]:
                return Action.pair(*parts)
        elif match := _TEXT.fullmatch(text):
            stage, kind, microbatch = match.groups()
            if microbatch or kind in _PARAMETERS:
                return Action(int(stage), kind, int(microbatch) if microbatch else None)
        required = "an action is STAGE KIND MICROBATCH, as in 2F0, 0SEND_F1, 3UNSHARD or (2F0;1B3)OVERLAP_F_B"
        raise PlanError(Violation(f"action {reprlib.repr(text)}", required, "correct this cell"))


Table = Sequence[Sequence[Action]]
"""Rank -> what it does, in order."""


def leaves(action: Action) -> tuple[Action, ...]:
    """The actions that an action consists of: itself, or the two parts of an overlapped pair."""
    return action.parts or (action,)


def format_csv(table: Table) -> str:
    """One line a rank, one cell an action, as torch's `_dump_csv` writes and `_load_csv` reads.

    A rank that does nothing has a line of bubbles, since blank lines are no ranks.
    """
    return "".join((",".join(map(str, row)) or ",") + "\n" for row in table)


def parse_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """The table of `format_csv` or of torch, without empty cells (torch's bubbles), blank lines and a byte order mark.

    Errors: `PlanError` naming line and cell.
    """
    bad: list[Violation] = []
    table = []
    lines = (line for line in text.removeprefix("\ufeff").splitlines() if line.strip())
    for rank, line in enumerate(lines):
        row = []
        for cell, word in enumerate(line.split(",")):
            if word.strip() in ("", "None"):
                continue
            try:
                row.append(Action.parse(word))
            except PlanError as error:
                place = f"rank {rank}, cell {cell}"
                bad += [Violation(f"{place}: {v.asked}", v.required, v.change) for v in error.violations]
        table.append(tuple(row))
    if not table:
        bad.append(Violation("an empty schedule", "a CSV holds one line for each rank", "write at least one line"))
    if len(bad) > _MOST_NAMED:
        more = f"{len(bad) - _MOST_NAMED} more cells"
        bad[_MOST_NAMED:] = [Violation(more, "are no actions either", "is this a CSV of a schedule?")]
    if bad:
        raise PlanError(bad)
    return tuple(table)


def format_table(table: Table, mark: tuple[int, int] | None = None, *, around: int = 6) -> str:
    """The table as text, one line a rank; with `mark=(rank, cell)` a window around that cell, set in >< marks.

    Example:
        >>> print(format_table([[Action(0, "F", 0), Action(0, "B", 0)]], mark=(0, 1)))
        rank 0: 0F0 >0B0<
    """
    first, last = 0, max((len(row) for row in table), default=0)
    if mark is not None:
        first, last = max(0, mark[1] - around), min(last, mark[1] + around + 1)
    cells = [
        [f">{row[i]}<" if (rank, i) == mark else str(row[i]) for i in range(first, min(last, len(row)))]
        for rank, row in enumerate(table)
    ]
    if mark is not None and mark[1] >= len(table[mark[0]]):
        cells[mark[0]].append(">end<")
    width = [max(map(len, column)) for column in _columns(cells)]
    label = len(str(max(len(table) - 1, 0)))
    before, after = "... " * (first > 0), " ..." * any(len(row) > last for row in table)
    return "\n".join(
        f"rank {rank:>{label}}: {before}{' '.join(c.ljust(w) for c, w in zip(row, width))}".rstrip() + after
        for rank, row in enumerate(cells)
    )


def _columns(rows: Sequence[Sequence[str]]) -> Iterable[list[str]]:
    for i in range(max((len(r) for r in rows), default=0)):
        yield [row[i] for row in rows if i < len(row)]
