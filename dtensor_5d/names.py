"""Names of the whole model's parameters, kept where a rank holds a part of them only (a stage of the pipeline axis).

    whole model            stage 0                stage 1
    model.embed_tokens     model.embed_tokens
    model.layers.0         model.layers.0
    model.layers.1                                model.layers.1
    model.norm                                    model.norm
    lm_head (tied)                                lm_head: a copy of model.embed_tokens

Nothing is renamed (contract C5), so "which stage has it" is a look into the rank's own model. What that model cannot
tell is noted here before it is cut: the order of all names, and which of them are one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["Names"]


@dataclass(frozen=True)
class Names:
    """order: of every parameter its first name, in the model's order. first: each name -> the first name of the same
    parameter, under which Hugging Face stores it (a tied one has several names)."""

    order: tuple[str, ...]
    first: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> Names:
        """The names of a model that is still whole, on meta or in memory.

        Example:
            >>> Names.of(gpt2).first["lm_head.weight"]
            'transformer.wte.weight'
        """
        first: dict[int, str] = {}
        named = model.named_parameters(remove_duplicate=False)
        by_name = {name: first.setdefault(id(parameter), name) for name, parameter in named}
        return Names(tuple(first.values()), by_name)

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of each parameter that has several, the first one first."""
        groups: dict[str, list[str]] = {}
        for name, first in self.first.items():
            groups.setdefault(first, []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def counted(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[nn.Parameter]:
        """The parameters that a sum over all stages must take from this one: a tied copy counts where its original is.

        named: what `named_parameters()` of this rank's part gives.
        """
        return (parameter for name, parameter in named if self.first.get(name, name) == name)
