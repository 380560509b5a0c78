"""How a window runs: `Engine` is what `Run` needs of it, `Loop` the plain one, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.batch import MicroBatch
from dtensor_5d.chunked import loss_sum, pending_logits, tokens_at_a_time
from dtensor_5d.dp.fsdp import DataParallel
from dtensor_5d.expert.watch import RouterWatch
from dtensor_5d.loss import LossFunction, nothing, own_loss_sum
from dtensor_5d.random import RandomStreams
from dtensor_5d.tensor.state import TensorState

__all__ = ["Engine", "Loop", "Surrounding"]

Surrounding = Callable[[MicroBatch], AbstractContextManager[object]]
"""What an axis puts around forward and backward of a micro-batch."""


class Engine(Protocol):
    """Runs windows on a parallel model. Sums are of this rank's tokens only: `Run` adds up the ranks."""

    def train(self, window: Sequence[MicroBatch], number: int, tokens: int, loss: LossFunction | None) -> TrainResult:
        """Forward and backward of all micro-batches; window `number` of the run, `tokens` supervised on all ranks."""
        ...

    def loss_sum(self, window: Sequence[MicroBatch]) -> torch.Tensor:
        """The summed cross entropy of all micro-batches: a 0-dim fp64 tensor; forward only."""
        ...

    def logits(self, micro: MicroBatch) -> torch.Tensor:
        """Logits [B, L, V] of one micro-batch, whole vocabulary, all tokens it has on this rank (padded ones too);
        forward only."""
        ...

    def forward_only(self) -> AbstractContextManager[None]:
        """Around forwards without backward."""
        ...

    def around(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """Around a forward of one micro-batch that the engine does not run itself."""
        ...

    def runnable(self, micro: MicroBatch) -> dict[str, torch.Tensor]:
        """The inputs of such a forward."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """loss: this rank's part of the mean, a 0-dim fp64 tensor. problem: what the user's loss function raised."""

    loss: torch.Tensor
    problem: Exception | None = None


class Loop:
    """Micro-batch after micro-batch, each forward and backward. Steers data and tensor axis, watches routers."""

    def __init__(
        self,
        model: nn.Module,
        decoder: Decoder,
        data: DataParallel,
        streams: RandomStreams,
        device: torch.device,
        *,
        multiple: int,
        tensor: TensorState | None = None,
        surroundings: Sequence[Surrounding] = (),
        routers: RouterWatch | None = None,
    ) -> None:
        self.model, self.decoder, self.data, self.streams = model, decoder, data, streams
        self.device, self.multiple, self.tensor, self.surroundings = device, multiple, tensor, tuple(surroundings)
        self.routers = routers

    def train(self, window: Sequence[MicroBatch], number: int, tokens: int, loss: LossFunction | None) -> TrainResult:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        problems: list[Exception] = []
        if self.routers is not None:
            self.routers.new_window()
        with self._window():
            for at, micro in enumerate(window):
                self.data.micro_batch(is_last=at + 1 == len(window))
                with self.streams.of(number, at), self.around(micro):
                    part, share = self._watched(micro, loss, tokens, problems)
                    part.backward()
                total += share
        return TrainResult(total, problems[0] if problems else None)

    def loss_sum(self, window: Sequence[MicroBatch]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in window:
            with self.around(micro):
                total += self._cross_entropy(micro).detach()
        return total

    def logits(self, micro: MicroBatch) -> torch.Tensor:
        with self.around(micro):
            return self._forward(micro)

    def forward_only(self) -> AbstractContextManager[None]:
        return self.data.forward_only()

    def runnable(self, micro: MicroBatch) -> dict[str, torch.Tensor]:
        return micro.runnable(self.multiple)

    def _watched(
        self, micro: MicroBatch, loss: LossFunction | None, tokens: int, problems: list[Exception]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what to go backward from, this rank's share of its value); with the routers' own loss where one is asked."""
        if self.routers is None:
            part = self._loss_of(micro, loss, tokens, problems)
            return part, part.detach()
        with self.routers.micro_batch(micro.counted(self.multiple)):
            part = self._loss_of(micro, loss, tokens, problems)
        share = part.detach()
        auxiliary = self.routers.auxiliary() if tokens else None  # no supervised token anywhere: no loss at all
        if auxiliary is not None:
            part, share = part + auxiliary.summand, share + auxiliary.share
        return part, share

    def _forward(self, micro: MicroBatch) -> torch.Tensor:
        # The routers' loss is ours: transformers knows one rank's tokens only.
        more = {} if self.routers is None or self.routers.coefficient is None else {"output_router_logits": False}
        # Without use_cache=False transformers builds a cache even in training, and packed documents see each other.
        logits: torch.Tensor = self.model(**self.runnable(micro), use_cache=False, **more).logits
        return logits

    def _loss_of(
        self, micro: MicroBatch, loss: LossFunction | None, tokens: int, problems: list[Exception]
    ) -> torch.Tensor:
        """This micro-batch's part of the global mean; what the user's loss raises is put into `problems`."""
        if loss is None:
            return self._cross_entropy(micro) / max(tokens, 1)
        logits = self._forward(micro)
        if micro.tokens == 0 or micro.labels is None:
            return nothing(logits)
        return own_loss_sum(loss, logits, micro.labels, problems) / tokens

    def _cross_entropy(self, micro: MicroBatch) -> torch.Tensor:
        """The sum over supervised tokens, chunk by chunk where there are many, over the rank's own columns under tp."""
        chunk, head = tokens_at_a_time(self.device), self.decoder.head
        with ExitStack() as stack:
            vocab = stack.enter_context(self.tensor.cut_logits()) if self.tensor is not None else None
            if head is not None and micro.labels is not None and micro.labels.numel() > chunk:
                stack.enter_context(pending_logits(self.model.get_submodule(head)))
            logits = self._forward(micro)
            if micro.labels is None or micro.is_empty:
                return nothing(logits)
            # Inside: chunk by chunk, the head runs again.
            return loss_sum(logits, micro.labels, chunk, vocab=vocab)

    @contextmanager
    def around(self, micro: MicroBatch) -> Iterator[None]:
        with ExitStack() as stack:
            for surrounding in self.surroundings:
                stack.enter_context(surrounding(micro))
            yield

    @contextmanager
    def _window(self) -> Iterator[None]:
        data, tensor = self.data, self.tensor
        if tensor is None:
            with data.window():
                yield
            return
        data.reshard()  # names lead to stored gradients, here and where they are summed
        with tensor.window():
            with data.window():
                yield
            data.reshard()
