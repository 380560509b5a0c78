"""Small facts that all ranks exchange before they act, so that one rank's mistake is every rank's clear error.

Without it a rank that raises leaves the others waiting in a collective for ever (contracts C8 and C9).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dtensor_5d.errors import PlanError

__all__ = ["Agreement"]


class Agreement:
    """Exchanges whole numbers and errors over one process group; free of any collective when it has one rank."""

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        self._group = group
        self._size = size
        self._device = _control_device(group, device) if size > 1 else torch.device("cpu")

    def numbers(self, *values: int) -> list[list[int]]:
        """The values of every rank, by rank (one all-gather of a few bytes)."""
        if self._size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.int64, device=self._device)
        every = own.new_empty(self._size * len(values))
        dist.all_gather_single(every, own, group=self._group)
        return every.view(self._size, -1).tolist()

    def check(self, error: Exception | None, *values: int) -> list[list[int]]:
        """The values of every rank, or the same error on every rank when any rank has one.

        A rank's own error is raised as it is; the others raise one of its type (`PlanError` for the kinds that only
        exist on that rank) that names the ranks and what they said.
        """
        every = self.numbers(int(error is not None), *values)
        failed = [rank for rank, row in enumerate(every) if row[0]]
        if failed:
            self._raise(error, failed)
        return [row[1:] for row in every]

    def _raise(self, error: Exception | None, failed: Sequence[int]) -> None:
        if self._size == 1:
            assert error is not None
            raise error
        messages: list[str | None] = [None] * self._size
        dist.all_gather_object(messages, None if error is None else str(error), group=self._group)
        if error is not None:
            raise error
        said = "; ".join(f"rank {rank}: {messages[rank]}" for rank in failed[:4])
        raise PlanError(f"{len(failed)} of {self._size} ranks cannot go on. {said}")


def _control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The CPU where the group can talk there: a question to the accelerator would stop it until it is answered."""
    if device.type == "cpu":
        return device
    backends = dist.get_backend_config(group)
    return torch.device("cpu") if "cpu:gloo" in str(backends) else device
