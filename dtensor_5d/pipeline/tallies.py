"""What every stage counts in its F and all stages need the sum of in their I, micro-batch by micro-batch.

    rank 0    F0 tells >--.    .--> I0: what it told, and what rank 1 did
    rank 1        F0 tells >---'     I0 ..

I of a micro-batch comes after its F on every stage, so all that it needs has been told: nobody waits in a circle. The
numbers travel in CPU memory, whatever the device of the model is, beside the messages of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dtensor_5d.pipeline.transport import Message, Transport
from dtensor_5d.schedule import Schedule

__all__ = ["Tallies"]


class Tallies:
    """Those of one window. transport: over the pipeline axis, of CPU tensors. rank: on that axis. tells: by stage,
    whether it counts anything. width: how many numbers each tells."""

    def __init__(self, transport: Transport, schedule: Schedule, rank: int, tells: Sequence[bool], width: int) -> None:
        self._transport, self._width = transport, width
        self._stages = [stage for stage, counts in enumerate(tells) if counts]
        self._rank_of = schedule.rank_of
        self._told: dict[tuple[int, int], Tensor] = {}
        rows = [[a for a in row if a.kind == "F" and tells[a.stage]] for row in schedule.table]
        # A lane brings what its peer tells in the order of that peer's F.
        self._coming = {
            peer: deque(self._message(a.stage, a.microbatch, peer) for a in row)
            for peer, row in enumerate(rows)
            if row and peer != rank and rows[rank]
        }

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around the actions of the window."""
        with self._transport.window([message for coming in self._coming.values() for message in coming]):
            yield

    def tell(self, stage: int, micro: int, counts: Tensor) -> None:
        """After F of a stage that counts: [width] numbers, sent on to all who count."""
        mine = counts.detach().to("cpu", torch.float64)
        self._told[stage, micro] = mine
        for peer in self._coming:
            self._transport.send(self._message(stage, micro, peer), mine)

    def total(self, micro: int) -> Tensor:
        """In I: the sum of what all stages told of a micro-batch. Errors: `PipelineError` for what did not come."""
        for stage in self._stages:
            while (stage, micro) not in self._told:
                message = self._coming[self._rank_of[stage]].popleft()
                self._told[message.stage, message.micro] = self._transport.receive(message).wait()
        return torch.stack([self._told[stage, micro] for stage in self._stages]).sum(0)

    def _message(self, stage: int, micro: int | None, peer: int) -> Message:
        assert micro is not None
        return Message("C", stage, micro, peer, (self._width,), torch.float64, self._transport.windows)
