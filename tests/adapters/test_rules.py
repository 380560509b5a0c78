"""The plans that models ship, read into our rules."""

from __future__ import annotations

import pytest
import torch
from transformers.distributed.fsdp import ALL_FSDP_STYLES
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from dtensor_5d.adapters.rules import STYLES, read_rules
from dtensor_5d.errors import PlanError
from dtensor_5d.plan import matches
from tests.adapters.models import meta_model, shared_meta_model
from tests.families.tiny import FAMILIES


def test_every_style_of_the_installed_transformers_is_known_and_no_other():
    assert set(STYLES) == {*ALL_PARALLEL_STYLES, *ALL_FSDP_STYLES}


def test_styles_have_one_name_each_but_for_what_transformers_names_twice():
    twice = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
    names = [style.name for given, style in STYLES.items() if given not in twice]
    assert len(names) == len(set(names))
    assert all(STYLES[old] == STYLES[new] or STYLES[old].name == STYLES[new].name for old, new in twice.items())
    assert all(style.why and set(style.axes) <= {"tp", "ep", "dp"} for style in STYLES.values())


def test_a_dense_model():
    assert read_rules(meta_model("qwen3")) == {
        "tp": {
            "lm_head": "head",
            "model.embed_tokens": "embedding",
            "model.layers.*.self_attn.q_proj": "column",
            "model.layers.*.self_attn.k_proj": "column",
            "model.layers.*.self_attn.v_proj": "column",
            "model.layers.*.self_attn.q_norm": "replicate_sum",
            "model.layers.*.self_attn.k_norm": "replicate_sum",
            "model.layers.*.self_attn.o_proj": "row",
            "model.layers.*.mlp.gate_proj": "column",
            "model.layers.*.mlp.up_proj": "column",
            "model.layers.*.mlp.down_proj": "row",
        },
        "ep": {},
        "dp": {
            "lm_head": "unit:last",
            "model.embed_tokens": "unit",
            "model.layers.*": "unit",
            "model.norm": "unit:last",
        },
    }


def test_experts_stand_on_both_axes_and_rules_without_a_module_are_left_out():
    rules = read_rules(meta_model("deepseek_v2"))
    assert rules["ep"] == {
        "model.layers.*.mlp.experts.gate_up_proj": "experts",
        "model.layers.*.mlp.experts.down_proj": "experts",
        "model.layers.*.mlp.experts": "dispatch",
    }
    assert rules["tp"]["model.layers.*.mlp.experts"] == "experts_sum"
    assert rules["tp"]["model.layers.*.mlp.experts.gate_up_proj"] == "packed_column"
    assert rules["tp"]["model.layers.*.self_attn.kv_a_proj_with_mqa"] == "latent"
    # The plan has a rule for models without the low-rank query; this one has it.
    model = meta_model("deepseek_v2")
    assert "model.layers.*.self_attn.q_proj" in model.tp_plan
    assert "model.layers.*.self_attn.q_proj" not in rules["tp"]


def test_a_model_without_plans_gets_empty_tables():
    assert read_rules(meta_model("gpt2")) == {"tp": {}, "ep": {}, "dp": {}}
    assert read_rules(torch.nn.Linear(2, 2)) == {"tp": {}, "ep": {}, "dp": {}}


def test_tied_embedding_and_head_are_one_unit():
    rules = read_rules(meta_model("gemma2", tie_word_embeddings=True))
    assert rules["dp"]["model.embed_tokens"] == rules["dp"]["lm_head"] == "unit:last"


def test_dense_rules_of_an_ep_plan_stand_under_tp_unless_tp_has_its_own():
    model = meta_model("qwen3_moe")
    model._ep_plan["model.layers.*.self_attn.o_proj"] = "colwise_gather_output"
    model._ep_plan["model.norm"] = "sequence_parallel"
    before = read_rules(meta_model("qwen3_moe"))
    rules = read_rules(model)
    assert rules["ep"] == before["ep"]
    assert rules["tp"] == {**before["tp"], "model.norm": "sequence"}


def test_an_ep_plan_with_dense_rules_is_shipped():
    model = shared_meta_model("gemma4_text")
    assert model.ep_plan["model.layers.*.mlp.down_proj"] == "rowwise"
    rules = read_rules(model)
    assert rules["ep"] == {} and rules["tp"]["model.layers.*.mlp.down_proj"] == "row"


@pytest.mark.parametrize("axis, plan", [("tp", "tp_plan"), ("ep", "ep_plan"), ("dp", "fsdp_plan")])
def test_unknown_styles_are_refused_by_name_all_at_once(axis, plan):
    model = meta_model("llama")
    getattr(model, plan).update({"model.norm": "ep_router", "lm_head": "gossip"})
    with pytest.raises(PlanError) as error:
        read_rules(model)
    assert len(error.value.violations) == 2
    for word in (plan, "'ep_router'", "'gossip'", "model.norm", "lm_head", f"rules={{'{axis}'"):
        assert word in str(error.value)


def test_a_style_of_another_axis_is_refused():
    model = meta_model("llama")
    model.fsdp_plan["model.norm"] = "colwise"
    model.tp_plan["model.norm"] = "ep_dispatch_experts"
    model.ep_plan["model.norm"] = "keep_full_weight"
    with pytest.raises(PlanError) as error:
        read_rules(model)
    assert len(error.value.violations) == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rules_of_every_family_fit_it_in_our_pattern_language(name):
    model = shared_meta_model(name)
    names = [n for n, _ in (*model.named_modules(), *model.named_parameters())]
    rules = read_rules(model)
    for table in rules.values():
        for pattern in table:
            assert any(matches(pattern, n) for n in names), pattern
    # What transformers itself would apply, module by module, is what our patterns reach.
    modules = {n for n, _ in model.named_modules()}
    for axis, plan in (("tp", model.tp_plan), ("ep", model.ep_plan), ("dp", model.fsdp_plan)):
        plan = {pattern: style for pattern, style in plan.items() if axis in STYLES[style].axes}
        theirs = modules & set(model._expand_parallel_plan(plan))
        assert theirs == {n for n in modules if any(matches(p, n) for p in rules[axis])}
