"""What a layer is made of, as data: parameters with the dim that each axis cuts, and the mixing of tokens.

Letters: M model size, H heads, K key-value heads, D head size, I inner size, E experts, S sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

__all__ = ["LayerShape", "Mixer", "Param", "linear", "shard_rows", "vector"]


@dataclass(frozen=True)
class Param:
    """One parameter under its Hugging Face name.

    part: embedding, position, head, norm, attention, mlp, router, shared, expert, or embedding_mix for what stands
    between embedding, layers and head.
    tp: the dim that the tensor axis cuts (for an expert: the expert-tensor axis), in pieces of `granule` rows.
    outputs: numbers that a token gets from the product with it; 0 where there is none (an embedding is looked up, a
    bias is added). For an expert: from one expert.
    """

    name: str
    shape: tuple[int, ...]
    part: str
    tp: int | None = None
    granule: int = 1
    outputs: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def multiplies(self) -> bool:
        return self.outputs > 0

    @property
    def is_expert(self) -> bool:
        return self.part == "expert"

    def local_shape(self, tp: int = 1, ep: int = 1) -> tuple[int, ...]:
        """The largest shard that a rank holds once the tensor (or expert-tensor) and expert axes have cut.

        Whole pieces only: key-value heads are repeated where there are fewer of them than ranks.
        """
        shape = list(self.shape)
        if self.is_expert:
            shape[0] = shard_rows(shape[0], ep)
        if self.tp is not None:
            pieces = max(1, shape[self.tp] // self.granule)
            shape[self.tp] = min(shape[self.tp], shard_rows(pieces, tp) * self.granule)
        return tuple(shape)


def shard_rows(rows: int, ranks: int) -> int:
    """Rows of the first shard when `torch.chunk` cuts them: the largest share."""
    return -(-rows // ranks)


@dataclass(frozen=True)
class Mixer:
    """How a layer lets tokens see each other.

    kind: full, sliding, chunked or linear (recurrences and convolutions, whose state has a fixed size).
    window: keys that a query sees at most, itself included (sliding), or the size of a chunk; 0 for no limit.
    state: multiply-adds per token of a recurrence.
    indexer: size of the products with each key that choose the keys (heads x size), 0 without.
    chunk: rows of the matrices that a recurrence writes out piece by piece, 0 without.
    """

    kind: str
    heads: int = 0
    kv_heads: int = 0
    qk_size: int = 0
    v_size: int = 0
    window: int = 0
    state: int = 0
    indexer: int = 0
    chunk: int = 0

    def keys(self, seq_len: int, attention: str) -> float:
        """Keys per query, on average over a sequence: all (full), or those that the mask lets through (causal)."""
        if self.kind == "linear":
            return 0.0
        if attention == "full":
            return float(seq_len)
        window = self.window or seq_len
        if self.kind == "chunked":
            whole, rest = divmod(seq_len, window)
            return (whole * window * (window + 1) + rest * (rest + 1)) / 2 / seq_len
        near = min(window, seq_len)
        return (near * (near + 1) / 2 + (seq_len - near) * near) / seq_len


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer. inner: the size inside the MLP (of one expert, where there are experts); beside: that of the
    MLP which some families have beside their experts."""

    index: int
    params: tuple[Param, ...]
    mixer: Mixer
    inner: int
    gated: bool
    experts: int = 0
    experts_per_token: int = 0
    beside: int = 0

    @property
    def parameters(self) -> int:
        return sum(p.numel for p in self.params)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for layers that differ in nothing but their place."""
        params = tuple((p.shape, p.part, p.tp, p.granule, p.outputs) for p in self.params)
        return (params, self.mixer, self.inner, self.gated, self.experts, self.experts_per_token, self.beside)

    def of(self, *parts: str) -> tuple[Param, ...]:
        """The parameters of these parts."""
        return tuple(p for p in self.params if p.part in parts)


def linear(
    name: str,
    outputs: int,
    inputs: int,
    part: str,
    cut: str | None = None,
    *,
    bias: bool = False,
    granule: int = 1,
    transposed: bool = False,
) -> list[Param]:
    """Weight and bias of a linear layer; cut: column (outputs), row (inputs) or None. transposed: GPT-2's Conv1D."""
    dim = {"column": 0, "row": 1}.get(cut or "")
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    tp = dim if dim is None or not transposed else 1 - dim
    made = [Param(f"{name}.weight", shape, part, tp, granule, outputs)]
    if bias:
        made.append(Param(f"{name}.bias", (outputs,), part, 0 if cut == "column" else None, granule))
    return made


def vector(name: str, size: int, part: str, *, cut: bool = False, granule: int = 1) -> Param:
    """A parameter with one dim."""
    return Param(name, (size,), part, 0 if cut else None, granule)
