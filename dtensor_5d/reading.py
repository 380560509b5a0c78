"""What a window is on all ranks: each rank's batches cut into micro-batches, then one exchange (contracts C1, C8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtensor_5d.agree import Agreement
from dtensor_5d.batch import BatchRules, MicroBatch, cut_window, fingerprint
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.mesh import Mesh

__all__ = ["Batch", "Reader", "Window"]

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches, as many on every rank; supervised tokens of all ranks; whether any rank has more."""

    micro: list[MicroBatch]
    tokens: int
    more: bool = True


@dataclass(frozen=True)
class Reader:
    """Cuts batches by `rules` and lets all ranks agree on them. parts: micro-batches of one batch. along: cuts the rows
    of a micro-batch, once all ranks have agreed on the whole ones."""

    mesh: Mesh
    rules: BatchRules
    agreement: Agreement
    parts: int
    along: Callable[[MicroBatch], MicroBatch] | None = None

    def window(
        self, batch: Batch | Sequence[Batch], *, need_labels: bool, parts: int | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Window:  # fmt: skip
        """One window. ready: raises where this rank cannot run it. Errors: `PlanError` on every rank, where any rank's
        batch is wrong or any is not ready."""
        window: list[MicroBatch] = []
        error: Exception | None = None
        try:
            if ready is not None:
                ready()
            window = self._cut(batch, need_labels, parts or self.parts)
        except Exception as problem:
            error = problem
        return self._agreed(error, window, True)

    def windows(self, batches: Iterable[Batch]) -> Iterator[Window]:
        """A window from each batch, as long as any rank has one."""
        source = _each(batches)
        while True:
            window: list[MicroBatch] = []
            error: Exception | None = None
            more = True
            try:
                batch = next(source, None)
                more = batch is not None
                window = self._cut(batch, True, self.parts) if batch is not None else []
            except Exception as problem:
                error = problem
            agreed = self._agreed(error, window, more)
            if not agreed.more:
                return
            yield agreed

    def _cut(self, batch: Batch | Sequence[Batch], need_labels: bool, parts: int) -> list[MicroBatch]:
        return cut_window(batch, parts, self.rules, self.mesh.device, need_labels=need_labels)

    def _agreed(self, error: Exception | None, window: list[MicroBatch], more: bool) -> Window:
        """Errors: `PlanError` on every rank where ranks that must read the same batch do not."""
        peers = self.mesh.world_size // self.mesh.data_size
        what = fingerprint(window) if peers > 1 else 0
        every = self.agreement.check(error, len(window), sum(m.tokens for m in window), what, int(more))
        share, size = self.mesh.axes["data"].index, self.mesh.data_size
        first = {share(rank): rank for rank in reversed(range(len(every)))}
        for rank, row in enumerate(every):
            other = first[share(rank)]
            if row != every[other]:
                raise PlanError(
                    Violation(f"other rows on rank {rank} than on rank {other}",
                              f"both have data_rank {share(rank)} of {size}: they must read the same batch",
                              "read the rows of run.data_rank, not of the process's rank")
                )  # fmt: skip
        missing = max(row[0] for row in every) - len(window)
        tokens = sum({share(rank): row[1] for rank, row in enumerate(every)}.values())  # each share once
        window = window + [MicroBatch.missing(self.mesh.device)] * missing
        if self.along is not None:
            window = [self.along(micro) for micro in window]
        return Window(window, tokens, any(row[3] for row in every))


def _each(batches: Iterable[Batch]) -> Iterator[Batch]:
    yield from batches  # what is wrong with them shows at the first next(), where all ranks hear of it
