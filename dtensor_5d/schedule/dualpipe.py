"""DualPipe and DualPipeV: two streams of micro-batches cross, and a forward hides in the backward it meets.

Source: DeepSeek-V3 technical report, section 3.2.1, and the order of `step()` in deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import deque

from dtensor_5d.schedule.actions import Action

__all__ = ["dualpipe", "dualpipev"]


def dualpipe(ranks: int, microbatches: int) -> list[list[Action]]:
    """Half of the micro-batches enters at rank 0, half at the last rank; every rank holds a stage of both copies.

    Stage r and stage 2p - 1 - r live on rank r: the first belongs to the copy 0..p-1, the other to p..2p-1.
    """
    half = microbatches // 2
    table = []
    for rank in range(ranks):
        mirrored = rank >= ranks // 2
        near, far = (2 * ranks - 1 - rank, rank) if mirrored else (rank, 2 * ranks - 1 - rank)
        streams = ((near, half if mirrored else 0), (far, 0 if mirrored else half))
        place = ranks - 1 - rank if mirrored else rank
        table.append(_Row(streams).build(place, ranks // 2, half))
    return table


def dualpipev(ranks: int, microbatches: int) -> list[list[Action]]:
    """DualPipe folded in the middle: one copy of the model, 2p stages in a V."""
    return [
        _Row(((rank, 0), (2 * ranks - 1 - rank, 0))).build(rank, ranks, microbatches) for rank in range(ranks)
    ]


class _Row:
    """The list of one rank. A stream is (stage, number of its first micro-batch)."""

    def __init__(self, streams: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self.streams = streams
        self.actions: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.weights: deque[Action] = deque()

    def build(self, place: int, places: int, count: int) -> list[Action]:
        """Eight phases. `place` counts from the end where stream 0 enters, `count` is the length of each stream."""
        middle = place == places - 1
        for _ in range(2 * (places - place - 1)):
            self.forward(0)
        for _ in range(place + 1):
            self.forward(0)
            self.forward(1)
        for _ in range(places - place - 1):
            self.input(1)
            self.weight()
            self.forward(1)
        for i in range(count - 2 * places + place + 1):
            if i == 0 and middle:
                # Not overlapped: the gradient is not there yet when the forward could start.
                self.forward(0)
                self.backward(1)
            else:
                self.both(0, 1)
            self.both(1, 0)
        for _ in range(places - place - 1):
            self.backward(1)
            self.both(1, 0)
        # From the middle of this phase on, weight gradients wait for the last two.
        for i in range(place + 1):
            (self.input if self._late(i, place, 1) else self.backward)(1)
            (self.input if self._late(i, place, 0) else self.backward)(0)
        for _ in range(places - place - 1):
            self.weight()
            self.input(0)
        while self.weights:
            self.weight()
        return self.actions

    @staticmethod
    def _late(i: int, place: int, stream: int) -> bool:
        half = (place + 1) // 2
        return i > half or (i == half and (place % 2 == 1 or stream == 0))

    def forward(self, stream: int) -> None:
        self.actions.append(self._next(stream, "F", self.forwards))

    def backward(self, stream: int) -> None:
        self.actions.append(self._next(stream, "B", self.backwards))

    def input(self, stream: int) -> None:
        action = self._next(stream, "I", self.backwards)
        self.actions.append(action)
        self.weights.append(Action(action.stage, "W", action.microbatch))

    def weight(self) -> None:
        self.actions.append(self.weights.popleft())

    def both(self, forward: int, backward: int) -> None:
        f, b = self._next(forward, "F", self.forwards), self._next(backward, "B", self.backwards)
        self.actions.append(Action.pair(f, b))

    def _next(self, stream: int, kind: str, counts: list[int]) -> Action:
        stage, first = self.streams[stream]
        counts[stream] += 1
        return Action(stage, kind, first + counts[stream] - 1)
