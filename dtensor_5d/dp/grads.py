"""The norm of all gradients and clipping, over any mix of meshes, DTensors and plain tensors.

torch's own `clip_grad_norm_` stacks the norms of all parameters and so refuses tensors on different meshes; one
reduction per mesh would do, but stages of a pipeline may hold parameters on different meshes. Here every rank divides
the squares of what it holds by the number of ranks that hold the same, and one sum over all ranks counts each element
once:

    4 ranks, 2 stages          rank 0        rank 1        rank 2        rank 3
    stage 0, whole             g^2 / 2       g^2 / 2
    stage 0, cut in 2          g0^2          g1^2
    stage 1, cut in 2                                      g0^2          g1^2
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

__all__ = ["clip_grads_", "grad_norm"]

_AT_ONCE = 1 << 16  # elements whose squares fp32 adds up to 1e-7


def grad_norm(
    parameters: Iterable[torch.Tensor], *, group: dist.ProcessGroup | None = None, stages: int = 1
) -> torch.Tensor:
    """The 2-norm of all gradients as one 0-dim float64 tensor, the same on every rank: one collective over `group`.

    parameters: of this rank's stage, a parameter that several stages hold (a tied one) on one of them only.
    group: all ranks (None: of the job), `stages` equal parts of them, each part holding every parameter of its stage.

    Parameters without a gradient count 0. NaN and infinity come through. Errors: `ValueError` for a gradient that is
    a partial sum (it has not been reduced yet).
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    held: dict[int, list[torch.Tensor]] = {}  # over how many ranks they are cut -> gradients
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        if parameter.grad is not None:
            held.setdefault(_parts(parameter), []).append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parts, tensors in held.items():
        assert ranks % (parts * stages) == 0, "each rank of a stage must hold its share of every parameter"
        total += _squares(tensors, device) * (parts * stages / ranks)
    if ranks > 1:
        dist.all_reduce(total, group=group)
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


def _parts(parameter: torch.Tensor) -> int:
    """Over how many ranks this parameter is cut."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))


def _local(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        return grad
    if any(isinstance(placement, Partial) for placement in grad.placements):
        raise ValueError(f"a gradient with placements {grad.placements} is a partial sum: reduce it before the norm")
    return grad._local_tensor  # no autograd here, so no placements for a gradient either


def _squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    filled = [piece for t in tensors if t.numel() for piece in _pieces(t.detach())]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Each piece's norm in at least fp32; their squares are few, so they are summed in fp64.
    wide = [t for t in filled if t.dtype in (torch.float32, torch.float64)]
    narrow = [t for t in filled if t.dtype not in (torch.float32, torch.float64)]
    norms = list(torch._foreach_norm(wide, 2)) if wide else []
    norms += list(torch._foreach_norm(narrow, 2, dtype=torch.float32)) if narrow else []
    return torch.stack([n.to(device, torch.float64) for n in norms]).square().sum()


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Piece by piece on the CPU, where torch adds up a norm in a few running sums and loses 1 % over 1e8 elements."""
    return tensor.flatten().split(_AT_ONCE) if tensor.device.type == "cpu" else (tensor,)
