"""Parameters by name and shape: against the real model on meta, against published sizes, and for bad configs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma4TextConfig, Glm4MoeConfig

from dtensor_5d.errors import PlanError
from dtensor_5d.families.published import PRESETS
from dtensor_5d.families.shape import ModelShape
from tests.families.tiny import FAMILIES, tiny_config

CONFIGS = {name: tiny_config(name).to_dict() for name in ("llama", "gemma3_text", "deepseek_v3", "qwen3_next", "jamba")}


def real_parameters(config) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def foretold(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in shape.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_its_name_and_shape(name):
    config = tiny_config(name)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.known
    assert foretold(shape) == real_parameters(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_save_pretrained_writes_is_enough(name):
    config = tiny_config(name)
    assert foretold(ModelShape.from_config(config.to_diff_dict())) == foretold(ModelShape.from_config(config.to_dict()))


# What the published configs of these families vary in: (family, fields)
VARIATIONS = [
    ("llama", dict(tie_word_embeddings=True)),
    ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=24, num_hidden_layers=3)),
    ("gpt2", dict(tie_word_embeddings=True, n_inner=80)),
    ("gemma3_text", dict(tie_word_embeddings=True, layer_types=None, num_hidden_layers=7)),
    ("gpt_oss", dict(layer_types=None, num_hidden_layers=3)),
    ("qwen2_moe", dict(mlp_only_layers=[1], decoder_sparse_step=2)),
    ("qwen3_moe", dict(mlp_only_layers=[0, 3])),
    ("deepseek_v3", dict(q_lora_rank=None, first_k_dense_replace=2, n_shared_experts=2)),
    ("deepseek_v2", dict(attention_bias=True)),
    ("llama4_text", dict(interleave_moe_layer_step=1)),
    ("glm4_moe", dict(use_qk_norm=True, attention_bias=True)),
    ("falcon", dict(new_decoder_architecture=False, multi_query=True, num_kv_heads=None, bias=True)),
    ("falcon", dict(new_decoder_architecture=False, multi_query=False, parallel_attn=False, num_kv_heads=None)),
    ("gpt_bigcode", dict(multi_query=False)),
    ("opt", dict(word_embed_proj_dim=32, do_layer_norm_before=False)),
    ("opt", dict(enable_bias=False)),
    ("stablelm", dict(qk_layernorm=True, use_qkv_bias=True, use_parallel_residual=True)),
    ("phi", dict(qk_layernorm=True)),
    ("cohere", dict(use_qk_norm=True)),
    ("gpt_neox", dict(attention_bias=False)),
    ("jamba", dict(mamba_proj_bias=True, expert_layer_period=3, num_hidden_layers=6)),
    ("ernie4_5_moe", dict(use_bias=True, moe_layer_interval=2, moe_layer_end_index=2)),
    ("lfm2", dict(block_auto_adjust_ff_dim=False, conv_bias=True)),
    ("granitemoeshared", dict(attention_bias=True)),
    ("seed_oss", dict(attention_out_bias=True)),
    ("mistral", dict(head_dim=None)),
    ("helium", dict(head_dim=16)),
    ("falcon", dict(num_kv_heads=2, num_key_value_heads=8)),
    ("gemma4_text", dict(global_head_dim=32)),
    ("gemma4_text", dict(attention_k_eq_v=True, num_global_key_value_heads=2, global_head_dim=16)),
    ("gemma4_text", dict(num_global_key_value_heads=2)),
    ("gemma4_text", dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)),
    ("gemma4_text", dict(layer_types=["full_attention"] * 2 + ["sliding_attention"] * 2, global_head_dim=16)),
    ("gemma4_text", dict(num_hidden_layers=12, global_head_dim=16, layer_types=None)),
    ("internlm3", dict(qkv_bias=True, bias=True)),
]


@pytest.mark.parametrize(("name", "fields"), VARIATIONS, ids=lambda v: str(v)[:50])
def test_variations_of_a_family(name, fields):
    config = tiny_config(name, **fields)
    assert foretold(ModelShape.from_config(config.to_dict())) == real_parameters(config)


def test_gemma4_defaults_as_transformers_and_as_published():
    config = Gemma4TextConfig()
    published = {k: v for k, v in config.to_dict().items() if k != "per_layer_config"} | {"global_head_dim": 512}
    nested = {"model_type": "gemma4", "text_config": config.to_dict()}
    for source in (config, config.to_dict(), published, nested):
        shape = ModelShape.from_config(source)
        assert (shape.parameters, shape.known) == (5_077_177_856, True)


def test_gemma4_experts_stand_beside_the_mlp():
    config = tiny_config("gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
    shape = ModelShape.from_config(config)
    assert shape.expert_parameters == 4 * 4 * 3 * 64 * 32
    assert shape.active_parameters == shape.parameters - shape.expert_parameters // 2
    names = {t.name for t in shape.activations(0, 16)}
    assert {"mlp gate", "experts gate"} <= names


def test_a_head_size_that_does_not_divide_is_rounded_down_where_the_family_does():
    config = Glm4MoeConfig(num_hidden_layers=2, vocab_size=128)  # 4096 over 96 heads, no head_dim
    assert foretold(ModelShape.from_config(config)) == real_parameters(config)


@pytest.mark.parametrize(("dtype", "width"), [("float64", 8), (torch.bfloat16, 2), ("torch.float16", 2), (None, 4)])
def test_bytes_of_a_number(dtype, width):
    assert ModelShape.from_config(tiny_config("llama").to_dict() | {"dtype": dtype}).bytes_per_number == width


# (parameters, active parameters per token), from the model cards' exact sums and published-numbers 1.2
PUBLISHED = {
    "llama-3.1-8b": (8_030_261_248, 8_030_261_248),
    "llama-3.1-70b": (70_553_706_496, 70_553_706_496),
    "llama-3.1-405b": (405_853_388_800, 405_853_388_800),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "gemma-3-27b": (27_009_346_304, 27_009_346_304),
    "smollm2-135m": (134_515_008, 134_515_008),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    shape = ModelShape.preset(name)
    assert (shape.parameters, shape.active_parameters) == PUBLISHED[name]


def test_every_preset_has_a_published_size():
    assert set(PRESETS) == set(PUBLISHED)


def test_the_parts_add_up():
    shape = ModelShape.preset("deepseek-v3")
    assert shape.expert_parameters == 58 * 256 * 3 * 7168 * 2048
    assert shape.embedding_parameters == shape.head_parameters == 129280 * 7168
    assert len(shape.layer_parameters()) == 61
    final_norm = 7168
    rest = shape.embedding_parameters + shape.head_parameters + final_norm
    assert sum(shape.layer_parameters()) + rest == shape.parameters
    tied = ModelShape.preset("smollm2-135m")
    assert tied.tied
    assert tied.head_parameters == 0


@pytest.mark.parametrize("as_path", [str, lambda p: p], ids=["str", "Path"])
def test_from_a_file_a_folder_and_inside_a_text_config(tmp_path, as_path):
    inner = tiny_config("gemma3_text").to_dict()
    want = ModelShape.from_config(inner).parameters
    outer = {"model_type": "gemma3", "text_config": {k: v for k, v in inner.items() if k != "model_type"}}
    outer["vision_config"] = {"hidden_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    for source in (tmp_path, tmp_path / "config.json"):
        shape = ModelShape.from_config(as_path(source))
        assert (shape.model_type, shape.parameters) == ("gemma3_text", want)
    assert ModelShape.from_config(outer).parameters == want


def test_an_unknown_family_is_read_as_its_nearest_and_says_so():
    dense = tiny_config("llama").to_dict() | {"model_type": "brand_new"}
    moe = tiny_config("qwen3_moe").to_dict() | {"model_type": "brand_new"}
    for config, size in ((dense, 139840), (moe, 363136)):
        shape = ModelShape.from_config(config)
        assert (shape.known, shape.parameters) == (False, size)


def broken(**fields):
    config = dict(PRESETS["llama-3.1-8b"]) | fields
    return {k: v for k, v in config.items() if v is not None}


BAD = [
    (broken(hidden_size=None), ["no value for hidden_size or n_embd", "add hidden_size"]),
    (broken(num_hidden_layers=0), ["0 for num_hidden_layers", ">= 1"]),
    (broken(vocab_size="many"), ["'many' for vocab_size"]),
    (broken(intermediate_size=None), ["no value for intermediate_size"]),
    (broken(hidden_size=4100), ["hidden_size=4100 with num_attention_heads=32", "use 25 heads"]),
    (broken(num_key_value_heads=5), ["num_key_value_heads=5 with num_attention_heads=32", "use 4 key-value heads"]),
    (broken(layer_types=["full_attention"] * 3), ["3 layer_types for num_hidden_layers=32", "num_hidden_layers=3"]),
    (broken(layer_types=["bogus"] * 32), ["'bogus' in layer_types", "full_attention, ", "sliding_attention"]),
    (broken(layer_types="abc"), ["layer_types='abc'", "must be a list"]),
    (broken(layer_types=[["x"]] * 32), ["['x'] in layer_types"]),
    (broken(mlp_layer_types=["thick"] * 32), ["'thick' in mlp_layer_types", "dense, sparse"]),
    (broken(sliding_window=-5), ["sliding_window=-5", ">= 1"]),
    (broken(sliding_window="wide"), ["sliding_window='wide'"]),
    (broken(dtype="banana"), ["dtype='banana'", "bfloat16"]),
    (broken(model_type=["llama"]), ["model_type=['llama']", "must be a text"]),
    (broken(per_layer_config={"40": {"head_dim": 4}}), ["layer '40' in per_layer_config", "0 to 31"]),
    (broken(per_layer_config=[3]), ["per_layer_config of type list"]),
    (dict(PRESETS["gemma-3-27b"]) | {"layer_types": ["bogus"] * 62, "sliding_window": -5, "dtype": "banana"},
     ["bogus", "sliding_window=-5", "dtype='banana'"]),
    (dict(PRESETS["qwen3-30b-a3b"]) | {"num_experts_per_tok": 200}, ["200 experts per token of 128", "use 128"]),
    (CONFIGS["jamba"] | {"mamba_dt_rank": float("inf")}, ["a config of jamba with a field of the wrong kind"]),
    ({}, ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]),
    ("/no/such/place", ["/no/such/place", "config.json"]),
    (7, ["config of type int"]),
]


@pytest.mark.parametrize(("config", "said"), BAD, ids=range(len(BAD)))
def test_bad_configs_get_an_answer(config, said):
    with pytest.raises(PlanError) as caught:
        ModelShape.from_config(config)
    for text in said:
        assert text in str(caught.value)


def test_bad_files_and_presets_get_an_answer(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(PlanError, match="must be JSON"):
        ModelShape.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(PlanError, match="a config that is a list"):
        ModelShape.from_config(tmp_path)
    with pytest.raises(PlanError, match=r"there are llama-3\.1-8b"):
        ModelShape.preset("llama-9")


JUNK = st.one_of(
    st.none(), st.integers(-3, 9), st.floats(allow_nan=False, width=16), st.text(max_size=3), st.booleans(),
    st.lists(st.integers(0, 4), max_size=4), st.just({}),
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_field_of_any_kind_gives_a_shape_or_an_answer(data):
    config = dict(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    config[data.draw(st.sampled_from(sorted(set(config) - {"model_type"})))] = data.draw(JUNK)
    try:
        shape = ModelShape.from_config(config)
    except PlanError as error:
        assert str(error)
    else:
        assert shape.parameters > 0


def test_several_contradictions_come_in_one_answer():
    config = broken(num_key_value_heads=5, layer_types=["full_attention"] * 3)
    with pytest.raises(PlanError) as caught:
        ModelShape.from_config(config)
    assert len(caught.value.violations) == 2


def test_importing_the_planner_is_quick_and_loads_no_torch():
    script = (
        "import time; start = time.process_time(); import dtensor_5d.planner; spent = time.process_time() - start\n"
        "import sys\n"
        "from dtensor_5d.planner import ModelShape, memory; ModelShape.preset('deepseek-v3')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(spent)"
    )
    command = [sys.executable, "-c", script]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(5)]
    assert min(float(r.stdout) for r in runs) < 0.05


def test_what_is_an_estimate_is_said():
    assert ModelShape.preset("llama-3.1-8b").notes == ()
    work, activations = "operations of jamba are an estimate", "activations of jamba are an estimate"
    notes = ModelShape.from_config(CONFIGS["jamba"]).notes
    assert [note.startswith(text) for note, text in zip(notes, (activations, work), strict=True)] == [True, True]
