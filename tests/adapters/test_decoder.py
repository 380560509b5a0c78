"""The decoder is found by structure: against hand-written names, and against what the models do when they run."""

from __future__ import annotations

import copy
import re
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from dtensor_5d.adapters.decoder import find_decoder
from tests.adapters.models import meta_model, shared_meta_model
from tests.families.tiny import FAMILIES, MOE, tiny_model

# layers, base, before, after: written down by hand from the modeling files.
BY_HAND = {
    "llama": ("model.layers", "model", ("model.embed_tokens",), ("model.norm", "lm_head")),
    "olmo": ("model.layers", "model", ("model.embed_tokens",), ("lm_head",)),
    "phi": ("model.layers", "model", ("model.embed_tokens",), ("model.final_layernorm", "lm_head")),
    "lfm2": ("model.layers", "model", ("model.embed_tokens",), ("model.embedding_norm", "lm_head")),
    "gpt2": ("transformer.h", "transformer", ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")),
    "gpt_neox": ("gpt_neox.layers", "gpt_neox", ("gpt_neox.embed_in",), ("gpt_neox.final_layer_norm", "lm_head")),
    "opt": (
        "model.decoder.layers", "model.decoder",
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"), ("model.decoder.final_layer_norm", "lm_head"),
    ),
    "bloom": (
        "transformer.h", "transformer",
        ("transformer.word_embeddings", "transformer.word_embeddings_layernorm"), ("transformer.ln_f", "lm_head"),
    ),
    "falcon": ("transformer.h", "transformer", ("transformer.word_embeddings",), ("transformer.ln_f", "lm_head")),
    "gemma3n_text": (
        "model.layers", "model",
        ("model.embed_tokens", "model.embed_tokens_per_layer", "model.per_layer_model_projection",
         "model.per_layer_projection_norm", "model.altup_projections.0"),
        ("model.altup_unembed_projections.0", "model.norm", "lm_head"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_names_written_down_by_hand(name):
    layers, base, before, after = BY_HAND[name]
    decoder = find_decoder(shared_meta_model(name))
    assert (decoder.layers, decoder.base, decoder.before, decoder.after) == (layers, base, before, after)
    assert (decoder.embedding, decoder.head, decoder.between) == (before[0], "lm_head", ())
    assert decoder.layer(3) == f"{layers}.3"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_found_whole(name):
    model = shared_meta_model(name)
    decoder = find_decoder(model)
    assert decoder.n_layers == 4 and decoder.in_order
    assert decoder.tuple_layers == (name in ("bloom", "falcon"))
    # Text models have nothing that plain text does not reach, and each owner of a parameter has one place.
    assert decoder.other == decoder.between == ()
    owners = {n.rpartition(".")[0] for n, _ in model.named_parameters() if not n.startswith(decoder.layers + ".")}
    assert sorted(owners) == sorted(decoder.before + decoder.after)
    assert model.get_submodule(decoder.embedding) is model.get_input_embeddings()
    assert model.get_submodule(decoder.head) is model.get_output_embeddings()
    # A module without parameters can stand on every stage as it is.
    for buffers in decoder.buffers_only:
        assert not list(model.get_submodule(buffers).parameters())


def order_when_run(model, layers):
    """The same facts from a real forward with real layers, seen by hooks."""
    seen = []

    def note(name):
        return lambda module, args: seen.append(name)

    for name, module in model.named_modules():
        inside = name.startswith(layers + ".")
        if (not inside and list(module._parameters)) or re.fullmatch(re.escape(layers) + r"\.\d+", name):
            module.register_forward_pre_hook(note(name))
    outputs = []
    model.get_submodule(layers + ".0").register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 11)[None], use_cache=False)
    first, last = seen.index(layers + ".0"), len(seen) - 1 - seen[::-1].index(layers + ".3")
    before, after = seen[:first], seen[last + 1 :]
    return tuple(dict.fromkeys(before)), tuple(dict.fromkeys(after)), isinstance(outputs[0], tuple)


def check_against_a_run(name):
    model = tiny_model(name).eval()
    decoder = find_decoder(model)
    assert (decoder.before, decoder.after, decoder.tuple_layers) == order_when_run(model, decoder.layers)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_order_is_that_of_a_real_forward(name):
    check_against_a_run(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BY_HAND])
def test_the_order_of_every_other_family_is_that_of_a_real_forward(name):
    check_against_a_run(name)


@pytest.mark.parametrize("name", ["bloom", "falcon", "llama", "gemma3n_text"])
def test_one_layer_is_enough_to_see_what_the_model_takes(name):
    extra = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0]} if name == "gemma3n_text" else {}
    decoder = find_decoder(meta_model(name, num_hidden_layers=1, **extra))
    assert (decoder.n_layers, decoder.in_order) == (1, True)
    assert decoder.tuple_layers == (name in ("bloom", "falcon"))


@pytest.mark.parametrize("name", MOE)
def test_experts_and_routers_follow_the_contract(name):
    model = tiny_model(name)
    decoder = find_decoder(model)
    # What transformers' own expert parallelism takes, and llama4's, which it cannot take.
    plan = model._expand_parallel_plan(model.ep_plan)
    assert list(decoder.experts) == [n for n, style in plan.items() if style == "ep_dispatch_experts"]
    assert bool(decoder.other_experts) == (name == "llama4_text") == (not decoder.experts)
    assert len(decoder.routers) == len(decoder.experts + decoder.other_experts) > 0
    asked, said = {}, {}
    for experts, router in zip(decoder.experts, decoder.routers):
        model.get_submodule(experts).register_forward_pre_hook(lambda m, args, name=experts: asked.update({name: args}))
        model.get_submodule(router).register_forward_hook(lambda m, a, out, name=experts: said.update({name: out}))
    model(input_ids=torch.arange(3, 11)[None], use_cache=False)
    assert list(asked) == list(said) == list(decoder.experts)
    for experts in decoder.experts:
        hidden, index, weights = asked[experts]
        assert hidden.shape == (8, 64) and index.shape == weights.shape == (8, 2) and index.dtype == torch.int64
        # The router beside them is who decided.
        for given in (index, weights):
            assert any(torch.equal(given.flatten().double(), out.flatten().double()) for out in said[experts])


def test_a_router_is_told_from_other_things_with_as_many_rows():
    # The shared expert is 8 wide, as there are 8 experts.
    decoder = find_decoder(meta_model("qwen2_moe", shared_expert_intermediate_size=8))
    assert decoder.routers == tuple(f"model.layers.{i}.mlp.gate" for i in range(4))
    # per_layer_input_gate has 8 rows, too.
    moe = dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=48)
    decoder = find_decoder(meta_model("gemma4_text", **moe))
    assert decoder.experts == tuple(f"model.layers.{i}.experts" for i in range(4))
    assert decoder.routers == tuple(f"model.layers.{i}.router" for i in range(4))


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe", "afmoe", "llama"])
def test_fp32_modules_are_those_that_transformers_keeps_in_fp32(name, tmp_path):
    tiny_model(name).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {n.rpartition(".")[0] for n, p in loaded.named_parameters() if p.dtype == torch.float32}
    assert set(find_decoder(shared_meta_model(name)).fp32_modules) == kept == set(find_decoder(loaded).fp32_modules)
    assert bool(kept) == (name != "llama")


def test_tied_parameters_stand_under_their_first_name():
    assert find_decoder(meta_model("gpt2")).ties == ()
    for model in (meta_model("gpt2", tie_word_embeddings=True), tiny_model("gpt2", tie_word_embeddings=True)):
        assert find_decoder(model).ties == (("transformer.wte.weight", "lm_head.weight"),)


def test_the_model_stays_as_it_was_and_its_hooks_do_not_fire():
    model = tiny_model("gemma2")
    fired = []
    model.model.norm.register_forward_pre_hook(lambda *_: fired.append("norm"))
    model.model.layers[0].register_forward_hook(lambda *_: fired.append("layer"))
    tensors = {n: t for n, t in (*model.named_parameters(), *model.named_buffers())}
    state, config = torch.get_rng_state(), copy.deepcopy(model.config)
    keys = {n: {k: id(v) for k, v in vars(m).items()} for n, m in model.named_modules()}
    found = find_decoder(model)
    assert found == find_decoder(meta_model("gemma2"))
    assert fired == []
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and model.config.to_dict() == config.to_dict()
    assert {n: {k: id(v) for k, v in vars(m).items()} for n, m in model.named_modules()} == keys
    assert all(t is tensors[n] for n, t in (*model.named_parameters(), *model.named_buffers()))
    assert all(not m._forward_hooks for n, m in model.named_modules() if n != "model.layers.0")


def test_a_70b_model_on_meta_is_found_in_well_under_a_second():
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    start = time.perf_counter()
    decoder = find_decoder(model)
    assert time.perf_counter() - start < 0.5  # 0.02 s on an idle machine
    assert (decoder.n_layers, decoder.after) == (80, ("model.norm", "lm_head"))


def test_position_tables_that_ask_how_long_the_text_is_do_not_stop_the_trace():
    base = dict(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    dynamic = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    factors = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, rope_theta=1e4, factor=64.0)
    for config in (
        LlamaConfig(**base, max_position_embeddings=4, rope_parameters=dynamic),
        Phi3Config(**base, max_position_embeddings=256, rope_parameters=factors),
    ):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert find_decoder(model).after == ("model.norm", "lm_head")
