"""`attend`: attention of the tokens of this rank with all tokens of the sequence, and `Scope`: what that means.

| strategy | heads | communication per layer forward | limit |
|---|---|---|---|
| ring | all | cp - 1 hops of k, v (fewer where the mask is empty), hidden behind compute | |
| allgather | all | one all-gather of k, v; memory for all of them | |
| ulysses | H / cp each | two all-to-alls | cp divides the query heads |
| ring+ulysses | H / u each | two all-to-alls in teams of u, cp / u - 1 hops of the team's k, v | u divides cp and H |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_5d.context.attention import Kept, Pass, run_pass
from dtensor_5d.context.block import block_for
from dtensor_5d.context.mask import Mask
from dtensor_5d.context.plan import TilePlan, plan_tiles
from dtensor_5d.context.transport import AllGather, Ring, Transport
from dtensor_5d.context.ulysses import Team, heads_apart, heads_together, require_heads
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.order import Order

__all__ = ["STRATEGIES", "Scope", "attend", "attend_keeping"]

STRATEGIES = ("ring", "allgather", "ulysses", "ring+ulysses")


@dataclass(frozen=True)
class _Way:
    """What a scope comes to for some heads, rows and device."""

    plan: TilePlan
    transport: Transport
    team: Team | None


@dataclass(frozen=True)
class Scope:
    """What the local queries see: made once per batch, the same on all ranks of the group.

    Example: rank r of 2 holds tokens of a row of 16, the last 3 of which are padding.
        >>> documents = documents_from_ids([0] * 13 + [PADDING] * 3)
        >>> scope = Scope(mesh["cp"].get_group(), (make_order("zigzag", 16, 2, documents),))
        >>> out = attend(q, k, v, scope=scope.masked(window=8))        # a layer with a sliding window

    group: the ranks that share the sequence; None for this process alone. orders: where the tokens of each row are and
    which documents they belong to, one order per row or one for all rows. mask: what a layer sees of its document;
    `masked` gives the scope of another layer, and plans are shared between them. strategy, ulysses: see above;
    `ulysses` is the size of the teams of ring+ulysses, None for the largest legal one. back_end: see `block.py`.

    Errors: `PlanError` where these do not fit together.
    """

    group: dist.ProcessGroup | None
    orders: tuple[Order, ...]
    mask: Mask = field(default_factory=Mask)
    strategy: str = "ring"
    ulysses: int | None = None
    back_end: str | None = None
    _ways: dict[tuple[object, ...], _Way] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        bad = []
        ranks = sorted({order.ranks for order in self.orders})
        if ranks != [self.size]:
            bad.append(
                Violation(f"orders for {ranks} ranks in a context group of {self.size} ranks",
                          "the orders must be made for the ranks that attend",
                          f"make_order(..., ranks={self.size})")
            )  # fmt: skip
        if len({order.length for order in self.orders}) > 1:
            lengths = sorted({order.length for order in self.orders})
            bad.append(Violation(f"rows of {lengths} tokens", "rows of a batch have 1 length", "pad the shorter ones"))
        if self.strategy not in STRATEGIES:
            bad.append(Violation(f"context={self.strategy!r}", f"must be one of {', '.join(STRATEGIES)}", "choose one"))
        if self.ulysses is not None and self.strategy != "ring+ulysses":
            bad.append(
                Violation(f"ulysses={self.ulysses} with context={self.strategy!r}", "it is for context='ring+ulysses'",
                          "leave it out")
            )  # fmt: skip
        elif self.ulysses is not None and (self.ulysses < 1 or self.size % self.ulysses):
            legal = [n for n in range(1, self.size + 1) if self.size % n == 0]
            bad.append(
                Violation(f"ulysses={self.ulysses} with cp={self.size}", f"must divide cp: {legal}", "use one of these")
            )
        if bad:
            raise PlanError(bad)

    @property
    def size(self) -> int:
        """Ranks that share the sequence."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def local_length(self) -> int:
        """Tokens of each row on this rank."""
        return self.orders[0].local_length

    def masked(self, *, causal: bool = True, window: int | None = None, chunk: int | None = None) -> Scope:
        """The scope of a layer with this mask."""
        return replace(self, mask=Mask(causal, window, chunk))

    def _way(self, batch: int, heads: int, device: torch.device) -> _Way:
        team = {"ulysses": self.size, "ring+ulysses": self.ulysses or gcd(self.size, heads)}.get(self.strategy, 1)
        require_heads(heads, team)
        key = (self.mask, team, batch, device)
        if key not in self._ways:
            self._ways[key] = self._made(batch, team, device)
        return self._ways[key]

    def _made(self, batch: int, team: int, device: torch.device) -> _Way:
        blocks = self.size // team
        # Teams whose tokens make long runs together: neighbours, or every n-th rank of stripes.
        if self.orders[0].kind == "striped":
            teams = [tuple(range(b, self.size, blocks)) for b in range(blocks)]
        else:
            teams = [tuple(range(b * team, (b + 1) * team)) for b in range(blocks)]
        me = next(b for b, ranks in enumerate(teams) if self.rank in ranks)
        place = teams[me].index(self.rank)
        members = tuple(ranks[place] for ranks in teams)
        plan = plan_tiles(self.orders, teams, me, self.mask, batch)
        way = Transport if blocks == 1 or not batch else AllGather if self.strategy == "allgather" else Ring
        swap = None
        if team > 1:
            assert self.group is not None
            swap = Team(self.group, teams[me], place, _places(self.orders, teams[me], device))
        return _Way(plan, way(self.group, members), swap)


def _places(orders: Sequence[Order], ranks: Sequence[int], device: torch.device) -> Tensor | None:
    """Where the tokens of these ranks, one rank after the other, go to be in ascending position."""
    kinds = {order.pieces: order for order in orders}
    rows = torch.stack([_rank_of(order, ranks) for order in (kinds.values() if len(kinds) == 1 else orders)])
    if torch.equal(rows, torch.arange(rows.size(1)).expand_as(rows)):
        return None
    return (rows[0] if len(rows) == 1 else rows).to(device)


def _rank_of(order: Order, ranks: Sequence[int]) -> Tensor:
    positions = torch.cat([torch.arange(p.start, p.stop, p.step) for r in ranks for p in order.pieces[r]])
    return positions.argsort().argsort()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scope: Scope,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the local queries with the whole sequence; every rank of the group calls it, in the same order.

    Shapes: q `[B, H, L, D]`, k `[B, K, L, D]`, v `[B, K, L, Dv]`, the local tokens in the order's order, rotary
    embeddings applied, H a multiple of K; result `[B, H, L, Dv]` in the dtype of q, 0 at padding.
    scale: of the scores, `D ** -0.5` if None. softcap: scores become `softcap * tanh(scores / softcap)`. sinks: `[H]`,
    one more score per head without a value (gpt_oss); each rank gets the gradient of its own queries, so that sinks
    are reduced over the context axis as every other parameter is.

    Errors: `PlanError` for shapes that do not fit the scope or one another, and for dropout.
    """
    return attend_keeping(q, k, v, scope=scope, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)[0]


def attend_keeping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scope: Scope,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    kept: Kept | None = None,
) -> tuple[Tensor, Kept]:
    """`attend` that also returns what a recomputation of the same call needs in order not to run the ring again.

    Example: `out, kept = attend_keeping(q, k, v, scope=scope)`; in the recomputation `attend_keeping(..., kept=kept)`
    gives the same output bit for bit, and backward goes on from there. With Ulysses the heads are still swapped.
    """
    _require_fit(q, k, v, scope, sinks, dropout)
    way = scope._way(q.size(0), q.size(1), q.device)
    block = block_for(q, v, q.size(-1) ** -0.5 if scale is None else scale, softcap, scope.back_end)
    how = Pass(way.plan, block, way.transport, kept)
    if way.team is None:
        return run_pass(q, k, v, sinks, how)
    q, k, v = heads_apart(q, k, v, way.team)
    if sinks is not None:
        sinks = sinks.unflatten(0, (way.team.size, -1))[way.team.me]
    out, found = run_pass(q, k, v, sinks, how)
    return heads_together(out, way.team), found


def _require_fit(q: Tensor, k: Tensor, v: Tensor, scope: Scope, sinks: Tensor | None, dropout: float) -> None:
    bad = []
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise PlanError(Violation(shapes, "must be [B, heads, tokens, head size]", "add or merge dims"))
    if k.shape[:3] != v.shape[:3] or q.size(-1) != k.size(-1) or q.size(0) != k.size(0) or q.size(2) != k.size(2):
        asked = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        bad.append(Violation(asked, "must agree in rows and tokens, q and k in head size, k and v in heads",
                             "fix them"))  # fmt: skip
    if not k.size(1) or q.size(1) % k.size(1):
        bad.append(
            Violation(f"{q.size(1)} query heads with {k.size(1)} kv heads", "query heads are a multiple of kv heads",
                      "give whole groups of heads")
        )  # fmt: skip
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        bad.append(Violation(f"q {q.dtype}, k {k.dtype}, v {v.dtype}", "must have 1 dtype", "cast them"))
    if q.size(2) != scope.local_length:
        bad.append(
            Violation(f"{q.size(2)} tokens on this rank", f"the order of the scope has {scope.local_length} for it",
                      "cut the batch with the same order")
        )  # fmt: skip
    if len(scope.orders) not in (1, q.size(0)):
        bad.append(
            Violation(f"{q.size(0)} rows with {len(scope.orders)} orders", "one order per row, or one for all",
                      "make the scope from this batch")
        )  # fmt: skip
    if sinks is not None and sinks.shape != q.shape[1:2]:
        bad.append(Violation(f"sinks {tuple(sinks.shape)}", f"must be [{q.size(1)}], one per head", "give local heads"))
    if dropout:
        bad.append(
            Violation(f"attention dropout {dropout}", "must be 0 where attention runs over the context axis",
                      "set attention_dropout=0 in the config")
        )  # fmt: skip
    if bad:
        raise PlanError(bad)
