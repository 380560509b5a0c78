"""Products whose weight gradient can wait: linear, embedding, matmul (Conv1D), batched and grouped experts.

Each is torch's own operation in forward. Backward gives the input gradient at once; the weight gradient goes to
autograd as usual, or, inside `store.deferring(key)`, waits in the store until `store.run(key)`. Without a store,
without gradients or with a frozen weight the plain operation runs, untouched.

Shapes: B batch, T tokens (any leading dims), I inputs, O outputs, E experts, V vocabulary, M model size.

A weight may be a DTensor while the input is a plain tensor (a tensor or expert style at work on local shards). The
product is then the local one, and the local weight gradient is taken as that shard of the whole gradient
(`grad_placements`: other placements of it, such as `Partial`; it is brought to the weight's own placements).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Placement

from dtensor_5d.ops.grouped import grouped_product, grouped_weight_gradient
from dtensor_5d.ops.store import Place, WeightGradients, home, is_watched

__all__ = ["batched_matmul", "embedding", "grouped_matmul", "linear", "matmul"]


class _Weight:
    """What backward must know of a weight besides its data: where its gradient lands and in which form."""

    def __init__(self, weight: Tensor, mixed: bool, grad_placements: Sequence[Placement] | None) -> None:
        self.home: tuple[Tensor, Place | None] | None = home(weight)
        self.dtype = weight.dtype
        self.like = weight if mixed else None
        self.grad_placements = grad_placements

    def local(self, weight: Tensor) -> Tensor:
        if self.like is None:
            return weight
        assert isinstance(weight, DTensor)
        return weight.to_local(grad_placements=self.grad_placements or weight.placements)

    def whole(self, gradient: Tensor) -> Tensor:
        """The gradient as autograd and `.grad` want it: the weight's dtype, and a DTensor if the weight is one."""
        gradient = gradient.to(self.dtype)
        if self.like is None:
            return gradient
        assert isinstance(self.like, DTensor)
        wrapped = DTensor.from_local(
            gradient, self.like.device_mesh, self.grad_placements or self.like.placements, run_check=False,
            shape=self.like.shape, stride=self.like.stride(),
        )  # fmt: skip
        return wrapped.redistribute(placements=self.like.placements)


def _deliver(ctx: Any, make: Callable[..., Tensor], *held: Tensor) -> Tensor | None:
    """The weight gradient `make(*held)` for autograd, or None where it waits in the store."""
    weight: _Weight = ctx.weight
    store: WeightGradients = ctx.store
    # With create_graph=True (grad mode on) the gradient is an input of further differentiation: it cannot wait.
    if not store.is_deferring or weight.home is None or torch.is_grad_enabled():
        return weight.whole(make(*held))
    parameter, place = weight.home
    if is_watched(parameter):  # a hook may have come after the forward
        return weight.whole(make(*held))
    store.add(parameter, place, lambda *tensors: weight.whole(make(*tensors)), *held)
    return None


def _plain(x: Tensor, weight: Tensor, store: WeightGradients | None) -> bool:
    return store is None or not weight.requires_grad or not torch.is_grad_enabled()


def _is_mixed(x: Tensor, weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and not isinstance(x, DTensor)


def _cast_as_autocast(x: Tensor) -> Tensor:
    # The input is saved as the product sees it; the weight is saved as it is and cast again in backward.
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, store: WeightGradients | None = None, *,
    grad_placements: Sequence[Placement] | None = None,
) -> Tensor:  # fmt: skip
    """`F.linear` whose weight gradient can wait. x [.., I], weight [O, I], bias [O] -> [.., O].

    The bias gradient (a column sum) never waits.
    """
    mixed = _is_mixed(x, weight)
    if _plain(x, weight, store) and not mixed:
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(_cast_as_autocast(x), weight, bias, store or WeightGradients(), mixed, grad_placements)
    return y


class _Linear(Function):
    """Forward: y = x w^T + b. Backward: dx = g w at once; db = sum of g at once; dw = g^T x now or later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradients, mixed: bool,
        grad_placements: Sequence[Placement] | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.weight = store, _Weight(weight, mixed, grad_placements)
        ctx.bias = None
        if bias is not None:
            ctx.bias = _Weight(bias, _is_mixed(x, bias), None)
            bias = ctx.bias.local(bias)
        return F.linear(x, ctx.weight.local(weight), bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = torch.matmul(g, ctx.weight.local(weight).to(g.dtype))
        if ctx.needs_input_grad[1]:
            dw = _deliver(ctx, _linear_weight_gradient, x, g)
        if ctx.needs_input_grad[2]:
            db = ctx.bias.whole(_rows(g).sum(0))
        return dx, dw, db, None, None, None


def _rows(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.unsqueeze(0) if t.dim() == 1 else t.flatten(0, -2)


def _linear_weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    return _rows(g).t() @ _rows(x)


def matmul(x: Tensor, weight: Tensor, store: WeightGradients | None = None) -> Tensor:
    """`x @ weight` whose weight gradient can wait. x [.., I], weight [I, O] -> [.., O]."""
    if _plain(x, weight, store):
        return torch.matmul(x, weight)
    y: Tensor = _Matmul.apply(_cast_as_autocast(x), weight, store)
    return y


class _Matmul(Function):
    """Forward: y = x w. Backward: dx = g w^T at once; dw = x^T g now or later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.weight = store, _Weight(weight, False, None)
        return torch.matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        x, weight = ctx.saved_tensors
        dx = torch.matmul(g, weight.to(g.dtype).t()) if ctx.needs_input_grad[0] else None
        dw = _deliver(ctx, _matmul_weight_gradient, x, g) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _matmul_weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    return _rows(x).t() @ _rows(g)


def batched_matmul(x: Tensor, weight: Tensor, store: WeightGradients | None = None) -> Tensor:
    """`torch.bmm` whose weight gradient can wait: experts that all see T rows. x [E, T, I], weight [E, I, O]."""
    if _plain(x, weight, store):
        return torch.bmm(x, weight)
    y: Tensor = _Batched.apply(_cast_as_autocast(x), weight, store)
    return y


class _Batched(Function):
    """Forward: y[e] = x[e] w[e]. Backward: dx[e] = g[e] w[e]^T at once; dw[e] = x[e]^T g[e] now or later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.weight = store, _Weight(weight, False, None)
        return torch.bmm(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        x, weight = ctx.saved_tensors
        dx = torch.bmm(g, weight.to(g.dtype).transpose(1, 2)) if ctx.needs_input_grad[0] else None
        dw = _deliver(ctx, _batched_weight_gradient, x, g) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _batched_weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    return torch.bmm(x.transpose(1, 2), g)


def embedding(
    ids: Tensor, weight: Tensor, store: WeightGradients | None = None, *, padding_idx: int | None = None,
    scale_grad_by_freq: bool = False, grad_placements: Sequence[Placement] | None = None,
) -> Tensor:  # fmt: skip
    """`F.embedding` whose weight gradient can wait. ids [..] integers, weight [V, M] -> [.., M].

    With a DTensor weight and plain ids the ids index the *local* rows; the caller masks what is not here.
    """
    mixed = _is_mixed(ids, weight)
    if _plain(ids, weight, store) and not mixed:
        return F.embedding(ids, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.size(0)
    y: Tensor = _Embedding.apply(
        ids, weight, store or WeightGradients(), padding_idx, scale_grad_by_freq, mixed, grad_placements
    )
    return y


class _Embedding(Function):
    """Forward: y = w[ids]. Backward: nothing for ids; dw[v] = sum of g over the places of v, now or later."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, store: WeightGradients, padding_idx: int | None, by_freq: bool,
        mixed: bool, grad_placements: Sequence[Placement] | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(ids)
        ctx.store, ctx.weight = store, _Weight(weight, mixed, grad_placements)
        local = ctx.weight.local(weight)
        ctx.rows, ctx.padding_idx, ctx.by_freq = local.size(0), -1 if padding_idx is None else padding_idx, by_freq
        return F.embedding(ids, local, padding_idx, scale_grad_by_freq=by_freq)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        (ids,) = ctx.saved_tensors
        rows, padding_idx, by_freq = ctx.rows, ctx.padding_idx, ctx.by_freq

        def make(ids: Tensor, g: Tensor) -> Tensor:
            dw: Tensor = torch.ops.aten.embedding_dense_backward(g, ids, rows, padding_idx, by_freq)
            return dw

        dw = _deliver(ctx, make, ids, g) if ctx.needs_input_grad[1] else None
        return None, dw, None, None, None, None, None


def grouped_matmul(
    x: Tensor, weight: Tensor, ends: Tensor, store: WeightGradients | None = None, *,
    grad_placements: Sequence[Placement] | None = None,
) -> Tensor:  # fmt: skip
    """Rows sorted by expert, each times its expert's matrix; the weight gradient can wait.

    x [T, I]; weight [E, I, O] (a `transpose(1, 2)` of [E, O, I] costs nothing); ends [E] int32: expert e has the rows
    from ends[e - 1] to ends[e]. -> [T, O]. Rows past ends[-1] are zero in the output and in the input gradient
    (`F.grouped_mm` leaves them uninitialised). T = 0 and experts without rows are fine: their gradient is zero.
    Dtypes and strides that `F.grouped_mm` does not take (fp64, rows that are no multiple of 16 bytes) go by a loop.
    """
    mixed = _is_mixed(x, weight)
    y: Tensor = _Grouped.apply(x, weight, ends, store or WeightGradients(), mixed, grad_placements)
    return y


class _Grouped(Function):
    """Forward: y[t] = x[t] w[e(t)]. Backward: dx[t] = g[t] w[e(t)]^T at once; dw[e] = x_e^T g_e now or later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, store: WeightGradients, mixed: bool,
        grad_placements: Sequence[Placement] | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, ends)
        ctx.store, ctx.weight = store, _Weight(weight, mixed, grad_placements)
        return grouped_product(x, ctx.weight.local(weight), ends)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        x, weight, ends = ctx.saved_tensors
        local = ctx.weight.local(weight)
        dx = grouped_product(g, local.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            by_column = local.stride(1) == 1 and local.stride(2) != 1

            def make(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
                # In the layout of the weight, so that accumulation needs no copy.
                if by_column:
                    return grouped_weight_gradient(g, x, ends).transpose(1, 2)
                return grouped_weight_gradient(x, g, ends)

            dw = _deliver(ctx, make, x, g, ends)
        return dx, dw, None, None, None, None
