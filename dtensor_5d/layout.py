"""Which ranks form a group on which axis: arithmetic on degrees, without a process group and without torch.

Every axis is a size and a stride in the world, outer to inner. World 16 as pp 2, dp_shard 2, cp 2, tp 2, ep 4:

    rank          0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15
    pp            0  0  0  0  0  0  0  0 | 1  1  1  1  1  1  1  1      stride 8
    dp_shard      0  0  0  0  1  1  1  1 | 0  0  0  0  1  1  1  1      stride 4
    cp            0  0  1  1  0  0  1  1 | 0  0  1  1  0  0  1  1      stride 2
    tp            0  1  0  1  0  1  0  1 | 0  1  0  1  0  1  0  1      stride 1
    fsdp          0  0  1  1  2  2  3  3 | 0  0  1  1  2  2  3  3      dp_shard x cp
    efsdp         0  0  0  0  1  1  1  1 | 0  0  0  0  1  1  1  1      of the expert view
    ep            0  1  2  3  0  1  2  3 | 0  1  2  3  0  1  2  3      of the expert view

The dense view is pp, dp_replicate, dp_shard, cp, tp; the expert view of the same ranks is pp, dp_replicate, efsdp, ep,
etp.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation

__all__ = ["DENSE_VIEW", "EXPERT_VIEW", "Axis", "axes_of", "groups_of", "select"]

DENSE_VIEW = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_VIEW = ("pp", "dp_replicate", "efsdp", "ep", "etp")


@dataclass(frozen=True)
class Axis:
    """The ranks of a group of this axis are `size` ranks, `stride` apart."""

    name: str
    size: int
    stride: int

    def index(self, rank: int) -> int:
        """Where `rank` stands in its group."""
        return rank // self.stride % self.size

    def ranks(self, rank: int) -> range:
        """The group of `rank`."""
        first = rank - self.index(rank) * self.stride
        return range(first, first + self.size * self.stride, self.stride)


def axes_of(degrees: Degrees) -> dict[str, Axis]:
    """Every axis and every named product of axes, by name.

    Example:
        >>> axes_of(Degrees(dp_shard=2, cp=2, tp=2))["fsdp"]
        Axis(name='fsdp', size=4, stride=2)

    Errors: `PlanError` while a degree is -1.
    """
    world = degrees.world_size
    sizes = {**dict(degrees.items()), "efsdp": degrees.efsdp}
    axes: dict[str, Axis] = {}
    for view in (DENSE_VIEW, EXPERT_VIEW):
        stride = world
        for name in view:
            stride //= sizes[name]
            axes[name] = Axis(name, sizes[name], stride)
        assert stride == 1, (view, sizes, world)
    inner = degrees.cp * degrees.tp
    products = (
        Axis("fsdp", degrees.fsdp, degrees.tp),
        Axis("loss", degrees.data * degrees.cp, degrees.tp),
        Axis("data", degrees.data, inner),
        Axis("world", world, 1),
    )
    axes.update((axis.name, axis) for axis in products)
    return axes


def groups_of(degrees: Degrees, name: str) -> list[list[int]]:
    """All groups of an axis: each rank of the world is in exactly one.

    Example:
        >>> groups_of(Degrees(dp_shard=2, tp=2), "dp_shard")
        [[0, 2], [1, 3]]
    """
    (axis,) = select(axes_of(degrees), (name,))
    return [list(axis.ranks(rank)) for rank in range(degrees.world_size) if axis.index(rank) == 0]


def select(axes: dict[str, Axis], names: tuple[str, ...]) -> tuple[Axis, ...]:
    """The axes of these names, which must be independent and go from outer to inner.

    Errors: `PlanError` for an unknown name, or for axes that share ranks or stand in another order.
    """
    unknown = [name for name in names if name not in axes]
    if unknown or not names:
        raise PlanError(
            Violation(
                f"mesh axis {', '.join(map(repr, unknown or names)) or '()'}",
                f"the axes are {', '.join(axes)}",
                "use one of these names, or several as mesh['dp_replicate', 'fsdp']",
            )
        )
    chosen = tuple(axes[name] for name in names)
    wide = [axis for axis in chosen if axis.size > 1]
    for outer, inner in pairwise(wide):
        if outer.stride < inner.size * inner.stride:
            raise PlanError(
                Violation(
                    f"mesh[{', '.join(map(repr, names))}]",
                    f"{outer.name} (size {outer.size}, stride {outer.stride}) must lie outside of {inner.name} "
                    f"(size {inner.size}, stride {inner.stride})",
                    f"choose axes of one view ({', '.join(DENSE_VIEW)} or {', '.join(EXPERT_VIEW)}), outer to inner",
                )
            )
    return chosen
