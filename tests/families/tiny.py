"""Tiny random causal language models of 69 Hugging Face families: 4 layers, hidden size 64, 128 tokens.

    >>> model = tiny_model("qwen3_moe", dtype=torch.float64)
    >>> model(torch.randint(3, VOCAB, (2, 32))).logits.shape
    torch.Size([2, 32, 128])

The weights are drawn wider than Hugging Face's own initialisation, so that every parameter (biases, norms, sinks,
router corrections) matters for the result; equal arguments give equal weights.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["CORE", "DENSE", "FAMILIES", "MOE", "VOCAB", "tiny_config", "tiny_model"]

VOCAB = 128

_BASE = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=96, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False,
)  # fmt: skip
_HEAD = dict(head_dim=8)
_WINDOW = dict(sliding_window=16)
_NO_DROP = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_GPT = dict(n_embd=64, n_layer=4, n_head=8, n_positions=256, **_NO_DROP)
_MLA = dict(
    kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=8, num_key_value_heads=8,
)  # fmt: skip
_LINEAR = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
# The names under which families count their experts.
_LOCAL = dict(num_local_experts=8, num_experts_per_tok=2)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=2)
_SMALL = dict(moe_intermediate_size=48)
_ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, **_SMALL)
_GROUPS = dict(n_group=2, topk_group=1)
_DEEPSEEK = dict(**_ROUTED, **_GROUPS, **_MLA, n_shared_experts=1, first_k_dense_replace=1)

_THREE_LOCAL = dict(layer_types=["sliding_attention"] * 3 + ["full_attention"])
_LINEAR_FULL = dict(layer_types=["linear_attention", "full_attention"] * 2)
_CONV_FULL = dict(layer_types=["conv", "full_attention"] * 2)
_WINDOW_FULL = dict(layer_types=["sliding_attention", "full_attention"] * 2)

_DENSE: dict[str, dict] = {
    "llama": {},
    "mistral": dict(sliding_window=None, **_HEAD),
    "mistral_sw": dict(_type="mistral", **_WINDOW, **_HEAD),
    "qwen2": {},
    "qwen3": _HEAD,
    "gemma": _HEAD,
    "gemma2": dict(**_HEAD, **_WINDOW, query_pre_attn_scalar=8),
    "gemma3_text": dict(**_HEAD, **_WINDOW, **_THREE_LOCAL, query_pre_attn_scalar=8),
    "gemma3n_text": dict(
        **_HEAD, **_WINDOW, **_WINDOW_FULL, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
        num_kv_shared_layers=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4, altup_num_inputs=2,
    ),
    "gemma4_text": dict(
        **_HEAD, **_WINDOW, **_THREE_LOCAL, global_head_dim=8, vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    ),
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": dict(**_WINDOW, **_THREE_LOCAL),
    "gpt2": _GPT,
    "gpt_neox": dict(attention_dropout=0.0, hidden_dropout=0.0),
    "gptj": dict(**_GPT, rotary_dim=4, n_inner=96),
    "gpt_bigcode": dict(**_GPT, n_inner=96),
    "opt": dict(ffn_dim=96, word_embed_proj_dim=64, dropout=0.0, do_layer_norm_before=True),
    "bloom": dict(n_head=8, n_layer=4),
    "falcon": dict(num_kv_heads=4, new_decoder_architecture=True, ffn_hidden_size=96, num_ln_in_parallel_attn=2),
    "smollm3": dict(no_rope_layers=[1, 1, 1, 0]),
    "starcoder2": {},
    "stablelm": {},
    "cohere": {},
    "cohere2": dict(**_HEAD, **_WINDOW, **_THREE_LOCAL),
    "glm": _HEAD,
    "glm4": _HEAD,
    "granite": {},
    "helium": _HEAD,
    "nemotron": {},
    "seed_oss": _HEAD,
    "exaone4": dict(**_WINDOW, sliding_window_pattern=4),
    "hunyuan_v1_dense": _HEAD,
    "ernie4_5": _HEAD,
    "arcee": {},
    "apertus": {},
    "ministral": dict(**_HEAD, **_WINDOW),
    "internlm3": _HEAD,
    "nanochat": {},
    "lfm2": dict(**_CONV_FULL, block_multiple_of=8),
    "vaultgemma": dict(**_HEAD, **_WINDOW, query_pre_attn_scalar=8),
    "qwen3_5_text": dict(**_HEAD, **_LINEAR, **_LINEAR_FULL),
}  # fmt: skip

_MOE: dict[str, dict] = {
    "mixtral": dict(**_LOCAL, **_HEAD, sliding_window=None),
    "qwen2_moe": dict(**_EXPERTS, **_SMALL, shared_expert_intermediate_size=48),
    "qwen3_moe": dict(**_EXPERTS, **_SMALL, **_HEAD),
    "olmoe": _EXPERTS,
    "deepseek_v2": dict(**_DEEPSEEK, topk_method="group_limited_greedy"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": dict(**_DEEPSEEK, index_topk=16, index_n_heads=4, index_head_dim=16),
    "glm4_moe": dict(**_ROUTED, **_GROUPS, **_HEAD, first_k_dense_replace=1),
    "glm4_moe_lite": _DEEPSEEK,
    "gpt_oss": dict(**_LOCAL, **_HEAD, **_WINDOW, **_WINDOW_FULL),
    "llama4_text": dict(
        **_HEAD, num_local_experts=8, num_experts_per_tok=1, intermediate_size_mlp=96, interleave_moe_layer_step=2,
        attention_chunk_size=16, use_qk_norm=True,
    ),
    "minimax": dict(**_LOCAL, **_HEAD, **_LINEAR_FULL, block_size=16),
    "minimax_m2": dict(**_LOCAL, **_HEAD),
    "phimoe": _LOCAL,
    "granitemoe": _LOCAL,
    "granitemoeshared": dict(**_LOCAL, shared_intermediate_size=48),
    "jamba": dict(
        num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
        mamba_d_state=8, mamba_expand=2,
    ),
    "qwen3_next": dict(**_EXPERTS, **_SMALL, **_HEAD, **_LINEAR, **_LINEAR_FULL, shared_expert_intermediate_size=48),
    "ernie4_5_moe": dict(
        **_SMALL, **_HEAD, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1,
    ),
    "hunyuan_v1_moe": dict(**_SMALL, **_HEAD, num_experts=8, moe_topk=2),
    "dots1": dict(**_ROUTED, **_GROUPS, **_HEAD, n_shared_experts=1, first_k_dense_replace=1),
    "flex_olmo": _EXPERTS,
    "lfm2_moe": dict(**_EXPERTS, **_SMALL, **_CONV_FULL, num_dense_layers=1),
    "afmoe": dict(**_EXPERTS, **_SMALL, **_HEAD, **_WINDOW, **_THREE_LOCAL, num_dense_layers=1),
    "solar_open": dict(**_ROUTED, **_GROUPS, **_HEAD),
}  # fmt: skip

_SETTINGS = {**_DENSE, **_MOE}

DENSE = tuple(_DENSE)
MOE = tuple(_MOE)
FAMILIES = DENSE + MOE
# Enough to meet every mechanism once: windows, soft-cap, sinks, fused projections, biases, MLA, shared experts.
CORE = (
    "llama", "mistral", "mistral_sw", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2", "gpt_neox",
    "smollm3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss",
    "llama4_text", "minimax",
)  # fmt: skip


def tiny_config(name: str, **overrides: object) -> PretrainedConfig:
    """The config of a tiny model of this family.

    Example:
        >>> tiny_config("llama", num_hidden_layers=2, tie_word_embeddings=True).model_type
        'llama'
    """
    settings = {**_BASE, **_SETTINGS[name], **overrides}
    # A list per layer follows the number of layers, repeated or cut.
    if "layer_types" not in overrides and "layer_types" in settings:
        types, layers = list(settings["layer_types"]), int(settings["num_hidden_layers"])
        settings["layer_types"] = [types[i % len(types)] for i in range(layers)]
    return CONFIG_MAPPING[settings.pop("_type", name)](**settings)


def tiny_model(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    attn: str | None = None,
    experts: str | None = None,
    **overrides: object,
) -> PreTrainedModel:
    """A tiny model of this family on the CPU, in training mode.

    attn and experts name a transformers implementation ("eager", "sdpa", "flex_attention"; "eager", "grouped_mm").
    Overrides go to the config.
    The global random state is left alone.

    Example:
        >>> tiny_model("gpt_oss", seed=1, num_hidden_layers=2).config.num_hidden_layers
        2
    """
    chosen = {"attn_implementation": attn, "experts_implementation": experts}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(name, **overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **{k: v for k, v in chosen.items() if v})
    # Drawn in float64 and rounded: the same weights in every dtype.
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).mul_(scale).to(tensor.dtype)

    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(noise(parameter, 0.08))
            else:
                parameter.add_(noise(parameter, 0.5 if parameter_name.endswith("sinks") else 0.05))
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.copy_(noise(buffer, 0.05))
    return model.train()
