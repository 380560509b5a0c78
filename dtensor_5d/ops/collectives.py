"""Collectives that autograd can go through; each is named after what forward does and what backward does.

| function | forward | backward | x | y |
|---|---|---|---|---|
| identity_all_reduce | nothing | all-reduce | same on all ranks | differs in use |
| all_reduce_identity | all-reduce | nothing | partial sums | same on all ranks |
| all_gather_reduce_scatter | all-gather | reduce-scatter | a part each | whole, differs in use |
| reduce_scatter_all_gather | reduce-scatter | all-gather | partial sums | a part each |
| split_all_gather | take the own part | all-gather | same on all ranks | a part each |
| all_gather_split | all-gather | take the own part | a part each | whole, same in use |
| all_to_all | rows to ranks | rows back | parts by receiver | parts by sender |

"Same in use" means that every rank goes on to compute the same from it, so its gradient is the same on all ranks
already; "differs in use" means that the ranks' gradients must be summed. Choosing the wrong one of a pair is silent:
gradients come out n times too large or short of the other ranks' share.

Group: a ProcessGroup (`mesh["tp"].get_group()`). Outputs are contiguous and fresh, save for `identity_all_reduce` (a
view). In a group of one rank each is the identity and costs nothing. `sizes`: what each rank holds along `dim`, the
same on every rank; None means equal parts. Errors: ValueError where sizes and tensors disagree, before the collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from dtensor_5d.ops.exchange import exchanged, gathered, own_part, scattered_sum, total

__all__ = [
    "added_once", "all_gather_reduce_scatter", "all_gather_split", "all_reduce_identity", "all_to_all",
    "identity_all_reduce", "reduce_scatter_all_gather", "split_all_gather",
]  # fmt: skip


def identity_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Before a column-parallel product: forward x, backward the sum of the ranks' gradients."""
    if group.size() == 1:
        return x
    y: Tensor = _IdentityAllReduce.apply(x, group)
    return y


class _IdentityAllReduce(Function):
    """Forward: y = x. Backward: dx = sum over ranks of g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return total(g, ctx.group), None


def all_reduce_identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """After a row-parallel product: forward the sum of the ranks' x, backward g."""
    if group.size() == 1:
        return x
    y: Tensor = _AllReduceIdentity.apply(x, group)
    return y


class _AllReduceIdentity(Function):
    """Forward: y = sum over ranks of x. Backward: dx = g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return g, None


def all_gather_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Into a tensor region from a sequence-parallel one: forward the whole, backward the own part of the summed g."""
    if group.size() == 1:
        return x
    y: Tensor = _AllGatherReduceScatter.apply(x, group, dim, sizes)
    return y


class _AllGatherReduceScatter(Function):
    """Forward: y = concatenation of the ranks' x. Backward: dx = the own part of the sum over ranks of g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return gathered(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return scattered_sum(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


def reduce_scatter_all_gather(
    x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Out of a tensor region into a sequence-parallel one: forward the own part of the sum, backward the whole g."""
    if group.size() == 1:
        return x
    y: Tensor = _ReduceScatterAllGather.apply(x, group, dim, sizes)
    return y


class _ReduceScatterAllGather(Function):
    """Forward: y = the own part of the sum over ranks of x. Backward: dx = concatenation of the ranks' g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return scattered_sum(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return gathered(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


def split_all_gather(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Cuts a replicated tensor: forward the own part of x, backward the concatenation of the ranks' g."""
    if group.size() == 1:
        return x
    y: Tensor = _SplitAllGather.apply(x, group, dim, sizes)
    return y


class _SplitAllGather(Function):
    """Forward: y = the own part of x. Backward: dx = concatenation of the ranks' g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return own_part(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return gathered(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


def all_gather_split(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Makes a tensor whole for replicated use: forward the concatenation, backward the own part of g."""
    if group.size() == 1:
        return x
    y: Tensor = _AllGatherSplit.apply(x, group, dim, sizes)
    return y


class _AllGatherSplit(Function):
    """Forward: y = concatenation of the ranks' x. Backward: dx = the own part of g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return gathered(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return own_part(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


def all_to_all(x: Tensor, group: dist.ProcessGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows to the ranks they belong to: `send[r]` rows of x go to rank r, `receive[r]` rows of y come from it."""
    if group.size() == 1:
        return exchanged(x, group, send, receive)
    y: Tensor = _AllToAll.apply(x, group, send, receive)
    return y


class _AllToAll(Function):
    """Forward: rows by `send`, into parts by `receive`. Backward: g by `receive`, into parts by `send`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return exchanged(x, group, send, receive)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return exchanged(g, ctx.group, ctx.receive, ctx.send), None, None, None


def added_once(x: Tensor, here: bool) -> Tensor:
    """A bias of outputs that the ranks sum: x where `here`, zeros on the other ranks.

    Backward hands on the gradient as it is, which every rank has whole: that of a sum goes to all its summands.
    """
    y: Tensor = _AddedOnce.apply(x, here)
    return y


class _AddedOnce(Function):
    """Forward: y = x on one rank, zeros on the others. Backward: dx = g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: bool) -> Tensor:
        return x.view_as(x) if here else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return g, None
