"""Which dtype weights are stored in and which they compute in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["apply_stored_dtype", "compute_dtype", "split_fp32"]


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


def split_fp32(model: nn.Module, fp32_modules: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of the modules whose own parameters must stay fp32: (those that are fp32 all through, the others).

    The first, outermost only, can be sharded as a unit of their own; below the others are parameters of another dtype.
    """
    wanted = set(fp32_modules)
    through: list[str] = []
    others: list[str] = []
    for name in sorted(fp32_modules, key=len):
        if any(name.startswith(outer + ".") for outer in through):
            continue
        below = model.get_submodule(name).named_modules(prefix=name)
        owners = {inner for inner, module in below if next(module.parameters(recurse=False), None) is not None}
        (through if owners <= wanted else others).append(name)
    return through, others
