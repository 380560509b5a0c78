"""A user's rules on the tensor axis: exact, or refused by name before anything is changed."""

from __future__ import annotations

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise

from dtensor_5d import Degrees, PlanError, plan_for
from dtensor_5d.tensor import BlockInput, ColwiseParallel, CutParameters, RowwiseParallel
from tests.families.tiny import tiny_config
from tests.parity import Case, check_parity

TINY = {"num_hidden_layers": 2}
TP, BOTH = Degrees(tp=2), Degrees(dp_shard=2, tp=2)
MLP, ATTENTION = "model.layers.*.mlp", "model.layers.*.self_attn"
WHOLE_MLP = {f"{MLP}.{name}": "replicate" for name in ("gate_proj", "up_proj", "down_proj")}
# As the README has them for use alone: in a plan they mean what their names mean.
OBJECTS = {
    MLP: BlockInput(), f"{MLP}.gate_proj": ColwiseParallel(own_input=False), f"{MLP}.up_proj": ColwiseParallel(),
    f"{MLP}.down_proj": RowwiseParallel(),
}  # fmt: skip
FALCON = {
    "transformer.h.*.self_attention": "replicate", "transformer.h.*.mlp.dense_h_to_4h": "column",
    "transformer.h.*.mlp.dense_4h_to_h": "row",
}  # fmt: skip
GRANITE = {
    **{f"{ATTENTION}.{name}": style for name, style in (("q_proj", "column"), ("k_proj", "column_kv"),
                                                        ("v_proj", "column_kv"), ("o_proj", "row"))},
    "model.layers.*.block_sparse_moe.router": "sequence",
}  # fmt: skip


@pytest.mark.parametrize(
    "family, rules, degrees, sequence, model",
    [
        # Attention mixes tokens, so under sequence parallelism it must get all of them when it stays whole.
        ("gpt2", {f"transformer.h.*.attn.{n}": "replicate" for n in ("c_attn", "c_proj")}, TP, True, {}),
        ("qwen3", {ATTENTION: "replicate"}, BOTH, True, {}),  # its norms sum nothing then
        pytest.param("qwen3", {ATTENTION: "replicate"}, TP, False, {}, marks=pytest.mark.slow),
        ("llama", WHOLE_MLP, TP, True, {}),
        ("llama", {"model.layers.1.mlp": "replicate", "model.layers.*.input_layernorm": "replicate"}, TP, True, {}),
        ("qwen3_moe", {f"{MLP}.gate": "replicate"}, TP, False, {}),  # on whole tokens there is nothing to sum
        ("llama", OBJECTS, TP, True, {}),
        pytest.param("llama", OBJECTS, BOTH, False, {}, marks=pytest.mark.slow),
        ("llama", {"lm_head": "replicate"}, TP, True, {}),
        ("llama", {"lm_head": "replicate", "model.embed_tokens": "replicate"}, BOTH, False,
         {"tie_word_embeddings": True}),
        ("falcon", FALCON, TP, True, {}),  # proved by nobody: a word on every matrix
        pytest.param("falcon", FALCON, TP, False, {}, marks=pytest.mark.slow),
        ("granitemoe", GRANITE, TP, True, {}),  # its experts need no word
    ],
    ids=str,
)  # fmt: skip
def test_rules_that_are_exact(family, rules, degrees, sequence, model):
    options = {"rules": {"tp": rules}, "sequence_parallel": sequence}
    check_parity(Case(family, degrees, options, {**TINY, **model}))


@pytest.mark.parametrize(
    "family, rules, parts",
    [
        # what is used on a part only
        ("qwen3", {f"{ATTENTION}.q_norm": "replicate"}, ("'replicate' for", "q_norm", "'replicate_sum'")),
        ("llama", {f"{MLP}.up_proj": "replicate"}, ("'replicate' for", "up_proj", "'column'", "every matrix")),
        ("llama", {ATTENTION: "replicate_sum"}, ("'replicate_sum' for model.layers.*.self_attn:",)),
        ("llama", {"model.norm": "replicate_sum"}, ("'replicate_sum' for model.norm outside the layers",)),
        ("llama", {MLP: "sequence"}, ("'sequence' for model.layers.*.mlp",)),
        ("llama", {"model.layers.*": "block"}, ("'block' for model.layers.* on a whole layer",)),
        # other cuts of a proved family: the right shapes and wrong numbers, or an error in the first forward
        ("llama", {f"{MLP}.gate_proj": "packed_column"}, ("'packed_column'", "proved rule of this family is 'column'")),
        ("llama", {f"{MLP}.gate_proj": "packed_column/0"}, ("packed_column/N with N > 0",)),
        ("llama", {f"{MLP}.gate_proj": "packed_column/5"}, ("5 must divide 96",)),
        ("llama", {"lm_head": "column"}, ("'column' for lm_head", "one of head, replicate")),
        ("qwen3_moe", {f"{MLP}.gate": "column"}, ("'column' for", "mlp.gate:")),
        # experts are the expert axis' own: on its ranks, and cut inside by etp
        ("qwen3_moe", {f"{MLP}.experts.down_proj": "cut/0"}, ("'cut/0' for", "ranks of their own", "etp (etp=2)")),
        ("qwen3_moe", {f"{MLP}.experts.down_proj": "row"}, ("'row' for", "ranks of their own", "etp (etp=2)")),
        ("qwen3_moe", {MLP: "replicate"}, ("'replicate' for model.layers.*.mlp", "etp (etp=2)")),
        ("mixtral", {MLP: "block"}, ("'block' for model.layers.*.mlp", "leave the rule out")),
        ("qwen3", {f"{ATTENTION}.q_norm": "norm_column"}, ("RMS norm with a weight of 64",)),
        ("gpt2", {"transformer.h.*.ln_1": "norm_column"}, ("must be an RMS norm",)),
        ("llama", {f"{MLP}.up_proj": "cut/0"}, ("for bare parameters", "rule to model.layers.*.mlp.up_proj.w")),
        ("llama", {f"{MLP}.up_proj.weight": "cut/0"}, ("beside 'column' for model.layers.*.mlp.up_proj",)),
        # objects that mean nothing in a plan
        ("llama", {f"{MLP}.up_proj": TorchColwise()}, ("torch.distributed.tensor.parallel.style.ColwiseParallel",)),
        ("llama", {MLP: CutParameters({})}, ("CutParameters: must be a style name",)),
        # families without proved rules
        ("jamba", {"lm_head": "head"}, ("tp for the family 'jamba', with no rule of yours for",)),
        ("minimax", {"lm_head": "head"}, ("tp for the family 'minimax'",)),
        ("gpt_bigcode", {"lm_head": "head"}, ("tp for the family 'gpt_bigcode'",)),
        ("falcon", {**FALCON, "transformer.h.*.mlp.dense_4h_to_h": "replicate"}, ("'replicate' for", "in a block")),
    ],
    ids=str,
)  # fmt: skip
def test_rules_that_are_refused(family, rules, parts):
    layers = {"n_layer": 2} if family == "gpt_bigcode" else TINY
    for sequence in (True, False):
        with pytest.raises(PlanError) as caught:
            plan_for(tiny_config(family, **layers), TP, rules={"tp": rules}, sequence_parallel=sequence)
        assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("one", ["model.embed_tokens", "lm_head"])
def test_rules_on_one_owner_of_a_tied_weight_are_refused(one):
    config = tiny_config("llama", **TINY, tie_word_embeddings=True)
    with pytest.raises(PlanError, match="2 names of 1 tensor must be cut alike"):
        plan_for(config, TP, rules={"tp": {one: "replicate"}})


def test_kv_heads_fewer_than_ranks_take_their_own_style():
    config = tiny_config("llama", **TINY, num_key_value_heads=1)
    with pytest.raises(PlanError, match="k_proj: the proved rule of this family is 'column_kv'"):
        plan_for(config, TP, rules={"tp": {f"{ATTENTION}.k_proj": "column"}})
    plan_for(tiny_config("llama", **TINY), TP, rules={"tp": {f"{ATTENTION}.k_proj": "column"}})  # the same there


def test_objects_are_names_in_the_plan():
    plan = plan_for(tiny_config("llama", **TINY), TP, rules={"tp": OBJECTS})
    named = plan_for(tiny_config("llama", **TINY), TP, rules={"tp": {f"{MLP}.up_proj": "column"}})
    assert plan.rules["tp"] == named.rules["tp"] and plan.rules["tp"][f"{MLP}.up_proj"] == "column"


@pytest.mark.parametrize(
    "family, switch",
    [("cohere", "use_qk_norm"), ("phi", "qk_layernorm"), ("glm4_moe", "use_qk_norm")],
)
@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_norms_that_a_switch_of_the_config_adds(family, switch, sequence):
    check_parity(Case(family, TP, {"sequence_parallel": sequence}, {**TINY, switch: True}))


def test_switches_that_cannot_be_on():
    with pytest.raises(PlanError, match="qk_layernorm=True with tp=2"):
        plan_for(tiny_config("stablelm", **TINY, qk_layernorm=True), TP)
    with pytest.raises(PlanError, match=r"layerdrop=0.5 with tp=2: must be 0.*set config.layerdrop to 0.0"):
        plan_for(tiny_config("opt", **TINY, layerdrop=0.5), TP)


def test_a_router_on_its_own_tokens_sums_its_gradient():
    with pytest.raises(PlanError, match=r"'replicate' for .*mlp.gate where each rank has a part of the tokens"):
        plan_for(tiny_config("qwen3_moe", **TINY), TP, rules={"tp": {f"{MLP}.gate": "replicate"}})


@pytest.mark.parametrize("degrees", [TP, Degrees(tp=2, etp=2)], ids=str)
def test_experts_of_any_inner_size(degrees):
    """20 over 2 ranks are 10 of 4 bytes, which transformers' grouped product does not take (multiples of 16)."""
    check_parity(Case("qwen3_moe", degrees, {}, {**TINY, "moe_intermediate_size": 20}))
