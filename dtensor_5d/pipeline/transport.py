"""Hidden states and their gradients between the ranks of a pipeline, without one message waiting behind another.

gloo    receives are posted `AHEAD` of their use and waited for where what they bring is read; each lane (peer and
        direction) has a thread that sends, since a send keeps its caller until the bytes are on their way. Messages
        carry tags, so lanes never mix.
others  sends and receives are posted at their place in the lowered schedule, which is one order for both ends: one
        stream for both directions cannot deadlock then (contract C7).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Arrival", "Message", "PipelineError", "Transport"]

_AHEAD = 2


class PipelineError(RuntimeError):
    """A message that did not come, or could not leave: with stage, action, micro-batch and peer."""


@dataclass(frozen=True)
class Message:
    """What goes from one stage to the next (kind "F") or back (kind "B"), named by the stage that reads it; or what a
    stage has counted (kind "C"), named by the one that tells.

    peer: the other rank of the pipeline axis. shape, dtype: known from the batch on both ends. window: its number, so
    that no message of a window that failed is taken for one of the next.
    """

    kind: str
    stage: int
    micro: int
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0

    @property
    def tag(self) -> int:
        """31 bits: window, micro-batch, stage, kind."""
        return (self.window % 8 << 28) | (self.micro << 13) | (self.stage << 2) | "FBC".index(self.kind)

    @property
    def lane(self) -> tuple[int, str]:
        return self.peer, self.kind

    def __str__(self) -> str:
        what = {"F": "the hidden states", "B": "the gradient", "C": "the counts"}[self.kind]
        return f"{what} of micro-batch {self.micro} {'from' if self.kind == 'C' else 'for'} stage {self.stage}"


class Transport:
    """The messages of one rank over the group of the pipeline axis."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._tagged = device.type == "cpu"
        self._posted: dict[Message, tuple[Tensor, Any]] = {}
        self._expected: dict[tuple[int, str], deque[Message]] = {}
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self.windows = 0

    @contextmanager
    def window(self, expected: Iterable[Message], leaving: Iterable[Message] = ()) -> Iterator[None]:
        """Around the actions of a window; `expected`: all that will be received, in order. Waits for all sends.

        leaving: what will be sent. Threads for it start here, not on the way of the first message of each rank.
        """
        self._expected = {}
        for message in expected:
            self._expected.setdefault(message.lane, deque()).append(message)
        try:
            if self._tagged:
                for lane in self._expected:
                    for _ in range(_AHEAD):
                        self._post_next(lane)
                for message in leaving:
                    self._lane(message)
            yield
        except BaseException:
            self._abandon()
            raise
        finally:
            self.windows += 1
        self._drain()

    def send(self, message: Message, tensor: Tensor) -> None:
        """Hands a tensor over; it must not be written to afterwards. Errors: ValueError for another shape or dtype."""
        if (tuple(tensor.shape), tensor.dtype) != (message.shape, message.dtype):
            raise ValueError(
                f"{message} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: rank {message.peer} of the "
                f"pipeline expects {message.shape} and {message.dtype}"
            )
        tensor = tensor.contiguous()
        if self._tagged:
            self._lane(message).put(message, tensor)
        elif tensor.numel():
            self._sent.append((dist.isend(tensor, group=self._group, group_dst=message.peer), tensor))

    def receive(self, message: Message) -> Arrival:
        """An expected message, to be waited for where it is read. Errors: `PipelineError`, from either."""
        if not self._tagged:
            self._post(message)
        return Arrival(self, message)

    def taken(self, message: Message) -> Tensor:
        """The tensor of a message that was received, waited for."""
        while message not in self._posted and self._expected[message.lane]:  # read before others of its lane
            self._post_next(message.lane)
        buffer, work = self._posted.pop(message)
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise _missing(message, error) from error
        if self._tagged:
            self._post_next(message.lane)
        return buffer

    def _lane(self, message: Message) -> _Lane:
        if message.lane not in self._lanes:
            self._lanes[message.lane] = _Lane(self._group)
        return self._lanes[message.lane]

    def _post_next(self, lane: tuple[int, str]) -> None:
        if self._expected[lane]:
            self._post(self._expected[lane].popleft())

    def _post(self, message: Message) -> None:
        buffer = torch.empty(message.shape, dtype=message.dtype, device=self._device)
        work = None
        if buffer.numel():
            tag = message.tag if self._tagged else 0
            try:
                work = dist.irecv(buffer, group=self._group, group_src=message.peer, tag=tag)
            except RuntimeError as error:
                raise _missing(message, error) from error
        self._posted[message] = buffer, work

    def _drain(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        errors = [lane.close() for lane in self._lanes.values()]
        self._lanes.clear()
        for error in errors:
            if error is not None:
                raise error

    def _abandon(self) -> None:
        for lane in self._lanes.values():
            lane.leave()
        self._lanes.clear()
        self._posted.clear()
        self._sent.clear()


@dataclass(frozen=True)
class Arrival:
    """A message on its way."""

    transport: Transport
    message: Message

    def wait(self) -> Tensor:
        """Its tensor. Errors: `PipelineError`."""
        return self.transport.taken(self.message)


class _Lane:
    """A thread that sends to one peer, one message after the other, as the peer receives them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._queue: SimpleQueue[tuple[Message, Tensor] | None] = SimpleQueue()
        self._error: PipelineError | None = None
        self._thread = threading.Thread(target=self._run, name="dtensor_5d sends", daemon=True)
        self._thread.start()

    def put(self, message: Message, tensor: Tensor) -> None:
        self._queue.put((message, tensor))

    def leave(self) -> None:
        """Lets the thread end by itself; nobody waits for what it still has."""
        self._queue.put(None)

    def close(self) -> PipelineError | None:
        """Waits until all is sent."""
        self.leave()
        self._thread.join()
        return self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            message, tensor = item
            if self._error is not None or not tensor.numel():
                continue
            try:
                dist.isend(tensor, group=self._group, group_dst=message.peer, tag=message.tag).wait()
            except RuntimeError as error:
                action = f"SEND_{message.kind}{message.micro}"
                self._error = PipelineError(
                    f"{action}: {message} could not be sent to rank {message.peer} of the pipeline axis, which is late "
                    f"or has died ({error})"
                )


def _missing(message: Message, error: RuntimeError) -> PipelineError:
    return PipelineError(
        f"{message.stage}RECV_{message.kind}{message.micro}: {message} did not come from rank {message.peer} of the "
        f"pipeline axis, which is late or has died ({error})"
    )
