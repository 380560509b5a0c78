"""Ranks find out together what is wrong, so that all raise the same error and none waits for one that gave up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from dtensor_5d.errors import PlanError, Violation

__all__ = ["SHOWN", "agree", "agree_on", "everyones", "my_rank", "short"]

SHOWN = 5  # how many of one kind are spelt out


def my_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def everyones(value: Any) -> list[Any]:
    """The small `value` of every rank, by rank. Collective over all ranks; no collective without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(found: Iterable[Violation]) -> None:
    """Raises the violations that any rank found, on every rank alike. Collective over all ranks.

    A violation that only some ranks see (a folder missing on one node, a full disk) is told with its first rank.

    Errors: `PlanError` with all of them.
    """
    by_rank = everyones(tuple(found))
    finders: dict[Violation, list[int]] = {}
    for rank, violations in enumerate(by_rank):
        for violation in dict.fromkeys(violations):
            finders.setdefault(violation, []).append(rank)
    if not finders:
        return
    told = []
    for v, ranks in finders.items():
        where = "" if len(ranks) == len(by_rank) else f"on {len(ranks)} of {len(by_rank)} ranks (first: {ranks[0]}), "
        told.append(Violation(where + v.asked, v.required, v.change))
    raise PlanError(told)


def short(violations: list[Violation]) -> list[Violation]:
    """The first few violations of one kind, and how many more there are."""
    rest = len(violations) - SHOWN
    more = [Violation(f"{rest} more of this kind", "as above", "as above")] if rest > 0 else []
    return [*violations[:SHOWN], *more]


def agree_on(value: Any, asked: str, required: str, change: str) -> None:
    """Raises on every rank when `value` is not the same on all of them. Collective over all ranks.

    Errors: `PlanError` naming the first rank that differs from rank 0.
    """
    values = everyones(value)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise PlanError(Violation(f"{asked}: rank {others[0]} differs from rank 0", required, change))
