"""Tiles say exactly what a mask written out token by token says, for any order, documents, window and chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.context.mask import Mask, held, sees, share_of, tiles_between
from dtensor_5d.context.plan import plan_tiles
from dtensor_5d.context.reference import visible
from dtensor_5d.errors import PlanError
from dtensor_5d.order import (
    KINDS,
    PADDING,
    Document,
    Order,
    documents_from_ids,
    documents_from_lengths,
    length_multiple,
    make_order,
)

MASKS = st.one_of(
    st.builds(Mask, st.booleans()),
    st.builds(Mask, st.just(True), st.integers(1, 30)),
    st.builds(Mask, st.booleans(), st.none(), st.integers(1, 30)),
    st.builds(Mask, st.just(True), st.integers(1, 30), st.integers(1, 30)),
)


@st.composite
def rows(draw):
    """(order, document ids): a row of any documents and padding."""
    kind, ranks = draw(st.sampled_from(KINDS)), draw(st.sampled_from([1, 2, 3, 4, 6]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    ids = [d if draw(st.booleans()) or d == 0 else PADDING for d in range(len(lengths))]
    row = [name for name, n in zip(ids, lengths) for _ in range(n)]
    row += [PADDING] * (-len(row) % length_multiple(kind, ranks))
    return make_order(kind, len(row), ranks, documents_from_ids(row)), row


def written_out(tiles, queries, keys):
    """How often each (query, key) pair occurs in the tiles; every row of a tile sees something."""
    counts = torch.zeros(queries, keys, dtype=torch.int)
    for tile in tiles:
        height, width = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
        seen = torch.ones(height, width, dtype=torch.bool)
        if tile.band.low is not None:
            seen &= torch.arange(width) >= torch.arange(height)[:, None] + tile.band.low
        if tile.band.high is not None:
            seen &= torch.arange(width) <= torch.arange(height)[:, None] + tile.band.high
        assert height and width and seen.any(1).all(), tile
        assert height == width or not tile.band.is_causal, tile
        counts[tile.q, tile.k] += seen
    return counts


@settings(deadline=None, max_examples=300)
@given(rows(), MASKS, st.data())
def test_tiles_are_the_mask(row, mask, data):
    order, ids = row
    team = data.draw(st.sampled_from([n for n in range(1, order.ranks + 1) if order.ranks % n == 0]))
    blocks = order.ranks // team
    stride = data.draw(st.booleans())
    teams = [range(b, order.ranks, blocks) if stride else range(b * team, (b + 1) * team) for b in range(blocks)]
    shares = [share_of(order, ranks, mask.chunk) for ranks in teams]
    places = [[p for piece in held(order, ranks) for p in piece] for ranks in teams]
    whole = visible(ids, mask)
    me = data.draw(st.integers(0, blocks - 1))
    plan = plan_tiles([order], teams, me, mask, 1)
    for other in range(blocks):
        assert places[other] == sorted(p for r in teams[other] for p in order.positions(r))
        want = whole[places[me]][:, places[other]]
        assert torch.equal(written_out(plan.tiles[other], len(places[me]), len(places[other])), want.int())
        assert sees(shares[me], shares[other], mask) == want.any()
        users = [s for s in range(1, blocks) if whole[places[(other + s) % blocks]][:, places[other]].any()]
        ends = (plan.first[other], plan.last[other])
        assert tuple(plan.offsets[t] for t in ends) == ((users[0], users[-1]) if users else (0, 0))
        assert set(users) <= set(plan.offsets)


def test_any_permutation_is_masked_right():
    # No kind of ours: pieces of unlike steps, which still ascend on each rank.
    pieces = ((range(0, 9, 2), range(9, 12)), (range(1, 4, 2), range(5, 6), range(7, 8), range(12, 16)))
    order = Order("none", 16, 2, pieces, documents_from_lengths([13, 3]))
    ids = [0] * 13 + [1] * 3
    for mask in (Mask(), Mask(window=3), Mask(False), Mask(chunk=4)):
        for me in range(2):
            plan = plan_tiles([order], [[0], [1]], me, mask, 1)
            for other in range(2):
                mine, theirs = list(order.positions(me)), list(order.positions(other))
                want = visible(ids, mask)[mine][:, theirs].int()
                assert torch.equal(written_out(plan.tiles[other], len(mine), len(theirs)), want)


def test_few_large_tiles():
    # The whole speed of the ring rests on this: one call per block, and half a block where half is hidden.
    for ranks in (2, 4, 8):
        for me in range(ranks):
            plan = plan_tiles([make_order("zigzag", 64 * ranks, ranks)], [[r] for r in range(ranks)], me, Mask(), 1)
            shapes = [[(t.q.stop - t.q.start, t.k.stop - t.k.start) for t in tiles] for tiles in plan.tiles]
            assert shapes == [[(64, 32)]] * me + [[(64, 64)]] + [[(32, 64)]] * (ranks - me - 1)


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_causal_work_is_even(kind):
    for ranks in (2, 4, 8):
        order = make_order(kind, 32 * ranks, ranks)
        work = [_pairs(order, r) for r in range(ranks)]
        assert tuple(work) == order.pairs()
        assert max(work) - min(work) <= 32 * 32  # one block


def test_packed_work_is_even():
    for ranks in (2, 4):
        lengths = [7, 40, 3, 64, 1, 61, 80]
        lengths.append(-sum(lengths) % ranks or ranks)
        order = make_order("document", sum(lengths), ranks, documents_from_lengths(lengths))
        work = [_pairs(order, r) for r in range(ranks)]
        assert tuple(work) == order.pairs()
        assert max(work) - min(work) <= 2 * ranks


def _pairs(order, rank):
    """Pairs that the tiles of a rank compute: what the kernels really do."""
    plan = plan_tiles([order], [[r] for r in range(order.ranks)], rank, Mask(), 1)
    return sum(int(written_out(tiles, order.local_length, order.local_length).sum()) for tiles in plan.tiles)


def test_rows_that_are_alike_go_together():
    one, two = make_order("zigzag", 8, 2), make_order("zigzag", 8, 2, (Document(0, 5, 0), Document(5, 8, PADDING)))
    shares = [share_of(order, [0]) for order in (one, one, two, one)]
    rows = {(t.rows.start, t.rows.stop) for t in tiles_between(shares, shares, Mask(), 4)}
    assert rows == {(0, 2), (2, 3), (3, 4)}
    assert {(t.rows.start, t.rows.stop) for t in tiles_between(shares[:1], shares[:1], Mask(), 4)} == {(0, 4)}


def test_a_million_tokens_on_64_ranks_are_planned_quickly():
    order = make_order("zigzag", 1 << 20, 64)
    members = [[r] for r in range(64)]
    for mask in (Mask(), Mask(window=4096), Mask(chunk=8192)):
        plan = plan_tiles([order], members, 5, mask, 1)
        assert sum(map(len, plan.tiles)) < 200
    assert plan_tiles([order], members, 5, Mask(window=4096), 1).offsets == (0, 1, 63)


@pytest.mark.parametrize("bad", [{"window": 0}, {"chunk": -1}, {"window": 4, "causal": False}])
def test_masks_that_make_no_sense(bad):
    with pytest.raises(PlanError, match=next(iter(bad))):
        Mask(**bad)
