"""What is left of a model on one stage of a pipeline, for tests that need its names only: it cannot run."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from dtensor_5d import Degrees, build_mesh, plan_for
from dtensor_5d.adapters.decoder import Decoder, find_decoder
from dtensor_5d.dp.fsdp import shard
from dtensor_5d.mesh import Mesh
from dtensor_5d.names import Names
from dtensor_5d.tensor.apply import apply_rules
from tests.checkpoint.layouts import _experts

# 4 layers on 2 stages; in a V shape stage 0 has both ends, and a tied tensor stays one.
LAYERS = {"halves": ({0, 1}, {2, 3}), "V": ({0, 3}, {1, 2}), "uneven": ({0}, {1, 2, 3})}


class Absent(nn.Module):
    """In the place of a module that another stage has."""


def cut(model: nn.Module, decoder: Decoder, layers: Collection[int]) -> None:
    """Keeps these layers of `model`, with what runs before the first one and after the last one."""
    first, last = 0 in layers, decoder.n_layers - 1 in layers
    gone = [decoder.layer(i) for i in range(decoder.n_layers) if i not in layers]
    gone += [] if first else decoder.before
    gone += [] if last else decoder.after
    if last and not first and decoder.ties:
        head = model.get_submodule(decoder.head)
        head.weight = nn.Parameter(torch.empty_like(head.weight))
        if not head.weight.is_meta:
            head.weight.data.copy_(model.get_submodule(decoder.embedding).weight.data)
    for name in gone:
        model.set_submodule(name, Absent())


def stage(model: nn.Module, shape: str = "halves", degrees: Degrees | None = None) -> tuple[nn.Module, Names, Mesh]:
    """This rank's stage of `model`, cut over tp, its experts over ep, then sharded; with the whole model's names."""
    mesh = build_mesh(degrees or Degrees(pp=2, dp_shard=2), "cpu")
    names, decoder = Names.of(model), find_decoder(model)
    rules = plan_for(model, Degrees(dp_shard=2)).rules["dp"]
    if mesh.degrees.tp > 1:
        apply_rules(model, decoder, plan_for(model, Degrees(tp=2)).rules["tp"], mesh["tp"], sequence=False)
    cut(model, decoder, LAYERS[shape][mesh.coordinate()["pp"]])
    if mesh.degrees.ep > 1:
        _experts(model, mesh["ep"], {"gate_up_proj": Shard(0), "down_proj": Shard(0)})
        for name, module in list(model.named_modules()):
            if name in decoder.experts:
                fully_shard(module, mesh=mesh["efsdp"])
    shard(model, mesh["fsdp"], rules, zero=3, precision=None, embedding=decoder.embedding, layers=decoder.layers)
    return model, names, mesh
