"""Rows of the collection of field faults whose axes name TP or SP and none of CP, PP, EP. Each test names its row.

Rows that are proved elsewhere: T1, T11, T14 (families), P25, L6 by tests/tensor/test_parity.py; T2, T4, T9, T16, T22,
Q8 by test_weights.py; T3, T6, T7, T8 by test_styles.py; T13, T15 by test_check.py; T17 by test_random.py; T18, L1,
L24 by test_run.py; L23, L25, L26, L27 by test_loss.py; T21, F10 by tests/checkpoint/test_slices.py. L22: the package
shifts labels and divides the loss itself (test_parity.py).
"""

from __future__ import annotations

import gc
import math
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.checkpoint.gather import whole
from dtensor_5d.checkpoint.slices import local_part
from dtensor_5d.tensor import ColwiseParallel, RowwiseParallel
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import Case, check_parity, rows

TINY = {"num_hidden_layers": 2}


def _run(family="llama", degrees=None, model=None, prepare=None, **options):
    made = tiny_model(family, **{**TINY, **(model or {})})
    if prepare:
        prepare(made)
    degrees = degrees or Degrees(tp=2)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _alone(window, family="llama", prepare=None, **model):
    made = tiny_model(family, **{**TINY, **model})
    if prepare:
        prepare(made)
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    loss = sum(made(**b, use_cache=False, num_items_in_batch=tokens).loss for b in window)
    loss.backward()
    return {n: p.grad for n, p in made.named_parameters()}


def _rope_slice(rank, sequence):
    run = _run("deepseek_v2", sequence_parallel=sequence)
    run.step(rows(0, 2, 8, VOCAB))
    return run.full_gradients()["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"][16:]


@pytest.mark.parametrize("sequence", [True, False])
def test_t5_the_shared_rope_key_has_the_gradients_of_all_heads(sequence):
    want = _alone([rows(0, 2, 8, VOCAB)], "deepseek_v2")["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"][16:]
    for got in run_ranks(2, _rope_slice, sequence):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab", [7, 8])
def test_t11_tied_tables_are_cut_alike(vocab):
    model = {**TINY, "tie_word_embeddings": True, "vocab_size": vocab}
    check_parity(Case("llama", Degrees(dp_shard=2, tp=2), {}, model))


def _freeze_norms(model):
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name)


def _frozen(rank, sequence):
    run = _run("qwen3", Degrees(dp_shard=2, tp=2), prepare=_freeze_norms, sequence_parallel=sequence)
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    return {n: None if p.grad is None else whole(p.grad) for n, p in run.named_parameters()}, run.grad_norm().item()


@pytest.mark.parametrize("sequence", [True, False])
def test_t19_frozen_norms_train_the_rest(sequence):
    want = _alone([rows(r, 2, 8, VOCAB) for r in range(2)], "qwen3", _freeze_norms)
    norm = torch.cat([g.flatten() for g in want.values() if g is not None]).norm().item()
    for grads, got_norm in run_ranks(4, _frozen, sequence):
        assert {n for n, g in grads.items() if g is None} == {n for n, g in want.items() if g is None}
        assert_same_gradients(grads, want, tol=1e-5)
        assert math.isclose(got_norm, norm, rel_tol=1e-5)


class _Noise(nn.Module):
    def __init__(self, inner, amount):
        super().__init__()
        self.inner, self.amount = inner, amount

    def forward(self, x):
        return self.inner(x) + self.amount


def _noisy(rank, where):
    run = _run(sequence_parallel=False)
    if where is not None:
        layer = run.model.model.layers[1]
        setattr(layer, where, _Noise(getattr(layer, where), 1e-3 * rank))
    return run.first_difference(rows(0, 2, 8, VOCAB))


def test_t20_the_first_module_that_differs_between_ranks_is_named():
    assert run_ranks(2, _noisy, None) == [None] * 2
    assert run_ranks(2, _noisy, "input_layernorm") == ["model.layers.1.input_layernorm"] * 2
    assert run_ranks(2, _noisy, "post_attention_layernorm") == ["model.layers.1.post_attention_layernorm"] * 2


def _coordinates(rank):
    run = _run(degrees=Degrees(dp_replicate=2, tp=2))
    return local_part(run.model.model.layers[0].mlp.up_proj.weight).clone()


def test_t21_the_shard_is_that_of_the_rank_in_its_group():
    """dp_replicate 2 x tp 2: ranks 0 and 2 hold equal shards, 0 and 1 different ones."""
    parts = run_ranks(4, _coordinates)
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])
    assert not torch.equal(parts[0], parts[1])
    want = tiny_model("llama", **TINY).model.layers[0].mlp.up_proj.weight
    assert torch.equal(torch.cat(parts[:2]), want)


def test_l6_sequence_parallelism_with_accumulation():
    """Lengths 16, 10, 7, 3 in two batches, 2 micro-batches each."""

    check_parity(Case("llama", Degrees(tp=2), {"microbatches": 2}, TINY, batches=_lengths))


def _lengths(step, rank, vocab):
    def padded(seed, lengths):
        batch = rows(seed, len(lengths), max(lengths), vocab, supervised=1.0)
        mask = torch.ones_like(batch["input_ids"])
        for row, length in enumerate(lengths):
            mask[row, length:] = 0
            batch["labels"][row, length:] = -100
        return batch | {"attention_mask": mask}

    return [padded(10 * step, (16, 10)), padded(10 * step + 1, (7, 3))]


def _every_position(rank):
    run = _run(model={"max_position_embeddings": 64})
    return run.logits({"input_ids": torch.arange(3, 11).repeat(8)[None]})


def test_c22_parts_of_the_sequence_know_where_they_are():
    """A pattern of 8 tokens repeated to 64: each rank's part gives what one process gives."""
    want = tiny_model("llama", **TINY, max_position_embeddings=64)(torch.arange(3, 11).repeat(8)[None]).logits
    for got in run_ranks(2, _every_position):
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)


def test_c23_kv_heads_that_fit_no_number_of_ranks_are_refused_and_others_shared():
    config = tiny_config("llama", hidden_size=112, num_attention_heads=28, num_key_value_heads=7)
    with pytest.raises(PlanError, match="tp=2 with 7 kv heads: tp must divide the 7 kv heads, or 7 must divide tp"):
        plan_for(config, Degrees(tp=2))
    model = {**TINY, "hidden_size": 112, "num_attention_heads": 28, "num_key_value_heads": 2}
    check_parity(Case("llama", Degrees(tp=4), {}, model))


class _Pair(nn.Module):
    def __init__(self, rows_, columns):
        super().__init__()
        self.first = nn.Linear(columns, rows_, bias=False)
        self.second = nn.Linear(columns, rows_, bias=False)
        for i, p in enumerate(self.parameters()):
            p.data = torch.arange(float(p.numel())).view_as(p) + 1000 * i


def _nested(rank, shape):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    pair = _Pair(*shape)
    parallelize_module(pair, mesh["model"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(pair, mesh=mesh["data"])
    return {n: whole(p) for n, p in pair.named_parameters()}


@pytest.mark.parametrize("shape", [(8, 8), (10, 6), (6, 10)])
def test_f9_cut_twice_along_one_dim_and_whole_again(shape):
    want = dict(_Pair(*shape).named_parameters())
    for got in run_ranks(4, _nested, shape):
        assert all(torch.equal(got[n], want[n]) for n in want)


def _uneven_twice(rank, vocab):
    run = _run(degrees=Degrees(dp_shard=2, tp=2), model={"vocab_size": vocab})
    before = run.full_parameters()["lm_head.weight"]
    run.step(rows(run.data_rank, 2, 8, vocab))
    return before, run.full_gradients()["lm_head.weight"]


@pytest.mark.parametrize("vocab", [5, 9, 11])
def test_f10_a_vocabulary_that_neither_axis_divides(vocab):
    """5 rows on tp 2: 3 and 2; on dp 2: 2, 1 and 1, 1."""
    want = tiny_model("llama", **TINY, vocab_size=vocab).lm_head.weight
    grad = _alone([rows(r, 2, 8, vocab) for r in range(2)], vocab_size=vocab)["lm_head.weight"]
    for got, got_grad in run_ranks(4, _uneven_twice, vocab):
        assert torch.equal(got, want)
        assert_same_gradients({"head": got_grad}, {"head": grad}, tol=1e-5)


def _clipped(rank):
    run = _run("qwen3", Degrees(dp_shard=2, tp=2))
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    norm = run.clip_grad_norm_(0.01).item()
    return norm, run.grad_norm().item()


def test_n2_clipping_over_cut_and_whole_parameters():
    """Norms count an element that several ranks hold once."""
    want = _alone([rows(r, 2, 8, VOCAB) for r in range(2)], "qwen3")
    norm = torch.cat([g.flatten() for g in want.values()]).norm().item()
    for before, after in run_ranks(4, _clipped):
        assert math.isclose(before, norm, rel_tol=1e-5)
        assert math.isclose(after, 0.01, rel_tol=1e-3)


def test_m9_float8_beside_tp_is_refused_by_name():
    with pytest.raises(PlanError, match="float8"):
        plan_for(tiny_config("llama"), Degrees(tp=2), float8="rowwise")


class _Lora(nn.Module):
    """peft's layout: base_layer, and adapters by name."""

    def __init__(self, base, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})
        for part in (self.lora_A, self.lora_B):
            part["default"].weight.data = torch.randn(part["default"].weight.shape, generator=generator) * 0.1

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def _adapt(model):
    model.requires_grad_(False)
    for i, layer in enumerate(model.model.layers):
        for j, (owner, name) in enumerate(
            [(layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.self_attn, "o_proj"),
             (layer.mlp, "up_proj"), (layer.mlp, "down_proj")]
        ):  # fmt: skip
            setattr(owner, name, _Lora(getattr(owner, name), 10 * i + j))


def _lora(rank, degrees, sequence):
    run = _run(degrees=degrees, prepare=_adapt, sequence_parallel=sequence)
    trainable = sum(p.numel() for p in run.parameters() if p.requires_grad)
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    return trainable, {n: None if p.grad is None else whole(p.grad) for n, p in run.named_parameters()}


@pytest.mark.parametrize("degrees, sequence", [(Degrees(tp=2), False), (Degrees(dp_shard=2, tp=2), True)], ids=str)
def test_m10_adapters_follow_the_layer_that_they_adapt(degrees, sequence):
    window = [rows(r, 2, 8, VOCAB) for r in range(degrees.data)]
    want = _alone(window, prepare=_adapt)
    trainable = sum(g.numel() for g in want.values() if g is not None)
    for count, grads in run_ranks(degrees.world_size, _lora, degrees, sequence):
        assert count == trainable, "the base stays frozen, the adapters trainable"
        assert_same_gradients(grads, want, tol=1e-5)


def _only_one_saves(rank, folder):
    run = _run(degrees=Degrees(tp=2))
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError):
            run.save_pretrained(folder)
    else:  # as a process that ends: with its groups
        del run
        gc.collect()
    return time.monotonic() - start


def test_k3_a_save_on_one_rank_only_fails_and_does_not_hang(tmp_path):
    """The other rank has left; what it left waiting ends with an error."""
    assert max(run_ranks(2, _only_one_saves, tmp_path / "out", timeout=30)) < 10
