"""Which module is the first to give the ranks of the tensor axis different values where they should have the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtensor_5d.tensor.state import TensorState

__all__ = ["first_difference"]


@torch.no_grad()
def first_difference(model: nn.Module, state: TensorState, inputs: Mapping[str, Tensor]) -> str | None:
    """The name of the first module whose output differs between the ranks, bit for bit, in a forward of `inputs`.

    Compared is what every rank has whole: outputs of the layers and of what stands between blocks; under sequence
    parallelism, where those are cut, what is outside the layers. None: no difference. A debugging aid, collective over
    the tensor axis; NaN equals NaN.
    """
    seen: list[tuple[str, int]] = []
    with _recording(model, state, seen):
        model(**inputs, use_cache=False)
    every: list[Any] = [None] * state.size
    dist.all_gather_object(every, seen, group=state.group)
    for rows in zip(*every):
        if len(set(rows)) > 1:
            return str(rows[0][0])
    return None


@contextmanager
def _recording(model: nn.Module, state: TensorState, seen: list[tuple[str, int]]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if name in state.whole_outputs:
            handles.append(module.register_forward_hook(_recorder(name, seen)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recorder(name: str, seen: list[tuple[str, int]]) -> Any:
    def record(_module: nn.Module, _args: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            bits = tensor.contiguous().view(torch.uint8).flatten().long()
            place = torch.arange(1, bits.numel() + 1, device=bits.device)
            seen.append((name, int(((bits + 1) * (place * 0x9E3779B1)).sum())))

    return record
