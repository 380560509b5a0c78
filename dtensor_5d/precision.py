"""Which dtype weights are stored in and which they compute in."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["apply_stored_dtype", "compute_dtype"]


def compute_dtype(precision: str | None) -> torch.dtype | None:
    """The dtype of compute and of gathered parameters; None: that of the stored ones."""
    return {None: None, "bf16": torch.bfloat16, "fp32": None}[precision]


def apply_stored_dtype(model: nn.Module, precision: str | None) -> None:
    """Makes the parameters fp32 (master weights) where a precision is asked for; buffers stay as they are.

    bf16 means: stored, reduced and updated in fp32, computed in bf16. On meta this costs nothing.
    """
    if precision is None:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
