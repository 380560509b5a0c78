from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_5d.checkpoint.slices import cut, local_slices, placed_slices, shape_of, whole_slices
from tests.harness import run_ranks

PLACEMENTS = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(-1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=3), Shard(1)),
]
SHAPES = [(8, 12), (7, 6), (3, 5), (1, 2)]


def placements_on(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    wrong = []
    for shape, placements in itertools.product(SHAPES, PLACEMENTS):
        full = torch.arange(math.prod(shape)).reshape(shape)
        tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        if not torch.equal(cut(full, local_slices(tensor)), tensor.to_local()):
            wrong.append((shape, placements, local_slices(tensor), tensor.to_local().tolist()))
    return wrong


def test_slices_are_what_torch_places():
    """T21: the part is chosen by the mesh coordinate. F12: shards with 0 rows."""
    assert run_ranks(4, placements_on) == [[]] * 4


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(
                st.tuples(st.integers(1, 4), st.integers(0, len(shape) - 1), st.sampled_from([0, 2, 3])),
                min_size=1,
                max_size=3,
            ),
        )
    )
)
@settings(deadline=None, max_examples=60)
def test_the_ranks_of_a_mesh_hold_each_element_once(case):
    shape, axes = case
    placements = [_StridedShard(dim, split_factor=sf) if sf else Shard(dim) for _, dim, sf in axes]
    sizes = [n for n, _, _ in axes]
    full = torch.arange(math.prod(shape)).reshape(shape)
    seen = []
    for coordinate in itertools.product(*(range(n) for n in sizes)):
        runs = placed_slices(shape, sizes, coordinate, placements)
        part = cut(full, runs)
        assert tuple(part.shape) == shape_of(runs)
        assert all(a.stop < b.start for dim in runs for a, b in itertools.pairwise(dim)), "runs must not touch"
        seen += part.flatten().tolist()
    assert sorted(seen) == full.flatten().tolist()


@given(st.integers(0, 40), st.integers(1, 4), st.integers(2, 4))
@settings(deadline=None, max_examples=60)
def test_what_fsdp2_shards_after_another_axis_is_named_as_it_is_stored(length, dp, tp):
    """F10. The inner axis cuts first, whatever the lengths; torch reads the placements of 7 on 3 x 2 otherwise."""
    whole = torch.arange(length)
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    for outer, inner in itertools.product(range(dp), range(tp)):
        stored = _part(_part(whole, tp, inner), dp, outer)
        assert torch.equal(cut(whole, placed_slices((length,), (dp, tp), (outer, inner), placements)), stored)


def _part(tensor, n, i):
    parts = tensor.chunk(n) if tensor.numel() else ()
    return parts[i] if i < len(parts) else tensor[:0]


def test_plain_tensors_are_whole_and_partial_ones_have_no_slices():
    assert local_slices(torch.empty(3, 2)) == ((slice(0, 3),), (slice(0, 2),))
    assert whole_slices((0, 2)) == ((), (slice(0, 2),))
    with pytest.raises(ValueError, match="reduce it first"):
        placed_slices((4,), (2,), (0,), (Partial(),))
