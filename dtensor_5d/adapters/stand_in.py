"""What stands in a model where another rank has the weights: modules without parameters, under the same names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Passed", "StandIn", "Zeros", "hidden_of", "stand_in_for"]


class StandIn(nn.Module):
    """A module whose weights another rank has. As it is: hands its first input on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class Passed(StandIn):
    """Stands for a decoder layer: hands its hidden states on.

    Plain attributes that a model reads from its layers (the kind of their attention) are those of the layer.
    """

    def __init__(self, layer: nn.Module, tuples: bool) -> None:
        super().__init__()
        plain = (bool, int, float, str, type(None))
        self.__dict__.update({k: v for k, v in vars(layer).items() if isinstance(v, plain) and not k.startswith("_")})
        self.tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.given(hidden_of(args, kwargs))

    def given(self, hidden: Any) -> Any:
        """What the model expects of a layer."""
        return (hidden,) if self.tuples else hidden


class Zeros(StandIn):
    """Stands for an embedding: zeros [..., M] for ids [...]."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.dtype = embedding.weight.dtype

    @property
    def weight(self) -> Tensor:
        """Models ask it for its dtype or device."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*ids.shape, self.embedding_dim, dtype=self.dtype, device=ids.device)


def stand_in_for(module: nn.Module) -> StandIn:
    """What takes the place of a module outside the layers."""
    return Zeros(module) if isinstance(module, nn.Embedding) else StandIn()


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
