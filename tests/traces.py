"""What a rank asked of its process groups, in order, beside marks that a test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "_allgather_base_": "gather",
    "allgather_into_tensor_coalesced_": "gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "allgather_": "gather_list",
}


@dataclass(frozen=True)
class Event:
    """One collective (kind, elements of its input) or one mark (its text)."""

    kind: str
    numel: int = 0


class Trace(TorchDispatchMode):
    """Records floating-point collectives; the whole numbers that ranks exchange to agree are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def mark(self, text: str) -> None:
        self.events.append(Event(text))

    def count(self, kind: str) -> int:
        return sum(e.kind == kind for e in self.events)

    def index(self, text: str) -> int:
        return next(i for i, e in enumerate(self.events) if e.kind == text)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            if tensors and tensors[0].is_floating_point():
                kind = _KINDS.get(func._schema.name.split("::")[1], func._schema.name)
                self.events.append(Event(kind, tensors[-1].numel()))
        return func(*args, **(kwargs or {}))
