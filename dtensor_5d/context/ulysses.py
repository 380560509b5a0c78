"""Ulysses: heads for sequence. Ranks of a team swap, so that each has some of the heads of all the team's tokens.

    before   rank 0: all heads, tokens of rank 0        after   rank 0: first half of the heads, tokens of both
             rank 1: all heads, tokens of rank 1                rank 1: second half of the heads, tokens of both

| function | forward | backward |
|---|---|---|
| heads_apart | q, k, v: heads out, tokens in, one all-to-all | tokens out, heads in, one all-to-all |
| heads_together | output: tokens out, heads in | heads out, tokens in |

Each is the other's transpose. Query heads must divide by the team. Keys go along with the queries that use them: with
fewer kv heads than ranks (or numbers that do not divide) a kv head is sent to several ranks, and its gradient is the
sum of theirs. Tokens are put into ascending position on arrival, so that a causal mask stays one triangle.

A team is some ranks of the context group; the all-to-all runs over the whole group with nothing for the others, so
that no further process group is needed. (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtensor_5d.errors import PlanError, Violation

__all__ = ["Team", "heads_apart", "heads_together", "require_heads"]


@dataclass(frozen=True)
class Team:
    """Ranks of `group` that swap heads for sequence; `me` is this rank's number in `ranks`.

    places: where token t of the team's ranks, one after the other, goes: `[S]` for all rows, or `[B, S]`; None where
    they are in ascending position already.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    me: int
    places: Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def swapped(self, parts: Tensor) -> Tensor:
        """`[team, N]` -> `[team, N]`: row r goes to the team's rank r, row r of the result is from it."""
        sizes = [0] * self.group.size()
        for rank in self.ranks:
            sizes[rank] = parts.size(1)
        ordered = sorted(self.ranks) == list(self.ranks)
        assert ordered, "the all-to-all goes by rank"
        got = torch.empty_like(parts)
        dist.all_to_all_single(got.view(-1), parts.view(-1), sizes, sizes, group=self.group)
        return got


def require_heads(heads: int, team: int) -> None:
    """Errors: `PlanError` if `heads` query heads cannot be shared out over a team."""
    if heads % team:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        raise PlanError(
            Violation(
                f"Ulysses over {team} ranks with {heads} query heads",
                f"the query heads must divide by the ranks (kv heads are replicated, query heads cannot be): {legal}",
                "use context='ring', or 'ring+ulysses' with one of these for ulysses",
            )
        )


def _kv_copies(heads: int, kv_heads: int, team: int) -> int:
    """How often each kv head must be there, so that a rank's kv heads serve its query heads in equal groups."""
    group = heads // kv_heads
    return group // gcd(heads // team, group)


def heads_apart(q: Tensor, k: Tensor, v: Tensor, team: Team) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, H, L, D]` -> `[B, H / team, L * team, D]`, of q, k and v in one message."""
    out: tuple[Tensor, Tensor, Tensor] = _Apart.apply(q, k, v, team)
    return out


def heads_together(x: Tensor, team: Team) -> Tensor:
    """`[B, H / team, L * team, D]` -> `[B, H, L, D]`."""
    y: Tensor = _Together.apply(x, team)
    return y


class _Apart(Function):
    """Forward: heads out, tokens in. Backward: tokens out, heads in; the copies of a kv head are summed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, team: Team) -> tuple[Tensor, ...]:
        ctx.team = team
        ctx.copies = _kv_copies(q.size(1), k.size(1), team.size)
        k, v = (x if ctx.copies == 1 else x.repeat_interleave(ctx.copies, 1) for x in (k, v))
        return _to_tokens([q, k, v], team)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        dq, dk, dv = _to_heads(list(grads), ctx.team)
        if ctx.copies > 1:
            dk, dv = (x.unflatten(1, (-1, ctx.copies)).sum(2) for x in (dk, dv))
        return dq, dk, dv, None


class _Together(Function):
    """Forward: tokens out, heads in. Backward: heads out, tokens in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return _to_heads([x], team)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch: (*grads: Any)
        return _to_tokens([grad], ctx.team)[0], None


def _to_tokens(tensors: list[Tensor], team: Team) -> tuple[Tensor, ...]:
    n = team.size
    by_rank = [x.unflatten(1, (n, -1)).movedim(1, 0) for x in tensors]  # [team, B, h, L, D]
    got = team.swapped(torch.cat([x.reshape(n, -1) for x in by_rank], 1))
    out = []
    for x, part in zip(by_rank, got.split([x[0].numel() for x in by_rank], 1)):
        tokens = part.view(x.shape).movedim(0, 2)  # [B, h, team, L, D]
        whole = x.new_empty(*tokens.shape[:2], n * x.size(3), x.size(4))
        if team.places is None:
            whole.unflatten(2, (n, -1)).copy_(tokens)
        elif team.places.dim() == 1:
            whole.index_copy_(2, team.places, tokens.flatten(2, 3))
        else:
            whole.scatter_(2, team.places[:, None, :, None].expand(whole.shape), tokens.flatten(2, 3))
        out.append(whole)
    return tuple(out)


def _to_heads(tensors: list[Tensor], team: Team) -> tuple[Tensor, ...]:
    n = team.size
    by_rank = []
    for x in tensors:
        if team.places is not None and team.places.dim() == 1:
            x = x.index_select(2, team.places)
        elif team.places is not None:
            x = x.gather(2, team.places[:, None, :, None].expand(x.shape))
        by_rank.append(x.unflatten(2, (n, -1)).movedim(2, 0))  # [team, B, h, L, D]
    got = team.swapped(torch.cat([x.reshape(n, -1) for x in by_rank], 1))
    parts = got.split([x[0].numel() for x in by_rank], 1)
    # [team, B, h, L, D] -> [B, team * h, L, D]
    return tuple(part.view(x.shape).movedim(0, 1).flatten(1, 2) for x, part in zip(by_rank, parts))
