"""Recomputation: layers that keep less from forward to backward and run their forward again there.

    policy      what a layer keeps                                     what runs again
    block       its input                                              all of it
    selective   its input, the outputs of matrix products and of       norms, activations, casts, sums
                fused attention
    every=k     its input, in every k-th layer; the others keep all    all of those layers

Not torch's own selective contexts: they refuse outputs that the model writes into later, and note every operation.
Layers are wrapped on the instance, inside the hooks of FSDP2: a layer's parameters are gathered once for backward, for
its second forward and its gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from dtensor_5d.families.activations import is_recomputed

__all__ = ["recompute_layers"]

Keeps = Callable[[Any], bool]


def recompute_layers(layers: Sequence[nn.Module], policy: str, keeps: Keeps | None = None) -> None:
    """Lets the layers of one stage, in order, run their forward again in backward, as `policy` says.

    policy: an option `recompute`. keeps: of an operation, whether its output is never computed anew, whatever the
    policy (a router's choice must not change between the two runs); None where there is no such operation.

    Example: `recompute_layers(model.model.layers, "every=2")` recomputes layers 0, 2, 4, ...
    """
    selective = policy == "selective"
    for place, layer in enumerate(layers):
        if is_recomputed(policy, place):
            layer.forward = _Recomputed(layer.forward, selective, keeps)


class _Recomputed:
    """The forward of a layer; without gradients it runs as it is."""

    def __init__(self, forward: Callable[..., Any], selective: bool, keeps: Keeps | None) -> None:
        self.forward, self.selective, self.keeps = forward, selective, keeps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        more = {"context_fn": self._contexts} if self.selective or self.keeps is not None else {}
        return checkpoint(self.forward, *args, use_reentrant=False, **more, **kwargs)

    def _contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        kept = _Kept(self._is_kept)
        return kept, _Given(kept)

    def _is_kept(self, operation: Any) -> bool:
        return (self.selective and operation in _DEAR) or (self.keeps is not None and self.keeps(operation))


class _Kept(TorchDispatchMode):
    """Around the first run: keeps what some operations return, by how often each was called."""

    def __init__(self, is_kept: Keeps) -> None:
        super().__init__()
        self.is_kept = is_kept
        self.outputs: dict[Any, list[tuple[Any, list[int]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_kept(func):
            held = tree_map(_detached, out)
            self.outputs.setdefault(func, []).append((held, _versions(held)))
        return out


class _Given(TorchDispatchMode):
    """Around the second run: gives what was kept, except where the model has written into it since (a bias that is
    added in place): that is computed anew, as everything else."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept

    def __enter__(self) -> Any:
        self.at: dict[Any, int] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kept.is_kept(func):
            at = self.at[func] = self.at.get(func, -1) + 1
            held, versions = self.kept.outputs[func][at]
            if _versions(held) == versions:
                return tree_map(_detached, held)
        return func(*args, **(kwargs or {}))


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # A detached tensor shares the counter of writes only if the dispatcher does the views.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(values: Any) -> list[int]:
    return [value._version for value in tree_leaves(values) if isinstance(value, Tensor)]


def _named(*names: str) -> frozenset[Any]:
    """The default overloads of those operations that this torch has."""
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(op.default for op in found if op is not None and "default" in op.overloads())


# Not bmm: the scores of an attention that is written out are what recomputation is there to drop.
_DEAR = _named(
    "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
)  # fmt: skip
