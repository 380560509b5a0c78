"""Keeping experts evenly loaded: counts, the auxiliary loss as Hugging Face defines it, the bias update without one.

All of them count over *all* data ranks (dp_replicate x dp_shard x cp, and tp where it cuts tokens): give the groups
`mesh["loss"].get_group()` and, with sequence parallelism, `mesh["tp"].get_group()`. Padding is no load.

Letters: T tokens, K choices, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_5d.ops import all_reduce_identity
from dtensor_5d.ops.exchange import total

__all__ = ["Tally", "balancing_loss", "expert_load", "load_balancing_loss", "tally", "update_bias"]


def expert_load(index: Tensor, experts: int, counts: Tensor | None = None) -> Tensor:
    """[E] int64: how many tokens of this rank chose each expert.

    index [.., K]; counts [..], bool or 0/1: which tokens are no padding (None: all). An index that is out of range
    counts nowhere (who dispatches by it says what is wrong with it).

    Example:
        >>> expert_load(torch.tensor([[0, 2], [0, 1]]), 3, torch.tensor([True, False]))
        tensor([1, 0, 1])
    """
    flat = index.reshape(-1)
    ones = (flat >= 0) & (flat < experts)
    if counts is not None:
        ones = ones & counts.bool().reshape(-1, 1).expand(counts.numel(), index.size(-1)).reshape(-1)
    # Not bincount: it asks the device for the largest index, and waits.
    return flat.new_zeros(experts).scatter_add_(0, flat.clamp(0, experts - 1), ones.to(flat.dtype))


def update_bias(bias: Tensor, load: Tensor, rate: float, groups: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """The router's correction bias after a window, in place: b += rate sign(mean load - load), then its mean to 0.

    bias, load [E]: what this rank's tokens of the whole window (all micro-batches) chose; it is summed over `groups`,
    so that every rank takes the same step. Once per optimizer step, after it. A constant changes no choice, and the
    mean is kept at 0 so that none builds up. Rule: Wang et al. 2024, arXiv:2408.15664, algorithm 1.

    Errors: ValueError where the sizes differ.
    """
    if bias.shape != load.shape:
        raise ValueError(f"a bias of {tuple(bias.shape)} and a load of {tuple(load.shape)}: one number for each expert")
    load = load.double()
    for group in groups:
        load = total(load, group)
    with torch.no_grad():
        step = rate * torch.sign(load.mean() - load)
        updated = bias.double() + step
        return bias.copy_(updated - updated.mean())


def load_balancing_loss(
    logits: Sequence[Tensor], top_k: int, *, groups: Sequence[dist.ProcessGroup] = (), mask: Tensor | None = None
) -> Tensor:
    """The auxiliary loss of one micro-batch of all data ranks: E sum over e of f_e p_e, the same on each.

    logits: of each layer, [T, E]; f_e: the mean over tokens and layers of how often e was chosen, p_e: the mean of its
    probability; both over all ranks of `groups`. mask [T] or [B, S]: 1 for tokens, 0 for padding.

    Gradients are those of this rank's own tokens: sum them over ranks (contract C1), as for any other loss. To be added
    once per micro-batch, times the model's `router_aux_loss_coef`. Formula: Switch Transformer, arXiv:2101.03961, (4)
    to (6), in the form of transformers' `load_balancing_loss_func`, which one process would compute. No token anywhere:
    0.
    """
    own = tally(logits, top_k, groups=groups, mask=mask)
    return balancing_loss(own, own.counts)


@dataclass(frozen=True)
class Tally:
    """What some layers' routers did with one micro-batch of all data ranks.

    counts [E + 1] fp64, without a graph: how often each expert was chosen, and of how many tokens and layers. Those of
    other layers add up with them. shares [E]: the summed probability of each expert, with the graph of this rank's own
    tokens.
    """

    counts: Tensor
    shares: Tensor


def tally(
    logits: Sequence[Tensor], top_k: int, *, groups: Sequence[dist.ProcessGroup] = (), mask: Tensor | None = None
) -> Tally:
    """Counts for `balancing_loss`; arguments as of `load_balancing_loss`. Collective over `groups`."""
    chosen: list[Tensor] = []
    shares: list[Tensor] = []
    weight = None if mask is None else mask.reshape(-1).to(torch.float32)
    for layer in logits:
        probability = torch.softmax(layer, -1).float()
        picked = torch.zeros_like(probability).scatter_(1, probability.topk(top_k, -1).indices, 1.0)
        if weight is not None:
            picked, probability = picked * weight.unsqueeze(1), probability * weight.unsqueeze(1)
        chosen.append(picked.sum(0))
        shares.append(probability.sum(0))
    rows = weight.sum() if weight is not None else logits[0].new_tensor(float(logits[0].size(0)), dtype=torch.float32)
    counts = torch.cat([torch.stack(chosen).sum(0), (rows * len(logits)).reshape(1)]).detach().double()
    share = torch.stack(shares).sum(0)
    for group in groups:
        counts, share = total(counts, group), all_reduce_identity(share, group)
    return Tally(counts, share)


def balancing_loss(own: Tally, counts: Tensor) -> Tensor:
    """The part of the auxiliary loss that the layers of `own` have, of all layers that `counts` counts; 0-dim."""
    fraction, count = counts[:-1], counts[-1].clamp_min(1.0)
    mean = (fraction / count).to(own.shares.dtype)
    return fraction.numel() * (mean * own.shares / count.to(own.shares.dtype)).sum()
