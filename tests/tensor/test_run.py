"""`Run` on a mesh with a tensor axis: lengths, agreement of peers, looking, user losses, models called by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import Case, check_parity, rows
from tests.traces import Trace

TINY = {"num_hidden_layers": 2}


def _run(family="llama", degrees=None, model=None, **options):
    made = tiny_model(family, **{**TINY, **(model or {})})
    degrees = degrees or Degrees(tp=2)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _alone(window, family="llama", **model):
    made = tiny_model(family, **{**TINY, **model})
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    loss = sum(made(**b, use_cache=False, num_items_in_batch=tokens).loss for b in window)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in made.named_parameters()}


# --- lengths


def _odd_lengths(step, rank, vocab):
    return [rows(100 * step + rank, 2, (15, 1, 3)[step] + 4 * (step == 1), vocab)]


@pytest.mark.parametrize(
    "family", ["gpt2", "mixtral", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "gemma2", "opt"))]
)
def test_t18_lengths_that_tp_does_not_divide_are_padded_inside(family):
    check_parity(Case(family, Degrees(tp=4), {}, {**TINY, "num_key_value_heads": 4}, batches=_odd_lengths))


def _packed(step, rank, vocab):
    batch = rows(100 * step + rank, 2, 13, vocab)
    lengths = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])
    positions = torch.tensor([[*range(5), *range(8)], [*range(9), *range(4)]])
    batch["labels"][:, 0] = -100
    batch["labels"][lengths.diff(dim=1, prepend=lengths[:, :1]) != 0] = -100
    return [batch | {"position_ids": positions}]


def test_packed_rows_of_an_odd_length():
    check_parity(Case("qwen3", Degrees(dp_shard=2, tp=2), {}, TINY, batches=_packed))


def _at_the_last_position(rank):
    run = _run("gpt2", model={"n_positions": 13})
    run.step(rows(0, 2, 13, VOCAB))
    return run.full_gradients()


def test_padding_needs_no_position_that_the_model_has_not():
    _, want = _alone([rows(0, 2, 13, VOCAB)], "gpt2", n_positions=13)
    for got in run_ranks(2, _at_the_last_position):
        assert_same_gradients(got, want, tol=1e-5)


# --- peers agree


def _different_rows(rank):
    run = _run(degrees=Degrees(dp_shard=2, tp=2))
    run.step(rows(rank, 2, 8, VOCAB))


def test_peers_that_read_different_rows_are_told_on_every_rank():
    said = fails_on_ranks(4, _different_rows, error=PlanError, match="other rows on rank 1 than on rank 0")
    assert "data_rank 0 of 2" in str(said[3])


def _same_multiset(rank):
    """The same ids in another order: what a sum of ids would not see."""
    run = _run()
    batch = rows(0, 2, 8, VOCAB, supervised=1.0)
    run.step({key: value.flip(1) if rank else value for key, value in batch.items()})


def test_peers_with_the_same_ids_in_another_order():
    fails_on_ranks(2, _same_multiset, error=PlanError, match="other rows on rank 1")


def _sum_of_tokens(rank, degrees):
    run = _run(degrees=degrees)
    batch = rows(run.data_rank, 2, 8, VOCAB)
    loss = run.step(batch).item()
    return loss, run.evaluate([batch]), run.grad_norm().item(), (run.data_rank, run.data_size), run.sequence_multiple


def test_l1_one_batch_on_every_mesh_gives_one_loss_and_norm():
    window = [rows(n, 2, 8, VOCAB) for n in range(2)]
    loss, grads = _alone(window)
    norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    for degrees in (Degrees(dp_shard=2, tp=2), Degrees(dp_replicate=2, tp=2), Degrees(dp_shard=2)):
        for rank, (got, (mean, count), got_norm, share, multiple) in enumerate(
            run_ranks(degrees.world_size, _sum_of_tokens, degrees)
        ):
            assert math.isclose(got, loss, rel_tol=1e-5) and math.isclose(mean, loss, rel_tol=1e-5)
            assert count == tokens and math.isclose(got_norm, norm, rel_tol=1e-5)
            assert share == (rank // degrees.tp, 2) and multiple == degrees.tp


def _cancelling(rank):
    """+1, -2, +1 in a row: what a sum over ids times places would not see."""
    run = _run()
    ids = torch.arange(20, 36).view(2, 8)
    change = torch.tensor([[0, 0, 1, -2, 1, 0, 0, 0], [0] * 8]) * rank
    run.step({"input_ids": ids + change, "labels": ids})


def test_peers_with_changes_that_cancel_in_a_sum():
    fails_on_ranks(2, _cancelling, error=PlanError, match="other rows on rank 1")


# --- other ways through the model


def _my_loss(logits, labels):
    assert logits.shape[-1] == 125
    keep = labels != -100
    return F.cross_entropy(logits[keep], labels[keep], reduction="sum", label_smoothing=0.1)


def _with_a_loss_of_ones_own(rank):
    run = _run(model={"vocab_size": 125})
    run.step(rows(0, 2, 8, 125), loss=_my_loss)
    return run.full_gradients()


def test_l24_a_loss_of_ones_own_sees_the_whole_vocabulary():
    """Label smoothing: what a loss over a cut vocabulary would silently get wrong."""
    made = tiny_model("llama", **TINY, vocab_size=125)
    batch = rows(0, 2, 8, 125)
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = _my_loss(made(batch["input_ids"], use_cache=False).logits, shifted) / (shifted != -100).sum()
    loss.backward()
    want = {n: p.grad for n, p in made.named_parameters()}
    for got in run_ranks(2, _with_a_loss_of_ones_own):
        assert_same_gradients(got, want, tol=1e-5)


def _by_hand(rank, family, sequence, lengths, degrees):
    run = _run(family, degrees, sequence_parallel=sequence)
    for length in lengths:  # gradients add up
        run.model(**rows(0, 2, length, VOCAB), use_cache=False).loss.backward()
    return run.full_gradients()


@pytest.mark.parametrize(
    "family, sequence, lengths",
    [("qwen3", True, (8, 8)), ("qwen3", True, (7, 8)), ("deepseek_v2", True, (1, 5)), ("qwen3_moe", False, (8, 8)),
     ("qwen3_moe", True, (7, 8))],
)  # fmt: skip
def test_the_model_called_by_hand_is_exact_too(family, sequence, lengths):
    """Norms and routers sum their gradients at once where no window does it for them; tokens whose number tp does not
    divide stay whole, and go to their experts once."""
    every = [_alone([rows(0, 2, length, VOCAB, supervised=0.8)], family)[1] for length in lengths]
    for degrees in (Degrees(tp=2), Degrees(tp=2, ep=2))[: 2 if family == "qwen3_moe" else 1]:
        for got in run_ranks(2, _by_hand, family, sequence, lengths, degrees):
            assert_same_gradients(got, {n: sum(grads[n] for grads in every) for n in got}, tol=1e-5)


def _routers_by_hand(rank, masked):
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    alone = tiny_model("mixtral", **TINY, **asked)
    run = _run("mixtral", Degrees(tp=2), model=asked)
    batch = rows(0, 2, 8, VOCAB)
    if masked:
        mask = torch.ones(2, 8, dtype=torch.long)
        mask[1, 6:] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].where(mask.bool(), -100)}
    found, want = (model(**batch, use_cache=False) for model in (run.model, alone))
    for out in (found, want):
        out.loss.backward()
    assert abs(found.aux_loss - want.aux_loss) < 1e-5
    for got, expected in zip(found.router_logits, want.router_logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert abs(found.loss.item() - want.loss.item()) < 1e-5
    assert_same_gradients(run.full_gradients(), {n: p.grad for n, p in alone.named_parameters()}, tol=1e-5)
    # The next window cuts tokens again.
    with Trace() as trace:
        run.step(batch)
    assert any(event.kind == "reduce_scatter" for event in trace.events)


@pytest.mark.parametrize("masked", [False, True])
def test_an_auxiliary_loss_of_a_forward_by_hand_is_of_all_tokens(masked):
    run_ranks(2, _routers_by_hand, masked)


def _generated(rank, family, degrees):
    run = _run(family, degrees)
    ids = rows(0, 2, 7, VOCAB)["input_ids"]
    first = run.model.eval().generate(ids, max_new_tokens=5, do_sample=False)
    run.step(rows(run.data_rank, 2, 8, VOCAB))  # the window that follows is cut again
    return first, run.full_gradients()


@pytest.mark.parametrize("family, degrees", [("llama", Degrees(tp=2)), ("gpt2", Degrees(dp_shard=2, tp=2))], ids=str)
def test_the_model_generates(family, degrees):
    """Prompts and steps (1 token) of lengths that tp does not divide."""
    ids = rows(0, 2, 7, VOCAB)["input_ids"]
    want = tiny_model(family, **TINY).eval().generate(ids, max_new_tokens=5, do_sample=False)
    _, grads = _alone([rows(r, 2, 8, VOCAB) for r in range(degrees.data)], family)
    for got, got_grads in run_ranks(degrees.world_size, _generated, family, degrees):
        assert torch.equal(got, want)
        assert_same_gradients(got_grads, grads, tol=1e-5)


def _twice(rank):
    run = _run()
    parallelize(run.model, run.plan, run.mesh)


def test_a_model_that_is_cut_already_is_refused():
    fails_on_ranks(2, _twice, error=PlanError, match="DTensors .model.embed_tokens.weight.*build the model anew")


def _two_windows(rank):
    run = _run("qwen3", degrees=Degrees(dp_shard=2, tp=2), zero=1)
    for n in range(2):
        run.step(rows(10 * n + run.data_rank, 2, 8, VOCAB, supervised=1.0))
    return run.full_gradients()


def test_a_second_window_adds_to_gradients_that_are_summed_already():
    grads = [_alone([rows(10 * n + r, 2, 8, VOCAB, supervised=1.0) for r in range(2)], "qwen3")[1] for n in range(2)]
    want = {name: grads[0][name] + grads[1][name] for name in grads[0]}
    for got in run_ranks(4, _two_windows):
        assert_same_gradients(got, want, tol=1e-5)


# --- chunked loss over a cut vocabulary


def _long(step, rank, vocab):
    """More tokens than one chunk of the loss."""
    return [rows(100 * step + rank, 5, 128, vocab)]


@pytest.mark.parametrize(
    "family, degrees, options",
    [
        ("gemma2", Degrees(tp=2), {"sequence_parallel": True}),  # soft-cap
        ("cohere", Degrees(dp_shard=2, tp=2), {"sequence_parallel": False, "zero": 3}),  # scale
        ("granite", Degrees(dp_shard=2, tp=2), {"zero": 2, "grad_reduce": "window"}),  # scale
        ("llama", Degrees(dp_replicate=2, tp=2), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_logits_chunk_by_chunk_over_a_cut_vocabulary(family, degrees, options, tied):
    model = {**TINY, "tie_word_embeddings": tied, "vocab_size": 125}
    check_parity(Case(family, degrees, options, model, batches=_long))
