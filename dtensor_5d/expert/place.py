"""Expert parameters over the axis: each rank keeps its experts, as a DTensor cut along dim 0. E experts, N ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.compute import ExpertForm

__all__ = ["check_experts", "cut_experts"]


def check_experts(experts: nn.Module, form: ExpertForm, ranks: int, name: str) -> int:
    """The number of experts E of a module that `ranks` ranks are to share; PlanError if they do not divide."""
    sizes = {key: p.shape[0] for key in form.parameters if (p := experts._parameters.get(key)) is not None}
    count = sizes[form.up]
    if set(sizes.values()) != {count} or count % ranks:
        legal = [n for n in range(1, count + 1) if count % n == 0]
        raise PlanError(
            Violation(f"ep={ranks} for {name} with {count} experts", f"ep must divide the {count} experts",
                      f"use an ep of {legal}")
        )  # fmt: skip
    placed = [key for key in sizes if isinstance(experts._parameters[key], DTensor)]
    if placed:
        raise PlanError(
            Violation(f"ExpertParallel on {name}, whose {placed[0]} is cut over ranks already", "must be plain tensors",
                      "apply ExpertParallel once, before any other style and before fully_shard")
        )  # fmt: skip
    return count


def cut_experts(experts: nn.Module, form: ExpertForm, mesh: DeviceMesh) -> None:
    """Replaces each parameter by this rank's experts [E / N, ..]. Nothing is communicated; meta stays meta."""
    for name in form.parameters:
        whole = experts._parameters[name]
        assert whole is not None
        local = whole.shape[0] // mesh.size()
        first = mesh.get_local_rank() * local
        with torch.no_grad():
            # A copy, so that the memory of the other experts is given back.
            mine = whole.detach()[first : first + local].clone(memory_format=torch.contiguous_format)
            placed = DTensor.from_local(
                mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride(),
                grad_placements=[Shard(0)],
            )  # fmt: skip
        new = nn.Parameter(placed, requires_grad=whole.requires_grad)
        for key, value in vars(whole).items():  # such as transformers' mark that it was initialised
            setattr(new, key, value)
        experts._parameters[name] = new
