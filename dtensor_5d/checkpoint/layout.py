"""Where each tensor of a saved model lies, known before a byte is written: so ranks write side by side, none waiting.

A safetensors file is: 8 bytes, the length of the header; the header, JSON of name -> dtype, shape, data_offsets; the
bytes. (https://github.com/huggingface/safetensors#format) Shapes are known on meta, so every rank computes the same
layout, and each writes the bytes of its units at their places. Nobody collects a file in memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

__all__ = ["Entry", "Layout", "create_files", "lay_out", "write_tensor"]


@dataclass(frozen=True)
class Entry:
    """One tensor of the folder: in which file, from which byte on."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: int
    offset: int  # in the file, header included

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All entries by name, the files' headers and names."""

    entries: Mapping[str, Entry]
    headers: Sequence[bytes]

    @property
    def files(self) -> tuple[str, ...]:
        n = len(self.headers)
        return tuple(f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n))

    @property
    def total_bytes(self) -> int:
        return sum(e.nbytes for e in self.entries.values())

    def index(self) -> str:
        """The text of `model.safetensors.index.json`."""
        count = sum(math.prod(e.shape) for e in self.entries.values())
        weight_map = {name: self.files[e.file] for name, e in sorted(self.entries.items())}
        metadata = {"total_parameters": count, "total_size": self.total_bytes}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"


def lay_out(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_shard_bytes: float) -> Layout:
    """Cuts name -> (shape, dtype), in order, into files of at most `max_shard_bytes` (a larger tensor alone in one).

    Example:
        >>> lay_out({"a": ((2,), torch.float32), "b": ((3,), torch.float32)}, 16).files
        ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
    """
    groups: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    size = 0
    for name, (shape, dtype) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + nbytes > max_shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = (shape, dtype)
        size += nbytes
    entries: dict[str, Entry] = {}
    headers = []
    for file, group in enumerate(groups):
        # Wide dtypes first: each tensor is then aligned to its own item size.
        ordered = sorted(group.items(), key=lambda item: -item[1][1].itemsize)
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        place, places = 0, []
        for name, (shape, dtype) in ordered:
            end = place + math.prod(shape) * dtype.itemsize
            table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
            places.append(place)
            place = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers.append(struct.pack("<Q", len(text)) + text)
        for (name, (shape, dtype)), place in zip(ordered, places):
            entries[name] = Entry(name, shape, dtype, file, len(headers[-1]) + place)
    return Layout(entries, headers)


def create_files(layout: Layout, folder: Path) -> None:
    """Makes the files with their headers and full length, without the values."""
    ends = [len(h) for h in layout.headers]
    for e in layout.entries.values():
        ends[e.file] = max(ends[e.file], e.offset + e.nbytes)
    for name, header, end in zip(layout.files, layout.headers, ends):
        with open(folder / name, "xb") as file:
            file.write(header)
            file.truncate(end)


def write_tensor(file: BinaryIO, entry: Entry, tensor: torch.Tensor) -> None:
    """Puts the values at their place."""
    assert tuple(tensor.shape) == entry.shape and tensor.dtype == entry.dtype, (entry, tensor.shape, tensor.dtype)
    file.seek(entry.offset)
    if tensor.numel():
        file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
