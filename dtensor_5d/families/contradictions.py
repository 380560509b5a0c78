"""What a config lacks or contradicts itself in: every violation at once, before a shape is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.fields import DTYPES, KINDS, Fields, layer_kind

__all__ = ["contradictions"]

_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_MLPS = ("dense", "sparse")


def contradictions(fields: Fields, *, known: bool, whole_heads: bool) -> list[Violation]:
    """All violations of a config. known: of a family whose kinds of layers are known here.

    whole_heads: the family refuses a model size that its heads do not divide.

    Example:
        >>> config = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=8, vocab_size=9, dtype="banana")
        >>> print(contradictions(Fields(config, {}), known=True, whole_heads=True)[0].asked)
        dtype='banana'
    """
    missing = [violation for name in _COUNTS for violation in _missing(fields, name)]
    if missing:
        return missing
    return [
        *_heads(fields, whole_heads),
        *_lists(fields, known),
        *_windows(fields),
        *_layers_apart(fields),
        *_experts(fields),
        *_dtype(fields),
    ]


def _missing(fields: Fields, name: str) -> tuple[Violation, ...]:
    try:
        fields.count(name)
    except PlanError as error:
        return tuple(error.violations)
    return ()


def _heads(fields: Fields, whole_heads: bool) -> Iterator[Violation]:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    uneven = hidden % heads if whole_heads else hidden < heads
    if not fields.get("head_dim") and uneven and not fields.get("kv_lora_rank"):
        near = _nearest_divisor(hidden, heads)
        yield Violation(
            f"hidden_size={hidden} with num_attention_heads={heads} and no head_dim",
            f"{heads} must divide {hidden}" if whole_heads else f"a head of {hidden} // {heads} numbers has none",
            f"give head_dim, or use {near} heads",
        )
    kv = fields.get("num_key_value_heads")
    is_count = isinstance(kv, int) and not isinstance(kv, bool) and kv > 0
    if kv is not None and (not is_count or heads % kv):
        near = _nearest_divisor(heads, kv) if is_count else heads
        yield Violation(
            f"num_key_value_heads={kv!r} with num_attention_heads={heads}",
            f"the key-value heads must divide the {heads} query heads",
            f"use {near} key-value heads",
        )


def _lists(fields: Fields, known: bool) -> Iterator[Violation]:
    layers = fields.count("num_hidden_layers")
    for name in ("layer_types", "mlp_layer_types"):
        kinds = fields.get(name)
        if kinds is None:
            continue
        if not isinstance(kinds, (list, tuple)):
            yield Violation(f"{name}={kinds!r}", "must be a list", f"give a list of {layers} {name}, or none")
            continue
        if len(kinds) != layers:
            yield Violation(
                f"{len(kinds)} {name} for num_hidden_layers={layers}",
                f"there must be {layers}, one for each layer",
                f"give {layers} {name} or num_hidden_layers={len(kinds)}",
            )
        legal = _MLPS if name == "mlp_layer_types" else tuple(KINDS)
        strange = [k for k in kinds if (k not in _MLPS if name == "mlp_layer_types" else layer_kind(k) is None)]
        if strange and known:
            yield Violation(f"{strange[0]!r} in {name}", f"there are {', '.join(legal)}", f"use these in {name}")


def _windows(fields: Fields) -> Iterator[Violation]:
    for name in ("sliding_window", "attention_chunk_size"):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            yield Violation(
                f"{name}={value!r}", "must be a whole number >= 1, or null for none", f"give {name} a number of tokens"
            )


def _layers_apart(fields: Fields) -> Iterator[Violation]:
    """Of `per_layer_config`: layer -> fields that differ there."""
    given, layers = fields.raw.get("per_layer_config"), fields.count("num_hidden_layers")
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        yield Violation(
            f"per_layer_config of type {type(given).__name__}", "must map a layer to its own fields",
            'give {"5": {"head_dim": 512}} and the like',
        )  # fmt: skip
        return
    for place in given:
        if not str(place).isdecimal() or int(place) >= layers:
            yield Violation(
                f"layer {place!r} in per_layer_config", f"there are layers 0 to {layers - 1}", "correct this key"
            )


def _experts(fields: Fields) -> Iterator[Violation]:
    experts, chosen = fields.get("experts"), fields.get("experts_per_token")
    if isinstance(experts, int) and isinstance(chosen, int) and not 1 <= chosen <= max(experts, 1):
        yield Violation(
            f"{chosen} experts per token of {experts} experts",
            f"must be between 1 and {experts}",
            f"use {min(max(chosen, 1), max(experts, 1))} experts per token",
        )


def _dtype(fields: Fields) -> Iterator[Violation]:
    dtype = fields.get("dtype")
    if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
        yield Violation(f"dtype={dtype!r}", f"there are {', '.join(DTYPES)}", "give one of these, or none")


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, min(number, 4096) + 1) if number % d == 0] + [number]
    return min(divisors, key=lambda d: (abs(math.log(d / wanted)), d))
