"""Small models laid out over ranks, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dtensor_5d.checkpoint.template import named_tensors


def on_meta(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def sharded(
    model: nn.Module, mesh: DeviceMesh, placement: Callable[[nn.Parameter], Any] | None = None, **options: Any
) -> nn.Module:
    """fully_shard per layer and root."""
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement, **options)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement, **options)
    return model


def lay_out(model: nn.Module, layout: str) -> nn.Module:
    """`dp4`, `hsdp` (2 x 2), `tp` (4 ranks), `tp+dp` (2 x 2, also dim 0 twice), `gate_up dim 1`, `ep+dp`."""
    if layout.startswith("dp"):
        return sharded(model, init_device_mesh("cpu", (int(layout[2:]),)))
    if layout == "hsdp":
        return sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    if layout == "gate_up dim 1":
        mesh = init_device_mesh("cpu", (4,))
        return sharded(model, mesh, lambda p: Shard(1) if p.dim() == 3 else None)
    if layout == "gate_up strided":
        _experts(model, init_device_mesh("cpu", (4,)), {"gate_up_proj": _StridedShard(1, split_factor=2)})
        return model
    if layout == "ep+dp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        _experts(model, mesh["ep"], {"gate_up_proj": Shard(0), "down_proj": Shard(0)})
        for module in model.modules():
            if getattr(module, "gate_up_proj", None) is not None and isinstance(module.gate_up_proj, DTensor):
                fully_shard(module, mesh=mesh["efsdp"])
        return sharded(model, init_device_mesh("cpu", (4,)))
    assert layout == "tp+dp"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            _place(module, "weight", mesh["tp"], Shard(1 if leaf in ("o_proj", "down_proj") else 0))
    return sharded(model, mesh["dp"])


def _experts(model: nn.Module, mesh: DeviceMesh, placements: dict[str, Any]) -> None:
    for module in model.modules():
        if getattr(module, "gate_up_proj", None) is not None and isinstance(module.gate_up_proj, nn.Parameter):
            for name, placement in placements.items():
                _place(module, name, mesh, placement)


def _place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Any) -> None:
    parameter = module._parameters[name]
    assert parameter is not None
    module._parameters[name] = nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of the model by name, gathered. Collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        name: (t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()).clone()
        for name, t in named_tensors(model).items()
    }


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not bit for bit the same, or that only one has."""
    odd = sorted(set(got) ^ set(want))
    return odd + [n for n in want if n in got and not (got[n].shape == want[n].shape and torch.equal(got[n], want[n]))]
