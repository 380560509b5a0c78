"""A parameter of which each rank keeps its part, as the local shard of a DTensor. Nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dtensor_5d.checkpoint.slices import cut, placed_slices
from dtensor_5d.sections import Sections

__all__ = ["placed"]


def placed(
    whole: nn.Parameter | Tensor, mesh: DeviceMesh, placements: Sequence[Placement], packed: Sections | None = None
) -> nn.Parameter:
    """`whole`, which every rank has, as a DTensor on `mesh`; one on meta stays there.

    packed: the sections along one dim that are each cut by themselves. What hangs on the parameter as attributes
    (transformers' mark that it was initialised) is kept.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    runs = placed_slices(whole.shape, mesh.shape, coordinate, placements, packed)
    with torch.no_grad():
        # A copy, so that the memory of the other parts is given back.
        local = cut(whole.detach(), runs).to(whole.device).clone(memory_format=torch.contiguous_format)
        made = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride(),
            grad_placements=placements,
        )  # fmt: skip
    new = nn.Parameter(made, requires_grad=whole.requires_grad)
    for key, value in vars(whole).items():
        setattr(new, key, value)
    return new
