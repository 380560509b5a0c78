"""Floating-point operations of a forward pass, counted by matrix product: 2 for each multiply-add.

Source: published-numbers section 4.1 (embeddings are looked up and cost nothing; a tied head costs its product).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dtensor_5d.families.blocks import LayerShape, Param

__all__ = ["product_flops"]


def product_flops(
    layers: Iterable[LayerShape],
    outside: Iterable[Param],
    hidden: int,
    vocab: int,
    tied: bool,
    seq_len: int,
    attention: str,
) -> dict[str, float]:
    """Operations per token by product: a weight's name without its layer, `scores` and `values` of the attention."""
    total: dict[str, float] = {}

    def add(name: str, flops: float) -> None:
        if flops:
            total[name] = total.get(name, 0.0) + flops

    for layer in layers:
        for param in layer.params:
            if not param.multiplies:
                continue
            share = layer.experts_per_token / layer.experts if param.is_expert else 1.0
            add(_product(param.name), 2 * param.numel * share)
        mixer, keys = layer.mixer, layer.mixer.keys(seq_len, attention)
        add("scores", 2 * mixer.heads * mixer.qk_size * keys)
        add("values", 2 * mixer.heads * mixer.v_size * keys)
        add("indexer", 2 * mixer.indexer * keys)
        add("state", 2 * mixer.state)
    for param in outside:
        if param.multiplies:
            add(_product(param.name), 2 * param.numel)
    if tied:
        add("lm_head", 2 * hidden * vocab)
    return total


def _product(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `mlp.up_proj`."""
    return re.sub(r"^.*?\.(?:layers|h)\.\d+\.", "", name).removesuffix(".weight")
