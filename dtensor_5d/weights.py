"""Whether all ranks hold the same weights: sharding a model that differs by rank would mix several models into one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from dtensor_5d.agree import Agreement
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.names import Names
from dtensor_5d.random import stream_seed

__all__ = ["fingerprint", "same_weights"]


def fingerprint(parameters: Iterable[torch.Tensor]) -> int:
    """A 63-bit number from the bytes of all parameters; different weights give different numbers, practically always.

    Sums of the raw bits as integers, weighted by where they stand: exact, so the same on every rank and device.
    """
    total = 0
    for place, parameter in enumerate(parameters, 1):
        bits = parameter.detach().contiguous().view(torch.uint8).flatten()
        words = bits[: bits.numel() // 4 * 4].view(torch.int32)
        plain = int(words.sum(dtype=torch.int64)) + int(bits[words.numel() * 4 :].sum(dtype=torch.int64))
        alternating = int(words[::2].sum(dtype=torch.int64))
        total = (total * 1_000_003 + plain * place + alternating) % (1 << 63)
    return total


def same_weights(model: nn.Module, names: Names, agreement: Agreement) -> None:
    """Compares the weights of ranks that hold parameters of the same names, and each tied tensor wherever it is.

    So all ranks while the model is whole; where it is cut into stages, those of a stage, and the stages of a tie.
    Errors: `PlanError` on every rank when weights that must be equal are not.
    """
    mine = dict(model.named_parameters(remove_duplicate=False))
    pairs = [(stream_seed(*mine), fingerprint(model.parameters()))]
    for group in names.ties:
        copy = next((mine[name] for name in group if name in mine), None)
        pairs.append((0, 0) if copy is None else (1, fingerprint([copy])))
    every = agreement.numbers(*(number for pair in pairs for number in pair))
    bad = []
    for place, what in enumerate(["weights", *(" = ".join(group) for group in names.ties)]):
        seen: dict[int, tuple[int, int]] = {}  # what is held -> the first rank with it, and its value
        other: dict[int, list[int]] = {}  # that first rank -> ranks that differ from it
        for rank, row in enumerate(every):
            held, value = row[2 * place : 2 * place + 2]
            first, wanted = seen.setdefault(held, (rank, value))
            if value != wanted:
                other.setdefault(first, []).append(rank)
        bad += [
            Violation(
                f"a model whose {what} on ranks {ranks[:8]} differ from those on rank {first}",
                "all ranks must start from the same weights",
                "build it under torch.device('meta') and call run.init_weights(seed) or run.load_pretrained(folder), "
                "or seed every rank alike before building it",
            )
            for first, ranks in other.items()
        ]
        if bad:
            raise PlanError(bad)  # a tied tensor is one of the weights: once is enough
