"""Errors that a user can fix, each one saying what was asked, what is required and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["PlanError", "Violation"]


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Example:
        >>> print(Violation("tp=3 with 8 query heads", "tp must divide the 8 query heads", "use tp 1, 2, 4 or 8"))
        tp=3 with 8 query heads: tp must divide the 8 query heads; use tp 1, 2, 4 or 8
    """

    asked: str
    required: str
    change: str

    def __str__(self) -> str:
        return f"{self.asked}: {self.required}; {self.change}"


class PlanError(ValueError):
    """What the user can fix. One message lists *all* violations; `.violations` holds them as data.

    Accepts a plain message, one `Violation` or several.
    """

    def __init__(self, problem: str | Violation | Iterable[Violation]) -> None:
        self.violations: Sequence[Violation]
        if isinstance(problem, str):
            self.violations = ()
            message = problem
        else:
            self.violations = (problem,) if isinstance(problem, Violation) else tuple(problem)
            assert self.violations, "a PlanError needs at least one violation"
            if len(self.violations) == 1:
                message = str(self.violations[0])
            else:
                lines = "".join(f"\n  {i}. {v}" for i, v in enumerate(self.violations, 1))
                message = f"{len(self.violations)} things to change:{lines}"
        super().__init__(message)

    def __reduce__(self) -> tuple[type[PlanError], tuple[str | Sequence[Violation]]]:
        # Errors cross process borders (all ranks raise the same one), so they must survive a round trip.
        return type(self), (tuple(self.violations) or str(self),)
