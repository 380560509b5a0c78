"""How blocks of keys and values get to the members that need them, and their gradients back home.

Two ways with one interface: `blocks` brings blocks, in the order of the steps of the plan, the own one first;
`Gradients` takes what the tiles of a step gave and ends with the whole gradient of the own block.

    ring        step i computes with one block while the next one arrives (p2p, two buffers). Memory: 2 blocks.
                The gradient of a block follows it one step behind, in fp32, and goes home from the last member.
    allgather   all blocks in one all-gather, the own one is computed meanwhile. Memory: all blocks.
                Backward gathers again, and reduce-scatters the gradients of all blocks.

Keys and values (and their two gradients) are one message. Members are given as ranks of `group`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_5d.context.mask import Tile
from dtensor_5d.context.plan import TilePlan
from dtensor_5d.context.sums import Total, exact_dtype

__all__ = ["AllGather", "Gradients", "Part", "Ring", "Transport"]

Part = tuple[Tile, Tensor, Tensor]
"""A tile with its dk and dv."""


@dataclass(frozen=True)
class Transport:
    """Members of a ring, as ranks of a group, in the order of the ring."""

    group: dist.ProcessGroup | None
    members: tuple[int, ...]

    def blocks(self, k: Tensor, v: Tensor, plan: TilePlan) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(owner, k, v) per step; a block that does not come this far has undefined contents, and no tiles here."""
        yield plan.me, k, v

    def gradients(self, k: Tensor, v: Tensor, plan: TilePlan) -> Gradients:
        """What collects the gradient of a block in backward."""
        return Gradients(k, v)


class Gradients:
    """The gradient of the own block when nobody else has it. `put` once per step of `blocks`, in the same order."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._dk, self._dv = Total(k), Total(v)

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        for tile, dk, dv in parts:
            self._dk.add(tile.rows, tile.k, dk)
            self._dv.add(tile.rows, tile.k, dv)

    def result(self) -> tuple[Tensor, Tensor]:
        return self._dk.result(), self._dv.result()


def _packed(x: Tensor, y: Tensor) -> Tensor:
    flat = x.new_empty(x.numel() + y.numel())
    a, b = _unpacked(flat, x, y)
    a.copy_(x)
    b.copy_(y)
    return flat


def _unpacked(flat: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, shaped like x and y."""
    return flat[: x.numel()].view(x.shape), flat[x.numel() :].view(y.shape)


def _add(flat: Tensor, k: Tensor, v: Tensor, parts: Iterable[Part]) -> None:
    dk, dv = _unpacked(flat, k, v)
    for tile, a, b in parts:
        dk[tile.rows, :, tile.k].add_(a)
        dv[tile.rows, :, tile.k].add_(b)


class Ring(Transport):
    """Blocks by p2p from member to member."""

    def blocks(self, k: Tensor, v: Tensor, plan: TilePlan) -> Iterator[tuple[int, Tensor, Tensor]]:
        travels = any(plan.last)
        here = _packed(k, v) if travels else None
        spare = torch.empty_like(here) if here is not None else None
        key, value = k, v
        for step in range(plan.steps):
            ops = []
            if here is not None and spare is not None and step + 1 < plan.steps:
                hop = plan.hop(step)
                if plan.last[plan.owner(step)] > step:
                    ops.append(self._op(dist.isend, here, plan.me + hop))
                if plan.last[plan.owner(step + 1)] > step:
                    ops.append(self._op(dist.irecv, spare, plan.me - hop))
            works = dist.batch_isend_irecv(ops) if ops else []
            yield plan.owner(step), key, value
            for work in works:
                work.wait()
            here, spare = spare, here
            if here is not None:
                key, value = _unpacked(here, k, v)

    def gradients(self, k: Tensor, v: Tensor, plan: TilePlan) -> Gradients:
        return _RingGradients(self, k, v, plan)

    def _op(self, way: object, flat: Tensor, member: int) -> dist.P2POp:
        return dist.P2POp(way, flat, group=self.group, group_peer=self.members[member % len(self.members)])


class _RingGradients(Gradients):
    """The gradient of each block travels behind it, one step late, and goes home from the last member that sees it."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, plan: TilePlan) -> None:
        super().__init__(k, v)
        self._ring, self._k, self._v, self._plan = ring, k, v, plan
        self._step = 0
        self._here: Tensor | None = None  # arrived with this step
        self._away: Tensor | None = None  # sent with the step before, free again once that is done
        self._home: Tensor | None = None
        self._works: list[dist.Work] = []

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        """One step: add to the gradient that came with the block, send it on, and let the next one in."""
        plan, step = self._plan, self._step
        self._wait()
        ops = []
        going: Tensor | None = None
        if step == 0:
            super().put(owner, parts)
        elif plan.first[owner] <= step <= plan.last[owner]:
            going = self._here if step > plan.first[owner] else self._free().zero_()
            assert going is not None
            _add(going, self._k, self._v, parts)
            onward = plan.me + plan.hop(step) if step < plan.last[owner] else owner
            ops.append(self._ring._op(dist.isend, going, onward))
        arriving: Tensor | None = None
        if step + 1 < plan.steps:
            coming = plan.owner(step + 1)
            if 0 < plan.first[coming] <= step < plan.last[coming]:
                arriving = self._free()
                ops.append(self._ring._op(dist.irecv, arriving, plan.me - plan.hop(step)))
        if 0 < plan.last[plan.me] == step:
            self._home = self._new()
            ops.append(self._ring._op(dist.irecv, self._home, plan.me + plan.offsets[step]))
        self._works = dist.batch_isend_irecv(ops) if ops else []
        self._here, self._away = arriving, going
        self._step += 1

    def result(self) -> tuple[Tensor, Tensor]:
        self._wait()
        dk, dv = super().result()
        if self._home is not None:
            a, b = _unpacked(self._home, self._k, self._v)
            dk.add_(a)
            dv.add_(b)
        return dk, dv

    def _free(self) -> Tensor:
        """The buffer whose sending is over, or a new one."""
        flat, self._away = self._away, None
        return self._new() if flat is None else flat

    def _new(self) -> Tensor:
        return self._k.new_empty(self._k.numel() + self._v.numel(), dtype=exact_dtype(self._k))

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class AllGather(Transport):
    """All blocks at once."""

    def blocks(self, k: Tensor, v: Tensor, plan: TilePlan) -> Iterator[tuple[int, Tensor, Tensor]]:
        own = _packed(k, v)
        every = own.new_empty(plan.size * own.numel())
        work = dist.all_gather_single(every, own, group=self.group, async_op=True)
        yield plan.me, k, v
        work.wait()
        blocks = every.view(plan.size, -1)
        for owner in map(plan.owner, range(1, plan.steps)):
            yield owner, *_unpacked(blocks[owner], k, v)

    def gradients(self, k: Tensor, v: Tensor, plan: TilePlan) -> Gradients:
        return _GatheredGradients(self, k, v, plan)


class _GatheredGradients(Gradients):
    """The gradients of all blocks, added up over the members in one reduce-scatter."""

    def __init__(self, way: AllGather, k: Tensor, v: Tensor, plan: TilePlan) -> None:
        super().__init__(k, v)
        self._group, self._k, self._v = way.group, k, v
        self._every = k.new_zeros(plan.size, k.numel() + v.numel(), dtype=exact_dtype(k))

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        _add(self._every[owner], self._k, self._v, parts)

    def result(self) -> tuple[Tensor, Tensor]:
        own = self._every.new_empty(self._every.size(1))
        dist.reduce_scatter_single(own, self._every.view(-1), group=self._group)
        return _unpacked(own, self._k, self._v)
