"""Rows cut along the sequence: whole micro-batches -> this rank's tokens with their `Scope`, and back (contract C3).

    whole rows, shifted labels, documents   --order of each row-->   pieces of this rank   --join-->   whole rows

Shapes: B rows, S tokens of a whole row, L = S / ranks tokens of it on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_5d.batch import MicroBatch
from dtensor_5d.context.attention import Kept
from dtensor_5d.context.scope import Scope
from dtensor_5d.loss import IGNORE
from dtensor_5d.order import PADDING, Document, Order, make_order

__all__ = ["LocalRows", "RowCutter"]

_KNOWN = 8
"""Orders whose tiles are kept for the next rows that are cut alike."""


@dataclass(frozen=True)
class LocalRows:
    """What attention needs to know of rows that were cut.

    places: where the local tokens stand in their whole row, `[L]`, or `[B, L]` where rows are cut differently.
    longest: the largest position of the whole rows + 1. kept: what recomputation need not compute again, by module.
    """

    scope: Scope
    places: Tensor
    longest: int
    kept: dict[int, Kept] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class RowCutter:
    """Cuts rows over the ranks of `group` in the order `balance`; strategy, ulysses: as in `Scope`.

    multiple: what whole rows were padded to a multiple of.
    """

    group: dist.ProcessGroup
    multiple: int
    balance: str = "zigzag"
    strategy: str = "ring"
    ulysses: int | None = None
    _known: dict[tuple[Order, ...], tuple[Scope, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def local(self, micro: MicroBatch) -> MicroBatch:
        """This rank's tokens of whole rows; `tokens` counts its own supervised ones. Empty rows stay as they are."""
        device = micro.inputs["input_ids"].device
        if micro.is_empty:
            nothing = Document(0, self.multiple, PADDING)
            order = make_order(self.balance, self.multiple, self.group.size(), (nothing,))
            return replace(micro, local=LocalRows(*self._cut_as((order,), device), longest=1))
        assert micro.documents is not None, "rows that are cut say which documents they hold"
        orders = orders_of(micro.documents, self.balance, self.group.size())
        scope, places = self._cut_as(orders, device)
        inputs = {key: _picked(value, places) for key, value in micro.inputs.items()}
        labels = _picked(micro.labels, places) if micro.labels is not None else None
        real = micro.inputs["position_ids"][:, : micro.length]
        local = LocalRows(scope, places, int(real.max()) + 1)
        tokens = int((labels != IGNORE).sum()) if labels is not None else 0
        seen = _picked(micro.documents != PADDING, places)
        return replace(micro, inputs=inputs, labels=labels, documents=None, tokens=tokens, local=local, real=seen)

    def joined(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """Whole rows `[B, S, ...]` in their own order, from the values `[B, L, ...]` of each rank's tokens."""
        orders = micro.local.scope.orders
        every = values.new_empty(self.group.size() * values.shape[0], *values.shape[1:])
        dist.all_gather_single(every, values.contiguous(), group=self.group)
        parts = every.unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)
        back = [torch.tensor(order.inverse(), device=values.device) for order in orders]
        if len(back) == 1:
            return parts[:, back[0]]
        return torch.stack([row[index] for row, index in zip(parts, back)])

    def _cut_as(self, orders: tuple[Order, ...], device: torch.device) -> tuple[Scope, Tensor]:
        """The scope of rows in these orders, and where the tokens of this rank stand in them."""
        if orders not in self._known:
            mine = [
                torch.cat([torch.arange(p.start, p.stop, p.step) for p in order.pieces[self.group.rank()]])
                for order in orders
            ]
            places = (mine[0] if len(mine) == 1 else torch.stack(mine)).to(device)
            while len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            self._known[orders] = Scope(self.group, orders, strategy=self.strategy, ulysses=self.ulysses), places
        return self._known[orders]


def orders_of(documents: Tensor, balance: str, ranks: int) -> tuple[Order, ...]:
    """The order of each row of documents `[B, S]`; one for all where they are alike."""
    rows = documents.cpu()
    if bool((rows == rows[:1]).all()):
        rows = rows[:1]
    return tuple(make_order(balance, rows.shape[1], ranks, _runs(row)) for row in rows)


def _runs(row: Tensor) -> list[Document]:
    """The documents of one row, in order."""
    ids, counts = torch.unique_consecutive(row, return_counts=True)
    stops = counts.cumsum(0)
    return [
        Document(stop - count, stop, number)
        for number, count, stop in zip(ids.tolist(), counts.tolist(), stops.tolist())
    ]


def _picked(values: Tensor, places: Tensor) -> Tensor:
    return values[:, places] if places.dim() == 1 else values.gather(1, places)
