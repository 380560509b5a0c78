"""Packed parameters: several matrices stored one after the other in one tensor, each of them cut by itself.

    rows of Hugging Face's qkv_proj     q0 q1 q2 q3 | k0 k1 | v0 v1
    on 2 ranks                          q0 q1 k0 v0 , q2 q3 k1 v1

No placement of torch says that where the sections differ in length, and none composes with FSDP2 along the same dim.
So the DTensor is an ordinary `Shard`, and its rows stand in the order "first all of rank 0, then all of rank 1, ...";
`Sections`, noted on the module that owns the parameter, leads back to Hugging Face's order. Whoever reads or writes
whole tensors (loading, saving, first weights, `full_parameters`) asks here; training does not care.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Sections", "note_sections", "sections_of"]

_NOTE = "_dtensor_5d_sections"


@dataclass(frozen=True)
class Sections:
    """Along `dim`, sections of these `sizes` (each a multiple of `parts`) are cut into `parts`.

    Example:
        >>> Sections(dim=0, sizes=(4, 2, 2), parts=2).order().tolist()
        [0, 1, 4, 6, 2, 3, 5, 7]
    """

    dim: int
    sizes: tuple[int, ...]
    parts: int

    def order(self) -> torch.Tensor:
        """Place in the DTensor -> place in Hugging Face's tensor."""
        assert not any(size % self.parts for size in self.sizes), self
        pieces = [section.chunk(self.parts) for section in torch.arange(sum(self.sizes)).split(self.sizes)]
        return torch.cat([piece[part] for part in range(self.parts) for piece in pieces])


def note_sections(module: nn.Module, parameter: str, sections: Sections) -> None:
    """Notes on `module` that this parameter of it is packed. The note outlives a replaced parameter (FSDP2 does)."""
    module.__dict__.setdefault(_NOTE, {})[parameter] = sections


def sections_of(model: nn.Module) -> dict[str, Sections]:
    """Parameter name -> its sections, for the packed ones."""
    return {
        f"{name}.{parameter}" if name else parameter: sections
        for name, module in model.named_modules()
        for parameter, sections in module.__dict__.get(_NOTE, {}).items()
    }
