from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.checkpoint.slices import cut, shape_of
from dtensor_5d.checkpoint.sources import Computed, Conversion, FileTensor, Joined, Stacked


def on_disk(tensor, log=None):
    def block(key, index):
        part = tensor[index]
        if log is not None:
            log.append(part.numel())
        return part

    return FileTensor("k", tuple(tensor.shape), tensor.dtype, block)


def runs_of(size):
    """Increasing slices of a dim, possibly none."""
    return st.lists(st.integers(0, size), unique=True, max_size=4).map(
        lambda cuts: tuple(slice(a, b) for a, b in zip(sorted(cuts)[::2], sorted(cuts)[1::2]))
    )


@given(runs_of(3), runs_of(10), runs_of(4), st.sampled_from([0, 1]))
@settings(deadline=None, max_examples=80)
def test_any_part_of_fused_experts_is_read_from_its_pieces(experts, rows, columns, join_dim):
    """K9: rows of a joined dim come from the right piece, whatever the cut."""
    gate, up = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    if join_dim == 0:  # the other order of rank-3 joins: experts one after the other
        rows = tuple(r for r in rows if r.stop <= 5)
    log: list[int] = []
    stacks = [Stacked([on_disk(e, log) for e in w], 0) for w in (gate, up)]
    joined, full = Joined(stacks, join_dim), torch.cat([gate, up], dim=join_dim)
    assert joined.shape == tuple(full.shape)
    runs = (experts, rows, columns)
    part = joined.read(runs)
    assert tuple(part.shape) == shape_of(runs)
    assert torch.equal(part, cut(full, runs))
    assert sum(log) == part.numel(), "each element is read once, nothing else is"


def test_pieces_that_do_not_fit_are_told():
    a, b = on_disk(torch.ones(2, 3)), on_disk(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 4\]"):
        Stacked([a, b], 0)
    with pytest.raises(ValueError, match="cannot be joined on 0"):
        Joined([a, b], 0)


def test_a_conversion_runs_once_for_all_its_results():
    calls = []

    def compute():
        calls.append(1)
        return {"a": torch.arange(4), "b": torch.arange(6)}

    conversion = Conversion(compute)
    a = Computed("a", (4,), torch.int64, conversion)
    b = Computed("b", (6,), torch.int64, conversion)
    assert a.read(((slice(1, 3),),)).tolist() == [1, 2]
    assert b.read(((slice(0, 1), slice(4, 6)),)).tolist() == [0, 4, 5]
    assert b.read(((),)).shape == (0,)
    assert calls == [1]
