"""`Route`: which rows travel where, from one sort of the (token, choice) pairs and one small exchange of counts.

    rank 0: tokens a b, top-2                 rank 1: token c, top-2           4 experts, 2 on each rank
      a -> 1, 2     b -> 0, 1                   c -> 1, 3
      sorted pairs: b0 a1 b1 | a2               sorted pairs: c1 | c3          | between owners
      rank 0 receives b0 a1 b1 (own), c1        rank 1 receives a2 (from 0), c3 (own)
      laid out:  b0 | a1 b1 c1                  laid out:  a2 | c3             | between local experts

Letters: T tokens and K choices of this rank, P pairs that it sends, R rows that it receives, E experts, N ranks,
L = E / N experts on each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_5d.expert.problems import Problems

__all__ = ["Route", "by_expert", "capacity_of", "check_routing", "find_route", "inverse", "told"]


@dataclass(frozen=True)
class Route:
    """Where the pairs of this rank go, and how what arrives is laid out.

    pair [P]: token * K + choice, sorted by expert and so by owner; place [T, K]: the row of each pair in that order,
    -1 for a pair that does not travel; ends [L] int32: where each local expert's rows end (no host sync is needed to
    compute with them); sent, received [N][L]: rows to and from each rank, by the receiver's local expert; rows_of [N]:
    the pairs that each rank of the group sends, the same on all ranks.
    """

    group: dist.ProcessGroup | None
    pair: Tensor
    place: Tensor
    ends: Tensor
    sent: list[list[int]]
    received: list[list[int]]
    rows_of: list[int]

    @property
    def ranks(self) -> int:
        return len(self.sent)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def tokens(self) -> int:
        return self.place.size(0)

    @property
    def rows(self) -> int:
        """R, the rows that this rank receives."""
        return sum(map(sum, self.received))

    @property
    def rows_sent(self) -> int:
        """Rows that leave this rank; times M and the bytes of a number, what one dispatch or combine moves."""
        return sum(sum(row) for rank, row in enumerate(self.sent) if rank != self.rank)

    @property
    def is_whole(self) -> bool:
        """Whether every pair travels."""
        return self.pair.numel() == self.place.numel()

    @cached_property
    def token(self) -> Tensor:
        """[P]: the token of each pair."""
        return self.pair // max(1, self.place.size(1))

    @cached_property
    def sent_at(self) -> list[list[int]]:
        """[N][L]: the first row of each block among the sorted pairs."""
        starts = iter(accumulate((n for row in self.sent for n in row), initial=0))
        return [[next(starts) for _ in row] for row in self.sent]

    @cached_property
    def received_at(self) -> list[list[int]]:
        """[N][L]: the first row of each block among the rows laid out by expert."""
        ranks, local = len(self.received), len(self.received[0])
        starts = list(accumulate((self.received[r][e] for e in range(local) for r in range(ranks)), initial=0))
        return [[starts[e * ranks + r] for e in range(local)] for r in range(ranks)]

    @cached_property
    def arrived(self) -> Tensor:
        """[R]: for each row as it is laid out, where it lay when it arrived (by sender, then expert)."""
        return by_expert(self.received).to(self.pair.device)

    @cached_property
    def departs(self) -> Tensor:
        """[R]: the inverse of `arrived`."""
        return inverse(self.arrived, self.arrived.numel())


def find_route(
    index: Tensor, weights: Tensor, experts: int, group: dist.ProcessGroup | None, *,
    most: Callable[[int], int] | None = None, skips: bool = False, problems: Problems | None = None,
) -> Route:  # fmt: skip
    """The route of this rank's tokens. Collective over the group: one all-gather of E + 3 integers.

    index [T, K]: the experts of each token; weights [T, K]; experts: their number E, a multiple of the group's size.
    group: None for this rank alone. most: how many pairs an expert takes, given the number of pairs of all ranks; they
    are taken by rank, then by token, and the rest do not travel. skips: pairs with a negative index do not travel
    (otherwise they are an error).

    Errors: ValueError on *every* rank of the group if one has an index out of range or a weight that is not finite.
    With `problems` the error is put there; while they are gathered every rank goes on (an index above the range does
    not travel, one below is taken as 0) until all can end together.
    """
    index = index.long()
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    local = experts // ranks
    assert local * ranks == experts, f"{experts} experts on {ranks} ranks"
    flat = index.reshape(-1)
    # What is out of range must not break the count: the error comes after the exchange, on all ranks alike.
    key = flat.clamp(-1, experts)
    if skips:
        key = torch.where(key < 0, experts, key)
    order = torch.argsort(key, stable=True)
    mine = torch.bincount(key.clamp_min(0), minlength=experts + 1)[:experts]
    table = told(torch.cat([mine, _facts(index, weights)]), group)  # the one host sync
    _refuse([row[experts:] for row in table], group, experts, skips, problems)
    counts = [row[:experts] for row in table]
    order = order[: sum(counts[rank])]
    if most is not None:
        taken = _within(counts, most(sum(map(sum, counts))))
        order = _first_of_each(order, counts[rank], taken[rank])
        counts = taken
    own = range(rank * local, (rank + 1) * local)
    per_expert = [sum(row[e] for row in counts) for e in own]
    return Route(
        group=group,
        pair=order,
        place=inverse(order, flat.numel()).view(index.shape),
        ends=torch.tensor(list(accumulate(per_expert)), dtype=torch.int32).to(index.device, non_blocking=True),
        sent=[counts[rank][r * local : (r + 1) * local] for r in range(ranks)],
        received=[[row[e] for e in own] for row in counts],
        rows_of=[sum(row) for row in counts],
    )


def capacity_of(pairs: int, experts: int, factor: float) -> int:
    """Pairs that one expert takes at most: `factor` times an equal share, rounded up.

    Example:
        >>> capacity_of(pairs=100, experts=8, factor=1.25)
        16
    """
    return int(-(-pairs * factor // experts))


def check_routing(
    index: Tensor, weights: Tensor, experts: int, group: dist.ProcessGroup, problems: Problems | None = None
) -> tuple[list[int], Tensor]:
    """The number of tokens T of each rank of the group, and the index in its range. Collective; errors as
    `find_route`."""
    size = index.new_tensor([index.size(0)])
    table = told(torch.cat([size, _facts(index, weights)]), group)
    _refuse([row[1:] for row in table], group, experts, False, problems)
    return [row[0] for row in table], index if problems is None else index.clamp(0, experts - 1)


def told(mine: Tensor, group: dist.ProcessGroup | None) -> list[list[int]]:
    """What each rank of the group has to say: a few integers, on the host."""
    if group is None or group.size() == 1:
        return [mine.tolist()]
    heard = mine.new_empty(group.size(), mine.numel())
    dist.all_gather_single(heard.view(-1), mine, group=group)
    table: list[list[int]] = heard.tolist()
    return table


def by_expert(received: list[list[int]]) -> Tensor:
    """[R]: the permutation that lays out by expert what lies by sender, then expert; received [N][L] rows.

    Example:
        >>> by_expert([[2, 1], [1, 0]])      # a0 a0 a1 | b0  ->  a0 a0 b0 | a1
        tensor([0, 1, 3, 2])
    """
    sizes = torch.tensor(received).view(len(received), -1)
    first = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
    laid, at = sizes.t().flatten(), first.t().flatten()
    shift = torch.repeat_interleave(at - (laid.cumsum(0) - laid), laid)
    return shift + torch.arange(shift.numel())


def inverse(order: Tensor, size: int) -> Tensor:
    place = order.new_full((size,), -1) if order.numel() < size else torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return place


def _within(counts: list[list[int]], most: int) -> list[list[int]]:
    """What each rank may send to each expert if `most` pairs are taken, rank by rank."""
    taken = []
    left = [most] * len(counts[0])
    for row in counts:
        taken.append([min(n, free) for n, free in zip(row, left)])
        left = [free - n for free, n in zip(left, taken[-1])]
    return taken


def _first_of_each(order: Tensor, sizes: list[int], kept: list[int]) -> Tensor:
    parts = [part[:n] for part, n in zip(order.split(sizes), kept)]
    return torch.cat(parts)


def _facts(index: Tensor, weights: Tensor) -> Tensor:
    """The smallest and the largest index, and how many weights are not finite."""
    low, high = index.aminmax() if index.numel() else (index.new_zeros(()), index.new_zeros(()))
    wrong = weights.numel() - weights.detach().isfinite().sum()
    return torch.stack([low, high, wrong.to(index.dtype)])


def _refuse(
    facts: list[list[int]], group: dist.ProcessGroup | None, experts: int, skips: bool, noted: Problems | None
) -> None:
    ranks = [0] if group is None else dist.get_process_group_ranks(group)  # those of the job
    problems = []
    for rank, (low, high, wrong) in zip(ranks, facts, strict=True):
        if (low < 0 and not skips) or high >= experts:
            worst = high if high >= experts else low
            problems.append(f"rank {rank} has the router index {worst}, must be 0 to {experts - 1} ({experts} experts)")
        if wrong:
            problems.append(f"rank {rank} has {wrong} routing weights that are not finite")
    if not problems:
        return
    error = ValueError("; ".join(problems) + " (among its tokens, with etp also those of the ranks that share them)")
    if noted is None:
        raise error
    noted.add(error)
