"""Which ranks form a group on which axis: written-out tables for worlds of 8, 16 and 24, laws for the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError
from dtensor_5d.layout import DENSE_VIEW, EXPERT_VIEW, axes_of, groups_of, select


def runs(*bounds):
    return [list(range(a, b)) for a, b in bounds]


# Field fault M1: every sub-mesh of a world of 8 against a table written by hand.
WORLD_8 = {
    "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "dp_replicate": [[r] for r in range(8)],
    "dp_shard": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "cp": [[r] for r in range(8)],
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "efsdp": [[r] for r in range(8)],
    "ep": runs((0, 4), (4, 8)),
    "etp": [[r] for r in range(8)],
    "fsdp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "loss": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "world": runs((0, 8)),
}
WORLD_16 = {
    "pp": [[r, r + 8] for r in range(8)],
    "dp_replicate": [[r] for r in range(16)],
    "dp_shard": [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)],
    "cp": [[r, r + 2] for r in (0, 1, 4, 5, 8, 9, 12, 13)],
    "tp": [[r, r + 1] for r in range(0, 16, 2)],
    "efsdp": [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)],
    "ep": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "etp": [[r, r + 1] for r in range(0, 16, 2)],
    "fsdp": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
    "loss": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
    "data": [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)],
    "world": runs((0, 16)),
}
# 3 nodes of 8, one replica a node.
WORLD_24 = {
    "pp": [[r] for r in range(24)],
    "dp_replicate": [[r, r + 8, r + 16] for r in range(8)],
    "dp_shard": [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19)],
    "cp": [[r, r + 2] for r in (0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21)],
    "tp": [[r, r + 1] for r in range(0, 24, 2)],
    "efsdp": [[r, r + 2, r + 4, r + 6] for r in (0, 1, 8, 9, 16, 17)],
    "ep": [[r, r + 1] for r in range(0, 24, 2)],
    "etp": [[r] for r in range(24)],
    "fsdp": [[r, r + 2, r + 4, r + 6] for r in (0, 1, 8, 9, 16, 17)],
    "loss": [list(range(0, 24, 2)), list(range(1, 24, 2))],
    "data": [[r, r + 4, r + 8, r + 12, r + 16, r + 20] for r in range(4)],
    "world": runs((0, 24)),
}
TABLES = {
    Degrees(pp=2, dp_shard=2, tp=2, ep=4): WORLD_8,
    Degrees(pp=2, dp_shard=2, cp=2, tp=2, ep=2, etp=2): WORLD_16,
    Degrees(dp_replicate=3, dp_shard=2, cp=2, tp=2, ep=2): WORLD_24,
}


@st.composite
def layouts(draw):
    """Degrees with a world of at most 4,096 ranks."""
    dense = {name: draw(st.sampled_from((1, 2, 3, 4))) for name in DENSE_VIEW}
    inner = dense["dp_shard"] * dense["cp"] * dense["tp"]
    ep = draw(st.sampled_from([d for d in range(1, inner + 1) if inner % d == 0]))
    etp = draw(st.sampled_from([d for d in range(1, inner // ep + 1) if (inner // ep) % d == 0]))
    return Degrees(**dense, ep=ep, etp=etp)


@pytest.mark.parametrize("degrees", TABLES, ids=lambda d: str(d.world_size))
def test_every_axis_of_these_worlds_has_the_groups_of_the_table(degrees):
    assert {name: groups_of(degrees, name) for name in axes_of(degrees)} == TABLES[degrees]


@settings(deadline=None, max_examples=50)
@given(layouts())
def test_groups_part_the_world_and_views_name_each_rank_once(degrees):
    axes = axes_of(degrees)
    for name in axes:
        groups = groups_of(degrees, name)
        assert sorted(r for g in groups for r in g) == list(range(degrees.world_size))
        for group in groups:
            assert [axes[name].index(r) for r in group] == list(range(axes[name].size))
            assert all(list(axes[name].ranks(r)) == group for r in group)
    for view in (DENSE_VIEW, EXPERT_VIEW, ("pp", "loss", "tp"), ("pp", "data", "cp", "tp"), ("pp", "dp_replicate",
                                                                                            "fsdp", "tp")):  # fmt: skip
        chosen = select(axes, view)
        places = {tuple(axis.index(r) for axis in chosen) for r in range(degrees.world_size)}
        assert len(places) == degrees.world_size


@settings(deadline=None, max_examples=50)
@given(layouts())
def test_products_are_what_their_parts_span(degrees):
    axes = axes_of(degrees)
    parts = {"fsdp": ("dp_shard", "cp"), "data": ("dp_replicate", "dp_shard"), "loss": ("dp_replicate", "fsdp")}
    for whole, (outer, inner) in parts.items():
        for rank in range(degrees.world_size):
            spanned = [r for o in axes[outer].ranks(rank) for r in axes[inner].ranks(o)]
            assert sorted(spanned) == list(axes[whole].ranks(rank))


def test_ranks_that_read_the_same_batch_differ_only_in_pp_cp_and_tp():
    axes = axes_of(Degrees(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2))
    for rank in range(32):
        place = (axes["dp_replicate"].index(rank), axes["dp_shard"].index(rank))
        assert axes["data"].index(rank) == place[0] * 2 + place[1]


@pytest.mark.parametrize(
    "names, message",
    [
        (("dp",), r"'dp'.*axes are pp, dp_replicate, dp_shard, cp, tp, efsdp, ep, etp, fsdp, loss, data, world;"),
        ((), "the axes are"),
        (("tp", "cp"), r"tp \(size 2, stride 1\) must lie outside of cp \(size 2, stride 2\)"),
        (("fsdp", "ep"), "choose axes of one view"),
        (("fsdp", "cp"), "must lie outside of cp"),
        (("tp", "tp"), "must lie outside of tp"),
    ],
)
def test_axes_that_make_no_mesh_are_refused(names, message):
    with pytest.raises(PlanError, match=message):
        select(axes_of(Degrees(dp_shard=2, cp=2, tp=2, ep=4)), names)


def test_layouts_need_no_torch():
    code = "import sys, dtensor_5d.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
