"""Where a parameter's values come from, without reading them yet: a tensor of a file, a stack, a join, a computation.

A checkpoint often stores a parameter in pieces (one tensor per expert and projection: `w1` and `w3` of 8 experts make
one `gate_up_proj` [8, 2I, M]). The pieces are put together as an expression, and a rank asks that expression for its
own slices only. Whatever the placement, each element is read once, from where it lies:

    gate_up_proj[2:4, 0:5, :]  ->  Joined(dim 1)  ->  Stacked(dim 0) of w1: experts 2, 3, rows 0:5
                                                  ->  Stacked(dim 0) of w3: nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dtensor_5d.checkpoint.slices import Runs, cut, cut_with, shape_of, whole_slices

__all__ = ["Computed", "Conversion", "FileTensor", "Joined", "Source", "Stacked"]


class Source(Protocol):
    """Something with a shape that can read any part of itself."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, runs: Runs) -> torch.Tensor:
        """The part that `runs` name, on CPU."""
        ...


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a safetensors file; `block` reads one block of it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: Callable[[str, tuple[slice, ...]], torch.Tensor]

    def read(self, runs: Runs) -> torch.Tensor:
        return cut_with(lambda index: self.block(self.key, index), runs, self.dtype)


@dataclass(frozen=True)
class Stacked:
    """Equal pieces along a new dim. Errors: `ValueError` for pieces of different shapes."""

    parts: Sequence[Source]
    dim: int

    def __post_init__(self) -> None:
        shapes = sorted({p.shape for p in self.parts})
        if len(shapes) != 1:
            raise ValueError(f"pieces of shapes {[list(s) for s in shapes]} cannot be stacked")

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, runs: Runs) -> torch.Tensor:
        inner = (*runs[: self.dim], *runs[self.dim + 1 :])
        out = torch.empty(shape_of(runs), dtype=self.dtype)
        chosen = [i for run in runs[self.dim] for i in range(run.start, run.stop)]
        for row, i in enumerate(chosen if out.numel() else []):
            out.select(self.dim, row).copy_(self.parts[i].read(inner))
        return out


@dataclass(frozen=True)
class Joined:
    """Pieces one after the other along `dim`. Errors: `ValueError` for pieces that differ in another dim."""

    parts: Sequence[Source]
    dim: int

    def __post_init__(self) -> None:
        others = {(*p.shape[: self.dim], *p.shape[self.dim + 1 :]) for p in self.parts}
        if len(others) != 1:
            raise ValueError(f"pieces of shapes {[list(p.shape) for p in self.parts]} cannot be joined on {self.dim}")

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(p.shape[self.dim] for p in self.parts), *first[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, runs: Runs) -> torch.Tensor:
        pieces, start = [], 0
        for part in self.parts:
            stop = start + part.shape[self.dim]
            overlap = ((max(r.start, start), min(r.stop, stop)) for r in runs[self.dim])
            here = tuple(slice(a - start, b - start) for a, b in overlap if a < b)
            if here:
                pieces.append(part.read((*runs[: self.dim], here, *runs[self.dim + 1 :])))
            start = stop
        return torch.cat(pieces, dim=self.dim) if pieces else torch.empty(shape_of(runs), dtype=self.dtype)


@dataclass
class Conversion:
    """A computation from whole tensors to whole named tensors; its results are kept until each was taken once."""

    compute: Callable[[], dict[str, torch.Tensor]]
    results: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str) -> torch.Tensor:
        if name not in self.results:
            self.results = self.compute()
        return self.results.pop(name)


@dataclass(frozen=True)
class Computed:
    """One result of a `Conversion` (one that cannot be sliced): computed whole, then cut."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    conversion: Conversion

    def read(self, runs: Runs) -> torch.Tensor:
        if not math.prod(shape_of(runs)):
            return torch.empty(shape_of(runs), dtype=self.dtype)
        return cut(self.conversion.take(self.name), runs)


def read_whole(source: Source) -> torch.Tensor:
    """All of a source."""
    return source.read(whole_slices(source.shape))
