"""Whole tensors from shards: on one rank, the others sending their part and holding nothing more; or on every rank,
also those of other pipeline stages.

`DTensor.full_tensor` would put the whole on every rank, and in torch 2.13 it fails where a dim is cut unevenly twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_5d.checkpoint.agree import my_rank
from dtensor_5d.checkpoint.slices import Runs, chunk_sizes, cutting_order, local_part, placed_slices, put, shape_of
from dtensor_5d.names import Names
from dtensor_5d.ops.exchange import gathered
from dtensor_5d.sections import Sections

__all__ = ["gather_to", "whole", "whole_model"]

_IN_FLIGHT = 2**28


def whole(tensor: torch.Tensor, sections: Sections | None = None) -> torch.Tensor:
    """The whole of `tensor` on every rank of its mesh, in Hugging Face's order; a copy. Collective over its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes: list[tuple[int, int, list[int]]] = []
    length = list(tensor.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds nothing of the tensor"
    for axis, dim, groups in cutting_order(mesh.shape, placements, tensor.dim()):
        assert groups == 1, "strided shards that no inner axis cuts have no contiguous parts"
        sizes.append((axis, dim, chunk_sizes(length[dim], mesh.size(axis))))
        length[dim] = sizes[-1][2][coordinate[axis]]
    out = local_part(tensor)
    for axis, dim, lengths in reversed(sizes):
        out = gathered(out, mesh.get_group(axis), dim, lengths)
    if sections is None:
        return out.clone() if out.data_ptr() == local_part(tensor).data_ptr() else out
    return torch.empty_like(out).index_copy_(sections.dim, sections.order().to(out.device), out)


def whole_model(
    tensors: Mapping[str, torch.Tensor], names: Names, stages: DeviceMesh, sections: Mapping[str, Sections]
) -> dict[str, torch.Tensor]:
    """The whole of every tensor of every stage on every rank, by its first name, in the model's order; copies.

    tensors: by name what this rank holds of them (parameters, or their gradients), the same names on all ranks of a
    stage. stages: the mesh of the pipeline axis, of size 1 where there is none. sections: of the packed ones.
    A tensor that several stages hold (a tied one) is the first one's. Collective over all ranks; one stage after the
    other sends, so it is an aid for looking, not for training.
    """
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    held = [mine]
    if stages.size() > 1:
        held = [mine] * stages.size()
        dist.all_gather_object(held, mine, group=stages.get_group())
    holder: dict[str, tuple[int, str]] = {}  # first name -> the stage that sends it, and its name there
    for stage, there in enumerate(held):
        for name in there:
            holder.setdefault(names.first.get(name, name), (stage, name))
    out = {}
    # Should someone have added parameters since, they come last.
    for first in [n for n in dict.fromkeys((*names.order, *holder)) if n in holder]:
        stage, name = holder[first]
        if stage == stages.get_local_rank():
            out[first] = whole(tensors[name], sections.get(name)).contiguous()
        else:
            shape, dtype = held[stage][name]
            out[first] = torch.empty(shape, dtype=dtype, device=stages.device_type)
        if stages.size() > 1:
            dist.broadcast(out[first], group=stages.get_group(), group_src=stage)
    return out


def gather_to(writer: int, tensor: torch.Tensor, sections: Sections | None = None) -> torch.Tensor | None:
    """The whole of `tensor` on CPU on rank `writer`, None elsewhere.

    Collective over the ranks of its mesh; a plain tensor costs no communication. On a mesh with replicas only the
    writer's own replica sends. The writer's device holds at most `_IN_FLIGHT` bytes of parts (or one part) at a time.
    """
    mine = writer == my_rank()
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if mine else None
    ranks = tensor.device_mesh.mesh
    if not mine and writer not in ranks:  # a replica elsewhere: the writer's own mesh serves it
        return None
    local = local_part(tensor).contiguous()
    senders = _replica(writer, tensor)
    if not mine:
        if my_rank() in senders and local.numel():
            _wait([dist.P2POp(dist.isend, local, writer)])
        return None
    whole = torch.empty(tensor.shape, dtype=local.dtype)
    pending: list[tuple[int, Runs]] = []
    size = 0
    for rank, place in senders.items():
        runs = placed_slices(tensor.shape, tuple(ranks.shape), place, tensor.placements, sections)
        nbytes = math.prod(shape_of(runs)) * local.itemsize
        if rank == writer:
            put(whole, runs, local)
        elif nbytes:
            if pending and size + nbytes > _IN_FLIGHT:
                _receive(whole, local, pending)
                pending, size = [], 0
            pending.append((rank, runs))
            size += nbytes
    _receive(whole, local, pending)
    return whole


def _replica(writer: int, tensor: DTensor) -> dict[int, list[int]]:
    """Ranks and mesh coordinates of the writer's replica: equal to it on every axis that does not cut."""
    ranks = tensor.device_mesh.mesh
    cut = [isinstance(p, Shard | _StridedShard) for p in tensor.placements]
    at_writer = torch.nonzero(ranks == writer)[0].tolist()
    places = torch.nonzero(ranks >= 0).tolist()
    return {
        int(ranks[tuple(place)]): place
        for place in places
        if all(is_cut or a == b for is_cut, a, b in zip(cut, place, at_writer))
    }


def _receive(whole: torch.Tensor, like: torch.Tensor, parts: list[tuple[int, Runs]]) -> None:
    buffers = [like.new_empty(shape_of(runs)) for _, runs in parts]
    _wait([dist.P2POp(dist.irecv, buffer, rank) for buffer, (rank, _) in zip(buffers, parts)])
    for buffer, (_, runs) in zip(buffers, parts):
        put(whole, runs, buffer)


def _wait(operations: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
