"""What the tensor axis refuses: before loading, with both numbers and the way out."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.adapters.models import meta_model, shared_meta_model
from tests.families.tiny import tiny_config
from tests.harness import fails_on_ranks

TWO = {"num_hidden_layers": 2}
SIX_KV = dict(hidden_size=96, num_attention_heads=12, num_key_value_heads=6)


def _refusal(family, tp=2, rules=None, **changes):
    with pytest.raises(PlanError) as caught:
        plan_for(tiny_config(family, **TWO, **changes), Degrees(tp=tp), rules={"tp": rules} if rules else {})
    assert all(v.asked and v.required and v.change for v in caught.value.violations)
    return str(caught.value)


@pytest.mark.parametrize(
    "family, tp, changes, both",
    [
        ("llama", 3, {}, ("tp=3 with 8 query heads", "1, 2, 4 or 8")),
        ("llama", 16, {}, ("tp=16 with 8 query heads",)),  # more ranks than query heads
        ("llama", 4, SIX_KV, ("4 with 6 kv heads", "1, 2, 3, 6 or 12")),
        ("phi3", 8, {}, ("tp=8 with 4 kv heads", "1, 2 or 4")),  # fused with q, so not shared by ranks
        ("llama", 4, dict(intermediate_size=90), ("mlp.gate_proj of 90 outputs", "tp must divide 90")),
        ("llama", 4, dict(intermediate_size=90), ("mlp.down_proj of 90 inputs",)),
        # T13: the physical size of both halves divides, the logical one does not.
        ("glm4", 4, dict(intermediate_size=90), ("gate_up_proj of 90 outputs in each of its 2 sections",)),
        ("phi3", 2, dict(intermediate_size=3), ("gate_up_proj of 3 outputs in each of its 2 sections",)),
        # Experts are not cut inside by tp, shared ones are.
        ("deepseek_v2", 4, dict(moe_intermediate_size=46), ("shared_experts.gate_proj of 46 outputs",)),
        # T15: uneven inner sizes would need other shapes on other ranks.
        ("llama", 2, dict(intermediate_size=5), ("tp must divide 5",)),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide(family, tp, changes, both):
    said = _refusal(family, tp, **changes)
    for part in both:
        assert part in said, said


def test_layers_and_sizes_are_told_once_and_everything_at_once():
    """Three projections have the one size that does not divide, in both layers."""
    assert _refusal("llama", 4, intermediate_size=90).count("tp must divide") == 1
    said = _refusal("deepseek_v2", 4, intermediate_size=90, moe_intermediate_size=46, first_k_dense_replace=1)
    assert said.startswith("2 things to change") and "divide 90" in said and "divide 46" in said, said


@pytest.mark.parametrize(
    "rules, part",
    [
        ({"model.layers.*.input_layernorm": "column"}, "must be a linear layer"),
        ({"model.norm": "embedding"}, "must be an embedding"),
        ({"model.embed_tokens": "row"}, "must be a linear layer"),
        ({"model.layers.*.mlp.up_proj": "colwise"}, "must be one of column"),
        ({"model.layers.*.mlp.nothing": "column"}, "match at least 1 module"),
        ({"model.layers.*.self_attn.q_proj": "norm_column"}, "must be an RMS norm"),
        ({"model.layers.*.self_attn.q_proj.weight": "cut/3"}, "it has 2 dims"),
        ({"model.layers.*.self_attn.q_proj": "qkv"}, "q, k and v of"),
    ],
)
def test_rules_that_do_not_fit(rules, part):
    assert part in _refusal("llama", 2, rules)


def test_a_parameter_beside_cut_ones_of_which_no_rule_speaks():
    model = meta_model("llama", **TWO)
    for layer in model.model.layers:
        layer.self_attn.extra = torch.nn.LayerNorm(8)
    with pytest.raises(PlanError, match=r"self_attn\.extra\.weight, which no rule speaks of"):
        plan_for(model, Degrees(tp=2))


def test_a_family_that_nobody_proved_needs_a_rule_for_every_matrix():
    assert "tp for the family 'falcon'" in _refusal("falcon")
    assert "tp for the family 'falcon'" in _refusal("falcon", 2, {"lm_head": "head"})
    attention = "model.layers.*.self_attn."
    said = _refusal("granitemoe", 2, {attention + "q_proj": "column", attention + "o_proj": "row"})
    assert f"no rule of yours for {attention}k_proj, {attention}v_proj, " in said, said


def test_options_without_an_axis_to_act_on():
    config = tiny_config("llama")
    with pytest.raises(PlanError, match="sequence_parallel=True with tp=1"):
        plan_for(config, Degrees(), sequence_parallel=True)
    with pytest.raises(PlanError, match="rules for tp with tp=1"):
        plan_for(config, Degrees(), rules={"tp": {"lm_head": "head"}})


def test_a_plan_prints_and_travels():
    plan = plan_for(shared_meta_model("qwen3"), Degrees(tp=2))
    text = str(plan)
    for style in ("block", "column_kv", "row", "replicate_sum", "sequence", "embedding", "head"):
        assert f" {style}\n" in text + "\n"
    assert type(plan).from_json(plan.to_json()) == plan


def _open_degrees(rank):
    model = meta_model("llama", **TWO)
    plan = plan_for(model, Degrees(tp=-1))
    parallelize(model, plan, build_mesh(Degrees(tp=3), "cpu"))


def test_open_degrees_are_checked_when_they_are_known():
    fails_on_ranks(3, _open_degrees, error=PlanError, match="tp=3 with 8 query heads")
