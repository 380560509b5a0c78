"""`Run`: one rank's mistake is every rank's error, and what does not fit is refused before anything runs."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import rows
from tests.test_run import TINY, _run


def _wrong_on_one_rank(rank, method):
    run = _run()
    good, bad = rows(rank, 2, 8, VOCAB), {"input_ids": torch.full((2, 8), VOCAB), "labels": torch.zeros(2, 8).long()}
    batch = bad if rank == 1 else good
    if method == "evaluate":
        run.evaluate([good, batch])
    else:
        getattr(run, method)(batch)


@pytest.mark.parametrize("method", ["step", "evaluate", "logits"])
def test_one_rank_with_a_bad_batch_is_an_error_on_all(method):
    errors = fails_on_ranks(2, _wrong_on_one_rank, method, error=PlanError, match=rf"id {VOCAB}.*\[0, {VOCAB}\)")
    assert "rank 1" in str(errors[0])


def _goes_on_after_an_error(rank):
    run = _run()
    for _ in range(2):
        with contextlib.suppress(PlanError):
            run.step({"input_ids": torch.zeros(2, 8)} if rank else rows(rank, 2, 8, VOCAB))
    return run.step(rows(rank, 2, 8, VOCAB)).item()


def test_a_refused_batch_loses_nothing():
    a, b = run_ranks(2, _goes_on_after_an_error)
    assert a == b and math.isfinite(a)


def _loss_raises(rank):
    run = _run()

    def broken(logits, labels):
        raise RuntimeError("no such loss")

    said = ""
    try:
        run.step(rows(rank, 2, 8, VOCAB), loss=broken)
    except RuntimeError as error:
        said = str(error)
    for p in run.parameters():
        p.grad = None
    return said, run.step(rows(rank, 2, 8, VOCAB)).item(), _run().step(rows(rank, 2, 8, VOCAB)).item()


def test_after_an_exception_in_a_window_the_next_one_is_right():
    for said, after, fresh in run_ranks(2, _loss_raises):
        assert said == "no such loss" and after == fresh


def _on_meta(rank, method):
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(tiny_config("llama", **TINY))
    run = parallelize(model, plan_for(model, Degrees(dp_shard=2)), build_mesh(Degrees(dp_shard=2), "cpu"))
    getattr(run, method)(rows(rank, 2, 8, VOCAB))


@pytest.mark.parametrize("method", ["step", "logits", "evaluate", "save_pretrained"])
def test_a_model_without_weights_says_what_to_call(method):
    fails_on_ranks(2, _on_meta, method, error=PlanError, match=r"load_pretrained\(folder\) or run.init_weights")


def _other_weights(rank):
    model = tiny_model("llama", seed=rank, **TINY)
    parallelize(model, plan_for(model, Degrees(dp_shard=2)), build_mesh(Degrees(dp_shard=2), "cpu"))


def _other_plan(rank):
    model = tiny_model("llama", **TINY)
    parallelize(model, plan_for(model, Degrees(dp_replicate=2)), build_mesh(Degrees(dp_shard=2), "cpu"))


def _other_model(rank):
    plan = plan_for(tiny_config("qwen3", **TINY), Degrees(dp_shard=2))
    parallelize(tiny_model("llama", **TINY), plan, build_mesh(Degrees(dp_shard=2), "cpu"))


def _no_decoder(rank):
    class Linear(torch.nn.Module):
        config = tiny_config("llama")

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

    parallelize(Linear(), plan_for(tiny_config("llama"), Degrees(dp_shard=2)), build_mesh(Degrees(dp_shard=2), "cpu"))


def _no_layers(rank):
    degrees = Degrees(dp_shard=2)
    plan = plan_for(tiny_config("llama"), degrees)
    parallelize(tiny_model("llama", num_hidden_layers=0), plan, build_mesh(degrees, "cpu"))


def _other_plans(rank, option):
    degrees = Degrees(dp_shard=2)
    values = {"zero": (3, 2), "precision": (None, "bf16"), "frozen": None, "meta": None}[option]
    model = tiny_model("llama", **TINY)
    if option == "frozen" and rank:
        model.lm_head.weight.requires_grad_(False)
    if option == "meta" and rank:
        model.to("meta")
    options = {option: values[rank]} if values else {}
    parallelize(model, plan_for(model, degrees, **options), build_mesh(degrees, "cpu"))


@pytest.mark.parametrize("option", ["zero", "precision", "frozen", "meta"])
def test_ranks_that_ask_for_different_things_are_told(option):
    fails_on_ranks(2, _other_plans, option, error=PlanError, match=r"on ranks \[1\] that is not that of rank 0")


def _other_seeds(rank, seed):
    degrees = Degrees(dp_replicate=2)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", **TINY))
    run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
    run.init_weights(rank if seed == "rank" else seed)


def test_seeds_must_be_one_whole_number():
    fails_on_ranks(2, _other_seeds, "rank", error=PlanError, match="rank 1 differs")
    for seed in ("a", -1, 1.5, True, 2**64):
        fails_on_ranks(2, _other_seeds, seed, error=PlanError, match="integer in")


def _loss_fails_on_one(rank, kind):
    run = _run(microbatches=2)

    def loss(logits, labels):
        if rank == 0 or kind == "fine":
            return logits.sum() * 0
        return {"raises": lambda: 1 / 0, "float": lambda: 3.0, "vector": lambda: logits.sum((1, 2))}[kind]()

    run.step(rows(rank, 2, 8, VOCAB), loss=loss)


@pytest.mark.parametrize("kind, error", [("raises", "division"), ("float", "0-dim"), ("vector", "0-dim")])
def test_a_loss_that_fails_on_one_rank_is_an_error_on_both(kind, error):
    fails_on_ranks(2, _loss_fails_on_one, kind, error=Exception, match=error)


def _no_head(rank):
    from transformers import LlamaModel

    degrees = Degrees(dp_shard=2)
    model = LlamaModel(tiny_config("llama", **TINY))
    parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))


def _other_config(rank):
    degrees = Degrees(dp_shard=2)
    model = tiny_model("qwen3_moe", **TINY)
    model.config.router_aux_loss_coef = 0.1 * (1 + rank)
    parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))


def _half(rank):
    degrees = Degrees(dp_shard=2)
    model = tiny_model("llama", **TINY).half()
    parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))


def _all_frozen(rank):
    run = _run()
    run.model.requires_grad_(False)
    run.step(rows(rank, 2, 8, VOCAB))


def _without_gradients(rank):
    with torch.no_grad():
        _run().step(rows(rank, 2, 8, VOCAB))


def _wrong_path(rank):
    _run().save_pretrained("x" if rank == 0 else 5)


def _wrong_batches(rank):
    _run().evaluate(None if rank else [])


def _world_mismatch(rank):
    build_mesh(Degrees(dp_shard=3), "cpu")


def _wrong_on_one(rank):
    degrees = Degrees(dp_shard=2)
    model = tiny_model("llama", **TINY)
    if rank == 1:
        model.config.output_router_logits = True
    parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))


@pytest.mark.parametrize(
    "fn, words",
    [
        (_other_weights, r"ranks \[1\] differ.*init_weights\(seed\)"),
        (_other_plan, r"dp_replicate=2.*dp_shard=2"),
        (_other_model, "'qwen3'.*'llama'"),
        (_no_decoder, "no input embedding"),
        (_no_layers, "decoder layer"),
        (_world_mismatch, "multiply to 3.*world size 2"),
        (_wrong_on_one, "auxiliary loss of its routers"),
        (_no_head, "without a head"),
        (_half, "loss scaling"),
        (_other_config, "the same plan, config and parameters"),
        (_all_frozen, "all frozen"),
        (_without_gradients, "no_grad"),
        (_wrong_path, "must be a path"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(fn, words):
    fails_on_ranks(2, fn, error=PlanError, match=words)


def test_plan_for_lists_everything_that_is_wrong():
    with pytest.raises(PlanError) as caught:
        plan_for(tiny_config("llama"), Degrees(), zero=7, schedule="zbv", offload=True)
    for part in ("no stages on 1 rank", "zero=7", "zbv", "CPU offload"):
        assert part in str(caught.value)
    with pytest.raises(PlanError, match="transformers config or model"):
        plan_for({"a": 1}, Degrees())


def test_one_rank_needs_no_launcher_and_is_not_wrapped():
    assert run_ranks(1, _alone) == [False]


def _alone(rank):
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    dist.destroy_process_group()
    run = _run(degrees=Degrees())
    loss = run.step(rows(0, 2, 8, VOCAB))
    assert loss.isfinite()
    return any(isinstance(m, FSDPModule) for m in run.model.modules())


def test_evaluating_what_is_no_list_is_an_error_on_every_rank():
    fails_on_ranks(2, _wrong_batches, error=Exception, match="not iterable|NoneType")


def _bert(rank):
    from transformers import BertConfig, BertLMHeadModel

    degrees = Degrees(dp_shard=2)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertLMHeadModel(config)
    run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
    fine = run.step(rows(rank, 2, 16, VOCAB)).isfinite().item()
    try:
        run.step(rows(rank, 2, 17, VOCAB))
    except PlanError as error:
        return fine, str(error)


def test_a_table_of_token_types_is_no_table_of_positions():
    for fine, said in run_ranks(2, _bert):
        assert fine and "position 16" in said and "0 to 15" in said


def _no_units(rank):
    import json

    from dtensor_5d import Plan

    degrees = Degrees(dp_shard=2)
    model = tiny_model("llama", **TINY)
    plan = json.loads(plan_for(model, degrees).to_json())
    plan["rules"]["dp"] = {}
    run = parallelize(model, Plan.from_json(json.dumps(plan)), build_mesh(degrees, "cpu"))
    run.step(rows(rank, 2, 8, VOCAB))
    held = sum(p.to_local(grad_placements=p.placements).numel() for p in run.parameters())
    return run.full_gradients(), held, sum(p.numel() for p in run.parameters())


def test_a_plan_without_units_is_sharded_as_one():
    alone = tiny_model("llama", **TINY)
    batches = [rows(r, 2, 8, VOCAB) for r in range(2)]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    for b in batches:
        alone(**b, use_cache=False, num_items_in_batch=tokens).loss.backward()
    for grads, held, whole in run_ranks(2, _no_units):
        assert_same_gradients(grads, {n: p.grad for n, p in alone.named_parameters()}, tol=1e-5)
        assert held * 2 == whole
