"""`make_deferrable`: the products of an unmodified model, in place, take a store for their weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtensor_5d.ops.products import batched_matmul, embedding, grouped_matmul, linear, matmul
from dtensor_5d.ops.store import WeightGradients

__all__ = ["Deferral", "make_deferrable", "restore"]


@dataclass(frozen=True)
class Deferral:
    """Names of the trainable parameters whose gradient can wait, and of those that get it at once in backward."""

    waits: tuple[str, ...]
    at_once: tuple[str, ...]


def make_deferrable(module: nn.Module, store: WeightGradients) -> Deferral:
    """Makes the products of `module` take `store`: their modules get a forward of their own, nothing else changes.

    Works on any module that calls torch's products on parameters of its own: Linear, Embedding, transformers' Conv1D,
    routers, fused experts (transformers' `eager` and `grouped_mm`), and subclasses of these that scale or shift.
    Names, state-dict keys, hooks and classes stay. Outside `store.deferring` results equal the plain module's bit for
    bit. At once: norms, biases, convolutions. A parameter of `waits` still gets its gradient at once where a backward
    must see it: hooks on it, more than a view between it and the product (experts as `batched_mm`, which copies
    them), a product in a module that does not own it.

    Example:
        >>> store = WeightGradients()
        >>> make_deferrable(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), store)
        Deferral(waits=('0.weight',), at_once=('0.bias', '1.weight', '1.bias'))

    Errors: ValueError if a product of the module already has a store.
    """
    owners = [m for m in module.modules() if _products(m)]
    taken = [type(m).__name__ for m in owners if isinstance(m.__dict__.get("forward"), _Forward)]
    if taken:
        raise ValueError(f"{len(taken)} modules ({taken[0]}, ..) already have a store; restore(module) takes it away")
    waits = {id(p) for m in owners for p in _products(m)}
    for owner in owners:
        if type(owner).forward is nn.Linear.forward and "forward" not in owner.__dict__:
            owner.forward = _LinearForward(owner, store)
        else:
            owner.forward = _Forward(owner.forward, store)
    names = [(name, id(p) in waits) for name, p in module.named_parameters() if p.requires_grad]
    return Deferral(tuple(n for n, w in names if w), tuple(n for n, w in names if not w))


def restore(module: nn.Module) -> None:
    """Takes the store out again: every module has the forward that it had before `make_deferrable`."""
    for owner in module.modules():
        forward = owner.__dict__.get("forward")
        if isinstance(forward, _Forward):
            del owner.forward
            if getattr(forward.plain, "__func__", None) is not type(owner).forward:
                owner.forward = forward.plain


def _products(module: nn.Module) -> list[nn.Parameter]:
    """The parameters a module owns that a product can multiply with: matrices, and stacks of them (experts)."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return []
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return []
    return [
        p for name, p in module.named_parameters(recurse=False) if p.dim() in (2, 3) and not name.endswith("bias")
    ]


class _Forward:
    """The forward of one module, run so that torch's products on parameters take the store.

    Kept out of compiled graphs: a traced backward would decide once, at tracing, whether its product waits.
    """

    def __init__(self, plain: Callable[..., Any], store: WeightGradients) -> None:
        self.plain, self.store = plain, store

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        with _Products(self.store):
            return self.plain(*args, **kwargs)


class _LinearForward(_Forward):
    """The same for a plain `nn.Linear`, without the interception."""

    def __init__(self, module: nn.Linear, store: WeightGradients) -> None:
        super().__init__(module.forward, store)
        self.module = module

    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:  # keyword name as in nn.Linear
        return linear(input, self.module.weight, self.module.bias, self.store)


class _Products(TorchFunctionMode):
    """Replaces calls of torch's products inside one forward; what it does not know runs as it is."""

    def __init__(self, store: WeightGradients) -> None:
        super().__init__()
        self.store = store

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        replaced = _REPLACED.get(func)
        if replaced is not None:
            result = replaced(self.store, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


# Each takes the call as torch's function does and returns None for a form that it leaves to torch.


def _linear(store: WeightGradients, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return linear(input, weight, bias, store) if weight.dim() == 2 else None


def _addmm(store: WeightGradients, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Tensor | None:
    return None if scales or input.dim() != 1 else linear(mat1, mat2.t(), input, store)


def _matmul(store: WeightGradients, x: Tensor, y: Tensor) -> Tensor | None:
    if y.dim() == 2 and x.dim() >= 1:
        return matmul(x, y, store)
    return _bmm(store, x, y)


def _bmm(store: WeightGradients, x: Tensor, y: Tensor) -> Tensor | None:
    return batched_matmul(x, y, store) if x.dim() == y.dim() == 3 and x.size(0) == y.size(0) else None


def _embedding(
    store: WeightGradients, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor | None:  # fmt: skip
    if max_norm is not None or sparse:
        return None
    return embedding(input, weight, store, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq)


def _grouped(
    store: WeightGradients, x: Tensor, weight: Tensor, offs: Tensor | None = None, **more: Any
) -> Tensor | None:
    if offs is None or x.dim() != 2 or weight.dim() != 3 or any(v is not None for v in more.values()):
        return None
    return grouped_matmul(x, weight, offs, store)


_REPLACED: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _bmm,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.bmm: _bmm,
    torch._grouped_mm: _grouped,
    F.grouped_mm: _grouped,
}
