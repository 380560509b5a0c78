"""`Run`: what every method gives on several ranks."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import run_ranks
from tests.parity import rows

TINY = {"num_hidden_layers": 2}


def _run(family="llama", degrees=None, model=None, **options):
    made = tiny_model(family, **{**TINY, **(model or {})})
    degrees = degrees or Degrees(dp_shard=2)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


# --- looking at a model


def _look(rank):
    run = _run(zero=2)
    alone = tiny_model("llama", **TINY).eval()
    run.model.train()
    run.model.model.norm.eval()  # a mixed mode must come back as it was
    batch = rows(rank, 2 + rank, 5 + rank, VOCAB)
    logits = run.logits(batch)
    want = alone(batch["input_ids"], use_cache=False).logits
    modes = (run.model.training, run.model.model.norm.training)
    sharded = all(p.to_local(grad_placements=p.placements).numel() * 2 == p.numel() for p in run.parameters())
    empty = run.logits({"input_ids": torch.zeros(0 if rank else 1, 4, dtype=torch.long)})
    batches = [rows(10 + i, 2, 6 + i, VOCAB) for i in range(3 if rank else 1)]
    loss, tokens = run.evaluate(iter(batches))
    every = [rows(10 + i, 2, 6 + i, VOCAB) for n in (1, 3) for i in range(n)]
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in every)
    total = sum(alone(**b, use_cache=False, num_items_in_batch=count).loss.item() for b in every)
    grads = all(p.grad is None for p in run.parameters())
    return (logits - want).abs().max().item(), modes, sharded, tuple(empty.shape), (loss, tokens), (total, count), grads


def test_logits_and_evaluate_are_those_of_one_process_and_leave_no_trace():
    for rank, (error, modes, sharded, empty, got, want, grads) in enumerate(run_ranks(2, _look)):
        assert error < 1e-5
        assert modes == (True, False)
        assert sharded, "parameters stayed gathered after looking"
        assert empty == (1 - rank, 4, VOCAB)
        assert got[1] == want[1] and math.isclose(got[0], want[0], rel_tol=1e-6)
        assert grads, "evaluation left gradients"


def _evaluate_with(rank, microbatches):
    return _run(microbatches=microbatches).evaluate([rows(rank, 4, 8, VOCAB)])


def test_evaluation_does_not_depend_on_micro_batches():
    """Field fault L21."""
    one, four = (run_ranks(2, _evaluate_with, m) for m in (1, 4))
    assert one[0][1] == four[0][1] and math.isclose(one[0][0], four[0][0], rel_tol=1e-6)
    assert one[0] == one[1]


def _nothing_to_evaluate(rank):
    run = _run()
    return run.evaluate([]), run.evaluate([rows(0, 1, 4, VOCAB, supervised=0.0)])


def test_evaluating_nothing_is_defined():
    assert run_ranks(2, _nothing_to_evaluate) == [((0.0, 0), (0.0, 0))] * 2


# --- steps


def _accumulate(rank):
    run = _run()
    a, b = rows(rank, 2, 8, VOCAB), rows(rank + 7, 2, 8, VOCAB)
    run.step(a)
    first = run.full_gradients()
    run.step(b)
    both = run.full_gradients()
    for p in run.parameters():
        p.grad = None
    zero = run.full_gradients()
    run.step(b)
    second = run.full_gradients()
    worst = max((both[n] - first[n] - second[n]).abs().max().item() for n in both)
    return worst, all((z == 0).all().item() for z in zero.values()), set(zero) == set(run.full_parameters())


def test_step_adds_to_gradients_and_never_zeroes_them():
    for worst, zero, names in run_ranks(2, _accumulate):
        assert worst < 1e-6 and zero and names


def _custom(rank):
    run = _run(microbatches=3)
    batch = rows(rank, 2, 8, VOCAB)  # two rows in three parts: one is empty
    seen = []

    def twice(logits, labels):
        seen.append((tuple(logits.shape), tuple(labels.shape)))
        return 2 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    plain = run.step(batch).item()
    grads = run.full_gradients()
    for p in run.parameters():
        p.grad = None
    loss = run.step(batch, loss=twice).item()
    worst = max((g - 2 * grads[n]).abs().max().item() for n, g in run.full_gradients().items())
    return plain, loss, worst, seen


def test_a_custom_loss_replaces_cross_entropy():
    results = run_ranks(2, _custom)
    for plain, loss, worst, seen in results:
        assert math.isclose(loss, 2 * plain, rel_tol=1e-6) and worst < 1e-6
        assert seen == [((1, 8, VOCAB), (1, 8))] * 2
    assert results[0][:2] == results[1][:2], "ranks disagree on the loss"


def _nothing_supervised(rank):
    run = _run()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = run.step(rows(rank, 2, 8, VOCAB, supervised=0.0))
    zero = all((g == 0).all().item() for g in run.full_gradients().values())
    return (
        loss.item(),
        zero,
        run.clip_grad_norm_(1.0).item(),
        any("no supervised token" in str(w.message) for w in said),
    )


def test_no_supervised_token_anywhere_gives_zeros_and_a_warning():
    """Field faults L14, L16: 0 and never NaN."""
    assert run_ranks(2, _nothing_supervised) == [(0.0, True, 0.0, True)] * 2


def _dropout(rank, seed):
    torch.manual_seed(seed)
    run = _run("gpt2", model=dict(resid_pdrop=0.3, embd_pdrop=0.3))
    same = rows(0, 2, 8, VOCAB)
    state = torch.get_rng_state()
    masks = []
    run.model.transformer.drop.register_forward_hook(lambda m, a, out: masks.append((out == 0).clone()))
    run.step(same)
    run.step(same)
    return masks, torch.equal(state, torch.get_rng_state())


def test_dropout_differs_between_data_ranks_and_windows_and_repeats_with_the_seed():
    first = run_ranks(2, _dropout, 1)
    again = run_ranks(2, _dropout, 1)
    other = run_ranks(2, _dropout, 2)
    for (masks, untouched), (repeated, _), (others, _) in zip(first, again, other):
        assert untouched
        assert all(torch.equal(a, b) for a, b in zip(masks, repeated))
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], others[0])
    assert not torch.equal(first[0][0][0], first[1][0][0])


def _clip(rank):
    run = _run(degrees=Degrees(dp_replicate=2, dp_shard=2))
    run.step(rows(rank, 2, 8, VOCAB))
    before = run.grad_norm().item()
    returned = run.clip_grad_norm_(before / 4).item()
    full = torch.cat([g.flatten() for g in run.full_gradients().values()]).norm().item()
    try:
        run.clip_grad_norm_(0.0)
        said = ""
    except PlanError as error:
        said = str(error)
    return before, returned, run.grad_norm().item(), full, said


def test_clipping_scales_to_the_norm_and_returns_the_old_one():
    results = run_ranks(4, _clip)
    assert len(set(results)) == 1
    before, returned, after, full, said = results[0]
    assert (
        before == returned and math.isclose(after, before / 4, rel_tol=1e-4) and math.isclose(full, after, rel_tol=1e-5)
    )
    assert "max_norm=0.0" in said


def _called_by_hand(rank, zero, grad):
    run = _run(zero=zero)
    alone = tiny_model("llama", **TINY)
    optim, optim_alone = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (run, alone))
    batches = [rows(r, 2, 8, VOCAB) for r in range(2)]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    worst = []
    for _ in range(2):
        run.step(batches[rank])
        for b in batches:
            alone(**b, use_cache=False, num_items_in_batch=tokens).loss.backward()
        for each in (optim, optim_alone):
            with torch.set_grad_enabled(grad):  # what it gathers must not outlive the optimizer's step
                run.model(input_ids=batches[rank]["input_ids"], use_cache=False)
            each.step()
            each.zero_grad()
        ids = batches[rank]["input_ids"]
        with torch.no_grad():
            got, want = (m(input_ids=ids, use_cache=False).logits for m in (run.model, alone))
        worst.append((got - want).abs().max().item())
    return max(worst)


@pytest.mark.parametrize("zero, grad", [(3, False), (2, False), (2, True)])
def test_the_model_can_be_called_by_hand_and_never_sees_old_weights(zero, grad):
    assert max(run_ranks(2, _called_by_hand, zero, grad)) < 1e-4


def _looked_up_after_a_forward(rank, zero, generate):
    run = _run(zero=zero)
    ids = rows(rank, 1, 4, VOCAB)["input_ids"]

    def by_hand():
        if generate:
            run.model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        else:
            run.model(input_ids=ids, use_cache=False)

    by_hand()
    optim = torch.optim.SGD(run.parameters(), lr=0.1)  # must hold what is trained
    before = run.full_parameters()
    run.step(rows(rank, 2, 8, VOCAB))
    norm = run.grad_norm().item()
    by_hand()
    seen = run.grad_norm().item(), run.clip_grad_norm_(norm / 2).item()
    grads = run.full_gradients()
    optim.step()
    after = run.full_parameters()
    still = [n for n in after if torch.equal(after[n], before[n])]
    full = torch.cat([g.flatten() for g in grads.values()]).norm().item()
    return norm, seen, full, still


@pytest.mark.parametrize("zero, generate", [(3, False), (2, False), (2, True)])
def test_norm_clip_and_optimizer_see_the_stored_parameters_after_a_forward_by_hand(zero, generate):
    for norm, seen, full, still in run_ranks(2, _looked_up_after_a_forward, zero, generate):
        assert seen == (norm, norm)
        assert math.isclose(full, norm / 2, rel_tol=1e-4)
        assert not still, "the optimizer holds parameters that no step trains"
