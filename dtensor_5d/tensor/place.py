"""Parameters cut over the tensor axis: each rank keeps its part as the local shard of a DTensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from dtensor_5d.placing import placed
from dtensor_5d.sections import Sections, note_sections

__all__ = ["cut_parameter"]

_CUT = "_dtensor_5d_cut"


def cut_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, dim: int, *, sections: Sequence[int] | None = None
) -> None:
    """Makes `module`'s parameter `name` a DTensor that is cut along `dim`. Nothing is communicated.

    mesh: the tensor axis, or the same ranks as (parts, copies) where neighbours hold the same part (`with_copies`).
    sections: lengths along `dim` that are each cut by themselves. A parameter on meta stays there. One that another
    module has as well (tied weights) becomes the same DTensor in both.
    """
    whole = module._parameters[name]
    assert whole is not None
    dim %= whole.dim()
    packed = Sections(dim, tuple(sections), mesh.size(0)) if sections is not None else None
    if packed is not None:
        note_sections(module, name, packed)
    if _CUT not in vars(whole):  # on the parameter itself, which lives as long as another module still has it
        placements = (Shard(dim), Replicate())[: mesh.ndim]
        setattr(whole, _CUT, placed(whole, mesh, placements, packed))
    module._parameters[name] = vars(whole)[_CUT]
