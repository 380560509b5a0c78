"""Bytes of parameters, gradients, master copies and optimizer state, as the ZeRO stages leave them on a rank.

    zero  gathered copy   gradients                 master, optimizer
    1     whole           whole inside the window   shard
    2     whole           shard (or by grad_reduce) shard
    3     unit by unit    shard (or by grad_reduce) shard

Sources: published-numbers 1.1 F2-F4; how FSDP2 keeps fp32 master weights: `dp/fsdp.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtensor_5d.degrees import Degrees
from dtensor_5d.families.blocks import Param, shard_rows

__all__ = ["Widths", "shard_numel", "state_terms", "whole_numel"]


@dataclass(frozen=True)
class Widths:
    """Bytes per parameter: the copy that computes, gradients, the fp32 master copy, optimizer state.

    shard: bytes of the stored shard where the computing copy itself is what is stored (no master copy, or the ZeRO
    paper's layout, which keeps a bf16 shard beside the fp32 master).

    FSDP2 with fp32 master weights: `Widths(2, 4, 4, 8)`. The ZeRO paper: `Widths(2, 2, 4, 8, shard=2)`.
    Megatron's distributed optimizer: `Widths(2, 4, 4, 8)` under zero 1.
    """

    compute: int
    gradient: int
    master: int
    optimizer: int
    shard: int = 0


def state_terms(whole: int, shard: int, zero: int, widths: Widths, *, whole_gradients: bool) -> dict[str, int]:
    """Bytes by cause for a rank that computes with `whole` parameters and stores `shard` of them.

    zero 0: nothing is sharded. whole_gradients: gradients are reduced once per window and whole until then.

    Example: 7.5 B parameters on 64 ranks, as in Figure 1 of the ZeRO paper: 31.4 GB.
        >>> paper = Widths(2, 2, 4, 8, shard=2)
        >>> sum(state_terms(7_500_000_000, 117_187_500, 1, paper, whole_gradients=True).values()) / 1e9
        31.40625
    """
    kept = whole if zero == 0 else shard
    return {
        "parameters": whole * widths.compute if zero < 3 else shard * widths.shard,
        "gradients": (whole if whole_gradients else kept) * widths.gradient,
        "master": kept * widths.master,
        "optimizer": kept * widths.optimizer,
    }


def whole_numel(params: Iterable[Param], degrees: Degrees) -> int:
    """Numbers of these parameters on a rank after the tensor and expert axes have cut, before the data axis has."""
    return _numel(params, degrees, 1, 1)


def shard_numel(params: Iterable[Param], degrees: Degrees) -> int:
    """Numbers of these parameters that the first rank of the data axis stores: the largest share."""
    return _numel(params, degrees, degrees.fsdp, degrees.efsdp)


def _numel(params: Iterable[Param], degrees: Degrees, dense_ranks: int, expert_ranks: int) -> int:
    tp, ep, etp = degrees.tp, degrees.ep, degrees.etp
    alike: dict[tuple[object, ...], int] = {}  # a model has many parameters of few shapes
    total = 0
    for param in params:
        key = (param.shape, param.tp, param.granule, param.is_expert)
        if key not in alike:
            shape = list(param.local_shape(etp if param.is_expert else tp, ep))
            ranks = expert_ranks if param.is_expert else dense_ranks
            # The data axis cuts along dim 0; experts that do not divide are cut along their last dim (see dp/fsdp.py).
            dim = 2 if len(shape) == 3 and shape[0] % ranks and shape[2] % ranks == 0 else 0
            shape[dim] = shard_rows(shape[dim], ranks)
            alike[key] = math.prod(shape)
        total += alike[key]
    return total
