"""Tensor-parallel rules that families do not ship, as data, and which families are proved.

Rules are relative to a decoder layer. What a family ships (`adapters/rules.py`) stands below these: an entry here
replaces it. `tests/tensor/test_parity.py` trains every family of `PROVED` and compares every gradient with one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["PROVED", "REFUSED_SETTINGS", "TENSOR_RULES"]

_QKV = {
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column_kv",
    "self_attn.v_proj": "column_kv",
    "self_attn.o_proj": "row",
}
# Shipped plans gather q, k and v for these norms over all heads; a norm over cut heads needs one number a token.
_NORMED = {**_QKV, "self_attn.q_norm": "norm_column", "self_attn.k_norm": "norm_column_kv"}
_GATED = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
# Shipped plans gather the halves, which are stored one after the other.
_PACKED = {"mlp.gate_up_proj": "packed_column", "mlp.down_proj": "row"}
_LATENT = {
    "self_attn.q_proj": "column",
    "self_attn.q_a_proj": "replicate_sum",
    "self_attn.q_a_layernorm": "replicate_sum",
    "self_attn.q_b_proj": "column",
    "self_attn.kv_a_proj_with_mqa": "replicate_sum",
    "self_attn.kv_a_layernorm": "replicate_sum",
    "self_attn.kv_b_proj": "column",
    "self_attn.o_proj": "row",
}

def _shared(name: str) -> dict[str, str]:
    """Shared experts that a shipped plan leaves whole."""
    return {f"mlp.{name}.gate_proj": "column", f"mlp.{name}.up_proj": "column", f"mlp.{name}.down_proj": "row"}


_HUNYUAN = {
    **_QKV,
    "self_attn.query_layernorm": "replicate_sum",
    "self_attn.key_layernorm": "replicate_sum",
}

TENSOR_RULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {"attn.c_attn": "packed_column/3", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
        "opt": {
            "self_attn.q_proj": "column",
            "self_attn.k_proj": "column",
            "self_attn.v_proj": "column",
            "self_attn.out_proj": "row",
            "fc1": "column",
            "fc2": "row",
        },
        "stablelm": {**_QKV, **_GATED},
        "phi3": {"self_attn.qkv_proj": "qkv", "self_attn.o_proj": "row", **_PACKED},
        "glm": _PACKED,
        "glm4": _PACKED,
        "olmo2": _NORMED,
        "olmo3": _NORMED,
        "olmoe": _NORMED,
        "flex_olmo": _NORMED,
        "minimax_m2": _NORMED,
        "qwen2_moe": _shared("shared_expert"),
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "glm4_moe_lite": {**_LATENT, **_shared("shared_experts")},
        "solar_open": _shared("shared_experts"),
        "hunyuan_v1_dense": {**_HUNYUAN, **_GATED},
        "hunyuan_v1_moe": {**_HUNYUAN, **_shared("shared_mlp")},
        # Norms that a switch of the config adds; what a model does not have is left out.
        "cohere": {"self_attn.q_norm.weight": "cut/0", "self_attn.k_norm.weight": "cut/0"},  # [heads, head size]
        "phi": {"self_attn.q_layernorm": "replicate_sum", "self_attn.k_layernorm": "replicate_sum"},
        "glm4_moe": {"self_attn.q_norm": "replicate_sum", "self_attn.k_norm": "replicate_sum"},
        "apertus": {"mlp.act_fn": "replicate_sum"},  # an activation with weights
        "gpt_oss": {**_QKV, "self_attn.sinks": "cut/0"},
    }
)

# Switches of a family's config that cannot be on, and why.
REFUSED_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "opt": {"layerdrop": "must be 0: the ranks would leave out other layers"},
        "stablelm": {"qk_layernorm": "must be False: ranks would take the norms of the first heads"},
    }
)

PROVED = (
    "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3", "llama",
    "minimax_m2", "ministral", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma",
)  # fmt: skip
