"""The slow, obvious attention that everything in this folder must equal; read this first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_5d.context.mask import Mask
from dtensor_5d.order import PADDING

__all__ = ["attention", "visible"]


def visible(document_ids: Sequence[int], mask: Mask) -> Tensor:
    """`[S, S]`: whether query i (row) sees key j (column) of one row of tokens in their original order.

    Example:
        >>> visible([0, 0, 7, -1], Mask()).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    n = len(document_ids)
    offset = [i - list(document_ids).index(d) for i, d in enumerate(document_ids)]

    def sees(i: int, j: int) -> bool:
        return (
            document_ids[i] == document_ids[j] != PADDING
            and (j <= i or not mask.causal)
            and (mask.window is None or j > i - mask.window)
            and (mask.chunk is None or offset[i] // mask.chunk == offset[j] // mask.chunk)
        )

    return torch.tensor([[sees(i, j) for j in range(n)] for i in range(n)], dtype=torch.bool)


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of whole sequences in one process, differentiable. seen: `[B, S, S]`; shapes else as `attend`."""
    heads = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # A query that sees nothing is padding; softmax over nothing would be NaN, so it sees all and is put to 0 below.
    padding = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | padding)[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.size(2)].masked_fill(padding[:, None], 0)
    return weights @ v
