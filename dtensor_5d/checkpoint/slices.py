"""Which part of a whole tensor this rank stores: per dim, the runs of indices, for any placements on any mesh.

M, N: sizes of a dim.  A run is a `slice(start, stop)`; a dim cut by `_StridedShard` has several, an empty shard none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtensor_5d.sections import Sections

__all__ = [
    "Runs", "chunk_sizes", "cut", "cut_with", "cutting_order", "local_part", "local_slices", "placed_slices", "put",
    "shape_of", "whole_slices",
]  # fmt: skip

Runs = tuple[tuple[slice, ...], ...]
"""One tuple of increasing, disjoint slices per dim."""


def local_slices(tensor: torch.Tensor, sections: Sections | None = None) -> Runs:
    """The runs of the whole tensor that this rank's local shard holds, dim by dim; everything for a plain tensor.

    Example: a [6, 4] DTensor with `Shard(0)` on 4 ranks: `((slice(2, 4),), (slice(0, 4),))` on rank 1 and
    `((), (slice(0, 4),))` on rank 3, whose shard is empty.

    sections: how the tensor is packed, if it is. Errors: `ValueError` for a `Partial` placement: such a shard is no
    part of the whole tensor but a summand of it.
    """
    if not isinstance(tensor, DTensor):
        return whole_slices(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is outside the mesh and stores nothing
        return tuple(() for _ in tensor.shape)
    return placed_slices(tensor.shape, tensor.device_mesh.shape, coordinate, tensor.placements, sections)


def placed_slices(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    sections: Sections | None = None,
) -> Runs:
    """`local_slices` without a live mesh: of the rank at `coordinate` in a mesh of `mesh_shape`.

    The indices 0..M-1 of a dim are cut as `torch.chunk` cuts, in the order of `cutting_order`. (torch's
    `compute_local_shape_and_global_offset` tells only the first index, which is not enough for `_StridedShard`.)
    """
    index: dict[int, torch.Tensor] = {}
    if sections is not None:
        index[sections.dim] = sections.order()
    for axis, dim, groups in cutting_order(mesh_shape, placements, len(shape)):
        before = index[dim] if dim in index else torch.arange(shape[dim])
        n, i = mesh_shape[axis], coordinate[axis]
        index[dim] = torch.cat([_chunk(_chunk(before, groups, group), n, i) for group in range(groups)])
    return tuple(_runs(index[d]) if d in index else whole_slices([size])[0] for d, size in enumerate(shape))


def cutting_order(
    mesh_shape: Sequence[int], placements: Sequence[Placement], ndim: int
) -> list[tuple[int, int, int]]:
    """Which mesh axis cuts first: (axis, dim, groups), for the axes that cut; of each of `groups` parts it takes one.

    From the outer to the inner axis, as `distribute_tensor` cuts. But where an outer axis is strided by just as much as
    the inner ones cut the same dim, the inner ones were first: so FSDP2 shards what another axis has cut, and only in
    this order uneven shards come out as FSDP2 stores them (7 rows on tp 2, then 3: torch's own order names others).
    """
    order: list[tuple[int, int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, Partial):
            raise ValueError(f"a tensor with placement {placement} has no slices: reduce it first")
        if not isinstance(placement, Shard | _StridedShard):
            continue
        dim = placement.dim % ndim
        groups = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        inner = [mesh_shape[a] for a, d, _ in order if d == dim]
        if groups > 1 and math.prod(inner) == groups:
            order.append((axis, dim, 1))
        else:
            order.insert(0, (axis, dim, groups))
    return order


def chunk_sizes(length: int, n: int) -> list[int]:
    """How many of `length` each of n ranks gets from `torch.chunk`."""
    step = -(-length // n)
    return [max(min(step, length - i * step), 0) for i in range(n)]


def whole_slices(shape: Sequence[int]) -> Runs:
    """The runs of everything."""
    return tuple((slice(0, size),) if size else () for size in shape)


def shape_of(runs: Runs) -> tuple[int, ...]:
    """The shape that the runs cut out."""
    return tuple(sum(r.stop - r.start for r in dim) for dim in runs)


def cut(whole: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The part of `whole` that `runs` name: a view where each dim has one run."""
    return cut_with(lambda index: whole[index], runs, whole.dtype)


def cut_with(read: Callable[[tuple[slice, ...]], torch.Tensor], runs: Runs, dtype: torch.dtype) -> torch.Tensor:
    """The part that `runs` name, from a reader of one block; nothing is read for an empty part."""
    if any(not dim for dim in runs):
        return torch.empty(shape_of(runs), dtype=dtype)
    for d, dim in enumerate(runs):
        if len(dim) > 1:
            blocks = [cut_with(read, (*runs[:d], (run,), *runs[d + 1 :]), dtype) for run in dim]
            return torch.cat(blocks, dim=d)
    return read(tuple(run for (run,) in runs))


def put(whole: torch.Tensor, runs: Runs, part: torch.Tensor) -> None:
    """Writes `part` to where `runs` name: the inverse of `cut`."""
    for d, dim in enumerate(runs):
        if len(dim) > 1:
            sizes = [run.stop - run.start for run in dim]
            for run, piece in zip(dim, part.split(sizes, dim=d)):
                put(whole, (*runs[:d], (run,), *runs[d + 1 :]), piece)
            return
    if all(runs):
        whole[tuple(run for (run,) in runs)] = part


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank stores of `tensor`, sharing its memory, outside of autograd."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _chunk(index: torch.Tensor, n: int, i: int) -> torch.Tensor:
    """The i-th of n chunks, each of ceil(M / n) but for the last ones, which may be empty."""
    step = -(-index.numel() // n)
    return index[i * step : (i + 1) * step]


def _runs(index: torch.Tensor) -> tuple[slice, ...]:
    if not index.numel():
        return ()
    breaks = (torch.nonzero(index[1:] - index[:-1] != 1).flatten() + 1).tolist()
    bounds = [0, *breaks, index.numel()]
    return tuple(slice(int(index[a]), int(index[b - 1]) + 1) for a, b in pairwise(bounds))
