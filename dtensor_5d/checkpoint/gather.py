"""Whole tensors from shards: on one rank, the others sending their part and holding nothing more; or on every rank.

`DTensor.full_tensor` would put the whole on every rank, and in torch 2.13 it fails where a dim is cut unevenly twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_5d.checkpoint.agree import my_rank
from dtensor_5d.checkpoint.slices import Runs, cutting_order, local_part, placed_slices, put, shape_of
from dtensor_5d.ops.exchange import gathered
from dtensor_5d.sections import Sections

__all__ = ["gather_to", "whole"]


def whole(tensor: torch.Tensor, sections: Sections | None = None) -> torch.Tensor:
    """The whole of `tensor` on every rank of its mesh, in Hugging Face's order; a copy. Collective over its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes: list[tuple[int, int, list[int]]] = []
    length = list(tensor.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds nothing of the tensor"
    for axis, along in cutting_order(mesh.shape, placements, tensor.dim()):
        assert isinstance(along, Shard), "strided shards that no inner axis cuts have no contiguous parts"
        dim = placements[axis].dim % tensor.dim()  # type: ignore[attr-defined]  # only sharding ones are named
        parts, _ = along._split_tensor(torch.arange(length[dim]), mesh.size(axis), with_padding=False, contiguous=False)
        sizes.append((axis, dim, [part.numel() for part in parts]))
        length[dim] = sizes[-1][2][coordinate[axis]]
    out = local_part(tensor)
    for axis, dim, lengths in reversed(sizes):
        out = gathered(out, mesh.get_group(axis), dim, lengths)
    if sections is None:
        return out.clone() if out.data_ptr() == local_part(tensor).data_ptr() else out
    return torch.empty_like(out).index_copy_(sections.dim, sections.order().to(out.device), out)


def gather_to(writer: int, tensor: torch.Tensor, sections: Sections | None = None) -> torch.Tensor | None:
    """The whole of `tensor` on CPU on rank `writer` (part of its mesh), None elsewhere.

    Collective over the ranks of its mesh; a plain tensor costs no communication. On a mesh with replicas only the
    writer's own replica sends.
    """
    mine = writer == my_rank()
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if mine else None
    if not mine and writer not in tensor.device_mesh.mesh:  # a replica elsewhere: the writer's own mesh serves it
        return None
    local = local_part(tensor).contiguous()
    parts = [(rank, runs) for rank, runs in _parts(writer, tensor, sections) if all(shape_of(runs))]
    if not mine:
        if any(rank == my_rank() for rank, _ in parts):
            _wait([dist.P2POp(dist.isend, local, writer)])
        return None
    whole = torch.empty(tensor.shape, dtype=local.dtype)
    received = {rank: local.new_empty(shape_of(runs)) for rank, runs in parts if rank != writer}
    _wait([dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in received.items()])
    for rank, runs in parts:
        put(whole, runs, local if rank == writer else received[rank])
    return whole


def _parts(writer: int, tensor: DTensor, sections: Sections | None) -> Iterator[tuple[int, Runs]]:
    """Which rank holds which part, of the replica that the writer belongs to."""
    ranks = tensor.device_mesh.mesh
    cut = [isinstance(p, Shard | _StridedShard) for p in tensor.placements]
    at_writer = torch.nonzero(ranks == writer)[0].tolist()
    for place in torch.nonzero(ranks >= 0).tolist():
        if all(is_cut or a == b for is_cut, a, b in zip(cut, place, at_writer)):
            runs = placed_slices(tensor.shape, tuple(ranks.shape), place, tensor.placements, sections)
            yield int(ranks[tuple(place)]), runs


def _wait(operations: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
