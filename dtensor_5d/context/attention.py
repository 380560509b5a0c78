"""Attention over the members of a ring as one autograd function.

| | forward | backward |
|---|---|---|
| for each block, as it comes | its tiles, added to output and log-sum-exp | its tiles, added to dq, dk, dv |
| communication | k, v of a block | k, v of a block once more; its dk, dv (the transpose) |
| at the end | sinks into the sum, output in the dtype of q | dk, dv of the own block home; the gradient of sinks |

Saved: q, k, v of this member, output, log-sum-exp. A pass can be given its `Kept` result of an earlier one: then
forward computes and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtensor_5d.context.block import Block
from dtensor_5d.context.plan import TilePlan
from dtensor_5d.context.sums import Output, Total, with_sinks
from dtensor_5d.context.transport import Part, Transport

__all__ = ["Kept", "Pass", "run_pass"]


@dataclass(frozen=True)
class Kept:
    """What a forward found, for a later recomputation of the same forward: detached output and log-sum-exp."""

    output: Tensor
    log_sum_exp: Tensor


@dataclass(frozen=True)
class Pass:
    """How one pass is done: which tiles, by which kernel, over which transport, from which earlier result."""

    plan: TilePlan
    block: Block
    transport: Transport
    kept: Kept | None = None


def run_pass(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Pass) -> tuple[Tensor, Kept]:
    """Output `[B, H, L, Dv]` of local queries over the keys of all members, and what a recomputation needs."""
    out, lse = _Attention.apply(q, k, v, sinks, how)
    return out, Kept(out.detach(), lse)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Pass
    ) -> tuple[Tensor, Tensor]:
        if how.kept is None:
            out, lse = _computed(q, k, v, sinks, how)
        else:
            out, lse = how.kept.output.detach(), how.kept.log_sum_exp.detach()
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = how
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        q, k, v, sinks, out, lse = ctx.saved_tensors
        how: Pass = ctx.how
        grad = grad.to(q.dtype)
        total = Total(q)
        gradients = how.transport.gradients(k, v, how.plan)
        for owner, key, value in how.transport.blocks(k, v, how.plan):
            parts: list[Part] = []
            for tile in how.plan.tiles[owner]:
                rows, mine, theirs = tile.rows, tile.q, tile.k
                dq, dk, dv = how.block.backward(
                    grad[rows, :, mine], q[rows, :, mine], key[rows, :, theirs], value[rows, :, theirs],
                    out[rows, :, mine], lse[rows, :, mine], tile.band,
                )  # fmt: skip
                total.add(rows, mine, dq)
                parts.append((tile, dk, dv))
            gradients.put(owner, parts)
        dk, dv = gradients.result()
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # d loss / d sink = -P(sink) * sum(grad * out), over all queries: a sink takes weight from every value.
            weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
            pulled = (grad * out).sum(-1, dtype=lse.dtype)
            # Where the sink has all the weight the output is 0: padding, whose gradient may be anything.
            pulled = pulled.masked_fill(weight == 1, 0)
            d_sinks = -(weight * pulled).sum((0, 2)).to(sinks.dtype)
        return total.result().to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None


def _computed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Pass) -> tuple[Tensor, Tensor]:
    output = Output(q, v.size(-1))
    for owner, key, value in how.transport.blocks(k, v, how.plan):
        for tile in how.plan.tiles[owner]:
            rows, mine, theirs = tile.rows, tile.q, tile.k
            output.add(
                tile, *how.block.forward(q[rows, :, mine], key[rows, :, theirs], value[rows, :, theirs], tile.band)
            )
    out, lse = output.result()
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse
