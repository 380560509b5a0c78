"""The norm of all gradients and clipping, over any mix of meshes, DTensors and plain tensors.

torch's own `clip_grad_norm_` stacks the norms of all parameters and so refuses tensors on different meshes. Here every
rank sums the squares of what it holds, grouped by the mesh axes that the tensors are cut over; each group is summed
over exactly those axes. An element that several ranks hold as replicas is thereby counted once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

__all__ = ["clip_grads_", "grad_norm"]


def grad_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients as one 0-dim float64 tensor, the same on every rank (a collective).

    Parameters without a gradient count 0. NaN and infinity come through. Errors: `ValueError` for a gradient that is
    a partial sum (it has not been reduced yet).
    """
    cut_over: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[torch.Tensor]]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        # A parameter whose gradient is missing still names its groups: all ranks must ask for the same reductions.
        groups = _groups(parameter)
        key = tuple(group.group_name for group in groups)
        held = cut_over.setdefault(key, (groups, []))[1]
        if parameter.grad is not None:
            held.append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key in sorted(cut_over):
        groups, tensors = cut_over[key]
        squares = _squares(tensors, device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return total.sqrt()


def clip_grads_(parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scales every gradient in place by min(1, max_norm / norm); `norm` is what `grad_norm` gave.

    The factor is that of torch's `clip_grad_norm_`: max_norm / (norm + 1e-6).
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = _local(parameter.grad)
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), grads in by_kind.items():
        torch._foreach_mul_(grads, scale.to(device, dtype))


def _groups(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    """The process groups over which this parameter is cut; axes of size 1 need no sum."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    ]


def _local(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        return grad
    if any(isinstance(placement, Partial) for placement in grad.placements):
        raise ValueError(f"a gradient with placements {grad.placements} is a partial sum: reduce it before the norm")
    return grad._local_tensor  # no autograd here, so no placements for a gradient either


def _squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    filled = [t.detach() for t in tensors if t.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Each tensor's norm in at least fp32; their squares are few, so they are summed in fp64.
    wide = [t for t in filled if t.dtype in (torch.float32, torch.float64)]
    narrow = [t for t in filled if t.dtype not in (torch.float32, torch.float64)]
    norms = list(torch._foreach_norm(wide, 2)) if wide else []
    norms += list(torch._foreach_norm(narrow, 2, dtype=torch.float32)) if narrow else []
    return torch.stack([n.to(device, torch.float64) for n in norms]).square().sum()
