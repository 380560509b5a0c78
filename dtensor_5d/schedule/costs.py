"""What an action costs: time, and the share of an activation that it lets go."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dtensor_5d.errors import PlanError, Violation

__all__ = ["Costs", "StageCosts", "costs_violation", "plain"]

PerStage = float | Sequence[float]

SMALLEST, LARGEST = 1e-100, 1e100
"""Times between these can be summed and divided without leaving the range of floats."""


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
    Numbers are whatever `float` takes, also numpy's; lists may be arrays.
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
            if value is None and field.name == "overlapped":
                continue
            # Frozen and hashable: a list becomes a tuple, and every number one of Python's.
            value = plain(value)
            object.__setattr__(self, field.name, value)
            problems = (_problem(field.name, number) for number in (value if isinstance(value, tuple) else (value,)))
            if problem := next((p for p in problems if p), None):
                bad.append(problem)
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


def costs_violation(costs: object) -> Violation | None:
    """What is wrong with something given as costs that is no `Costs`."""
    if isinstance(costs, Costs):
        return None
    required = "must be Costs(forward, backward_input, backward_weight, ...)"
    return Violation(f"costs={reprlib.repr(costs)}", required, "for example costs=Costs(1, 1, 1)")


def plain(value: Any) -> Any:
    """A number as int or float and a list as a tuple of them; what is neither stays as it is, to be refused."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # arrays and numbers of numpy, and tensors
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(plain(v) for v in value)
    if isinstance(value, (int, float)) or not hasattr(value, "__float__"):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _problem(name: str, value: object) -> Violation | None:
    # Compared, not converted: a whole number may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST <= value <= LARGEST:
        required = f"must be a finite number, at most {LARGEST:g}"
        # Python does not write out integers of thousands of digits.
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else reprlib.repr(value)
        shown = repr(value) if isinstance(value, bool) else shown
        return Violation(f"{name}={shown}", required, "give a measured time")
    if name == "input_release":
        if value > 1:
            return Violation(f"{name}={value}", "I cannot let go more than the 1 unit that F stored", "give at most 1")
    elif name == "comm":
        if value < 0:
            return Violation(f"{name}={value}", "a latency is at least 0", "give 0 or more")
    elif 0 < value < SMALLEST:
        return Violation(f"{name}={value}", f"a time must be at least {SMALLEST:g}", "use a smaller unit of time")
    elif value <= 0:
        return Violation(f"{name}={value}", "a time must be greater than 0", "give a measured time, or 1 for any unit")
    return None


def _spread(value: PerStage, stages: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * stages
