"""Random variations of every family's config: each parameter has the name and shape of the real model on meta."""

from __future__ import annotations

import json
import random

import pytest

from dtensor_5d.families.shape import ModelShape
from tests.families.test_shape import foretold, real_parameters
from tests.families.tiny import FAMILIES, tiny_config

# Field -> values; a family is varied in the fields that its own config has.
VALUES = {
    **dict.fromkeys(
        (
            "attention_bias", "mlp_bias", "tie_word_embeddings", "use_qk_norm", "qk_layernorm", "use_bias",
            "use_qkv_bias", "qkv_bias", "bias", "attention_out_bias", "use_parallel_residual", "lm_head_bias",
            "parallel_attn", "multi_query", "enable_bias", "new_decoder_architecture", "do_layer_norm_before",
            "alibi", "conv_bias", "mamba_proj_bias", "mamba_conv_bias", "attention_k_eq_v", "enable_moe_block",
            "use_double_wide_mlp", "block_auto_adjust_ff_dim",
        ),
        (True, False),
    ),
    "num_key_value_heads": (1, 2, 8),
    "num_kv_heads": (2, 8),
    "num_hidden_layers": (2, 4, 6),
    "head_dim": (4, 16, 24, None),
    "global_head_dim": (16, 32),
    "num_global_key_value_heads": (2,),
    "num_attention_heads": (8, 16),
    "first_k_dense_replace": (0, 1, 2),
    "num_dense_layers": (0, 1, 2),
    "moe_layer_start_index": (0, 1, 2),
    "moe_layer_end_index": (2, -1),
    "moe_layer_interval": (1, 2),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([1], []),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
    "moe_num_shared_experts": (0, 2),
    "shared_intermediate_size": (32, 0),
    "q_lora_rank": (24, None),
    "interleave_moe_layer_step": (1, 2),
    "word_embed_proj_dim": (32,),
    "n_inner": (80,),
    "intermediate_size": (104, 128),
    "vocab_size": (131,),
    "expert_layer_period": (1, 2, 3),
    "attn_layer_period": (2, 3),
    "mamba_dt_rank": (8, "auto"),
    "num_ln_in_parallel_attn": (1, 2),
    "ffn_hidden_size": (96, 200),
    "num_kv_shared_layers": (0, 2),
    "hidden_size_per_layer_input": (0, 8),
    "linear_num_key_heads": (2, 4),
}  # fmt: skip
# What a switch needs beside it.
_NEEDS = {"enable_moe_block": dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32)}
_OWN_WAY = {"gemma3n_text": ("hidden_size_per_layer_input", "num_hidden_layers", "head_dim")}


def vary(name: str, seed: int) -> dict[str, object]:
    """Fields to change."""
    rnd = random.Random(f"{name} {seed}")
    has = set(tiny_config(name).to_dict()) | ({"global_head_dim", "num_global_key_value_heads"} & _extra(name))
    chosen: dict[str, object] = {}
    for field, values in VALUES.items():
        if field in has and field not in _OWN_WAY.get(name, ()) and rnd.random() < 0.4:
            chosen[field] = rnd.choice(values)
            if chosen[field] is True:
                chosen |= _NEEDS.get(field, {})
    return chosen


def _extra(name: str) -> set[str]:
    return {"global_head_dim", "num_global_key_value_heads"} if name == "gemma4_text" else set()


def compare(name: str, seed: int) -> bool:
    """Whether transformers builds this variation; if so, our shape must be its."""
    fields = vary(name, seed)
    try:
        config = tiny_config(name, **fields)
        real = real_parameters(config)
    except Exception:  # the family itself refuses the combination, in whatever way it does
        return False
    for source in (config, config.to_dict(), json.loads(config.to_json_string())):
        shape = ModelShape.from_config(source)
        assert shape.known
        assert foretold(shape) == real, fields
    return True


@pytest.mark.parametrize("name", FAMILIES)
def test_random_variations_are_exact(name):
    assert sum(compare(name, seed) for seed in range(3)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_many_random_variations_are_exact(name):
    assert sum(compare(name, seed) for seed in range(3, 28)) >= 6
