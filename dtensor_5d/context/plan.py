"""Who computes which tiles and how far each block of keys and values travels: made once per batch and kind of mask.

A *member* holds one block; there are as many members as the ring is long. In step i member r has the block of member
r - i (its owner). The block of owner s makes hop i, from member s + i to s + i + 1, only if somebody from there on sees
it: `last[s]` is the largest such i + 1. Its gradient starts at `first[s]`, the first member that computes with it,
travels along, and goes home from `last[s]`. Both are the same on every rank, so nobody waits for what is not sent.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtensor_5d.context.mask import Mask, Tile, sees, share_of, tiles_between
from dtensor_5d.order import Order

__all__ = ["TilePlan", "plan_tiles"]


@dataclass(frozen=True)
class TilePlan:
    """Tiles of this member by owner, and by owner the first and last step at which a member sees its block.

    `first` and `last` are 0 where no other member sees the block: it stays at home.
    """

    me: int
    tiles: tuple[tuple[Tile, ...], ...]
    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.tiles)

    def owner(self, step: int) -> int:
        """Whose block this member has in this step."""
        return (self.me - step) % self.size

    def hops(self) -> int:
        """How often this member sends a block in one forward."""
        return sum(self.last[self.owner(step)] > step for step in range(self.size - 1))


def plan_tiles(orders: Sequence[Order], members: Sequence[Sequence[int]], me: int, mask: Mask, batch: int) -> TilePlan:
    """The plan of member `me`. `orders`: one per row, or one for all; `members`: the ranks whose tokens each holds."""
    shares = [[share_of(order, ranks, mask.chunk) for order in orders] for ranks in members]
    n = len(members)
    first, last = [0] * n, [0] * n
    for owner in range(n if batch else 0):
        steps = range(1, n)
        seen = (s for s in steps if _any_sees(shares[(owner + s) % n], shares[owner], mask))
        back = (s for s in reversed(steps) if _any_sees(shares[(owner + s) % n], shares[owner], mask))
        first[owner], last[owner] = next(seen, 0), next(back, 0)
    tiles = [tiles_between(shares[me], shares[owner], mask, batch) if batch else () for owner in range(n)]
    return TilePlan(me, tuple(tiles), tuple(first), tuple(last))


def _any_sees(q: Sequence[tuple], k: Sequence[tuple], mask: Mask) -> bool:
    return any(sees(a, b, mask) for a, b in zip(q, k))
