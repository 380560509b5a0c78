"""Whether all ranks hold the same weights: sharding a model that differs by rank would mix several models into one."""

from __future__ import annotations

import torch
from torch import nn

from dtensor_5d.agree import Agreement
from dtensor_5d.errors import PlanError, Violation

__all__ = ["fingerprint", "same_weights"]


def fingerprint(model: nn.Module) -> int:
    """A 63-bit number from the bytes of all parameters; different weights give different numbers, practically always.

    Sums of the raw bits as integers, weighted by where they stand: exact, so the same on every rank and device.
    """
    total = 0
    for place, parameter in enumerate(model.parameters(), 1):
        bits = parameter.detach().contiguous().view(torch.uint8).flatten()
        words = bits[: bits.numel() // 4 * 4].view(torch.int32)
        plain = int(words.sum(dtype=torch.int64)) + int(bits[words.numel() * 4 :].sum(dtype=torch.int64))
        alternating = int(words[::2].sum(dtype=torch.int64))
        total = (total * 1_000_003 + plain * place + alternating) % (1 << 63)
    return total


def same_weights(model: nn.Module, agreement: Agreement) -> None:
    """Errors: `PlanError` on every rank when the ranks' weights differ."""
    every = [row[0] for row in agreement.numbers(fingerprint(model))]
    other = [rank for rank, value in enumerate(every) if value != every[0]]
    if other:
        raise PlanError(
            Violation(
                f"a model whose weights on ranks {other[:8]} differ from those on rank 0",
                "all ranks must start from the same weights",
                "build it under torch.device('meta') and call run.init_weights(seed) or run.load_pretrained(folder), "
                "or seed every rank alike before building it",
            )
        )
