"""`ContextParallel` and `cut_batch` alone: torch's own mesh, `parallelize_module`, `fully_shard`, an ordinary model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_5d import ContextParallel, PlanError, cut_batch
from tests.context.batches import packed
from tests.context.cases import recorded
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import rows

TINY = {"num_hidden_layers": 2}
ATTENTION = {"gpt2": "transformer.h.*.attn", "minimax": "model.layers.1.self_attn"}  # layer 0 has no attention


def _model(family, **model):
    """The router of phimoe draws lots in training, so that family is compared in eval mode."""
    return tiny_model(family, **TINY, **model).train(family != "phimoe")


def _prepared(family, **model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    made = _model(family, **model)
    return parallelize_module(made, mesh, {ATTENTION.get(family, "model.layers.*.self_attn"): ContextParallel()}), mesh


def _alone(rank, family, batch, options, sharded):
    model, mesh = _prepared(family)
    if sharded:
        fully_shard(model, mesh=mesh)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    loss = model(**cut_batch(batch, mesh["cp"], **options)).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    if sharded:
        grads = {n: g.full_tensor() for n, g in grads.items()}
    else:
        for grad in grads.values():
            dist.all_reduce(grad)
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item(), grads


@pytest.mark.parametrize(
    "family, n, options, sharded",
    [
        ("llama", 2, {}, True),
        ("gemma3_text", 4, {"balance": "striped", "context": "ring+ulysses"}, False),
        ("gpt_oss", 2, {"balance": "document"}, False),
        ("llama4_text", 2, {}, False),  # hands on no positions
        ("gpt2", 2, {"context": "ulysses"}, False),
        ("phimoe", 2, {}, False),
    ],
)
def test_loss_and_gradients_are_sums_over_the_ranks(family, n, options, sharded):
    batch = rows(0, 2, 21, VOCAB) if family in ("gpt_oss", "llama4_text") else packed(0, 0, VOCAB)[0]
    model = _model(family)
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    loss = model(**batch, use_cache=False, num_items_in_batch=tokens).loss
    loss.backward()
    for got, grads in run_ranks(n, _alone, family, batch, options, sharded):
        assert math.isclose(got, loss.item(), rel_tol=1e-5)
        assert_same_gradients(grads, {n: p.grad for n, p in model.named_parameters()}, tol=1e-5)


def _cut(rank, batch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return {key: value.tolist() for key, value in cut_batch(batch, mesh).items() if isinstance(value, torch.Tensor)}


def test_l18_labels_are_shifted_before_they_are_cut():
    """16 tokens, zig-zag: rank 0 predicts 1 2 3 4 and 13 14 15; a shift after the cut would let 3 predict 12."""
    ids = torch.arange(16).view(1, 16)
    first, second = run_ranks(2, _cut, {"input_ids": ids, "labels": ids})
    assert first["input_ids"] == first["position_ids"] == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert first["shift_labels"] == first["labels"] == [[1, 2, 3, 4, 13, 14, 15, -100]]
    assert second["shift_labels"] == [[5, 6, 7, 8, 9, 10, 11, 12]]


def _sent(rank):
    model, mesh = _prepared("llama")
    with recorded() as (sent, _):
        model(**cut_batch(rows(0, 1, 32, VOCAB), mesh))
    return len(sent)


def test_the_ring_is_used():
    assert run_ranks(2, _sent) == [2, 2]


def _wrong(rank, what):
    family, model, cut = "llama", {}, {}
    batch = rows(0, 1, 9, VOCAB)
    if what == "family":
        family = "minimax"
    if what == "length":
        model = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    if what == "positions":
        _opt()
    prepared, mesh = _prepared(family, **model)
    if what == "implementation":
        prepared.config._attn_implementation = "sdpa"
    if what == "whole":
        prepared(**batch)
    if what == "rows" and rank:
        batch["input_ids"] += 1
    if what == "padding":
        cut = {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])}
    prepared(**cut_batch(batch | cut, mesh))


def _opt():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = parallelize_module(tiny_model("opt"), mesh, {"model.decoder.layers.*.self_attn": ContextParallel()})
    model(**cut_batch(rows(0, 1, 9, VOCAB), mesh))


@pytest.mark.parametrize(
    "what, said",
    [
        ("family", "linear attention layers carry state"),
        ("length", "rotary embeddings that depend on the length"),
        ("positions", "positions that do not count padding"),
        ("whole", "with rows that were not cut"),
        ("rows", "other rows on ranks"),
        ("implementation", r"\(layers \[0\]\) attended otherwise"),
        ("padding", "zeros between ones"),
    ],
)
def test_what_cannot_be_done_alone_is_refused(what, said):
    fails_on_ranks(2, _wrong, what, error=PlanError, match=said)
