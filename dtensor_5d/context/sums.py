"""Sums over tiles: the output by the weight each tile saw, and gradients. All in fp32, or fp64 for fp64 inputs.

Two outputs of the same query over different keys, o1 with log-sum-exp l1 and o2 with l2, make

    l = log(e^l1 + e^l2)        o = o1 + (o2 - o1) sigmoid(l2 - l1)

(the merge of Ring Attention). A first tile that covers everything is taken as it is, without a copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dtensor_5d.context.mask import Tile

__all__ = ["Output", "Total", "exact_dtype", "with_sinks"]


def exact_dtype(x: Tensor) -> torch.dtype:
    """What sums over tiles of x are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Output:
    """Output `[B, H, L, Dv]` and log-sum-exp `[B, H, L]` of the queries q, tile by tile."""

    def __init__(self, q: Tensor, value_size: int) -> None:
        self._q = q
        self._shape = (*q.shape[:3], value_size)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Takes a tile in; `out` and `lse` are the caller's no more."""
        exact = exact_dtype(self._q)
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out.to(exact), lse
            return
        whole, total = self._begun()
        o, m = whole[tile.rows, :, tile.q], total[tile.rows, :, tile.q]
        weight = torch.sigmoid(lse - m).unsqueeze(-1).expand_as(o)
        o.lerp_(out.to(exact), weight)
        m.copy_(torch.logaddexp(m, lse))

    def result(self) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp); 0 and -inf for queries that no tile covers: padding."""
        return self._begun()

    def _begun(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            b, h, length, size = self._shape
            exact = exact_dtype(self._q)
            # Heads next to one another, as the flash kernels give it and as models want it back.
            self._out = self._q.new_zeros(b, length, h, size, dtype=exact).transpose(1, 2)
            self._lse = self._q.new_full((b, h, length), -math.inf, dtype=exact)
        return self._out, self._lse


class Total:
    """A sum over tiles of parts of a tensor like x."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._sum: Tensor | None = None

    def add(self, rows: slice, tokens: slice, part: Tensor) -> None:
        """Adds `part` at these rows and tokens; it is the caller's no more."""
        if self._sum is None and part.shape == self._x.shape:
            self._sum = part.to(exact_dtype(self._x))
        else:
            self.result()[rows, :, tokens].add_(part)

    def result(self) -> Tensor:
        """The sum, zeros where nothing was added."""
        if self._sum is None:
            self._sum = self._x.new_zeros(self._x.shape, dtype=exact_dtype(self._x))
        return self._sum


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with one more score per head, `sinks` [H], whose value is zero (in place on out)."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    return out, total
