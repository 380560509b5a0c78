"""What a `Run` gives to experts and takes from them: a style of the user's own, wrong routings, loads, no warnings."""

from __future__ import annotations

import warnings

import pytest
import torch

from dtensor_5d import Degrees, ExpertParallel, PlanError, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import fails_on_ranks, run_ranks
from tests.parity import Case, check_parity, rows

TINY = {"num_hidden_layers": 2}
EP2 = Degrees(dp_shard=2, ep=2)
OWN = {"ep": {"model.layers.*.mlp.experts": ExpertParallel(dispatch="all_gather")}}


def _run(degrees, family="qwen3_moe", model=None, **options):
    made = tiny_model(family, **{**TINY, **(model or {})})
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


@pytest.mark.parametrize("sequence", [True, False])
def test_a_style_of_ones_own_knows_the_ranks_with_the_same_tokens(sequence):
    check_parity(Case("qwen3_moe", Degrees(tp=2, ep=2), {"sequence_parallel": sequence, "rules": OWN}, TINY))


def _routed_wrong(run, rank, bad):
    """Rank `bad` chooses experts that are not there; returns what undoes it."""
    gate = dict(run.model.named_modules())["model.layers.1.mlp.gate"]
    forward = gate.forward

    def wrong(hidden):
        logits, weights, index = forward(hidden)
        return logits, weights, index + 8 * (rank == bad)

    gate.forward = wrong
    return lambda: setattr(gate, "forward", forward)


def _own_style(rank):
    run = _run(Degrees(dp_shard=4, ep=2), rules=OWN)
    _routed_wrong(run, rank, bad=3)
    run.step(rows(rank, 2, 8, VOCAB))


def test_a_wrong_routing_names_its_rank_also_under_a_style_of_ones_own():
    fails_on_ranks(4, _own_style, error=ValueError, match="rank 3 has the router index")


def _by_hand(rank):
    run = _run(EP2)
    undo = _routed_wrong(run, rank, bad=1)
    with pytest.raises(ValueError, match="rank 1 has the router index"):
        run.model(input_ids=rows(rank, 2, 8, VOCAB)["input_ids"], use_cache=False)
    with pytest.raises(ValueError, match="rank 1 has the router index"):
        run.logits(rows(rank, 2, 8, VOCAB))
    undo()
    assert run.step(rows(rank, 2, 8, VOCAB)).isfinite()


def test_a_wrong_routing_by_hand_is_told_at_once_and_not_later():
    run_ranks(2, _by_hand)


def _load(rank, degrees):
    run = _run(degrees, "llama4_text", {"num_hidden_layers": 4}, recompute="block")
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    return run.expert_load()


@pytest.mark.parametrize("degrees", [Degrees(dp_shard=2), EP2], ids=str)
def test_the_load_of_experts_that_take_no_indices(degrees):
    model, want = tiny_model("llama4_text", num_hidden_layers=4), {}
    for name in ("model.layers.1.feed_forward", "model.layers.3.feed_forward"):
        def note(router, args, out, name=name + ".experts"):
            chosen = out[1].topk(router.top_k, dim=1).indices.flatten()
            want[name] = want.get(name, 0) + torch.bincount(chosen, minlength=out[1].size(1))

        model.get_submodule(name + ".router").register_forward_hook(note)
    for rank in range(2):
        model(input_ids=rows(rank, 2, 8, VOCAB)["input_ids"], use_cache=False)
    for got in run_ranks(2, _load, degrees):
        assert got.keys() == want.keys()
        for name, load in got.items():
            assert torch.equal(load, want[name]), name


def _quiet(rank):
    run = _run(Degrees(tp=2, ep=2), sequence_parallel=False, precision="fp32")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.step(rows(0, 2, 8, VOCAB))
    return [str(w.message) for w in seen if "view" in str(w.message)]


def test_fsdp_does_not_warn_of_views():
    assert run_ranks(2, _quiet) == [[], []]


@pytest.mark.parametrize("capacity", [float("inf"), float("nan"), 0.0])
def test_a_capacity_must_be_a_number_of_rows(capacity):
    with pytest.raises(PlanError, match="must be > 0 and finite"):
        ExpertParallel(capacity=capacity)
