"""Bit for bit the gradients of `torch.distributed.pipelining` on the same stages, whole and sharded (zero 2)."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_5d.loss import token_loss_sum
from dtensor_5d.pipeline import PipelineParallel
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import run_ranks
from tests.parity import rows

MICRO = 4


class _Part(torch.nn.Module):
    """A stage as torch's runtime takes it."""

    def __init__(self, view):
        super().__init__()
        self.model, self.view = view.module, view

    def forward(self, hidden, ids):
        out = self.view({"input_ids": ids}, None if self.view.is_first else hidden)
        return getattr(out, "logits", out)


def _cut(mesh, name):
    return parallelize_module(tiny_model("llama"), mesh["pp"], PipelineParallel(schedule=name, microbatches=MICRO))


def _ours(mesh, name, batch, sharded):
    model = _cut(mesh, name)
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    model.step(batch)
    return model


def _theirs(mesh, name, batch, sharded):
    model = _cut(mesh, name)
    staging = model.step.staging
    parts = []
    for view in staging.views:
        part = _Part(view)
        if sharded:
            mine = {p for owner in staging.owners[view.number] for p in owner.parameters(recurse=False)}
            for layer in staging.cut.layers(view.number):
                fully_shard(model.model.layers[layer], mesh=mesh["dp"], reshard_after_forward=False)
            others = set(part.parameters()) - mine
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False, ignored_params=others)
        parts.append(part)
    group, depth = mesh["pp"].get_group(), staging.cut.stages
    stages = [PipelineStage(p, p.view.number, depth, torch.device("cpu"), group=group) for p in parts]
    tokens = int((batch["labels"][:, 1:] != -100).sum())

    def loss(logits, labels):
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        return token_loss_sum(logits, shifted) / tokens

    if name == "1f1b":
        schedule = Schedule1F1B(stages[0], MICRO, loss_fn=loss, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, MICRO, loss_fn=loss, scale_grads=False)
    args = (torch.zeros(4, 8, 64),) if any(p.view.is_first for p in parts) else ()
    schedule.step(*args, ids=batch["input_ids"], target=batch["labels"])
    return model


def _gradients(model, sharded):
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert grads and all(isinstance(g, DTensor if sharded else torch.Tensor) for g in grads.values())
    return {n: g.full_tensor() if sharded else g for n, g in grads.items()}


def _compared(rank, name, data):
    mesh = init_device_mesh("cpu", (2, data), mesh_dim_names=("pp", "dp"))
    batch = rows(mesh.get_local_rank("dp"), 4, 8, VOCAB, supervised=1.0)
    ours, theirs = (_gradients(run(mesh, name, batch, data > 1), data > 1) for run in (_ours, _theirs))
    return set(ours) == set(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_bit_equal_to_torchs_runtime(name, data):
    assert run_ranks(2 * data, _compared, name, data) == [True] * 2 * data
