"""Pipelines that are refused, and failures that are reported."""

from __future__ import annotations

import copy
import time

import pytest
import torch

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.pipeline.transport import PipelineError
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import rows
from tests.pipeline.test_run import _alone, _run


def _plan(degrees, family="llama", **options):
    return plan_for(tiny_config(family), degrees, **options)


@pytest.mark.parametrize(
    "degrees, options, words",
    [
        (Degrees(pp=8), {}, "8 pipeline stages for 4 layers"),
        (Degrees(pp=4), {"schedule": "zbv"}, "8 pipeline stages for 4 layers"),
        (Degrees(pp=2), {"layers_per_stage": [1, 2]}, r"layers_per_stage=\[1, 2\] \(sum 3\).*2 numbers.* the 4"),
        (Degrees(pp=2), {"layers_per_stage": [1, 1, 2]}, "2 numbers"),
        (Degrees(pp=2), {"schedule": "dualpipe"}, "dualpipev"),
        (Degrees(pp=2), {"schedule": "dualpipev", "microbatches": 2}, "at least 2 for each rank: 4"),
        (Degrees(pp=2), {"schedule": "zbv", "chunks": 3}, "chunks=3"),
        (Degrees(), {"schedule": "zbv"}, "no stages on 1 rank"),
        (Degrees(pp=2), {"rules": {"pp": {"model.layers.0": "stage 1"}}}, "layers_per_stage"),
    ],
)
def test_what_cannot_be_planned_is_refused(degrees, options, words):
    """Field faults P7, P17, P18."""
    with pytest.raises(PlanError, match=words):
        _plan(degrees, **options)


def _open_degrees(rank):
    made = tiny_model("llama", num_hidden_layers=1)
    plan = plan_for(made, Degrees(pp=-1))
    parallelize(made, plan, build_mesh(Degrees(pp=-1), "cpu"))


def test_open_degrees_are_checked_when_they_are_known():
    fails_on_ranks(2, _open_degrees, error=PlanError, match="2 pipeline stages for 1 layers")


def _wrong_on_one_rank(rank, wrong):
    run = _run(degrees=Degrees(pp=2, dp_shard=2))
    batch = rows(run.data_rank, 2, 8, VOCAB)
    if rank == wrong:
        batch["input_ids"][0, 0] = VOCAB
    with pytest.raises(PlanError):
        run.step(batch)
    # A batch with fewer rows than micro-batches, on one rank only: exact (the parity tests), and no hang here.
    assert run.step(rows(run.data_rank, 1 + 3 * (run.data_rank == 1), 8, VOCAB)).isfinite()


def test_a_wrong_batch_on_one_rank_is_every_ranks_error_before_the_first_send():
    run_ranks(4, _wrong_on_one_rank, 3)


def _dies(rank):
    run = _run(schedule="1f1b")
    run.step(rows(0, 4, 8, VOCAB))
    if rank == 1:
        import os

        os._exit(0)
    time.sleep(0.5)
    # The ranks agree on a window before it starts; what follows is a window whose peer is gone.
    micro = run._parts.reader._cut(rows(0, 4, 8, VOCAB), True, 4)
    said = "0RECV_B0: the gradient of micro-batch 0 for stage 0 did not come from rank 1"
    with pytest.raises(PipelineError, match=said):
        run._parts.engine.train(micro, 1, 10, None)
    raise ValueError("reported")


def test_a_dead_rank_is_reported_with_action_micro_batch_and_peer():
    from tests.harness import pool

    outcome = pool().run(2, _dies, (), 60.0)[0]
    assert isinstance(outcome.error, ValueError) and "reported" in str(outcome.error), outcome


def _failing_loss(rank):
    run = _run(schedule="zbv")

    def broken(logits, labels):
        raise KeyError("mine")

    with pytest.raises((KeyError, PlanError), match="mine"):
        run.step(rows(0, 4, 8, VOCAB), loss=broken)
    for p in run.parameters():
        p.grad = None
    run.step(rows(0, 4, 8, VOCAB), loss=lambda logits, labels: torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100))  # fmt: skip
    return run.full_gradients()


def test_a_loss_that_fails_is_every_ranks_error_and_the_next_window_is_clean():
    made, _ = _alone([rows(0, 4, 8, VOCAB)])
    for got in run_ranks(2, _failing_loss):
        assert_same_gradients(got, {n: p.grad for n, p in made.named_parameters()}, tol=1e-5)


def test_the_plan_shows_who_has_what():
    text = str(_plan(Degrees(pp=2), schedule="zbv", microbatches=4))
    for part in ("model.layers.{0..0}", "stage 3 on rank 0", "model.embed_tokens", "lm_head"):
        assert part in text
    assert copy.deepcopy(_plan(Degrees(pp=2))).rules["pp"]
