"""Recomputation never routes anew: what the router chose is saved, not recomputed.

A router that is run twice may choose otherwise the second time (rounding, noise), and then rows no longer match what
was saved or what other ranks expect. `keep_routing` is an identity that a checkpoint policy recognises:

    checkpoint(layer, x, use_reentrant=False, context_fn=keeping_routing)

T tokens, K choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["is_routing", "keep_routing", "keeping_routing"]


@torch.library.custom_op("dtensor_5d::keep_routing", mutates_args=())
def _keep(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return index.clone(), weights.clone()


@_keep.register_fake
def _(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(index), torch.empty_like(weights)


def _backward(ctx: Any, of_index: Tensor | None, of_weights: Tensor) -> tuple[None, Tensor]:
    return None, of_weights


_keep.register_autograd(_backward)


def keep_routing(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """index [T, K] and weights [T, K] as they are; under a policy that saves `is_routing`, those of the first run."""
    kept: tuple[Tensor, Tensor] = _keep(index, weights)
    return kept


def is_routing(operation: Any) -> bool:
    """Whether an operation seen by a checkpoint policy is `keep_routing`: then it must be saved."""
    return operation is torch.ops.dtensor_5d.keep_routing.default


def keeping_routing() -> tuple[Any, Any]:
    """A `context_fn` for `torch.utils.checkpoint` that recomputes everything except what routers chose."""

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_routing(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts
