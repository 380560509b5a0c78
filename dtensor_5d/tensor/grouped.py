"""The grouped product of transformers' experts takes rows of whole 16 bytes: what cutting experts inside must leave."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.tensor_rules import rule_of
from dtensor_5d.errors import Violation

__all__ = ["grouped_violations"]

_BYTES = 16


def grouped_violations(
    model: nn.Module, decoder: Decoder, rules: Mapping[str, Any], tp: int, dtype: torch.dtype | None
) -> Iterator[Violation]:
    """Inner sizes of which a rank's part is not a multiple of 16 bytes, where the grouped product computes it.

    dtype: of computing, None: as stored.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) != "grouped_mm":
        return
    for experts in (*decoder.experts, *decoder.other_experts):
        module = model.get_submodule(experts)
        for leaf, parameter in module._parameters.items():
            style = rule_of(f"{experts}.{leaf}", rules)
            if parameter is None or parameter.dim() != 3 or style is None:
                continue
            if style not in ("row", "cut/1"):
                continue
            computed = dtype or parameter.dtype
            inner = parameter.shape[2 if style == "row" else 1]
            if inner // tp * computed.itemsize % _BYTES:
                name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", f"{experts}.{leaf}")
                asked = f"tp={tp} with {name} of {inner}: {inner // tp} of {computed} on a rank"
                needs = f"the grouped product needs a multiple of {_BYTES // computed.itemsize}"
                yield Violation(asked, needs, "build the model with experts_implementation='eager', or use ep")
