"""How many ranks each axis has: plain, frozen numbers. `mesh.py` turns them into live process groups.

The five dense axes multiply to the world size, outer to inner: pp, dp_replicate, dp_shard, cp, tp.
The expert axes fold over the inner three:  dp_shard x cp x tp = efsdp x ep x etp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from dtensor_5d.errors import PlanError, Violation

__all__ = ["DENSE_AXES", "EXPERT_AXES", "Degrees"]

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("ep", "etp")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Ranks per axis. One dense axis may be -1: what is left of the world.

    Example:
        >>> Degrees(dp_shard=-1, tp=2, ep=4).resolve(8)
        Degrees(dp_shard=4, tp=2, ep=4)

    Errors: `PlanError` for a degree that is no positive integer (nor a single -1), and from `resolve` for degrees
    that do not multiply to the world size.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        bad = [
            Violation(f"{name}={value!r}", _requirement(name), f"give {name} a whole number of ranks, 1 for none")
            for name, value in self.items()
            if isinstance(value, bool)
            or not isinstance(value, int)
            or not (value >= 1 or (value == -1 and name in DENSE_AXES))
        ]
        open_axes = self.open_axes
        if not bad and len(open_axes) > 1:
            bad.append(
                Violation(
                    f"{len(open_axes)} degrees are -1 ({', '.join(open_axes)})",
                    "at most 1 degree may be -1 (what is left of the world)",
                    "give numbers to the others",
                )
            )
        if not bad and not open_axes:
            bad += self._fold_violations()
        if bad:
            raise PlanError(bad)

    def items(self) -> Iterator[tuple[str, int]]:
        """(axis, degree) in order, dense axes first."""
        return ((f.name, getattr(self, f.name)) for f in fields(self))

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The axes whose degree is -1."""
        return tuple(name for name, value in self.items() if value == -1)

    @property
    def is_resolved(self) -> bool:
        return not self.open_axes

    @property
    def world_size(self) -> int:
        """Product of the dense degrees: the number of ranks. Errors: `PlanError` while a degree is -1."""
        self._require_resolved("world_size")
        return math.prod(getattr(self, name) for name in DENSE_AXES)

    @property
    def data(self) -> int:
        """Ranks that read different rows: dp_replicate x dp_shard."""
        self._require_resolved("data")
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which dense parameters are sharded: dp_shard x cp."""
        self._require_resolved("fsdp")
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which expert parameters are sharded: dp_shard x cp x tp / (ep x etp)."""
        self._require_resolved("efsdp")
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def resolve(self, world_size: int) -> Degrees:
        """These degrees with -1 replaced, so that they multiply to `world_size`.

        Errors: `PlanError` naming both numbers when they cannot.
        """
        known = math.prod(v for n, v in self.items() if n in DENSE_AXES and v != -1)
        spelled = " x ".join(f"{n} {v}" for n, v in self.items() if n in DENSE_AXES and v != 1) or "all degrees 1"
        if self.open_axes:
            axis = self.open_axes[0]
            if world_size % known or world_size < known:
                raise PlanError(
                    Violation(
                        f"{spelled} in a world of {world_size} ranks",
                        f"the known degrees multiply to {known}, which must divide {world_size}",
                        f"start a multiple of {known} ranks or change a degree",
                    )
                )
            return replace(self, **{axis: world_size // known})
        if known != world_size:
            raise PlanError(
                Violation(
                    f"{spelled} in a world of {world_size} ranks",
                    f"the degrees multiply to {known}, which must equal the world size {world_size}",
                    f"start {known} ranks, or give one degree as -1 to take what is left",
                )
            )
        return self

    def _fold_violations(self) -> list[Violation]:
        inner = self.dp_shard * self.cp * self.tp
        if inner % (self.ep * self.etp) == 0:
            return []
        return [
            Violation(
                f"ep={self.ep} x etp={self.etp} = {self.ep * self.etp}",
                f"ep x etp must divide dp_shard x cp x tp = {self.dp_shard} x {self.cp} x {self.tp} = {inner}",
                f"choose ep x etp among {_divisors(inner)}",
            )
        ]

    def _require_resolved(self, what: str) -> None:
        if self.open_axes:
            raise PlanError(
                Violation(
                    f"{what} of degrees with {self.open_axes[0]}=-1",
                    "the world size must be known",
                    "call degrees.resolve(world_size) first",
                )
            )

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}={v}" for n, v in self.items() if v != 1)
        return f"Degrees({shown})"


def _requirement(name: str) -> str:
    return "a degree must be an integer >= 1" + (", or -1 for what is left of the world" if name in DENSE_AXES else "")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0][:32]
