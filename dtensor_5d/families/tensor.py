"""Tensor-parallel rules that families do not ship, as data, and which families are proved.

Rules are relative to a decoder layer. What a family ships (`adapters/rules.py`) stands below these: an entry here
replaces it. `tests/tensor/test_parity.py` trains every family of `PROVED` and compares every gradient with one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["PROVED", "TENSOR_RULES"]

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
        "qwen2_moe": {
            "mlp.shared_expert.gate_proj": "column",
            "mlp.shared_expert.up_proj": "column",
            "mlp.shared_expert.down_proj": "row",
            "mlp.shared_expert_gate": "replicate_sum",
        },
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        # Gate and up alternate along the last dim, so a contiguous half has whole pairs.
        "gpt_oss": {
            **_QKV,
            "self_attn.sinks": "cut/0",
            "mlp.experts.gate_up_proj": "cut/2",
            "mlp.experts.gate_up_proj_bias": "cut/1",
            "mlp.experts.down_proj": "cut/1",
            "mlp.experts.down_proj_bias": "once",
        },
    }
)

PROVED = (
    "cohere", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss",
    "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
