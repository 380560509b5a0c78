"""Sums and exchanges of one tensor over a process group, along any dim and in uneven parts, without autograd.

`sizes[r]` is what rank r of the group holds along `dim`; every rank must pass the same ones. None means equal parts.
Outputs are fresh and contiguous, inputs are never written to. A group of one rank costs nothing: the input comes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["exchanged", "gathered", "own_part", "scattered_sum", "total"]


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group, on every rank."""
    if group.size() == 1 or not x.numel():
        return x
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


def gathered(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The parts of all ranks, one after the other along `dim`.

    Errors: ValueError if this rank's part is not `sizes[rank]` long.
    """
    n = group.size()
    if n == 1:
        return x
    dim = _known_dim(x, dim)
    sizes = [x.size(dim)] * n if sizes is None else _checked(sizes, n)
    if x.size(dim) != sizes[group.rank()]:
        raise ValueError(f"rank {group.rank()} of the group holds {x.size(dim)} along dim {dim}, sizes say {sizes}")
    longest = max(sizes)
    if not longest * _others(x, dim):
        return x.new_empty(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    mine = _padded(x, dim, longest)
    whole = mine.new_empty(n * mine.size(0), *mine.shape[1:])
    dist.all_gather_single(whole.view(-1), mine.view(-1), group=group)
    if dim == 0 and min(sizes) == longest:
        return whole  # no view of it: FSDP2 warns of those
    buffer = whole.view(n, *mine.shape)
    return torch.cat([p.narrow(dim, 0, s) for p, s in zip(buffer.unbind(), sizes)], dim)


def scattered_sum(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part, along `dim`, of the sum over the group.

    Errors: ValueError if `dim` is not as long as all parts together, or not divisible where `sizes` is None.
    """
    n = group.size()
    if n == 1:
        return x
    dim = _known_dim(x, dim)
    sizes = _parts(x, dim, n, sizes)
    longest, mine = max(sizes), sizes[group.rank()]
    shape = (*x.shape[:dim], longest, *x.shape[dim + 1 :])
    if not longest * _others(x, dim):
        return x.new_empty(*x.shape[:dim], mine, *x.shape[dim + 1 :])
    if dim == 0 and min(sizes) == longest:
        send = x.contiguous()
    else:
        send = torch.stack([_padded(p, dim, longest) for p in x.split(sizes, dim)])
    y = x.new_empty(shape)
    dist.reduce_scatter_single(y.view(-1), send.view(-1), group=group)
    return y if mine == longest else y.narrow(dim, 0, mine).contiguous()


def own_part(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part of a tensor that every rank holds whole. Errors: as `scattered_sum`."""
    n = group.size()
    if n == 1:
        return x
    dim = _known_dim(x, dim)
    sizes = _parts(x, dim, n, sizes)
    start = list(itertools.accumulate(sizes, initial=0))[group.rank()]
    return x.narrow(dim, start, sizes[group.rank()]).clone(memory_format=torch.contiguous_format)


def exchanged(x: Tensor, group: dist.ProcessGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """All-to-all of rows: `send[r]` rows go to rank r, in rank order; `receive[r]` rows come from it.

    Errors: ValueError if x has not the rows that `send` says, or this rank sends itself what it does not expect.
    """
    n, me = group.size(), group.rank()
    send, receive = _checked(send, n), _checked(receive, n)
    if x.size(0) != sum(send) or send[me] != receive[me]:
        raise ValueError(f"rank {me} of the group has {x.size(0)} rows; sends {send}, receives {receive}")
    if n == 1:
        return x
    y = x.new_empty(sum(receive), *x.shape[1:])
    if _others(x, 0):
        dist.all_to_all_single(y, x.contiguous(), list(receive), list(send), group=group)
    return y


def _known_dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} of a tensor with {x.dim()} dims")
    return dim % x.dim()


def _checked(sizes: Sequence[int], n: int) -> list[int]:
    if len(sizes) != n or min(sizes) < 0:
        raise ValueError(f"sizes {list(sizes)} for a group of {n} ranks")
    return list(sizes)


def _parts(x: Tensor, dim: int, n: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is None:
        if x.size(dim) % n:
            raise ValueError(f"dim {dim} of length {x.size(dim)} in {n} equal parts: give the sizes")
        return [x.size(dim) // n] * n
    if sum(_checked(sizes, n)) != x.size(dim):
        raise ValueError(f"dim {dim} of length {x.size(dim)} in parts {list(sizes)}, together {sum(sizes)}")
    return list(sizes)


def _others(x: Tensor, dim: int) -> int:
    count = 1
    for d, size in enumerate(x.shape):
        count *= 1 if d == dim else size
    return count


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    # gloo gathers and scatters equal parts only.
    if x.size(dim) == length:
        return x.contiguous()
    padding = x.new_zeros(*x.shape[:dim], length - x.size(dim), *x.shape[dim + 1 :])
    return torch.cat([x, padding], dim)
