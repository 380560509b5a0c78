"""What an action costs: time, and the share of an activation that it lets go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from dtensor_5d.errors import PlanError, Violation

__all__ = ["Costs", "StageCosts"]

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times of one action of one chunk, in any unit, each a number or one number for each stage.

    Example:
        >>> Costs(29.7, 29.4, 19.9, 0.5)                       # the same on every stage
        >>> Costs([1, 1, 1, 2], [1, 1, 1, 2], 1, comm=0.1)     # a heavy last stage
        >>> Costs(1, 1, 1, overlapped=2.4)                     # DualPipe: an F and a B hide in each other

    A stage is one chunk: where a rank holds v chunks, each costs 1/v of what the rank's layers cost.
    `comm`: latency from the end of an action to the start of what needs its result on another rank; never occupies
    a rank; one number for each stage means: of the edge behind that stage. `overlapped`: time of an F and a B run as
    one; None means their sum.
    `input_release`: the share of a stored activation that I lets go, W lets the rest go. The Zero Bubble papers'
    (34h + 5as - 32h) / (34h + 5as) for a transformer layer; negative where I stores more than it frees. The default
    of one half is that of the papers' small examples.
    Errors: `PlanError` for a time that is not a positive number (comm may be 0).
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    comm: PerStage = 0.0
    overlapped: PerStage | None = None
    input_release: PerStage = 0.5

    def __post_init__(self) -> None:
        bad: list[Violation] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                # Frozen and hashable: a list becomes a tuple.
                object.__setattr__(self, field.name, tuple(value))
            elif value is None and field.name == "overlapped":
                continue
            for number in _numbers(value):
                if problem := _problem(field.name, number):
                    bad.append(problem)
                    break
        if bad:
            raise PlanError(bad)

    def for_stages(self, stages: int) -> StageCosts:
        """One number for each stage. Errors: `PlanError` if a list has another length."""
        bad = [
            Violation(
                f"{field.name} lists {len(value)} stages",
                f"the schedule has {stages}",
                f"give one number, or {stages}",
            )
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), tuple) and len(value) != stages
        ]
        if bad:
            raise PlanError(bad)
        return StageCosts(
            _spread(self.forward, stages),
            _spread(self.backward_input, stages),
            _spread(self.backward_weight, stages),
            _spread(self.comm, stages),
            None if self.overlapped is None else _spread(self.overlapped, stages),
            _spread(self.input_release, stages),
        )


@dataclass(frozen=True)
class StageCosts:
    """`Costs` with one number for each stage in every field."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    comm: tuple[float, ...]
    overlapped: tuple[float, ...] | None
    input_release: tuple[float, ...]


def _numbers(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _problem(name: str, value: object) -> Violation | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return Violation(f"{name}={value!r}", "must be a finite number", "give a measured time")
    if name == "input_release":
        if value > 1:
            return Violation(f"{name}={value}", "I cannot let go more than the 1 unit that F stored", "give at most 1")
    elif name == "comm":
        if value < 0:
            return Violation(f"{name}={value}", "a latency is at least 0", "give 0 or more")
    elif value <= 0:
        return Violation(f"{name}={value}", "a time must be greater than 0", "give a measured time, or 1 for any unit")
    return None


def _spread(value: PerStage, stages: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * stages
