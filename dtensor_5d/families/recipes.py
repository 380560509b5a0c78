"""How the families differ, as data: each line says in what a family departs from Llama.

A rule that is a string names the field of the config that decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RECIPES", "Moe", "Recipe", "recipe_for"]


@dataclass(frozen=True)
class Moe:
    """Where and how a family has experts.

    when: always, first_k (dense layers first), step (every n-th), layers (a list), period (Jamba), interval (Ernie), or
    flag (`enable_moe_block`).
    inner: the field with the inner size of one expert.
    shared_inner: field of the inner size of the shared expert; `shared_count` multiplies the experts' size instead.
    """

    router: str = "gate"
    router_bias: bool = False
    experts: str = "experts"
    when: str = "always"
    inner: str = "moe_intermediate_size"
    shared: str | None = None
    shared_inner: str | None = None
    shared_count: str | None = None
    shared_gate: bool = False
    transposed: bool = False
    expert_bias: bool = False
    extra: tuple[str, ...] = ()  # vectors of E entries
    fp32_router: bool = False
    parent: str | None = None  # the module that holds router and experts; None: the MLP's name, "": the layer itself
    beside: bool = False  # the layer has its MLP as well
    router_scale: str | None = None  # a vector of M entries
    norms: tuple[str, ...] = ()  # that only layers with experts have


@dataclass(frozen=True)
class Recipe:
    """A family's names, biases, norms and layer pattern. The defaults are Llama's."""

    root: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    position: str | None = None
    final_norm: str | None = "norm"
    embed_norm: str | None = None
    head_bias: bool | str = False
    norm: str = "rms"  # rms, gemma (all in fp32), layer, layer_plain (no bias), none
    norm_bias: bool = True
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    conv1d: bool = False
    qk_norm: str | None = None  # head, full, layer_heads
    qk_norm_if: bool | str = True
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    whole_heads: bool = False  # refuses a model size that its heads do not divide; others round the head size down
    kv: str = "field"  # field, heads (as many as queries), multi_query
    attention_gate: str | None = None  # afmoe: gate_proj; qwen3_next: q (twice as many queries)
    sinks: bool = False
    softmax: str = "fp32"  # or compute: the dtype in which eager attention normalises the scores
    mla: bool = False
    indexer: bool = False
    mlp: str = "mlp"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    mlp_fused: bool = False
    mlp_bias: bool | str = False
    inner: str = "intermediate_size"  # or "name|4": four times the model size where the field is missing
    parallel: bool | str = False  # attention and MLP side by side
    moe: Moe | None = None
    last_full: bool = False  # the last layer is full whatever layer_types say
    out_square: bool = False  # the attention's output product takes M numbers whatever the head size
    pattern: int = 0  # every n-th layer is full where layer_types is missing; 0: all alike
    linear: str | None = None  # what stands in for attention in the linear layers
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # field -> names that this family has for it


def _with(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    # Plain dicts, made into a `Recipe` when asked for: 69 of them would cost the import 10 ms.
    return {**base, **changes}


_LLAMA: dict[str, Any] = {}
_BIASED: dict[str, Any] = dict(qkv_bias="attention_bias", out_bias="attention_bias")
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_FOUR_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_GPT = dict(
    root="transformer", layers="h", embed="wte", final_norm="ln_f", norm="layer", norms=("ln_1", "ln_2"),
    attention="attn", kv="heads", mlp_bias=True, inner="n_inner|4",
)  # fmt: skip
_FUSED_QKV = dict(
    root="transformer", layers="h", embed="word_embeddings", final_norm="ln_f", norm="layer",
    attention="self_attention", qkv=("query_key_value",), out="dense", kv="heads",
    mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
)  # fmt: skip
_GEMMA = _with(_LLAMA, norm="gemma", defaults={"head_dim": 256, **_TIED}, **_BIASED)
_GEMMA2 = _with(_GEMMA, norms=_FOUR_NORMS, pattern=2)
_GEMMA3 = _with(
    _GEMMA2, qk_norm="head", pattern=6,
    defaults={**_GEMMA["defaults"], "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
)  # fmt: skip
_MOE_LOCAL = dict(inner="intermediate_size")
_DEEP = dict(when="first_k", shared="shared_experts", shared_count="n_shared_experts", fp32_router=True)
_DEEPSEEK = _with(_LLAMA, mla=True, moe=_DEEP, **_BIASED)
_QWEN_MOE = dict(when="step")

RECIPES: Mapping[str, dict[str, Any]] = {
    "llama": _with(_LLAMA, mlp_bias="mlp_bias", **_BIASED),
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "qwen2": _with(_LLAMA, qkv_bias=True),
    "qwen3": _with(_LLAMA, qk_norm="head", defaults={"head_dim": 128}, **_BIASED),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": _with(_GEMMA3, pattern=5),
    "gemma4_text": _with(
        _GEMMA3, pattern=6, last_full=True,
        defaults={**_GEMMA3["defaults"], "vocab_size": 262144, "full_head_dim": 512, "sliding_window": 512},
        moe=dict(
            router="router.proj", when="flag", beside=True, parent="", extra=("router.per_expert_scale",),
            router_scale="router.scale",
            norms=("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"),
        ),
    ),
    "vaultgemma": _with(_GEMMA2, norms=("input_layernorm", "pre_feedforward_layernorm")),
    "phi": _with(
        _LLAMA, norm="layer", norms=("input_layernorm",), final_norm="final_layernorm", out="dense", qkv_bias=True,
        out_bias=True, qk_norm="layer", qk_norm_if="qk_layernorm", qk_names=("q_layernorm", "k_layernorm"),
        mlp_names=("fc1", "fc2"), mlp_bias=True, head_bias=True, parallel=True,
    ),
    "phi3": _with(_LLAMA, qkv=("qkv_proj",), mlp_names=("gate_up_proj", "down_proj"), mlp_fused=True),
    "olmo": _with(_LLAMA, norm="none", **_BIASED),
    "olmo2": _with(_LLAMA, norm="gemma", norms=_POST_NORMS, qk_norm="full", **_BIASED),
    "olmo3": _with(_LLAMA, norm="gemma", norms=_POST_NORMS, qk_norm="full", pattern=4, **_BIASED),
    "gpt2": _with(
        _GPT, position="wpe", qkv=("c_attn",), out="c_proj", qkv_bias=True, out_bias=True, conv1d=True,
        mlp_names=("c_fc", "c_proj"), softmax="compute", defaults=_TIED,
    ),
    "gpt_bigcode": _with(
        _GPT, position="wpe", qkv=("c_attn",), out="c_proj", qkv_bias=True, out_bias=True, kv="multi_query",
        mlp_names=("c_fc", "c_proj"), defaults={"multi_query": True, **_TIED},
    ),
    "gptj": _with(
        _GPT, norms=("ln_1",), out="out_proj", mlp_names=("fc_in", "fc_out"), head_bias=True, parallel=True
    ),
    "gpt_neox": _with(
        _FUSED_QKV, root="gpt_neox", layers="layers", embed="embed_in", final_norm="final_layer_norm",
        attention="attention", mlp_bias=True, parallel="use_parallel_residual",
        defaults={"attention_bias": True, "use_parallel_residual": True}, **_BIASED,
    ),
    "bloom": _with(
        _FUSED_QKV, embed_norm="word_embeddings_layernorm", qkv_bias=True, out_bias=True, mlp_bias=True,
        inner="none|4", defaults=_TIED,
    ),
    "falcon": _with(
        _FUSED_QKV, softmax="compute", kv="multi_query", qkv_bias="bias", out_bias="bias", mlp_bias="bias",
        inner="ffn_hidden_size|4", parallel="parallel_attn",
        defaults={"multi_query": True, "parallel_attn": True, **_TIED},
        aliases={"num_key_value_heads": ("num_kv_heads",)},
    ),
    "opt": _with(
        _LLAMA, root="model.decoder", position="embed_positions", final_norm="final_layer_norm", norm="layer",
        norms=("self_attn_layer_norm", "final_layer_norm"), out="out_proj", qkv_bias="enable_bias",
        out_bias="enable_bias", kv="heads", mlp="", mlp_names=("fc1", "fc2"), mlp_bias="enable_bias", inner="ffn_dim",
        defaults={"enable_bias": True, **_TIED},
    ),
    "smollm3": _with(_LLAMA, mlp_bias="mlp_bias", defaults=_TIED, **_BIASED),
    "starcoder2": _with(
        _LLAMA, norm="layer", qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias",
        mlp_names=("c_fc", "c_proj"), defaults={"use_bias": True, **_TIED},
    ),
    "stablelm": _with(
        _LLAMA, norm="layer", qkv_bias="use_qkv_bias", qk_norm="layer_heads", qk_norm_if="qk_layernorm",
        qk_names=("q_layernorm", "k_layernorm"), parallel="use_parallel_residual",
    ),
    "cohere": _with(
        _LLAMA, norm="layer_plain", norms=("input_layernorm",), qk_norm="cohere_heads", qk_norm_if="use_qk_norm",
        parallel=True, defaults=_TIED, **_BIASED,
    ),
    "cohere2": _with(
        _LLAMA, norm="layer_plain", norms=("input_layernorm",), parallel=True, pattern=4, defaults=_TIED, **_BIASED
    ),
    "glm": _with(
        _LLAMA, qkv_bias="attention_bias", mlp_names=("gate_up_proj", "down_proj"), mlp_fused=True,
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "glm4": _with(
        _LLAMA, qkv_bias="attention_bias", mlp_names=("gate_up_proj", "down_proj"), mlp_fused=True,
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "granite": _with(_LLAMA, mlp_bias="mlp_bias", **_BIASED),
    "helium": _with(_LLAMA, norm="gemma", out_square=True, mlp_bias="mlp_bias", qkv_bias="attention_bias"),
    "nemotron": _with(_LLAMA, norm="layer", mlp_names=("up_proj", "down_proj"), mlp_bias="mlp_bias", **_BIASED),
    "seed_oss": _with(
        _LLAMA, qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "exaone4": _with(_LLAMA, norms=_POST_NORMS, qk_norm="head", pattern=4),
    "hunyuan_v1_dense": _with(_LLAMA, qk_norm="head", qk_names=("query_layernorm", "key_layernorm"), **_BIASED),
    "ernie4_5": _with(
        _LLAMA, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", defaults={"head_dim": 128, **_TIED}
    ),
    "arcee": _with(_LLAMA, mlp_names=("up_proj", "down_proj"), mlp_bias="mlp_bias", **_BIASED),
    "apertus": _with(
        _LLAMA, norms=("attention_layernorm", "feedforward_layernorm"), qk_norm="head",
        mlp_names=("up_proj", "down_proj"), **_BIASED,
    ),
    "internlm3": _with(
        _LLAMA, qkv_bias="attention_bias", out_bias="mlp_bias", mlp_bias="mlp_bias",
        aliases={"attention_bias": ("attention_bias", "qkv_bias"), "mlp_bias": ("mlp_bias", "bias")},
    ),
    "nanochat": _with(_LLAMA, norm="none", mlp_names=("fc1", "fc2"), **_BIASED),
    "lfm2": _with(
        _LLAMA, final_norm="embedding_norm", norms=("operator_norm", "ffn_norm"), out="out_proj", qk_norm="head",
        qk_names=("q_layernorm", "k_layernorm"), mlp="feed_forward", mlp_names=("w1", "w3", "w2"), linear="conv",
        defaults=_TIED,
    ),
    "qwen3_5_text": _with(
        _LLAMA, norm="gemma", qk_norm="head", attention_gate="q", linear="qwen3_5", pattern=4,
        defaults={"head_dim": 256}, **_BIASED,
    ),
    # experts
    "mixtral": _with(_LLAMA, moe=_MOE_LOCAL),
    "qwen2_moe": _with(
        _LLAMA, qkv_bias="qkv_bias", defaults={"qkv_bias": True},
        moe=_with(
            _QWEN_MOE, shared="shared_expert", shared_inner="shared_expert_intermediate_size", shared_gate=True
        ),
    ),
    "qwen3_moe": _with(_LLAMA, qk_norm="head", moe=_QWEN_MOE, **_BIASED),
    "olmoe": _with(_LLAMA, qk_norm="full", moe=_MOE_LOCAL, **_BIASED),
    "flex_olmo": _with(_LLAMA, norm="gemma", norms=_POST_NORMS, qk_norm="full", moe=_MOE_LOCAL, **_BIASED),
    "deepseek_v2": _with(_DEEPSEEK, mlp_bias="mlp_bias"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _with(_DEEPSEEK, indexer=True, defaults={"first_k_dense_replace": 3}),
    "glm4_moe": _with(
        _LLAMA, qkv_bias="attention_bias", qk_norm="head", qk_norm_if="use_qk_norm", moe=_DEEP,
        defaults={"first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": _with(_DEEPSEEK, defaults={"first_k_dense_replace": 1}),
    "dots1": _with(_LLAMA, qk_norm="head", moe=_DEEP, **_BIASED),
    "solar_open": _with(_LLAMA, qkv_bias="attention_bias", moe=_with(_DEEP, when="always")),
    "gpt_oss": _with(
        _LLAMA, sinks=True, pattern=2, defaults={"attention_bias": True, "head_dim": 64},
        moe=dict(router="router", router_bias=True, inner="intermediate_size", transposed=True, expert_bias=True),
        **_BIASED,
    ),
    "llama4_text": _with(
        _LLAMA, mlp="feed_forward", inner="intermediate_size_mlp", pattern=4, **_BIASED,
        moe=dict(
            router="router", when="layers", inner="intermediate_size", shared="shared_expert",
            shared_inner="intermediate_size", transposed=True,
        ),
    ),
    "minimax": _with(_LLAMA, moe=_MOE_LOCAL, linear="lightning", pattern=2),
    "minimax_m2": _with(_LLAMA, qk_norm="full", moe=_MOE_LOCAL),
    "phimoe": _with(
        _LLAMA, norm="layer", head_bias="lm_head_bias", moe=dict(router="router", inner="intermediate_size"), **_BIASED
    ),
    "granitemoe": _with(
        _LLAMA, moe=dict(router="router", inner="intermediate_size", parent="block_sparse_moe"), **_BIASED
    ),
    "granitemoeshared": _with(
        _LLAMA, moe=dict(
            router="router", inner="intermediate_size", parent="block_sparse_moe", shared="~shared_mlp",
            shared_inner="shared_intermediate_size",
        ), **_BIASED,
    ),
    "jamba": _with(
        _LLAMA, final_norm="final_layernorm", norms=("input_layernorm", "pre_ff_layernorm"), mlp="feed_forward",
        linear="mamba", moe=dict(router="router", when="period", inner="intermediate_size"),
        defaults={"mamba_conv_bias": True, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    ),
    "qwen3_next": _with(
        _LLAMA, norm="gemma", qk_norm="head", attention_gate="q", linear="qwen3_next", pattern=4,
        defaults={"head_dim": 256}, **_BIASED,
        moe=_with(
            _QWEN_MOE, shared="shared_expert", shared_inner="shared_expert_intermediate_size", shared_gate=True
        ),
    ),
    "ernie4_5_moe": _with(
        _LLAMA, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias", defaults=_TIED,
        moe=dict(
            when="interval", fp32_router=True, shared="shared_experts", shared_count="moe_num_shared_experts",
            extra=("gate.moe_statics.e_score_correction_bias:1",),
        ),
    ),
    "hunyuan_v1_moe": _with(
        _LLAMA, qk_norm="head", qk_names=("query_layernorm", "key_layernorm"), **_BIASED,
        moe=dict(
            router="gate.wg", inner="intermediate_size", shared="shared_mlp", shared_inner="intermediate_size",
            fp32_router=True,
        ),
    ),
    "lfm2_moe": _with(
        _LLAMA, final_norm="embedding_norm", norms=("operator_norm", "ffn_norm"), out="out_proj", qk_norm="head",
        qk_names=("q_layernorm", "k_layernorm"), mlp="feed_forward", mlp_names=("w1", "w3", "w2"), linear="conv",
        defaults=_TIED, moe=dict(when="first_k"),
    ),
    "afmoe": _with(
        _LLAMA, qk_norm="head", attention_gate="gate_proj", pattern=4, **_BIASED,
        norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        moe=dict(
            router="router.gate", when="first_k", shared="shared_experts", shared_count="num_shared_experts",
            extra=("expert_bias",),
        ),
    ),
}  # fmt: skip


_WHOLE_HEADS = frozenset((
    "llama", "gpt2", "gpt_bigcode", "gptj", "gpt_neox", "opt", "bloom", "falcon", "stablelm", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "arcee", "ministral", "internlm3", "deepseek_v2", "olmoe",
))  # fmt: skip


def recipe_for(model_type: str) -> Recipe | None:
    """The recipe of a family, or None for one that is not known here."""
    if model_type not in RECIPES:
        return None
    settings = {"whole_heads": model_type in _WHOLE_HEADS, **RECIPES[model_type]}
    if moe := settings.pop("moe", None):
        settings["moe"] = Moe(**moe)
    return Recipe(**settings)
