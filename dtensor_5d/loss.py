"""The loss of a window: a sum over supervised tokens, divided once by their global count (contract C1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor_5d.errors import PlanError, Violation

__all__ = ["IGNORE", "LossFunction", "nothing", "own_loss_sum", "token_loss_sum"]

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


def own_loss_sum(
    loss: LossFunction, logits: torch.Tensor, labels: torch.Tensor, problems: list[Exception]
) -> torch.Tensor:
    """What the user's loss makes of a micro-batch; 0, and an entry in `problems`, where it raises or returns no loss.

    The window goes on then, since other ranks wait for what follows: raise the problem on all of them after it.
    """
    try:
        value = loss(logits, labels)
        if not isinstance(value, torch.Tensor) or value.dim() or not value.requires_grad:
            asked = f"a loss function that returned {value!r}"
            needs = "must return a 0-dim tensor that depends on the logits"
            raise PlanError(Violation(asked, needs, "return the sum over supervised tokens"))
    except Exception as problem:
        problems.append(problem)
        return nothing(logits)
    return value


class _TokenLossSum(torch.autograd.Function):
    """Forward: log-sum-exp of each of T rows of V minus the logit of its label, summed over supervised rows; keeps the
    softmax. Backward: (softmax - one-hot) of supervised rows, made in the kept buffer; rows that are not supervised
    are *set* to 0 (torch's own cross entropy multiplies by 0, which leaves NaN where the logits were NaN).

    One buffer of T x V beside the logits, where log-softmax and its backward need two or three; so one backward only.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        ignored = labels == IGNORE
        target = labels.masked_fill(ignored, 0).unsqueeze(1)
        p = torch.softmax(logits, dim=-1, dtype=wide)
        # The largest entry of a softmax is at least 1/V, so its logarithm is safe: log-sum-exp = top - log p(top).
        top, p_top = logits.amax(dim=-1, keepdim=True), p.amax(dim=-1, keepdim=True)
        nll = top.to(wide) - p_top.log() - logits.gather(1, target).to(wide)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(p, target, ignored)
        return nll.squeeze(1).masked_fill(ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, target, ignored = ctx.saved_tensors
        # In place: torch sees the saved tensor change and refuses a second backward through it by name.
        out.scatter_add_(1, target, out.new_tensor(-1.0).expand_as(target))
        out.mul_(grads[0])
        out.masked_fill_(ignored.unsqueeze(1), 0.0)
        return out.to(ctx.dtype), None
