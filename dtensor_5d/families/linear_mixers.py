"""Layers that carry a state of fixed size along the sequence instead of attending: their parameters and work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtensor_5d.families.blocks import Mixer, Param, linear, vector
from dtensor_5d.families.fields import Fields

__all__ = ["LINEAR_MIXERS"]

_Made = tuple[list[Param], Mixer]


def _convolution(name: str, channels: int, width: int, bias: bool) -> list[Param]:
    """A depthwise convolution: each channel of a token is multiplied by `width` weights."""
    made = [Param(f"{name}.weight", (channels, 1, width), "attention", 0, outputs=channels)]
    return made + ([vector(f"{name}.bias", channels, "attention", cut=True)] if bias else [])


def _conv(fields: Fields, prefix: str) -> _Made:
    hidden, bias = fields.count("hidden_size"), fields.flag("conv_bias")
    made = _convolution(f"{prefix}conv.conv", hidden, fields.count("conv_L_cache", 3), bias)
    made += linear(f"{prefix}conv.in_proj", 3 * hidden, hidden, "attention", bias=bias)
    made += linear(f"{prefix}conv.out_proj", hidden, hidden, "attention", bias=bias)
    return made, Mixer("linear")


def _lightning(fields: Fields, prefix: str) -> _Made:
    hidden, heads, size = fields.count("hidden_size"), fields.count("num_attention_heads"), fields.head_size
    name = f"{prefix}self_attn"
    made = [vector(f"{name}.norm.weight", heads * size, "norm")]
    made += linear(f"{name}.qkv_proj", 3 * heads * size, hidden, "attention")
    made += linear(f"{name}.out_proj", hidden, heads * size, "attention")
    made += linear(f"{name}.output_gate", heads * size, hidden, "attention")
    return made, Mixer("linear", heads, heads, size, size, state=2 * heads * size * size)


def _delta(fields: Fields, prefix: str, fused: bool) -> _Made:
    hidden, name = fields.count("hidden_size"), f"{prefix}linear_attn"
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_size, value_size = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    key, value = keys * key_size, values * value_size
    made = [vector(f"{name}.{v}", values, "attention") for v in ("dt_bias", "A_log")]
    made += _convolution(f"{name}.conv1d", 2 * key + value, fields.count("linear_conv_kernel_dim", 4), False)
    if fused:
        made += linear(f"{name}.in_proj_qkvz", 2 * key + 2 * value, hidden, "attention")
        made += linear(f"{name}.in_proj_ba", 2 * values, hidden, "attention")
    else:
        made += linear(f"{name}.in_proj_qkv", 2 * key + value, hidden, "attention")
        made += linear(f"{name}.in_proj_z", value, hidden, "attention")
        made += linear(f"{name}.in_proj_b", values, hidden, "attention")
        made += linear(f"{name}.in_proj_a", values, hidden, "attention")
    made.append(vector(f"{name}.norm.weight", value_size, "norm"))
    made += linear(f"{name}.out_proj", hidden, value, "attention")
    # The delta rule reads the state, writes it and reads it again: three products of key size x value size a head.
    return made, Mixer("linear", values, keys, key_size, value_size, state=3 * values * key_size * value_size, chunk=64)


def _qwen3_next(fields: Fields, prefix: str) -> _Made:
    return _delta(fields, prefix, fused=True)


def _qwen3_5(fields: Fields, prefix: str) -> _Made:
    return _delta(fields, prefix, fused=False)


def _mamba(fields: Fields, prefix: str) -> _Made:
    hidden, name = fields.count("hidden_size"), f"{prefix}mamba"
    inner, states = fields.count("mamba_expand") * hidden, fields.count("mamba_d_state")
    rank = fields.get("mamba_dt_rank", "auto")
    rank = -(-hidden // 16) if rank == "auto" else int(rank)
    bias = fields.flag("mamba_proj_bias")
    made = [Param(f"{name}.A_log", (inner, states), "attention"), vector(f"{name}.D", inner, "attention")]
    made += _convolution(f"{name}.conv1d", inner, fields.count("mamba_d_conv"), fields.flag("mamba_conv_bias"))
    made += linear(f"{name}.in_proj", 2 * inner, hidden, "attention", bias=bias)
    made += linear(f"{name}.x_proj", rank + 2 * states, inner, "attention")
    made += linear(f"{name}.dt_proj", inner, rank, "attention", bias=True)
    made += linear(f"{name}.out_proj", hidden, inner, "attention", bias=bias)
    for own, size in (("dt", rank), ("b", states), ("c", states)):
        made.append(vector(f"{name}.{own}_layernorm.weight", size, "norm"))
    return made, Mixer("linear", inner, inner, states, 1, state=2 * inner * states)


LINEAR_MIXERS: Mapping[str, Callable[[Fields, str], _Made]] = {
    "conv": _conv,
    "lightning": _lightning,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "mamba": _mamba,
}
