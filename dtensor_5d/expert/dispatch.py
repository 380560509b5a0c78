"""Tokens to their experts and back: `dispatch`, `combine`, and the plain reference beside them.

| function | forward | backward |
|---|---|---|
| dispatch | the row of each pair travels to its expert | gradients travel back, are summed over a token's choices |
| combine | rows travel back, are weighted and summed over choices | weighted gradients travel to the experts |

Each is the other's transpose, so a layer moves its rows four times. The routing weights stay with the sender. Every
backward enters its collective, also on a rank that sent or received nothing.

What runs between posting and waiting of `dispatch` (its `meanwhile`) overlaps with the travel both ways: its nodes are
made after the one that posts and before the one that waits, and autograd runs what is ready latest-made first.

    forward     post | meanwhile | wait | experts | combine
    backward                     combine | experts | post | meanwhile | wait

Only there, not in `combine` too: what is computed once can hide one travel, and both are of the same rows.

Letters: T tokens, K choices, P pairs sent, R rows received, M model size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtensor_5d.expert.route import Route
from dtensor_5d.expert.transport import Buffers, Flight, Transport

__all__ = ["combine", "dispatch", "plain_experts"]


def dispatch(
    hidden: Tensor, route: Route, transport: Transport, buffers: Buffers, meanwhile: Callable[[], None] | None = None
) -> Tensor:
    """The rows of this rank's experts: hidden [T, M] -> [R, M], laid out by local expert (`route.ends`).

    meanwhile: what may run while they travel.
    """
    trip = _Trip(route, transport, buffers)
    leaving = _Post.apply(hidden, trip)
    if meanwhile is not None:
        try:
            meanwhile()
        except BaseException:
            trip.landed()  # messages must not write into memory that others have by then
            raise
    rows: Tensor = _Wait.apply(leaving, trip)
    return rows


class _Trip:
    """What the two halves of a dispatch share: how rows travel, those on their way, and where gradients arrive."""

    def __init__(self, route: Route, transport: Transport, buffers: Buffers) -> None:
        self.route, self.transport, self.buffers = route, transport, buffers
        self.flight: Flight | None = None

        self.lent: Tensor | None = None

    def landed(self) -> Tensor:
        flight, self.flight = self.flight, None
        assert flight is not None
        return flight.finish()


class _Post(Function):
    """Forward: the row of each pair, h[token], leaves. Backward: dh[t] = sum over its pairs of g, which has come back.

    The result [0, M] only ties it to `_Wait`.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.flight = trip.transport.there(hidden, trip.route.token, trip.route, trip.buffers)
        return hidden.new_empty(0, hidden.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        trip: _Trip = ctx.trip
        summed = _sum_by_token(trip.landed(), trip.route, None)
        lent, trip.lent = trip.lent, None
        assert lent is not None
        trip.buffers.take_back("leaving", lent)
        return summed, None


class _Wait(Function):
    """Forward: the rows that came. Backward: their gradients leave."""

    @staticmethod
    def forward(ctx: Any, leaving: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.landed()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        trip: _Trip = ctx.trip
        trip.lent = trip.buffers.lend("leaving", trip.route.pair.numel(), g)
        trip.flight = trip.transport.back(g, trip.route, trip.buffers, trip.lent)
        return g.new_empty(0, g.size(1)), None


def combine(rows: Tensor, weights: Tensor | None, route: Route, transport: Transport, buffers: Buffers) -> Tensor:
    """What the experts made of each token: rows [R, M], weights [T, K] (None: ones) -> [T, M], in the dtype of rows."""
    out: Tensor = _Combine.apply(rows, weights, route, transport, buffers)
    return out


class _Combine(Function):
    """Forward: out[t] = sum over its pairs of w y, back. Backward: dy = w g[t], there; dw = <g[t], y>, here."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, route: Route, transport: Transport, buffers: Buffers
    ) -> Tensor:
        out = rows.new_empty(route.pair.numel(), rows.size(1))
        returned = transport.back(rows, route, buffers, out).finish()
        ctx.save_for_backward(weights, returned if ctx.needs_input_grad[1] else None)
        ctx.route, ctx.transport, ctx.buffers = route, transport, buffers
        return _sum_by_token(returned, route, weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        route: Route = ctx.route
        weights, returned = ctx.saved_tensors
        rows = ctx.buffers.lend("leaving", route.pair.numel(), g)
        torch.index_select(g, 0, route.token, out=rows)
        dw = dy = None
        if ctx.needs_input_grad[1]:
            dw = weights.new_zeros(weights.numel())
            dw[route.pair] = _dot(rows, returned).to(weights.dtype)
            dw = dw.view_as(weights)
        if ctx.needs_input_grad[0] and weights is not None:
            rows.mul_(weights.reshape(-1)[route.pair].unsqueeze(1).to(rows.dtype))
        if ctx.needs_input_grad[0]:
            dy = ctx.transport.there(rows, None, route, ctx.buffers).finish()
        ctx.buffers.take_back("leaving", rows)
        return dy, dw, None, None, None


def _sum_by_token(rows: Tensor, route: Route, weights: Tensor | None) -> Tensor:
    """[T, M]: the sum over each token's pairs of rows [P, M], weighted; zero for a token without pairs."""
    if not rows.numel() or not route.tokens:
        return rows.new_zeros(route.tokens, rows.size(1))
    if weights is not None and weights.dtype != rows.dtype:
        # Routers that compute in fp32 weigh in fp32.
        rows = rows.to(torch.promote_types(rows.dtype, weights.dtype))
        weights = weights.to(rows.dtype)
    if route.is_whole:
        return F.embedding_bag(route.place, rows, mode="sum", per_sample_weights=weights)
    travels = route.place >= 0
    sizes = travels.sum(1)
    return F.embedding_bag(
        route.place[travels], rows, sizes.cumsum(0) - sizes, mode="sum",
        per_sample_weights=None if weights is None else weights[travels],
    )  # fmt: skip


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """[P]: the product of each row of x with the one of y; in blocks that stay in the cache."""
    block = max(1, (1 << 17) // max(1, x.size(1)))
    parts = [(a * b).sum(1) for a, b in zip(x.split(block), y.split(block))]
    return torch.cat(parts) if parts else x.new_empty(0)


def plain_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, experts: int, expert: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """The reference, in one process: out[t] = sum over its choices k of weights[t, k] * expert(hidden[t], index[t, k]).

    hidden [T, M], index and weights [T, K]; `expert(rows, e)` is what expert e makes of rows [n, M].
    """
    out = torch.zeros_like(hidden)
    for e in range(experts):
        token, choice = torch.where(index == e)
        out = out.index_add(0, token, (weights[token, choice, None] * expert(hidden[token], e)).to(out.dtype))
    return out
