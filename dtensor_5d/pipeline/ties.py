"""Weights that two stages share, a tied embedding and head: two copies whose gradients are summed (contract C7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Tie", "summed_ties"]


@dataclass(frozen=True)
class Tie:
    """One copy of a weight. owner, leaf: where it is on this rank. peer: the rank of pp that has the other copy."""

    owner: nn.Module
    leaf: str
    peer: int

    @property
    def parameter(self) -> nn.Parameter:
        """The stored parameter (where its unit is resharded)."""
        return cast(nn.Parameter, self.owner._parameters[self.leaf])


@contextmanager
def summed_ties(ties: Sequence[Tie], group: dist.ProcessGroup) -> Iterator[None]:
    """Around a window, with parameters resharded at both ends: its gradients of both copies are summed, then added to
    those of earlier windows. a + b is b + a, so both copies end up with the same bits."""
    before = [tie.parameter.grad for tie in ties]
    for tie in ties:
        tie.parameter.grad = None
    done = False
    try:
        yield
        done = True
    finally:
        for tie, old in zip(ties, before):
            if done:
                _sum(tie, group)
            if old is not None:
                new = tie.parameter.grad
                tie.parameter.grad = old if new is None else old.add_(new)


def _sum(tie: Tie, group: dist.ProcessGroup) -> None:
    parameter = tie.parameter
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    own = _local(parameter.grad).contiguous()
    other = torch.empty_like(own)
    if own.numel():
        exchange = [
            dist.P2POp(dist.isend, own, group=group, group_peer=tie.peer),
            dist.P2POp(dist.irecv, other, group=group, group_peer=tie.peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        _local(parameter.grad).add_(other)


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad
