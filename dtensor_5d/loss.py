"""The loss of a window: a sum over supervised tokens, divided once by their global count (contract C1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["IGNORE", "LossFunction", "nothing", "token_loss_sum"]

IGNORE = -100  # the label of a position that is not supervised (Hugging Face convention)

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over supervised tokens: a 0-dim tensor, in fp32 or, for fp64 logits, fp64.

    logits [B, S, V]; labels [B, S], already shifted (labels[b, s] is the target of position s), -100 = not supervised.
    A position that is not supervised adds exactly 0 to the loss and to every gradient, whatever its logits are: they
    may be NaN.
    """
    loss: torch.Tensor = _TokenLossSum.apply(logits.flatten(0, 1), labels.flatten())
    return loss


def nothing(logits: torch.Tensor) -> torch.Tensor:
    """A loss of 0 with a gradient of 0 for every parameter that made `logits`, for a rank with no tokens to add.

    Selected and not multiplied: 0 x infinity would be NaN.
    """
    return logits.masked_fill(torch.ones((), dtype=torch.bool, device=logits.device), 0.0).sum()


class _TokenLossSum(torch.autograd.Function):
    """Forward: log-softmax of T rows of V, the negated entry of each label, summed over supervised rows.
    Backward: (softmax - one-hot) of supervised rows; rows that are not are *set* to 0 (torch's own cross entropy
    multiplies by 0, which leaves NaN where the logits were NaN)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_p = torch.log_softmax(logits, dim=-1, dtype=wide)
        picked = log_p.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(log_p, labels)
        ctx.dtype = logits.dtype
        return torch.where(labels == IGNORE, 0.0, -picked).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_p, labels = ctx.saved_tensors
        out = log_p.exp()
        out.scatter_add_(1, labels.clamp_min(0).unsqueeze(1), out.new_tensor(-1.0).expand(labels.numel(), 1))
        out.mul_(grads[0])
        out[labels == IGNORE] = 0.0
        return out.to(ctx.dtype), None
