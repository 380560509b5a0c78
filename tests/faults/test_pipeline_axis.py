"""Rows of the collection of field faults whose axes name PP, and F8. Each test names its row.

Rows that are proved elsewhere: P3, P7, P10, P15, P17, P18, P20, P21, P22, P23, P28, F8, I2, L21 by
tests/pipeline/test_run.py; P11, P21, Q11 by tests/pipeline/test_split.py; P19, P24 by tests/pipeline/test_parity.py; P8
by tests/schedule/test_check.py (every schedule is simulated with unbuffered sends); P27, Q9, Q10 by tests/schedule;
F17, Q3, Q5 by tests/planner/test_pipeline_memory.py. K7: optimizer states are not in a Hugging Face folder. E10 by
tests/expert/test_balanced_runs.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import Case, check_parity, rows, train


def _run(degrees=None, model=None, **options):
    made = tiny_model("llama", **(model or {}))
    degrees = degrees or Degrees(pp=2)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _alone(window):
    made = tiny_model("llama")
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    for batch in window:
        made(**batch, use_cache=False, num_items_in_batch=tokens).loss.backward()
    return {n: p.grad for n, p in made.named_parameters()}


def _gradients(rank, microbatches, schedule):
    run = _run(microbatches=microbatches, schedule=schedule)
    batch = rows(3, 4, 10, VOCAB, supervised=0.3)
    run.step(batch)
    return run.full_gradients(), run.grad_norm().item()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_p2_p3_gradients_do_not_depend_on_how_a_batch_is_cut(schedule):
    """Unequal supervised tokens in each micro-batch: one divisor, applied before backward."""
    want = _alone([rows(3, 4, 10, VOCAB, supervised=0.3)])
    norm = torch.cat([g.flatten().double() for g in want.values()]).norm().item()
    for microbatches in (2, 4):
        for got, found in run_ranks(2, _gradients, microbatches, schedule):
            assert_same_gradients(got, want, tol=1e-5)
            assert abs(found - norm) < 1e-5 * norm  # N6: the norm is that of all stages


def _reduced(rank):
    run = _run(Degrees(pp=2, dp_shard=2), schedule="zb-h1", microbatches=2, zero=2)
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    waiting = run._parts.engine.store.waiting
    state = torch.distributed.fsdp.fully_shard.state(run.model)
    events = [group._post_reduce_event for s in state._state_ctx.all_states for group in s._fsdp_param_groups]
    return waiting, events, run.full_gradients()


def test_p4_p5_split_gradients_are_reduced_and_waited_for():
    """P4: autograd's hooks see no deferred gradient; P5: the final callback of FSDP2 has run when `step` returns."""
    want = _alone([rows(0, 2, 8, VOCAB), rows(1, 2, 8, VOCAB)])
    for waiting, events, got in run_ranks(4, _reduced):
        assert waiting == () and set(events) == {None}
        assert_same_gradients(got, want, tol=1e-5)


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev"])
def test_p9_several_messages_are_on_their_way_between_two_ranks(schedule):
    """gloo, 2 ranks with 2 chunks each: both directions carry hidden states and gradients."""
    check_parity(Case("llama", Degrees(pp=2), {"schedule": schedule, "microbatches": 6}, {}))


def _documents(step, rank, vocab):
    batch = rows(step, 4, 12, vocab)
    cuts = torch.tensor([[3], [7], [12], [1]])
    batch["position_ids"] = torch.where(torch.arange(12) < cuts, torch.arange(12), torch.arange(12) - cuts)
    return [batch]


def test_p12_each_micro_batch_has_its_own_documents():
    check_parity(Case("llama", Degrees(pp=2), {"microbatches": 4, "schedule": "zbv"}, {}, batches=_documents))


def _right_padded(step, rank, vocab):
    batch = rows(step, 2, 16, vocab, supervised=1.0)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 5:] = 0
    batch["labels"][0, 5:] = -100
    return [batch | {"attention_mask": mask}]


def test_p14_middle_stages_see_the_mask():
    case = Case("llama", Degrees(pp=3), {"microbatches": 2}, {"num_hidden_layers": 3}, batches=_right_padded)
    check_parity(case)
    check_parity(dataclasses.replace(case, family="gemma2"))


def _trajectory(rank):
    case = Case("llama", Degrees(pp=2, tp=2), {"schedule": "zbv", "microbatches": 2}, {})
    made = tiny_model("llama")
    run = parallelize(made, plan_for(made, case.degrees, **case.options), build_mesh(case.degrees, "cpu"))
    return [(step["loss"], step["norm"]) for step in train(run, case)["steps"]]


def test_p22_p25_loss_and_norm_are_the_same_on_every_rank():
    first, *others = run_ranks(4, _trajectory)
    assert all(other == first for other in others)
    assert all(loss > 0 and norm > 0 for loss, norm in first)


def _interrupted(rank):
    run = _run(Degrees(pp=2, dp_shard=2), schedule="zb-h1", microbatches=2, zero=3)
    batch = rows(run.data_rank, 2, 8, VOCAB)
    engine = run._parts.engine
    micro = run._parts.reader._cut(batch, True, 2)
    bomb = next(layer for layer in run.model.model.layers if any(True for _ in layer.parameters()))
    # Stage 0 fails in its first F, receives for gradients already posted; stage 1 where it waits for that.
    handle = bomb.register_forward_pre_hook(lambda *_: 1 / 0)
    receive, engine.transport.receive = engine.transport.receive, lambda message: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.train(micro, 0, 10, None)
    handle.remove()
    engine.transport.receive = receive
    for p in run.parameters():
        assert p.grad is None
    root = torch.distributed.fsdp.fully_shard.state(run.model)
    assert root._state_ctx.is_last_backward
    run.step(batch)
    return run.full_gradients()


def test_f8_a_window_that_failed_leaves_no_flag_behind():
    want = _alone([rows(0, 2, 8, VOCAB), rows(1, 2, 8, VOCAB)])
    for got in run_ranks(4, _interrupted):
        assert_same_gradients(got, want, tol=1e-5)
