"""Where a rank's part and the whole meet: at the input and the output of attention and MLP, and around the layers.

                    tokens whole (replicated)               tokens cut (sequence parallel)
    into a block    as it is        <- sum of gradients     all-gather      <- reduce-scatter
    out of a block  all-reduce      <- as it is             reduce-scatter  <- all-gather
    first layer     as it is                                own part        <- all-gather
    last layer      as it is                                all-gather      <- own part
    into a module   as it is                                all-gather      <- own part
     that is whole
    out of it       as it is                                own part        <- all-gather

Inside a block every gradient is a summand: one exchange at its input serves all its projections, and whatever
parameter stays whole in there has its gradient summed. The tokens are whole before the first layer and after the last
one, so masks, positions and rotary tables are those of the whole sequence. A sequence of a length that does not divide
(a step of `generate`, a model called by hand) stays whole for that forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtensor_5d.ops import (
    all_gather_reduce_scatter,
    all_gather_split,
    all_reduce_identity,
    identity_all_reduce,
    reduce_scatter_all_gather,
    split_all_gather,
)
from dtensor_5d.random import draw_seed, switch_stream
from dtensor_5d.tensor.interpose import map_hidden, map_output
from dtensor_5d.tensor.state import TensorState

__all__ = ["cut_between", "into_block", "into_whole", "out_of_block", "out_of_whole", "whole_for_routers"]


def into_block(x: Tensor, state: TensorState) -> Tensor:
    """x [B, S, M] or [B S, M] of which this rank computes a summand from here on."""
    if not state.cut:
        return identity_all_reduce(x, state.group)
    return all_gather_reduce_scatter(x, state.group, _tokens(x))


def out_of_block(x: Tensor, state: TensorState) -> Tensor:
    """The sum of the ranks' x, always a fresh tensor: what follows may write into it."""
    if not state.cut:
        return all_reduce_identity(x, state.group)
    return reduce_scatter_all_gather(x, state.group, _tokens(x))


def into_whole(x: Tensor, state: TensorState) -> Tensor:
    """x of all tokens, from which every rank computes the same."""
    return all_gather_split(x, state.group, _tokens(x)) if state.cut else x


def out_of_whole(x: Tensor, state: TensorState) -> Tensor:
    """The own tokens of what every rank has computed."""
    return split_all_gather(x, state.group, _tokens(x)) if state.cut else x


def cut_between(layers: list[nn.Module], state: TensorState, cuts: bool = True, joins: bool = True) -> None:
    """Cuts the tokens before the first of these layers and joins them after the last one.

    cuts, joins: False where another pipeline stage has done so, or will do so.
    """
    saved: list[Any] = []

    def cut(x: Tensor) -> Tensor:
        state.cut = not state.whole and (not cuts or x.shape[_tokens(x)] % state.size == 0)
        if not state.cut:
            return x
        if state.draws and layers[0].training:  # other tokens, other dropout
            state.seed = draw_seed(x.device)
            saved.append(switch_stream(x.device, "tokens", state.seed, state.rank))
        return out_of_whole(x, state) if cuts else x

    def join(x: Tensor) -> Tensor:
        if saved:
            saved.pop().restore()
        return into_whole(x, state) if joins else x

    change_input, change_output = map_hidden(cut), map_output(join)
    layers[0].register_forward_pre_hook(lambda _, args, kwargs: change_input(args, kwargs), with_kwargs=True)
    layers[-1].register_forward_hook(lambda _, args, out: change_output(out))


def whole_for_routers(model: nn.Module, inner: nn.Module, state: TensorState) -> None:
    """Leaves tokens whole in forwards that return what routers made of them, or an auxiliary loss of it.

    inner: the module around the layers, which can be called by itself.
    """

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_router_logits")
        if asked is not None or module is model:
            state.whole = bool(getattr(module.config, "output_router_logits", False) if asked is None else asked)

    for module in {model, inner}:
        module.register_forward_pre_hook(note, with_kwargs=True)


def _tokens(x: Tensor) -> int:
    """The dim of the tokens. A few families flatten [B, S, M] before their MLP: rank by rank, and back the same way."""
    assert x.dim() in (2, 3) and torch.is_floating_point(x), x.shape
    return x.dim() - 2
