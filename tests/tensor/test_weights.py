"""Weights on the tensor axis: first weights, folders in and out, whole tensors; packed, uneven and shared layouts."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from dtensor_5d.checkpoint.slices import local_part
from tests.adapters.models import meta_model
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import run_ranks
from tests.parity import rows

# family, what its config changes: packed, unequal sections, transposed, shared kv heads, uneven vocabulary, experts
LAYOUTS = [
    ("glm4", {"vocab_size": 125}),
    ("phi3", {"num_key_value_heads": 4}),
    ("gpt2", {"vocab_size": 125, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 2, "vocab_size": 101}),
    ("olmo2", {"num_key_value_heads": 2}),
    ("gpt_oss", {"num_key_value_heads": 2}),
    ("qwen3_moe", {}),
    ("deepseek_v3", {}),
]
DEGREES = [Degrees(tp=4), Degrees(dp_shard=2, tp=2), Degrees(dp_replicate=2, tp=2)]
SPREAD = [(family, changes, DEGREES[i % 3]) for i, (family, changes) in enumerate(LAYOUTS)]


def _settings(changes):
    return {"num_hidden_layers": 2, **changes}


def _run(degrees, family, changes, on_meta=True):
    make = meta_model if on_meta else tiny_model
    model = make(family, **_settings(changes))
    return parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))


def _through_a_folder(rank, degrees, family, changes, source, target):
    run = _run(degrees, family, changes)
    run.load_pretrained(source)
    loaded = run.full_parameters()
    held = sum(local_part(p).numel() for p in run.parameters())
    run.save_pretrained(target)
    return loaded, held


@pytest.mark.parametrize("family, changes, degrees", SPREAD, ids=str)
def test_a_folder_comes_in_and_goes_out_bit_equal(family, changes, degrees, tmp_path):
    """Q8: and a rank holds its part: the whole / tp, and what stays whole."""
    model = tiny_model(family, **_settings(changes))
    model.save_pretrained(tmp_path / "in")
    want = dict(model.named_parameters())
    total = sum(p.numel() for p in want.values())
    for loaded, held in run_ranks(4, _through_a_folder, degrees, family, changes, tmp_path / "in", tmp_path / "out"):
        assert set(loaded) == set(want)
        assert all(torch.equal(loaded[name], want[name]) for name in want)
        assert held < 0.62 * total, "no rank holds more than its half and what is replicated"
    before, after = (_stored(tmp_path / name) for name in ("in", "out"))
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def _stored(folder):
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def _first_weights(rank, degrees, family, changes):
    run = _run(degrees, family, changes)
    run.init_weights(seed=3)
    return run.full_parameters()


@pytest.mark.parametrize(
    "family, changes, degrees", [*SPREAD[:3], *(pytest.param(*row, marks=pytest.mark.slow) for row in SPREAD[3:6])],
    ids=str,
)  # fmt: skip
def test_first_weights_do_not_depend_on_the_layout(family, changes, degrees):
    """C11, T16."""
    (want,) = run_ranks(1, _first_weights, Degrees(), family, changes)
    for got in run_ranks(4, _first_weights, degrees, family, changes):
        assert all(torch.equal(got[name], want[name]) for name in want)


def _after_three_steps(rank, degrees, family, changes, sequence):
    model = tiny_model(family, **_settings(changes))
    run = parallelize(model, plan_for(model, degrees, sequence_parallel=sequence), build_mesh(degrees, "cpu"))
    optim = torch.optim.SGD(run.parameters(), lr=0.1)
    for step in range(3):
        run.step(rows(10 * step + run.data_rank, 2, 8, VOCAB))
        grads = {n: _stored_part(p.grad) for n, p in run.named_parameters() if _is_replica(p)}
        optim.step()
        optim.zero_grad()
    weights = {n: _stored_part(p) for n, p in run.named_parameters() if _is_replica(p)}
    return run.mesh.coordinate()["dp_shard"], grads, weights


def _is_replica(parameter):
    """Not cut over the ranks of the tensor axis, nor over those of experts: the same on its ranks."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return not any(name.startswith("tp") or name == "efsdp" for name in names)


def _stored_part(tensor):
    return local_part(tensor).clone()


@pytest.mark.parametrize(
    "family, sequence",
    [
        ("qwen3", True), ("qwen3_moe", True), ("qwen3_moe", False), ("deepseek_v2", True),
        *(pytest.param(family, False, marks=pytest.mark.slow) for family in ("qwen3", "deepseek_v2")),
    ],
)  # fmt: skip
def test_replicas_stay_bit_equal(family, sequence):
    """T2, T3, T4: norms, per-head norms, routers and latent projections, their gradients and weights after 3 steps."""
    results = run_ranks(4, _after_three_steps, Degrees(dp_shard=2, tp=2), family, {}, sequence)
    for (place, grads, weights), (other, grads_1, weights_1) in ((results[0], results[1]), (results[2], results[3])):
        assert place == other and len(grads) >= 5
        assert all(torch.equal(grads[name], grads_1[name]) for name in grads)
        assert all(torch.equal(weights[name], weights_1[name]) for name in weights)


def _shared_kv(rank):
    model = tiny_model("qwen2", num_hidden_layers=1, num_key_value_heads=2)
    degrees = Degrees(tp=4)
    run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
    run.step(rows(0, 2, 8, VOCAB))
    attention = run.model.model.layers[0].self_attn
    kept = (attention.k_proj.weight, attention.v_proj.bias)
    return [(_stored_part(p), _stored_part(p.grad)) for p in kept], attention.q_proj.weight.to_local().shape


def test_shared_kv_heads_are_held_once_a_group_and_stay_equal():
    """T9: 2 kv heads on 4 ranks; their gradients are sums over the group of ranks."""
    results = run_ranks(4, _shared_kv)
    assert results[0][0][0][0].shape == (8, 64) and results[0][1] == (16, 64)
    for left, right in ((0, 1), (2, 3)):
        for (a, da), (b, db) in zip(results[left][0], results[right][0]):
            assert torch.equal(a, b) and torch.equal(da, db)
    assert not torch.equal(results[0][0][0][0], results[2][0][0][0])


def _trained_and_saved(rank, degrees, folder):
    run = _run(degrees, "llama", {"tie_word_embeddings": True, "vocab_size": 125}, on_meta=False)
    optim = torch.optim.AdamW(run.parameters(), lr=1e-3)
    run.step(rows(run.data_rank, 2, 8, 100))
    run.clip_grad_norm_(1.0)
    optim.step()
    run.save_pretrained(folder)
    return run.logits({"input_ids": torch.arange(3, 16)[None]})


def test_t22_clip_step_save_and_load_again(tmp_path):
    """And logits of 13 tokens on 2 ranks: whole vocabulary, original length."""
    logits = run_ranks(4, _trained_and_saved, Degrees(dp_shard=2, tp=2), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        want = again(torch.arange(3, 16)[None]).logits
    for got in logits:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
