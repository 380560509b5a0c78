"""How rows travel along a `Route`: two transports behind one contract, and room for others.

| transport | there | own rows | good for |
|---|---|---|---|
| AllToAll | gather, one all-to-all, one permutation | travel like the others | small blocks, many ranks |
| Direct | gather, one message per peer and expert, straight into its place | copied once | large blocks |

`there` brings P sorted pairs to the R places of their experts; `back` is its exact transpose. Both post their messages
and return a `Flight`, which waits for them when its rows are asked for; until then others may compute. A transport of
one's own needs these two methods and no registration; one that has waited already returns `Flight(lambda: rows)`.

Letters: P, R, N, L as in `route`; M model size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_5d.expert.route import Route

__all__ = ["DIRECT_FROM_BYTES", "TRANSPORTS", "AllToAll", "Auto", "Buffers", "Direct", "Flight", "Transport"]

# Mean size of the block that one rank has for one expert from which `Direct` wins (benchmarks/expert_layer.py).
DIRECT_FROM_BYTES = 64 * 1024


class Buffers:
    """Memory for rows on their way, used again by every layer: on the CPU fresh pages cost more than the exchange.

    What is lent is nobody else's until it is taken back: who asks meanwhile gets other memory. Other devices have
    allocators that keep memory; there each call gets fresh memory. Nothing that outlives a call (what autograd saves,
    a gradient that waits) may lie here.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, torch.dtype], torch.UntypedStorage] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffers:
        return Buffers()

    def lend(self, name: str, count: int, like: Tensor) -> Tensor:
        """[count, M] with M, dtype and device of `like`; contents are whatever was there."""
        width = like.size(1)
        if like.device.type != "cpu":
            return like.new_empty(count, width)
        held = self._free.pop((name, like.dtype), None)
        if held is None or held.nbytes() < count * width * like.element_size():
            # Routing varies from step to step; some room spares most of the growing.
            held = torch.empty(count * width * 5 // 4, dtype=like.dtype).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(held, 0, (count, width))

    def take_back(self, name: str, rows: Tensor) -> None:
        """After `lend`, when nobody reads or writes these rows any more."""
        if rows.device.type == "cpu":
            self._free[name, rows.dtype] = rows.untyped_storage()


class Flight:
    """Rows on their way. land: gives them, once the messages `works` are done. holds: what the messages read and write.

    Example:
        >>> Flight(lambda: torch.ones(2, 3)).finish().shape
        torch.Size([2, 3])
    """

    def __init__(
        self, land: Callable[[], Tensor], works: Sequence[dist.Work] = (), holds: Sequence[Tensor] = ()
    ) -> None:
        self._land, self._works, self._holds = land, works, holds

    def finish(self) -> Tensor:
        """Waits for the messages and lays the rows out; to be called once."""
        for work in self._works:
            work.wait()
        rows = self._land()
        self._holds = ()
        return rows


class Transport(Protocol):
    """Brings rows to their experts and back. Collective over the route's group."""

    def there(self, source: Tensor, pick: Tensor | None, route: Route, buffers: Buffers) -> Flight:
        """Lands as fresh [R, M], laid out by expert: row p of P is `source[pick[p]]`, or `source[p]` without `pick`."""

    def back(self, rows: Tensor, route: Route, buffers: Buffers, out: Tensor) -> Flight:
        """Lands as `out` [P, M], filled with what the experts made of each pair: rows [R, M] the way they came."""


class AllToAll:
    """One all-to-all; rows arrive by sender and one permutation lays them out by expert."""

    def there(self, source: Tensor, pick: Tensor | None, route: Route, buffers: Buffers) -> Flight:
        if route.ranks == 1:
            laid = source.clone() if pick is None else source.index_select(0, pick)
            return Flight(lambda: laid)
        rows = source
        if pick is not None:
            rows = buffers.lend("leaving", pick.numel(), source)
            torch.index_select(source, 0, pick, out=rows)
        arrived = buffers.lend("arrived", route.rows, source)

        def land() -> Tensor:
            laid = arrived.index_select(0, route.arrived)
            buffers.take_back("arrived", arrived)
            if pick is not None:
                buffers.take_back("leaving", rows)
            return laid

        return _all_to_all(rows, arrived, route.sent, route.received, route.group, land)

    def back(self, rows: Tensor, route: Route, buffers: Buffers, out: Tensor) -> Flight:
        if route.ranks == 1:
            out.copy_(rows)
            return Flight(lambda: out)
        leaving = buffers.lend("arrived", route.rows, rows)
        torch.index_select(rows, 0, route.departs, out=leaving)

        def land() -> Tensor:
            buffers.take_back("arrived", leaving)
            return out

        return _all_to_all(leaving, out, route.received, route.sent, route.group, land)


class Direct:
    """One message per peer and expert, sent from and received into its place; own rows are copied once."""

    def there(self, source: Tensor, pick: Tensor | None, route: Route, buffers: Buffers) -> Flight:
        laid = source.new_empty(route.rows, source.size(1))
        me = route.rank
        first = route.sent_at[me][0]
        last = first + sum(route.sent[me])
        rows = source.contiguous()
        if pick is not None:
            rows = buffers.lend("leaving", pick.numel(), source)
            for a, b in ((0, first), (last, pick.numel())):
                if b > a:
                    torch.index_select(source, 0, pick[a:b], out=rows[a:b])
        works = _messages(rows, route.sent_at, route.sent, laid, route.received_at, route.received, route.group)
        for at, to, n in zip(route.sent_at[me], route.received_at[me], route.sent[me]):
            if n and pick is None:
                laid[to : to + n] = rows[at : at + n]
            elif n:
                assert pick is not None
                torch.index_select(source, 0, pick[at : at + n], out=laid[to : to + n])

        def land() -> Tensor:
            if pick is not None:
                buffers.take_back("leaving", rows)
            return laid

        return Flight(land, works, (rows, laid))

    def back(self, rows: Tensor, route: Route, buffers: Buffers, out: Tensor) -> Flight:
        me, rows = route.rank, rows.contiguous()
        works = _messages(rows, route.received_at, route.received, out, route.sent_at, route.sent, route.group)
        for at, to, n in zip(route.received_at[me], route.sent_at[me], route.sent[me]):
            if n:
                out[to : to + n] = rows[at : at + n]
        return Flight(lambda: out, works, (rows, out))


class Auto:
    """`Direct` on the CPU where blocks are large, else `AllToAll`: every rank of the group chooses alike."""

    def __init__(self, direct_from: int = DIRECT_FROM_BYTES) -> None:
        self.direct_from = direct_from
        self.direct, self.all_to_all = Direct(), AllToAll()

    def choice(self, route: Route, like: Tensor) -> Transport:
        """From the sizes that all ranks know: the mean block of one rank for one expert, in bytes."""
        blocks = len(route.sent) * len(route.sent) * len(route.sent[0])
        mean = sum(route.rows_of) * like.size(1) * like.element_size() / blocks
        # Elsewhere than on the CPU the crossing was not measured.
        return self.direct if like.device.type == "cpu" and mean >= self.direct_from else self.all_to_all

    def there(self, source: Tensor, pick: Tensor | None, route: Route, buffers: Buffers) -> Flight:
        return self.choice(route, source).there(source, pick, route, buffers)

    def back(self, rows: Tensor, route: Route, buffers: Buffers, out: Tensor) -> Flight:
        return self.choice(route, rows).back(rows, route, buffers, out)


TRANSPORTS: MappingProxyType[str, Transport] = MappingProxyType(
    {"auto": Auto(), "all_to_all": AllToAll(), "direct": Direct()}
)


def _all_to_all(
    rows: Tensor, out: Tensor, leave: list[list[int]], arrive: list[list[int]], group: dist.ProcessGroup | None,
    land: Callable[[], Tensor],
) -> Flight:  # fmt: skip
    sizes_out, sizes_in = [sum(r) for r in arrive], [sum(r) for r in leave]
    rows = rows.contiguous()
    work = dist.all_to_all_single(out, rows, sizes_out, sizes_in, group=group, async_op=True)
    return Flight(land, [] if work is None else [work], (rows, out))


def _messages(
    rows: Tensor, rows_at: list[list[int]], leave: list[list[int]], out: Tensor, out_at: list[list[int]],
    arrive: list[list[int]], group: dist.ProcessGroup | None,
) -> list[dist.Work]:  # fmt: skip
    """Messages with every other rank of the group, posted; both sides post one pair's messages in expert order."""
    posted: list[dist.P2POp] = []
    if group is None:
        return []
    for step in range(1, group.size()):
        # Each rank starts with another peer, so that no one is asked by all at once.
        peer = (group.rank() + step) % group.size()
        for at, n in zip(out_at[peer], arrive[peer]):
            if n:
                posted.append(dist.P2POp(dist.irecv, out[at : at + n], group=group, group_peer=peer))
        for at, n in zip(rows_at[peer], leave[peer]):
            if n:
                posted.append(dist.P2POp(dist.isend, rows[at : at + n], group=group, group_peer=peer))
    return dist.batch_isend_irecv(posted) if posted else []
