"""The sequence order: every kind is a permutation, cuts come back, and the causal work is shared evenly."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.errors import PlanError
from dtensor_5d.options import _CHOICES
from dtensor_5d.order import (
    KINDS,
    PADDING,
    Document,
    documents_from_ids,
    documents_from_lengths,
    length_multiple,
    make_order,
)

quick = settings(deadline=None, max_examples=60)


@st.composite
def rows(draw, kinds=KINDS):
    """(kind, ranks, document ids): a row of any documents and padding, padded to the multiple of its kind."""
    kind, ranks = draw(st.sampled_from(kinds)), draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=7))
    ids = [d if draw(st.booleans()) or d == 0 else PADDING for d in range(len(lengths))]
    row = [name for name, n in zip(ids, lengths) for _ in range(n)]
    row += [PADDING] * (-len(row) % length_multiple(kind, ranks))
    return kind, ranks, row


def order_of(kind, ranks, ids):
    return make_order(kind, len(ids), ranks, documents_from_ids(ids))


def pairs_by_mask(order, ids, window):
    """The slow, obvious count: for every query of a rank, look at every key of the row."""
    reach = window or len(ids)
    return tuple(
        sum(ids[q] == ids[k] != PADDING and q - reach < k <= q for q in order.positions(r) for k in range(len(ids)))
        for r in range(order.ranks)
    )


def test_the_kinds_are_the_values_of_the_option_balance():
    assert set(KINDS) == set(_CHOICES["balance"])


def test_zigzag_of_16_on_2_ranks_as_users_expect_it():
    """Field fault C1."""
    order = make_order("zigzag", 16, 2)
    assert [list(order.positions(r)) for r in range(2)] == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    row = [f"t{i}" for i in range(16)]
    assert order.join([order.cut(row, r) for r in range(2)]) == row


@pytest.mark.parametrize(
    "kind, held",
    [
        ("none", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("document", [[0, 3, 4, 7], [1, 2, 5, 6]]),
    ],
)
def test_8_tokens_in_two_documents_of_4_on_2_ranks(kind, held):
    order = make_order(kind, 8, 2, documents_from_lengths([4, 4]))
    assert [list(order.positions(r)) for r in range(2)] == held
    assert order.document_ids(1) == [p // 4 for p in held[1]]


@quick
@given(rows())
def test_an_order_is_a_permutation_and_its_inverse_puts_back(row):
    kind, ranks, ids = row
    order = order_of(kind, ranks, ids)
    permutation, inverse = order.permutation(), order.inverse()
    assert sorted(permutation) == list(range(len(ids)))
    assert [permutation[i] for i in inverse] == list(range(len(ids)))
    held = [list(order.positions(r)) for r in range(ranks)]
    assert [p for h in held for p in h] == permutation
    assert all(len(h) == order.local_length for h in held)
    assert all(h == sorted(h) for h in held), "a rank holds its tokens in ascending order"
    assert order.join([order.cut(ids, r) for r in range(ranks)]) == ids


@quick
@given(rows())
def test_document_ids_are_cut_like_any_row(row):
    kind, ranks, ids = row
    order = order_of(kind, ranks, ids)
    assert [order.document_ids(r) for r in range(ranks)] == [order.cut(ids, r) for r in range(ranks)]


@quick
@given(rows(), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_equal_a_count_over_the_mask(row, window):
    """Padding inside may make several runs of -1; a query never reaches across a run that is not its own."""
    kind, ranks, ids = row
    order = order_of(kind, ranks, ids)
    assert order.pairs(window) == pairs_by_mask(order, ids, window)


@quick
@given(st.integers(1, 16), st.integers(1, 32))
def test_zigzag_is_exactly_even_and_striped_within_one_row(ranks, blocks):
    length = 2 * ranks * blocks
    zigzag, striped = (make_order(kind, length, ranks).pairs() for kind in ("zigzag", "striped"))
    assert len(set(zigzag)) == 1
    assert max(striped) - min(striped) < length
    assert sum(zigzag) == sum(striped) == length * (length + 1) // 2


@quick
@given(rows(kinds=("document",)))
def test_packed_rows_are_even_within_two_pairs_per_rank_however_uneven_the_documents(row):
    kind, ranks, ids = row
    pairs = order_of(kind, ranks, ids).pairs()
    assert max(pairs) - min(pairs) < 2 * ranks


def test_a_packed_row_is_uneven_in_zigzag_and_even_by_document():
    documents = documents_from_lengths([4096 * 7, 1000, 3000, 96])
    zigzag, document = (make_order(k, 32768, 8, documents).pairs() for k in ("zigzag", "document"))
    assert max(zigzag) > 1.1 * min(zigzag)
    assert max(document) - min(document) < 16


@pytest.mark.parametrize(
    "kind, length, ranks, padded",
    [
        ("zigzag", 10, 3, 12),
        ("zigzag", 2, 3, 6),
        ("none", 10, 3, 12),
        ("striped", 2, 3, 3),
        ("document", 13, 4, 16),
        ("zigzag", 8423, 8, 8432),
        ("none", 0, 2, 2),
    ],
)
def test_other_lengths_are_refused_with_both_numbers_and_the_way_out(kind, length, ranks, padded):
    """Field fault C5."""
    with pytest.raises(PlanError, match=f"{length} tokens.*on {ranks} ranks.*= {length_multiple(kind, ranks)};.*"
                                        f"pad to {padded} "):  # fmt: skip
        make_order(kind, length, ranks)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make_order("zig-zag", 8, 2), "orders are none, zigzag, striped, document"),
        (lambda: make_order("none", 8, 0), "at least 1 rank"),
        (lambda: make_order("none", 8, 2, documents_from_lengths([4, 3])), r"0 to 7 of a row of 8.*Document\(7, 8"),
        (lambda: make_order("none", 8, 2, documents_from_lengths([4, 5])), "0 to 9 of a row of 8.*shorten"),
        (lambda: make_order("none", 8, 2, [Document(0, 4, 0), Document(5, 8, 1)]), "0 to 4 of a row of 8"),
        (lambda: documents_from_ids([3, 4, 3]), "id 3 at token 2, which already ended at token 1"),
        (lambda: documents_from_lengths([3, 0]), "each must be >= 1"),
        (lambda: make_order("none", 8, 2).pairs(window=0), "at least 1 token"),
        (lambda: make_order("none", 8, 2).cut([1, 2, 3], 0), "a row of 3: this order needs 8"),
        (lambda: make_order("none", 8, 2).join([[1] * 4, [2] * 3]), "of 7: this order needs 8"),
    ],
)
def test_other_mistakes_are_refused(call, message):
    with pytest.raises(PlanError, match=message):
        call()


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_tokens_are_a_few_ranges(kind):
    start = time.process_time()
    order = make_order(kind, 2**20, 64, documents_from_lengths([2**18 + 7, 2**19, 2**18 - 7]))
    pairs = order.pairs()
    assert time.process_time() - start < 0.1
    assert sum(len(p) for p in order.pieces) <= 64 * 2 * 3 + 2 * 127
    assert sum(pairs) == sum(d.length * (d.length + 1) // 2 for d in order.documents)


def test_order_needs_no_torch():
    code = "import sys, dtensor_5d.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
