"""Families that cannot run over the context axis, each with its reason, and what others need of a batch, as data.

`tests/context/test_families.py` trains every other family of `facts.FACTS` over cp 2 and compares every gradient with
one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dtensor_5d.families.facts import facts_for

__all__ = ["ATTENTION", "COUNTS_REAL", "LAYER_TYPES", "REFUSED", "refusal"]

ATTENTION = "dtensor_5d_context"
"""The name under which transformers knows our attention: in a config it says that modules attend over the axis."""

_STATE = "its {} layers carry state from token to token, which no ring passes on"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "bloom": "its attention takes distances from a mask that it makes itself (alibi)",
        "falcon": "its attention is not dispatched by transformers",
        "deepseek_v32": "its indexer chooses keys from a mask over the whole sequence",
        "lfm2": _STATE.format("convolution"),
        "lfm2_moe": _STATE.format("convolution"),
        "minimax": _STATE.format("linear attention"),
        "jamba": _STATE.format("mamba"),
        "qwen3_next": _STATE.format("linear attention"),
        "qwen3_5_text": _STATE.format("linear attention"),
    }
)

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers whose mask the ring can make."""

COUNTS_REAL = ("opt",)
"""Families whose own positions do not count padding."""


def refusal(model_type: str) -> str | None:
    """Why a family cannot run over the context axis, or None where it can.

    Example:
        >>> refusal("falcon")
        'its attention is not dispatched by transformers'
    """
    if model_type in REFUSED:
        return REFUSED[model_type]
    facts = facts_for(model_type)
    if not facts.verified:
        return "nobody has compared this family with one process"
    return None if "custom" in facts.attention else "a registered attention function does not get all it needs"
