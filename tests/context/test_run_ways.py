"""Other ways through a `Run` on a context axis: losses of one's own, small batches, meta, comparing, plans."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dtensor_5d import Degrees, Plan, PlanError, build_mesh, parallelize, plan_for
from tests.context.test_run import _LONG, TINY, _run
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import rows


def _my_loss(logits, labels):
    keep = labels != -100
    return F.cross_entropy(logits[keep], labels[keep], reduction="sum", label_smoothing=0.1)


def _own_loss(rank):
    run = _run()
    run.step(rows(0, 2, 9, VOCAB, supervised=0.3), loss=_my_loss)
    return run.full_gradients()


def test_a_loss_of_ones_own_gets_the_labels_of_its_tokens():
    alone, batch = tiny_model("llama", **TINY), rows(0, 2, 9, VOCAB, supervised=0.3)
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    (_my_loss(alone(batch["input_ids"], use_cache=False).logits, shifted) / (shifted != -100).sum()).backward()
    for got in run_ranks(2, _own_loss):
        assert_same_gradients(got, {n: p.grad for n, p in alone.named_parameters()}, tol=1e-5)


def _small(rank):
    run = _run(degrees=Degrees(dp_shard=2, cp=2))
    none = {"input_ids": torch.zeros(0, 5).long(), "labels": torch.zeros(0, 5).long()}
    one = rows(0, 1, 1, VOCAB)
    shapes = [tuple(run.logits(batch).shape) for batch in (none, one)]
    with pytest.warns(UserWarning, match="no supervised token"):
        loss = run.step([one, none] if run.data_rank else one)
    mean, tokens = run.evaluate([rows(9, 2, 6, VOCAB, supervised=1.0)] * run.data_rank)
    return shapes, loss.item(), run.grad_norm().item(), tokens, math.isfinite(mean)


def test_smallest_batches():
    assert run_ranks(4, _small) == [([(0, 5, VOCAB), (1, 1, VOCAB)], 0.0, 0.0, 10, True)] * 4


def _missed(rank):
    run = _run()
    attention = run.model.model.layers[1].self_attn
    attention.config = type(attention.config)(**attention.config.to_dict())  # a copy that names its own attention
    attention.config._attn_implementation = "sdpa"
    run.step(rows(0, 1, 8, VOCAB))


def test_c15_attention_that_did_not_go_round_is_told():
    fails_on_ranks(2, _missed, error=PlanError, match=r"1 of 2 attention modules \(layers \[1\]\) attended otherwise")


def _from_meta(rank, degrees):
    """Weights that come later, buffers of rotary embeddings among them; bf16 in between."""
    model = {**TINY, "rope_parameters": {**_LONG, "original_max_position_embeddings": 32}}
    found = []
    for precision in (None, "bf16"):
        config = tiny_config("phi3", **model)
        plan = plan_for(config, degrees, precision=precision, recompute="selective")
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
        run = parallelize(made, plan, build_mesh(degrees, "cpu"))
        run.init_weights(seed=3)
        found.append(run.step([rows(0, 2, 40, VOCAB), rows(1, 1, 17, VOCAB)]).item())
    return found


def test_models_from_meta_and_bf16():
    (exact, _), *_ = run_ranks(1, _from_meta, Degrees())
    for whole, half in run_ranks(2, _from_meta, Degrees(cp=2)):
        assert math.isclose(whole, exact, rel_tol=1e-5) and math.isclose(half, exact, rel_tol=1e-2)


def _compared(rank):
    run = _run("qwen3", Degrees(cp=2, tp=2))
    batch = rows(0, 2, 13, VOCAB)
    same = run.first_difference(batch)
    run.model.model.norm.register_forward_hook(lambda module, args, out: out + 1e-3 * (rank % 2))
    return same, run.first_difference(batch)


def test_the_first_module_that_differs_over_tp():
    assert run_ranks(4, _compared) == [(None, "model.norm")] * 4


# --- plans


def _from_json(rank):
    made = tiny_model("phi3", **TINY, rope_parameters={**_LONG, "original_max_position_embeddings": 32})
    plan = Plan.from_json(plan_for(made, Degrees(cp=2), balance="striped").to_json())
    assert plan.rules["cp"] == {"model.layers.*.self_attn": "attention", "model.rotary_emb": "rotary"}
    assert "cp    model.layers.*.self_attn" in str(plan)
    run = parallelize(made, plan, build_mesh(plan.degrees, "cpu"))
    return run.step(rows(0, 2, 9, VOCAB)).item()


def test_rules_are_printed_and_travel():
    assert len(set(run_ranks(2, _from_json))) == 1


def _said(family, degrees=None, model=None, **options):
    with pytest.raises(PlanError) as caught:
        plan_for(tiny_model(family, **{**TINY, **(model or {})}), degrees or Degrees(cp=2), **options)
    return str(caught.value)


def test_plans_that_cannot_be():
    said = _said("llama", Degrees(cp=16, tp=4), context="ulysses")
    assert "over 16 ranks with 8 query heads / tp 4" in said and "[1, 2]" in said
    assert "must divide cp: [1, 2, 4]" in _said("llama", Degrees(cp=4), context="ring+ulysses", ulysses=8)
    assert "team of context='ring+ulysses'" in _said("llama", ulysses=2)
    assert "attention dropout 0.1" in _said("gpt2", model={"attn_pdrop": 0.1})
    assert "must be one of attention, rotary" in _said("llama", rules={"cp": {"model.layers.*.self_attn": "column"}})
    assert "must be an attention module" in _said("llama", rules={"cp": {"model.layers.*.mlp": "attention"}})
    said = _said("llama", Degrees(dp_shard=2), balance="striped", context="ulysses")
    assert "balance='striped' with cp=1" in said and "context='ulysses' with cp=1" in said
