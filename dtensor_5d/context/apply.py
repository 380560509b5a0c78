"""From rules to styles: which modules of a model attend over the context axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_5d.context.style import ContextParallel, ContextState
from dtensor_5d.plan import matches

__all__ = ["apply_attention"]


def apply_attention(
    model: nn.Module, rules: Mapping[str, Any], mesh: DeviceMesh, device: torch.device, *, keeps: bool
) -> ContextState:
    """Lets the modules that the rules name attend over `mesh` (the cp axis) while rows are run that were cut.

    keeps: as in `ContextState`.
    """
    state = ContextState(mesh.get_group(), device, keeps=keeps)
    style = ContextParallel(state=state)
    for name, module in model.named_modules():
        if any(matches(pattern, name) for pattern in rules):
            style._apply(module, mesh)
    # One object in most models; sub-models and modules with their own number of heads have others.
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    unique = {id(config): config for config in configs if hasattr(config, "_attn_implementation")}
    state.configs = list(unique.values())
    return state
