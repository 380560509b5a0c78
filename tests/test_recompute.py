"""Recomputation: the same gradients, less kept, each layer run once more and never oftener."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from dtensor_5d.recompute import recompute_layers
from tests.families.tiny import tiny_model
from tests.harness import run_ranks
from tests.pairwise import pairwise
from tests.parity import Case, check_parity, rows, uneven

ROWS = pairwise(
    {
        "recompute": ["selective", "block", "every=2"],
        "degrees": [Degrees(dp_shard=2), Degrees(dp_shard=2, tp=2), Degrees(tp=2)],
        "zero": [3, 1],
        "family": ["llama", "qwen3_moe", "gemma2", "gpt_oss"],
    }
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_gradients_equal_those_of_one_process(row):
    options = {"recompute": row["recompute"], "zero": row["zero"]}
    model = {"num_hidden_layers": 2, "tie_word_embeddings": row["family"] == "gemma2"}
    check_parity(Case(row["family"], row["degrees"], options, model, torch.float32, uneven))


def _dropout(rank, recompute):
    """Dropout draws the same numbers the second time, also between ranks that cut the tokens."""
    grads = []
    for policy in ("none", recompute):
        torch.manual_seed(0)
        model = tiny_model("gpt2", num_hidden_layers=2, resid_pdrop=0.3, embd_pdrop=0.1)
        degrees = Degrees(dp_shard=2, tp=2)
        run = parallelize(model, plan_for(model, degrees, recompute=policy), build_mesh(degrees, "cpu"))
        run.step([rows(run.data_rank, 2, 12, 128), rows(run.data_rank + 9, 1, 8, 128)])
        grads.append(run.full_gradients())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_dropout_draws_the_same_numbers_again(recompute):
    run_ranks(4, _dropout, recompute)


def _kept_and_runs(recompute):
    """(bytes that forward keeps, forwards of each layer in forward and backward)."""
    model = tiny_model("llama", hidden_size=128, intermediate_size=512)
    layers, runs, kept = list(model.model.layers), {}, {}
    for number, layer in enumerate(layers):
        layer.input_layernorm.register_forward_pre_hook(lambda *_, n=number: runs.update({n: runs.get(n, 0) + 1}))
    recompute_layers(layers, recompute)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(3, 128, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return sum(kept.values()), [runs[n] for n in range(len(layers))]


def test_less_is_kept_and_each_layer_runs_once_more():
    whole, once = _kept_and_runs("none")
    block, twice = _kept_and_runs("block")
    half, every = _kept_and_runs("every=2")
    assert once == [1] * 4 and twice == [2] * 4 and every == [2, 1, 2, 1]
    assert block < half < whole and block < whole / 4


class _Counting(TorchDispatchMode):
    """Counts what is computed: it stands outside of the modes that a layer's second run enters."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_selective_computes_no_product_anew():
    model = tiny_model("llama")
    recompute_layers(list(model.model.layers), "selective")
    ids = torch.randint(3, 128, (2, 16))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with _Counting() as seen:
        loss.backward()
    # Backward of 7 linear layers in each of 4 layers and of the head: two products each, and none of a forward.
    assert seen.counts["aten::mm"] == 2 * (7 * 4 + 1)
    assert seen.counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == 0
    assert seen.counts["aten::rsqrt"] == 8  # the norms do run again


def test_without_gradients_a_layer_runs_as_it_is():
    model = tiny_model("llama").eval()
    ids = torch.randint(3, 128, (2, 16))
    with torch.no_grad():
        want = model(input_ids=ids).logits
        recompute_layers(list(model.model.layers), "block")
        assert torch.equal(model(input_ids=ids).logits, want)
