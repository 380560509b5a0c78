"""Grouped products: one kernel where torch has it, a loop over experts elsewhere (fp64, odd strides, no rows).

T tokens sorted by expert, E experts, I inputs, O outputs; ends [E] int32, cumulative.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_product", "grouped_weight_gradient", "kernel_takes"]


def kernel_takes(*operands: Tensor) -> bool:
    """Whether `F.grouped_mm` takes these: bf16, fp16 or fp32, not empty, rows of a multiple of 16 bytes.

    On CUDA compute capability 8.0 is needed, and below 9.0 or in another dtype than bf16 torch loops by itself.
    """
    for t in operands:
        if t.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not t.numel():
            return False
        if t.is_cuda and torch.cuda.get_device_capability(t.device) < (8, 0):
            return False
        last, row = t.stride()[-1], t.stride()[-2]
        if last != 1:
            last, row = row, last
        if last != 1 or row * t.element_size() % 16 or t.data_ptr() % 16 or row < 1:
            return False
    return True


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y[t] = x[t] @ weight[e(t)]; x [T, I], weight [E, I, O] -> [T, O]; rows past ends[-1] are zero."""
    x = x.to(weight.dtype) if x.dtype != weight.dtype else x
    if kernel_takes(x, weight) and weight.size(2) * weight.element_size() % 16 == 0:
        return _cleared(F.grouped_mm(x, weight, offs=ends), ends)
    return grouped_product_by_loop(x, weight, ends)


def grouped_weight_gradient(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """dw[e] = x_e^T @ g_e; x [T, I], g [T, O] -> [E, I, O]; zero for an expert without rows."""
    x = x.to(g.dtype) if x.dtype != g.dtype else x
    if kernel_takes(x, g):
        return F.grouped_mm(x.transpose(0, 1), g, offs=ends)
    return grouped_weight_gradient_by_loop(x, g, ends)


def _cleared(y: Tensor, ends: Tensor) -> Tensor:
    """y with zeros past ends[-1], in place: a copy costs as much as a quarter of a product of narrow experts."""
    if y.device.type == "cpu":
        y[int(ends[-1]) :].zero_()
        return y
    unused = torch.arange(y.size(0), device=y.device) >= ends[-1]  # the host does not wait for the device
    return y.masked_fill_(unused.unsqueeze(1), 0)


def grouped_product_by_loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The slow, obvious form of `grouped_product`."""
    bounds = [0, *ends.tolist()]
    # Never weight[e]: its backward writes a whole zero gradient for each expert.
    parts = [x[a:b] @ w for (a, b), w in zip(pairwise(bounds), weight.unbind())]
    return torch.cat([*parts, x.new_zeros(x.size(0) - bounds[-1], weight.size(2))])


def grouped_weight_gradient_by_loop(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """The slow, obvious form of `grouped_weight_gradient`."""
    bounds = [0, *ends.tolist()]
    return torch.stack([x[a:b].t() @ g[a:b] for a, b in pairwise(bounds)])
