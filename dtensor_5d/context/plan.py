"""Who computes which tiles and how far each block of keys and values travels: made once per batch and kind of mask.

A *member* holds one block; there are as many members as the ring is long. In step t member r has the block of member
r - offsets[t], its *owner*. With a causal mask the offsets are 0, 1, 2, .. : the ring. An offset at which no member
sees anything is left out, and blocks jump over it: with a sliding window in zig-zag order only 0, 1 and -1 remain,

    owner 0 1 2 3 4 5 6 7      step 0: at home     step 1: one further     step 2: n - 2 further, one before home

The block of owner s goes on after step t only if somebody later sees it: `last[s]` is the last such step. Its gradient
starts at `first[s]`, the first member that computes with it, travels along, and goes home after `last[s]`. All of this
is the same on every rank, so nobody waits for what is not sent.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtensor_5d.context.mask import Mask, Share, Tile, sees, share_of, tiles_between
from dtensor_5d.order import Order

__all__ = ["TilePlan", "plan_tiles"]


@dataclass(frozen=True)
class TilePlan:
    """Tiles of this member by owner; the offsets of the steps; by owner the first and last step at which it is seen.

    `first` and `last` are 0 where no other member sees the block: it stays at home.
    """

    me: int
    tiles: tuple[tuple[Tile, ...], ...]
    offsets: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def size(self) -> int:
        """Members."""
        return len(self.tiles)

    @property
    def steps(self) -> int:
        return len(self.offsets)

    def owner(self, step: int) -> int:
        """Whose block this member has in this step."""
        return (self.me - self.offsets[step]) % self.size

    def hop(self, step: int) -> int:
        """How many members further blocks go after this step."""
        return self.offsets[step + 1] - self.offsets[step]

    def hops(self) -> int:
        """How often this member sends a block in one forward."""
        return sum(self.last[self.owner(step)] > step for step in range(self.steps))


def plan_tiles(orders: Sequence[Order], members: Sequence[Sequence[int]], me: int, mask: Mask, batch: int) -> TilePlan:
    """The plan of member `me`. `orders`: one per row, or one for all; `members`: the ranks whose tokens each holds."""
    shares = [[share_of(order, ranks, mask.chunk) for order in orders] for ranks in members]
    n = len(members)
    seen = [  # by owner: the offsets of the members that see its block
        [d for d in range(1, n) if batch and _any_sees(shares[(owner + d) % n], shares[owner], mask)]
        for owner in range(n)
    ]
    offsets = (0, *sorted({d for found in seen for d in found}))
    step = {d: t for t, d in enumerate(offsets)}
    first = tuple(step[found[0]] if found else 0 for found in seen)
    last = tuple(step[found[-1]] if found else 0 for found in seen)
    tiles = [tiles_between(shares[me], shares[owner], mask, batch) if batch else () for owner in range(n)]
    return TilePlan(me, tuple(tiles), offsets, first, last)


def _any_sees(q: Sequence[Share], k: Sequence[Share], mask: Mask) -> bool:
    return any(sees(a, b, mask) for a, b in zip(q, k))
