"""How many bytes of logits exist at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LogitsMemory(TorchDispatchMode):
    """Follows the storages of all tensors made while it is on whose last dim is the vocabulary, forward and backward.

    The gradient of a head's weight has the vocabulary as its first dim and is not among them.

    Example:
        >>> with LogitsMemory(32000) as memory:
        ...     run.step(batch)
        >>> memory.peak  # bytes
    """

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.peak = 0
        self._vocab = vocab
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dim() >= 2 and t.shape[-1] == self._vocab and t.numel():
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in views and key not in self._alive:
                    self._alive[key] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, key, None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return out
