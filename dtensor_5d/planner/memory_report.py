"""The answer of the memory planner: bytes per pipeline rank, by cause and by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dtensor_5d.errors import PlanError, Violation

__all__ = ["CAUSES", "Device", "MemoryReport", "RankMemory", "StageMemory"]

GIB = 2**30
CAUSES = (
    "parameters", "gradients", "master", "optimizer", "activations", "stash", "recompute", "logits", "working",
    "gathered", "reduce buffer", "buffers", "temporary", "context",
)  # fmt: skip
_MORE = ("memory", "line")  # what cannot be zero


@dataclass(frozen=True)
class Device:
    """The memory of a device, in bytes, and what is gone before the first tensor.

    context: driver, kernels and libraries (published-numbers 1.4: 1-2 GB). communicator: of each process group.
    margin: what the allocator reserves beyond what is in use; line: the share of the memory that a plan may fill.
    """

    memory: int = 80 * GIB
    context: int = int(1.25 * GIB)
    communicator: int = GIB // 8
    margin: float = 0.08
    line: float = 0.8

    def __post_init__(self) -> None:
        bad = [
            Violation(f"{name}={value!r}", f"must be a number {'> 0' if name in _MORE else '>= 0'}", f"correct {name}")
            for name, value in vars(self).items()
            if isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (0 <= value < float("inf") and (value or name not in _MORE))
        ]
        if bad:
            raise PlanError(bad)


@dataclass(frozen=True)
class StageMemory:
    """A stage on its rank: layers it has, and bytes that belong to it alone."""

    number: int
    layers: tuple[int, ...]
    parameters: int
    state: int
    activations_per_microbatch: int


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank: the fullest of the ranks that share its place.

    phases: "step 1: forward and backward" and the like -> cause -> bytes. Step 1 has no optimizer state until its end.
    dense, experts: parameters, gradients, master and optimizer of each kind apart.
    """

    rank: int
    stages: tuple[StageMemory, ...]
    phases: Mapping[str, Mapping[str, int]]
    dense: Mapping[str, int]
    experts: Mapping[str, int]

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def causes(self) -> Mapping[str, int]:
        """Bytes by cause in the phase that needs most."""
        return self.phases[self.peak_phase]

    @property
    def active(self) -> int:
        """Bytes in use at the peak."""
        return sum(self.causes.values())

    def peak(self, step: int) -> int:
        """Bytes in use at the peak of step 1 or of step 2 (and every later one)."""
        return max(sum(c.values()) for phase, c in self.phases.items() if phase.startswith(f"step {step}:"))


@dataclass(frozen=True)
class MemoryReport:
    """Bytes per pipeline rank, by cause.

    active: in use at the peak of the fullest rank. reserved: with what the allocator holds beyond that. The line is
    80 % of the device's memory: above it, fragmentation and uneven batches decide whether a run survives.
    """

    ranks: tuple[RankMemory, ...]
    device: Device

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.active)

    @property
    def active(self) -> int:
        return self.fullest.active

    @property
    def reserved(self) -> int:
        causes = self.fullest.causes
        return int((self.active - causes["context"]) * (1 + self.device.margin)) + causes["context"]

    @property
    def causes(self) -> Mapping[str, int]:
        """Bytes by cause on the fullest rank at its peak."""
        return self.fullest.causes

    @property
    def line(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.device.memory * self.device.line)

    @property
    def fits(self) -> bool:
        """Whether the reserved bytes are below the device's memory."""
        return self.reserved <= self.device.memory

    @property
    def below_line(self) -> bool:
        """Whether the active bytes are below the 80 % line."""
        return self.active <= self.line

    def __iter__(self) -> Iterator[RankMemory]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RankMemory:
        return self.ranks[rank]

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return {
            "device_memory": self.device.memory,
            "line": self.line,
            "active": self.active,
            "reserved": self.reserved,
            "fits": self.fits,
            "below_line": self.below_line,
            "ranks": [
                {
                    "rank": r.rank,
                    "peak_phase": r.peak_phase,
                    "peak_step_1": r.peak(1),
                    "peak_step_2": r.peak(2),
                    "causes": dict(r.causes),
                    "phases": {phase: dict(causes) for phase, causes in r.phases.items()},
                    "dense": dict(r.dense),
                    "experts": dict(r.experts),
                    "stages": [
                        {
                            "stage": s.number,
                            "layers": list(s.layers),
                            "parameters": s.parameters,
                            "state": s.state,
                            "activations_per_microbatch": s.activations_per_microbatch,
                        }
                        for s in r.stages
                    ],
                }
                for r in self.ranks
            ],
        }

    def __str__(self) -> str:
        shown = [c for c in CAUSES if any(r.causes.get(c) for r in self.ranks)]
        rows = [["GiB", *(f"rank {r.rank}" for r in self.ranks)]]
        rows += [[c, *(f"{r.causes.get(c, 0) / GIB:.2f}" for r in self.ranks)] for c in shown]
        rows.append(["peak of step 1", *(f"{r.peak(1) / GIB:.2f}" for r in self.ranks)])
        rows.append(["peak of step 2", *(f"{r.peak(2) / GIB:.2f}" for r in self.ranks)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        verdict = "below" if self.below_line else "ABOVE"
        lines.append(
            f"active {self.active / GIB:.2f}, reserved {self.reserved / GIB:.2f} of "
            f"{self.device.memory / GIB:.0f} GiB; "
            f"{verdict} the {self.device.line:.0%} line of {self.line / GIB:.0f} GiB"
        )
        return "\n".join(lines)
