"""Runs one rank's row of a lowered schedule: a loop over its actions, and who does what.

    F I W                    the stage
    SEND RECV                the transport
    UNSHARD RESHARD REDUCE   whoever holds the parameters (`Parameters`)

Between two stages of one rank nothing is sent; the tensor stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from dtensor_5d.pipeline.transport import Arrival, Message, Transport
from dtensor_5d.schedule import Action, Schedule

__all__ = ["Parameters", "Record", "Runtime", "StageActions", "Unsharded", "forwards_only", "without_idle_gathers"]


class Parameters(Protocol):
    """What the parameter actions of a schedule do on a rank."""

    def gather(self, stage: int) -> None:
        """UNSHARD."""
        ...

    def release(self, stage: int) -> None:
        """RESHARD."""
        ...

    def reduce(self, stage: int, last: bool) -> None:
        """REDUCE_GRAD; `last`: no other follows in this window."""
        ...

    def keep(self, stage: int) -> None:
        """After an I or a W: what it has added to gradients waits for REDUCE_GRAD."""
        ...


class Unsharded:
    """`Parameters` that every rank holds whole."""

    def gather(self, stage: int) -> None: ...
    def release(self, stage: int) -> None: ...
    def reduce(self, stage: int, last: bool) -> None: ...
    def keep(self, stage: int) -> None: ...


class StageActions(Protocol):
    """F, I and W of one stage; see `stage.Stage`."""

    def forward(self, micro: int, received: Tensor | None) -> Tensor: ...
    def backward_input(self, micro: int, gradient: Tensor | None) -> Tensor | None: ...
    def backward_weight(self, micro: int) -> None: ...


@dataclass(frozen=True)
class Record:
    """When an action ran on this rank, in seconds from the start of its window; waiting for its input not counted."""

    action: Action
    start: float
    end: float


class _Here(dict[tuple[str, int, int], Tensor | Arrival]):
    """By kind, reading stage and micro-batch: what is to be read or sent next, or is on its way."""

    def take(self, kind: str, stage: int, micro: int) -> Tensor:
        found = self.pop((kind, stage, micro))
        return found.wait() if isinstance(found, Arrival) else found


@dataclass
class Runtime:
    """One rank of a pipeline. rank: on the pipeline axis. stages: those of this rank, by number.

    shape: of the hidden states of a micro-batch. sends_gradient: by stage, whether its input gradient is wanted.
    records: of the window that ran last.
    """

    rank: int
    stages: Mapping[int, StageActions]
    transport: Transport
    parameters: Parameters
    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    sends_gradient: Sequence[bool]
    records: list[Record] = field(default_factory=list)

    def run(self, schedule: Schedule) -> dict[int, Tensor]:
        """Runs this rank's row of a lowered schedule; what the last stage's F gave, by micro-batch, where it is here.

        Errors: `PipelineError` for a message that did not come; whatever a stage raises.
        """
        row = [a for a in schedule.table[self.rank] if not self._is_void(schedule, a)]
        last = {a.stage: i for i, a in enumerate(row) if a.kind == "REDUCE_GRAD"}
        results: dict[int, Tensor] = {}
        here = _Here()
        self.records.clear()
        zero = perf_counter()
        coming, leaving = (
            [self._message(schedule, a) for a in row if a.kind.startswith(kind)] for kind in ("RECV", "SEND")
        )
        with self.transport.window(coming, leaving):
            for at, action in enumerate(row):
                stage, kind, micro, _ = action
                if kind == "UNSHARD":
                    self.parameters.gather(stage)
                elif kind == "RESHARD":
                    self.parameters.release(stage)
                elif kind == "REDUCE_GRAD":
                    self.parameters.reduce(stage, last[stage] == at)
                elif kind.startswith("RECV"):
                    assert micro is not None
                    # Its place is that of one order for both ends; waiting here would hold up what it is not for.
                    here[kind[-1], stage, micro] = self.transport.receive(self._message(schedule, action))
                elif kind.startswith("SEND"):
                    message = self._message(schedule, action)
                    self.transport.send(message, here.take(message.kind, message.stage, message.micro))
                else:
                    assert micro is not None
                    read = self._read(schedule, action, micro, here)
                    start = perf_counter()
                    self._compute(schedule, action, micro, read, here, results)
                    self.records.append(Record(action, start - zero, perf_counter() - zero))
        assert not here, list(here)
        return results

    def _read(self, schedule: Schedule, action: Action, micro: int, here: _Here) -> Tensor | None:
        """What an action reads, waited for: hidden states (F), a gradient (I); None where it needs none."""
        stage = action.stage
        if action.kind == "F":
            return here.take("F", stage, micro) if schedule.before(stage) is not None else None
        after = schedule.after(stage)
        wanted = action.kind == "I" and after is not None and self.sends_gradient[after]
        return here.take("B", stage, micro) if wanted else None

    def _compute(
        self, schedule: Schedule, action: Action, micro: int, read: Tensor | None, here: _Here,
        results: dict[int, Tensor],
    ) -> None:  # fmt: skip
        number, kind = action.stage, action.kind
        stage, before, after = self.stages[number], schedule.before(number), schedule.after(number)
        if kind == "F":
            out = stage.forward(micro, read)
            if after is None:
                results[micro] = out
            else:
                here["F", after, micro] = out
        elif kind == "I":
            found = stage.backward_input(micro, read)
            self.parameters.keep(number)
            if before is not None and self.sends_gradient[number]:
                assert found is not None
                here["B", before, micro] = found
        else:
            assert kind == "W", kind
            stage.backward_weight(micro)
            self.parameters.keep(number)

    def _is_void(self, schedule: Schedule, action: Action) -> bool:
        """A message that carries a gradient which nobody needs: all before it is frozen."""
        if action.kind == "SEND_B":
            return not self.sends_gradient[action.stage]
        if action.kind == "RECV_B":
            after = schedule.after(action.stage)
            return after is not None and not self.sends_gradient[after]
        return False

    def _message(self, schedule: Schedule, action: Action) -> Message:
        kind, stage, micro = action.kind[-1], action.stage, action.microbatch
        assert micro is not None
        toward = schedule.after if kind == "F" else schedule.before
        if action.kind.startswith("SEND"):
            reader = toward(stage)
            assert reader is not None
            peer = schedule.rank_of[reader]
        else:
            source = (schedule.before if kind == "F" else schedule.after)(stage)
            assert source is not None
            reader, peer = stage, schedule.rank_of[source]
        return Message(kind, reader, micro, peer, self.shape(micro), self.dtype, self.transport.windows)


def forwards_only(rank_of: Sequence[int], microbatches: int) -> Schedule:
    """A schedule on these stages (by stage, its rank) that only runs F: at once, the later stage of a rank first.

    Every rank's order is a part of one order of all, so nothing waits in a circle.
    """
    order = sorted(
        ((stage, micro) for stage in range(len(rank_of)) for micro in range(microbatches)),
        key=lambda item: (item[0] + item[1], -item[0]),
    )
    ranks = max(rank_of) + 1
    table = tuple(tuple(Action(s, "F", m) for s, m in order if rank_of[s] == rank) for rank in range(ranks))
    return Schedule("forward", ranks, len(rank_of) // ranks, microbatches, tuple(rank_of), table)


def without_idle_gathers(row: Sequence[Action]) -> Iterator[Action]:
    """A rank's row without a RESHARD whose stage is gathered again before anything else is computed."""
    skipped: set[int] = set()
    for at, action in enumerate(row):
        if at in skipped:
            continue
        if action.kind == "RESHARD":
            for later in range(at + 1, len(row)):
                following = row[later]
                if following.kind == "UNSHARD" and following.stage == action.stage:
                    skipped.add(later)
                    break
                if not following.kind.startswith(("SEND", "RECV")):
                    yield action
                    break
            else:
                yield action
            continue
        yield action
