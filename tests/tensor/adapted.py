"""LoRA as peft lays it out, and parity of models that are prepared before they are cut."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dtensor_5d import build_mesh, parallelize, plan_for
from tests.families.tiny import tiny_model
from tests.parity import compare, train, train_alone


class Lora(nn.Module):
    """base_layer, and adapters by name."""

    def __init__(self, base, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        outputs, inputs = base.weight.shape
        dtype = base.weight.dtype
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 4, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, outputs, bias=False, dtype=dtype)})
        for part in (self.lora_A, self.lora_B):
            weight = part["default"].weight
            weight.data = torch.randn(weight.shape, generator=generator, dtype=dtype) * 0.1

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Adapt:
    """Puts LoRA around every linear layer of these names, and freezes the rest."""

    def __init__(self, *names):
        self.names = names

    def __call__(self, model):
        model.requires_grad_(False)
        for seed, (name, module) in enumerate(list(model.named_modules())):
            outer, _, leaf = name.rpartition(".")
            if leaf in self.names:
                setattr(model.get_submodule(outer), leaf, Lora(module, seed))


def prepared_parity(rank, case, prepare):
    """`tests.parity.check_parity` of one rank, for a model that `prepare` changes first."""
    model = tiny_model(case.family, dtype=case.dtype, **case.model)
    prepare(model)
    reference = copy.deepcopy(model).train() if rank == 0 else None
    run = parallelize(model, plan_for(model, case.degrees, **case.options), build_mesh(case.degrees, "cpu"))
    got = train(run, case)
    if reference is not None:
        compare(got, train_alone(reference, case), case.tol)
