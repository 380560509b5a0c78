"""Rows of the collection of field faults whose axes are all among DP, GA, FSDP, loss, clip, init, mesh and data.

Each test names its row. Rows that are proved elsewhere: L14, L16, L21 in tests/test_run.py and test_run_mistakes.py;
L17 in tests/test_batch.py; N1, N2, N4 in tests/dp/test_grads.py, test_fsdp.py and tests/context/test_parity.py;
K1, K12, M6, M7 in tests/loader; K10, K11, K13, I1, I3 in tests/checkpoint; M1, M2 in tests/test_mesh.py.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from tests.dp.test_fsdp import _count
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import rows

TINY = {"num_hidden_layers": 2}


def _run(degrees, model=None, prepare=None, **options):
    made = tiny_model("llama", **{**TINY, **(model or {})})
    if prepare:
        prepare(made)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _alone(window, model=None, prepare=None):
    """Gradients of the token mean over `window` in one process of plain transformers."""
    made = tiny_model("llama", **{**TINY, **(model or {})})
    if prepare:
        prepare(made)
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    loss = sum(made(**b, use_cache=False, num_items_in_batch=tokens).loss for b in window)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in made.named_parameters()}


def _with_counts(counts, length=8, seed=0):
    """One row for each count, with that many supervised tokens."""
    batch = rows(seed, len(counts), length, VOCAB, supervised=1.0)
    for row, count in enumerate(counts):
        batch["labels"][row, count + 1 :] = -100
    return batch


# --- L: one divisor


def _accumulated(rank, parts):
    run = _run(Degrees(dp_shard=2), microbatches=parts)
    counts = [1, 2, 3] if rank == 0 else [4, 5, 6]
    loss = run.step(_with_counts(counts, seed=rank)).item()
    return loss, run.full_gradients()


def test_l2_l3_l5_l9_windows_of_any_shape_give_one_gradient():
    """L2: 6 sequences with 1..6 supervised tokens; 1, 2, 3 micro-batches a rank. L3: the gradient, not the logged loss.
    L5, L9: the token mean, not a mean of means over micro-batches or ranks."""
    window = [_with_counts([1, 2, 3], seed=0), _with_counts([4, 5, 6], seed=1)]
    loss, want = _alone(window)
    for parts in (1, 2, 3):
        for got_loss, got in run_ranks(2, _accumulated, parts):
            assert math.isclose(got_loss, loss, rel_tol=1e-5)
            assert_same_gradients(got, want, tol=1e-5)


def _short_window(rank):
    run = _run(Degrees(dp_shard=2))
    for pair in ((0, 1), (2, 3)):
        run.step([rows(10 * n + rank, 1, 8, VOCAB) for n in pair])
        for p in run.parameters():
            p.grad = None
    run.step([rows(40 + rank, 1, 8, VOCAB)])
    return run.full_gradients()


def test_l4_a_short_last_window_is_divided_by_what_it_holds():
    _, want = _alone([rows(40 + rank, 1, 8, VOCAB) for rank in range(2)])
    for got in run_ranks(2, _short_window):
        assert_same_gradients(got, want, tol=1e-5)


def _seven_and_one(rank, spread):
    run = _run(Degrees(dp_shard=2))
    losses = {7: 1.0, 1: 9.0}

    def fixed(logits, labels):
        """A loss of 1 for each of 7 tokens, of 9 for the one: whatever the logits."""
        count = int((labels != -100).sum())
        return count * losses[count] + 0.0 * logits.sum()

    seven, one = _with_counts([7], seed=0), _with_counts([1], seed=1)
    empty = rows(2, 1, 8, VOCAB, supervised=0.0)
    own = [seven if rank == 0 else one] if spread else ([seven, one] if rank == 0 else [empty])
    return run.step(own, loss=fixed).item()


@pytest.mark.parametrize("spread", [True, False])
def test_l5_l9_7_tokens_of_loss_1_and_1_token_of_loss_9_are_2(spread):
    """The mean of means gives 5."""
    assert run_ranks(2, _seven_and_one, spread) == pytest.approx([2.0, 2.0])


def _twelve_and_six(rank):
    run = _run(Degrees(dp_shard=2))
    run.step(_with_counts([6, 6] if rank == 0 else [6], seed=rank))
    return run.full_gradients()


def test_l8_the_mean_of_fsdp_is_undone():
    _, want = _alone([_with_counts([6, 6], seed=0), _with_counts([6], seed=1)])
    for got in run_ranks(2, _twelve_and_six):
        ratio = got["lm_head.weight"].norm() / want["lm_head.weight"].norm()
        assert math.isclose(ratio, 1.0, rel_tol=1e-5)
        assert_same_gradients(got, want, tol=1e-5)


# --- F: units, ties, frozen parameters, empty shards, optimizers


def _tied(rank, vocab):
    run = _run(Degrees(dp_shard=2), dict(tie_word_embeddings=True, vocab_size=vocab))
    before = run.full_parameters()
    optim = torch.optim.SGD(run.parameters(), lr=0.5)
    for step in range(3):
        batch = rows(step + 10 * rank, 2, 8, vocab, supervised=1.0)
        run.step(batch)
        optim.step()
        optim.zero_grad()
    after = run.full_parameters()
    name = "model.embed_tokens.weight"
    changed = (after[name] != before[name]).any(dim=1)
    model = run.model
    return "lm_head.weight" in after, changed.all().item(), model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("vocab", [5, 8])
def test_f1_f2_f3_tied_tables_train_and_every_row_moves(vocab):
    """F2: vocabulary 5 on 2 ranks leaves one padded row on the last shard."""
    assert run_ranks(2, _tied, vocab) == [(False, True, True)] * 2


def _largest_reduction(rank):
    run = _run(Degrees(dp_shard=2), dict(vocab_size=4096))
    from tests.traces import Trace

    with Trace() as trace:
        run.step(rows(rank, 1, 8, VOCAB))
    table = run.model.lm_head.weight.numel()
    return max(e.numel for e in trace.events if e.kind == "reduce_scatter"), table


def test_f4_two_vocabulary_tables_are_never_in_one_reduction():
    for largest, table in run_ranks(2, _largest_reduction):
        assert table <= largest < 1.1 * table


def _freeze_all_but_head(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name == "lm_head.weight")


def _freeze_every_second(model):
    for i, (_, p) in enumerate(model.named_parameters()):
        p.requires_grad_(i % 2 == 0)


def _frozen(rank, prepare, zero, recompute):
    run = _run(Degrees(dp_shard=2), prepare=prepare, zero=zero, recompute=recompute)
    run.step(rows(rank, 2, 8, VOCAB))
    grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in run.named_parameters()}
    resident = [n for n, p in run.named_parameters() if not isinstance(p, DTensor)]
    return grads, resident, run.grad_norm().item()


@pytest.mark.parametrize(("zero", "recompute"), [(3, "none"), (1, "none"), (3, "block")])
@pytest.mark.parametrize("prepare", [_freeze_all_but_head, _freeze_every_second])
def test_f5_f15_frozen_parameters_have_no_gradient_and_are_freed(prepare, zero, recompute):
    """F15: recomputation needs them again after they were freed."""
    _, want = _alone([rows(rank, 2, 8, VOCAB) for rank in range(2)], prepare=prepare)
    norm = torch.cat([g.flatten() for g in want.values() if g is not None]).norm().item()
    for grads, resident, got_norm in run_ranks(2, _frozen, prepare, zero, recompute):
        assert {n for n, g in grads.items() if g is None} == {n for n, g in want.items() if g is None}
        assert_same_gradients(grads, want, tol=1e-5)
        assert not resident, "whole parameters stayed after backward"
        assert math.isclose(got_norm, norm, rel_tol=1e-5)


def test_f8_one_reduction_per_window_or_one_per_micro_batch():
    window = run_ranks(2, _count, Degrees(dp_shard=2), 3, "window", 4)
    each = run_ranks(2, _count, Degrees(dp_shard=2), 3, "microbatch", 4)
    assert each[0][0][0][1] == 4 * window[0][0][0][1]


def _narrow(model):
    """A parameter of one row and one of 17 columns beside the others."""
    layer = model.model.layers[0].mlp
    layer.gate_proj = _Bottleneck(layer.gate_proj)


class _Bottleneck(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        generator = torch.Generator().manual_seed(3)
        self.down = nn.Parameter(torch.randn(1, linear.in_features, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(linear.out_features, 1, generator=generator) * 0.1)

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)


def _empty_shards(rank, folder):
    run = _run(Degrees(dp_shard=4), prepare=_narrow)
    held = run.model.model.layers[0].mlp.gate_proj.down
    rows_here = held.to_local(grad_placements=held.placements).shape[0]
    run.step(rows(rank, 2, 8, VOCAB))
    grads = run.full_gradients()
    norm = run.clip_grad_norm_(1e9).item()
    for optim in (torch.optim.SGD(run.parameters(), lr=0.1), torch.optim.AdamW(run.parameters(), lr=1e-3)):
        optim.step()
    finite = all(p.isfinite().all().item() for p in run.full_parameters().values())
    return rows_here, grads, norm, finite


def test_f12_f14_ranks_without_a_row_of_a_parameter_step_and_clip():
    """F12: a (1, 64) weight on 4 ranks leaves three without a row. F14: an adapter is sharded with its layer."""
    _, want = _alone([rows(rank, 2, 8, VOCAB) for rank in range(4)], prepare=_narrow)
    norm = torch.cat([g.flatten() for g in want.values()]).norm().item()
    results = run_ranks(4, _empty_shards, "")
    assert [r[0] for r in results] == [1, 0, 0, 0]
    for _, grads, got_norm, finite in results:
        assert_same_gradients(grads, want, tol=1e-5)
        assert math.isclose(got_norm, norm, rel_tol=1e-5) and finite


def _optimizers(rank, kind):
    run = _run(Degrees(dp_replicate=2, dp_shard=2))
    optim = torch.optim.AdamW(run.parameters(), lr=1e-2, weight_decay=0.1, **kind)
    run.step(rows(rank, 2, 8, VOCAB))
    optim.step()
    return run.full_parameters()


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_f13_every_implementation_of_adamw_steps_and_replicas_stay_equal(kind):
    results = run_ranks(4, _optimizers, kind)
    base = run_ranks(4, _optimizers, {})
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results[1:]), f"{name} differs between ranks"
        torch.testing.assert_close(value, base[0][name], rtol=1e-4, atol=1e-6)


# --- M: unequal work


def _five_and_one(rank, zero, grad_reduce):
    run = _run(Degrees(dp_shard=2), zero=zero, grad_reduce=grad_reduce)
    run.step([rows(10 * rank + n, 1, 6 + n, VOCAB) for n in range(5 if rank == 0 else 1)])
    return run.full_gradients()


@pytest.mark.parametrize("zero, grad_reduce", [(3, "microbatch"), (3, "window"), (1, "window")])
def test_m3_five_micro_batches_beside_one_finish_and_are_exact(zero, grad_reduce):
    window = [rows(10 * rank + n, 1, 6 + n, VOCAB) for rank, count in ((0, 5), (1, 1)) for n in range(count)]
    _, want = _alone(window)
    for got in run_ranks(2, _five_and_one, zero, grad_reduce):
        assert_same_gradients(got, want, tol=1e-5)


def _conditional(model):
    model.model.layers[1].mlp = _Sometimes(model.model.layers[1].mlp)


class _Sometimes(nn.Module):
    """A branch that only rows with an even first value take: on some ranks it is never used."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.extra = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x):
        out = self.mlp(x)
        return out + self.extra * x if x.shape[1] % 2 == 0 else out


def _branch(rank):
    run = _run(Degrees(dp_shard=2), prepare=_conditional)
    run.step(rows(rank, 2, 8 + rank, VOCAB))  # an even length on rank 0, an odd one on rank 1
    return run.full_gradients()


def test_m5_a_branch_taken_on_one_rank_only_does_not_hang_and_is_exact():
    _, want = _alone([rows(rank, 2, 8 + rank, VOCAB) for rank in range(2)], prepare=_conditional)
    for got in run_ranks(2, _branch):
        assert_same_gradients(got, want, tol=1e-5)
