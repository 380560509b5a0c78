"""Ways of bringing tokens to experts, behind one contract: `dispatch(hidden, index, weights, compute) -> out`.

| way | what travels, in rows of M | when |
|---|---|---|
| all_to_all | one row per token and choice on another rank, there and back | many experts, few choices |
| all_gather | every token to every rank; the sums back by one reduce-scatter | K near or above the number of ranks |
| two_step | across nodes one row per token and *node* visited; inside, one per choice | slow links between nodes |

`compute(rows, ends)` makes of each row, sorted by local expert, what its expert makes of it. Routing weights are
applied by the sender (all_to_all), the receiver (all_gather), or the rank of the same lane in the visited node
(two_step). `meanwhile` is called while rows are on their way to the experts (all_to_all), or across nodes (two_step);
all_gather has none: its collectives are waited for at once.

Letters: T tokens, K choices, M model size, E experts, N ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_5d.expert.dispatch import combine, dispatch
from dtensor_5d.expert.problems import Problems
from dtensor_5d.expert.route import capacity_of, check_routing, find_route
from dtensor_5d.expert.transport import Auto, Buffers, Transport
from dtensor_5d.ops import all_gather_reduce_scatter, reduce_scatter_all_gather
from dtensor_5d.ops.exchange import gathered

__all__ = ["AllGatherDispatch", "AllToAllDispatch", "Dispatch", "TwoStepDispatch"]

Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Dispatch(Protocol):
    """Brings tokens to their experts and what these make of them back. Collective over the expert-parallel group."""

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """hidden [T, M], index [T, K] (of all E experts), weights [T, K] -> [T, M]; T may differ between ranks."""


@dataclass(frozen=True)
class AllToAllDispatch:
    """Each row straight to its expert's rank and back. capacity: see `capacity_of`; None drops nothing."""

    group: dist.ProcessGroup
    experts: int
    transport: Transport = field(default_factory=Auto)
    buffers: Buffers = field(default_factory=Buffers)
    capacity: float | None = None
    problems: Problems | None = None
    meanwhile: Callable[[], None] | None = None

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        factor, experts = self.capacity, self.experts
        most = None if factor is None else lambda pairs: capacity_of(pairs, experts, factor)
        route = find_route(index, weights, experts, self.group, most=most, problems=self.problems)
        rows = dispatch(hidden, route, self.transport, self.buffers, self.meanwhile)
        return combine(compute(rows, route.ends), weights, route, self.transport, self.buffers)


@dataclass(frozen=True)
class AllGatherDispatch:
    """Every rank sees all tokens and computes its experts' share, already weighted; the shares are summed."""

    group: dist.ProcessGroup
    experts: int
    transport: Transport = field(default_factory=Auto)
    buffers: Buffers = field(default_factory=Buffers)
    capacity: float | None = None
    problems: Problems | None = None

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        sizes, index = check_routing(index, weights, self.experts, self.group, self.problems)
        whole = all_gather_reduce_scatter(hidden, self.group, 0, sizes)
        shares = all_gather_reduce_scatter(weights, self.group, 0, sizes)
        local = self.experts // self.group.size()
        chosen = _own(gathered(index, self.group, 0, sizes), self.group.rank() * local, local)
        most = None
        if self.capacity is not None:
            limit = capacity_of(sum(sizes) * index.size(1), self.experts, self.capacity)
            most = lambda pairs: limit  # noqa: E731  # the number of all pairs, not only of those that travel, counts
        route = find_route(chosen, shares, local, None, most=most, skips=True, problems=self.problems)
        rows = dispatch(whole, route, self.transport, self.buffers)
        partial = combine(compute(rows, route.ends), shares, route, self.transport, self.buffers)
        return reduce_scatter_all_gather(partial, self.group, 0, sizes)


@dataclass(frozen=True)
class TwoStepDispatch:
    """Across nodes one row per token and node visited, to the rank in the same lane; from there inside the node.

        rank of the group = node * lanes + lane          across: ranks of one lane       inside: ranks of one node

    With node-limited routing (DeepSeek-V3: at most 4 nodes a token) what crosses is at most T x nodes visited x M.
    """

    group: dist.ProcessGroup
    across: dist.ProcessGroup
    inside: dist.ProcessGroup
    experts: int
    transport: Transport = field(default_factory=Auto)
    buffers: Buffers = field(default_factory=Buffers)
    problems: Problems | None = None
    meanwhile: Callable[[], None] | None = None

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        _, index = check_routing(index, weights, self.experts, self.group, self.problems)
        nodes = self.across.size()
        local = self.experts // nodes
        visited = index.new_full((index.size(0), nodes), -1)
        home = index // local
        visited.scatter_(1, home, home)
        out_and_back = find_route(visited, weights, nodes, self.across, skips=True, problems=self.problems)
        tokens = dispatch(hidden, out_and_back, self.transport, self.buffers, self.meanwhile)
        shares = dispatch(weights, out_and_back, self.transport, self.buffers)
        with torch.no_grad():
            choices = self.transport.there(index, out_and_back.token, out_and_back, self.buffers).finish()
        here = _own(choices, self.across.rank() * local, local)
        route = find_route(here, shares, local, self.inside, skips=True, problems=self.problems)
        rows = dispatch(tokens, route, self.transport, self.buffers)
        partial = combine(compute(rows, route.ends), shares, route, self.transport, self.buffers)
        return combine(partial, None, out_and_back, self.transport, self.buffers)


def _own(index: Tensor, first: int, count: int) -> Tensor:
    """Indices counted from `first`; -1 for experts that are elsewhere."""
    here = (index >= first) & (index < first + count)
    return torch.where(here, index - first, -1)
