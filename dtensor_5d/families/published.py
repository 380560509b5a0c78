"""Configs of published models, as data: the fields that decide their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS"]


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int = 8) -> dict[str, Any]:
    return dict(
        model_type="llama", vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, hidden_act="silu", max_position_embeddings=131072,
        attention_bias=False, mlp_bias=False, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[], hidden_act="silu", attention_bias=False,
        max_position_embeddings=40960, tie_word_embeddings=False, dtype="bfloat16",
    ),
    "mixtral-8x7b": dict(
        model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, hidden_act="silu",
        max_position_embeddings=32768, tie_word_embeddings=False, dtype="bfloat16",
    ),
    "deepseek-v3": dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, num_nextn_predict_layers=1,
        hidden_act="silu", attention_bias=False, max_position_embeddings=163840, tie_word_embeddings=False,
        dtype="bfloat16",
    ),
    "gpt-oss-120b": dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18, hidden_act="silu",
        attention_bias=True, max_position_embeddings=131072, tie_word_embeddings=False, dtype="bfloat16",
    ),
    "gemma-3-27b": dict(
        model_type="gemma3_text", vocab_size=262208, hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=16, head_dim=128, sliding_window=1024, sliding_window_pattern=6,
        query_pre_attn_scalar=168, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131072,
        tie_word_embeddings=True, dtype="bfloat16",
    ),
    "smollm2-135m": dict(
        model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, hidden_act="silu", max_position_embeddings=8192,
        attention_bias=False, mlp_bias=False, tie_word_embeddings=True, dtype="bfloat16",
    ),
}  # fmt: skip
