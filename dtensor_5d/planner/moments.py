"""What a pipeline rank keeps alive while it walks through its schedule, and the fullest moment of each phase. No torch.

A rank is in phase `loss` when a forward has ended (behind the last stage the logits are there) and when a backward is
about to begin (the logits' gradient is there); it is in phase `backward` from the start of an I, W or B to its end.
Each phase is judged where *it* is fullest: the moment with most activations in flight need not be the one with most
stash, nor the one with the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtensor_5d.planner.activity import Activity

if TYPE_CHECKING:
    from dtensor_5d.schedule import Schedule

__all__ = ["InFlight", "fullest_moments", "in_flight"]

_PARTS = ("activations", "stash", "logits", "recompute", "working")


@dataclass(frozen=True)
class InFlight:
    """What a rank keeps at its fullest moment, in bytes."""

    activations: int
    stash: int


@dataclass(frozen=True)
class _Step:
    """One action on one stage: (activations, stash) of the whole rank before it and after it."""

    kind: str
    stage: int
    before: tuple[int, int]
    after: tuple[int, int]
    beside: tuple[int, ...] = ()  # the stages whose forward runs overlapped with this backward


def in_flight(schedule: Schedule | None, rank: int, activation: Sequence[int], stash: Sequence[int]) -> InFlight:
    """The fullest moment of a rank between two actions of its schedule.

    activation, stash: bytes of one micro-batch on each stage of the model, between F and I, and between I and W.
    Without a pipeline one micro-batch is alive at a time.
    """
    steps = _walk(schedule, rank, dict(enumerate(activation)), dict(enumerate(stash)))
    return InFlight(*max((step.after for step in steps), key=sum))


def fullest_moments(
    schedule: Schedule | None, rank: int, activity: Mapping[int, Activity]
) -> dict[str, dict[str, int]]:
    """Phase (`loss`, `backward`) -> cause -> bytes, each at its own fullest moment. activity: of a micro-batch by stage.

    Inside an I the kept tensors of a stage become its stash, layer by layer; in recomputed layers the stash is the
    larger one, so that the end of the I is fuller than its start. Both ends are looked at.
    """
    fullest: dict[str, dict[str, int]] = {phase: dict.fromkeys(_PARTS, 0) for phase in ("loss", "backward")}

    def meet(phase: str, *parts: int) -> None:
        if sum(parts) > sum(fullest[phase].values()):
            fullest[phase] = dict(zip(_PARTS, parts, strict=True))

    kept, stash = ({s: getattr(a, name) for s, a in activity.items()} for name in ("kept", "stash"))
    for step in _walk(schedule, rank, kept, stash):
        own = activity[step.stage]
        if step.kind == "F":
            meet("loss", *step.after, own.logits, 0, 0)
            continue
        held, waiting = step.before
        again, hand = (0, 0) if step.kind == "W" else (own.recompute, own.working)
        logits = sum(activity[s].logits for s in step.beside)
        if step.kind != "W":
            meet("loss", *step.before, max(own.logits, logits), 0, 0)
            held -= own.probabilities  # of this micro-batch alone: the others still have theirs
        meet("backward", held, waiting, logits, again, hand)
        meet("backward", *step.after, logits, again, hand)
    return fullest


def _walk(schedule: Schedule | None, rank: int, kept: Mapping[int, int], stash: Mapping[int, int]) -> Iterator[_Step]:
    """The actions that change what is alive, in order. Of an overlapped pair the forward is counted first."""
    if schedule is None:
        everything = sum(kept.values()), 0
        for stage in kept:
            yield _Step("F", stage, (0, 0), everything)
            yield _Step("B", stage, everything, (0, 0))
        return
    alive = (0, 0)
    for action in schedule.table[rank]:
        parts = sorted(action.parts or (action,), key=lambda part: part.kind != "F")
        forwards = tuple(part.stage % schedule.depth for part in parts if part.kind == "F" and len(parts) > 1)
        for part in parts:
            if part.kind not in ("F", "I", "W", "B"):
                continue
            stage = part.stage % schedule.depth
            held, waiting = {
                "F": (kept[stage], 0),
                "B": (-kept[stage], 0),
                "I": (-kept[stage], stash[stage]),
                "W": (0, -stash[stage]),
            }[part.kind]
            before, alive = alive, (alive[0] + held, alive[1] + waiting)
            yield _Step(part.kind, stage, before, alive, () if part.kind == "F" else forwards)
