"""Rotary embeddings whose frequencies depend on the length (`dynamic`, `longrope`), for rows that are cut.

transformers takes the length from the largest position of the call. A rank that holds early tokens only would get
other frequencies than its peers: so each call sees one more token, at the last position of the whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["adapts_to_length", "on_whole_range"]

_ADAPTIVE = ("dynamic", "longrope")


def adapts_to_length(module: nn.Module) -> bool:
    """Whether this module is a rotary embedding that takes its frequencies from the length."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in _ADAPTIVE for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def on_whole_range(module: nn.Module, longest: Callable[[], int | None]) -> None:
    """Lets the module assume rows of `longest()` tokens; None: those of its call.

    forward(x, position_ids [B, L], ...) -> a tensor [B, L, .] or several.
    """
    inner = module.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        length = longest()
        if length is None:
            return inner(x, position_ids, *args, **kwargs)
        last = torch.full_like(position_ids[:, :1], length - 1)
        out = inner(x, torch.cat([position_ids, last], dim=1), *args, **kwargs)
        return tuple(part[:, :-1] for part in out) if isinstance(out, tuple) else out[:, :-1]

    module.forward = forward
