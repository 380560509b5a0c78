"""Whole gradients of a unit of FSDP2, from backward until they are reduced together."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["drop_gradients", "zeros_for_unused"]


def zeros_for_unused(group: Any) -> None:
    """Gradients of 0, in the dtype of the reduction, for unused parameters beside gradients that were added up in it.

    group: FSDP2's parameter group of a unit. FSDP2 itself would take zeros of the dtype of compute there, and refuses
    to reduce two dtypes at once.
    """
    parameters = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    if not any(p.unsharded_accumulated_grad is not None for p in parameters):
        return
    for p in parameters:
        unsharded = p._unsharded_param
        is_unused = unsharded.grad is None and p.unsharded_accumulated_grad is None
        if is_unused and unsharded.requires_grad and p.reduce_dtype is not None:
            p.unsharded_accumulated_grad = torch.zeros_like(unsharded, dtype=p.reduce_dtype, requires_grad=False)


def drop_gradients(group: Any) -> None:
    """Drops what a window that failed has left: FSDP2 would add the next one's to it, and no optimizer sees it."""
    for p in group.fsdp_params:
        p.unsharded_accumulated_grad = None
        if hasattr(p, "_unsharded_param"):
            p._unsharded_param.grad = None
