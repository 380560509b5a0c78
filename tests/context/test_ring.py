"""What travels, what does not, and what must not have any influence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtensor_5d.context import Mask, Scope, attend, attend_keeping
from dtensor_5d.errors import PlanError
from dtensor_5d.order import PADDING, documents_from_ids, documents_from_lengths, make_order
from tests.context.cases import DEFAULTS, cut, document_ids, expected, found_on_ranks, inputs, orders_of, recorded
from tests.harness import fails_on_ranks, run_ranks


def case_of(**changes):
    return {**DEFAULTS, **changes}


def local(case, orders, rank):
    """This rank's q, k, v that want a gradient, and the gradient of its output."""
    q, k, v, grad, _ = inputs(case, orders[0].length)
    return [cut(x, orders, rank).requires_grad_() for x in (q, k, v)], cut(grad, orders, rank)


def traffic(rank, orders, mask, strategy, dtype):
    """(p2p messages of forward, of backward, collectives): (bytes, to whom)."""
    case = case_of(heads=(8, 2), sizes=(16, 12), batch=2, dtype=dtype)
    leaves, grad = local(case, orders, rank)
    scope = Scope(dist.group.WORLD, orders, mask, strategy)
    with recorded() as (sent, called):
        out = attend(*leaves, scope=scope)
        forward = list(sent)
        torch.autograd.grad(out, leaves, grad)
        return forward, sent[len(forward) :], called


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [2, 4])
def test_the_ring_is_used(n, dtype, mask):
    length = 64
    order = make_order("zigzag", length, n)
    found = run_ranks(n, traffic, (order,), mask, "ring", dtype)
    numbers = 2 * (length // n) * 2 * (16 + 12)  # B x S/cp x kv heads x (Dk + Dv): heads are never expanded
    hop = numbers * getattr(torch, dtype).itemsize
    for rank, (forward, backward, called) in enumerate(found):
        onward = (rank + 1) % n
        assert forward == [(hop, onward)] * (n - 1)
        # Keys and values once more; each gradient follows its block, in fp32, and ends at home.
        assert sorted(backward) == sorted([(hop, onward)] * (n - 1) + [(numbers * 4, onward)] * (n - 1))
        assert not called


def test_nothing_is_sent_for_nothing():
    contiguous = (make_order("none", 64, 4),)
    # Contiguous and causal: rank 3's block is seen by nobody else, rank 0's by all.
    found = run_ranks(4, traffic, contiguous, Mask(), "ring", "float32")
    assert sum(len(forward) for forward, _, _ in found) == 3 + 2 + 1
    assert sum(len(backward) for _, backward, _ in found) == 2 * (3 + 2 + 1)
    # A window that reaches into the neighbour only.
    found = run_ranks(4, traffic, contiguous, Mask(window=10), "ring", "float32")
    assert [len(forward) for forward, _, _ in found] == [1, 1, 1, 0]
    # In zig-zag order both neighbours: the block jumps over those that do not see it.
    eight = (make_order("zigzag", 128, 8),)
    found = run_ranks(8, traffic, eight, Mask(window=5), "ring", "float32")
    assert max(len(forward) for forward, _, _ in found) == 2
    # Documents that do not leave their rank, and one that does.
    apart = (make_order("none", 64, 4, documents_from_lengths([16, 10, 6, 32])),)
    found = run_ranks(4, traffic, apart, Mask(), "ring", "float32")
    assert [len(forward) for forward, _, _ in found] == [0, 0, 1, 0]


def test_other_ways_use_their_collective_only():
    order = (make_order("zigzag", 64, 2),)
    for strategy, wanted in (("allgather", ["all_gather_single"] * 2), ("ulysses", ["all_to_all_single"] * 4)):
        for forward, backward, called in run_ranks(2, traffic, order, Mask(), strategy, "float32"):
            assert (forward, backward, called) == ([], [], wanted)


def alone(rank):
    """A group of one rank and no group at all: the same bits, and not one message."""
    order = make_order("zigzag", 38, 1, documents_from_lengths([30, 8]))
    case = case_of(tokens=38)
    results = []
    with recorded() as (sent, called):
        for group in (dist.group.WORLD, None):
            for strategy in ("ring", "allgather", "ulysses", "ring+ulysses"):
                leaves, grad = local(case, (order,), 0)
                out = attend(*leaves, scope=Scope(group, (order,), strategy=strategy))
                results.append([out, *torch.autograd.grad(out, leaves, grad)])
    same = all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0]))
    return same, sent, called


def test_no_communication_on_one_rank():
    assert run_ranks(1, alone) == [(True, [], [])]


def two_groups(rank):
    """Context groups {0, 2} and {1, 3} with different data: ranks of a group are not ranks of the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for strategy in ("ring", "allgather", "ulysses", "ring+ulysses"):
        case = case_of(strategy=strategy, seed=rank % 2, heads=(4, 1))
        ids = document_ids("packed", 40, 1, 4)
        orders = orders_of(case, ids, 2)
        got = found_on_ranks(groups[rank % 2], case, ids, orders, Mask())
        for name, want in expected(case, ids, Mask()).items():
            torch.testing.assert_close(got[name], cut(want, orders, rank // 2))


def test_a_context_group_is_not_the_world():
    run_ranks(4, two_groups)


def bf16_error(rank, n):
    """Largest error of output, dq, dk, dv against fp64."""
    case = case_of(heads=(4, 2), sizes=(32, 32), dtype="bfloat16", tokens=256)
    ids = [[0] * 256]
    orders = orders_of(case, ids, n)
    got = found_on_ranks(dist.group.WORLD, case, ids, orders, Mask())
    want = expected(case, ids, Mask())
    return {name: (got[name].double() - cut(x, orders, rank)).abs().max().item() for name, x in want.items()}


def test_bf16_error_does_not_grow_with_the_ring():
    worst = {}
    for n in (1, 2, 4, 8):
        found = run_ranks(n, bf16_error, n)
        worst[n] = {name: max(f[name] for f in found) for name in found[0]}
    for n in (2, 4, 8):
        for name, error in worst[n].items():
            assert error <= 2 * worst[1][name], (n, name, worst)


def recomputed(rank, strategy):
    """A forward with what an earlier one kept: same bits, same gradients, no ring."""
    case = case_of(heads=(4, 2), sinks=True)
    order = make_order("zigzag", 48, 2)
    leaves, grad = local(case, (order,), rank)
    sinks = inputs(case, 48)[4].requires_grad_()
    scope = Scope(dist.group.WORLD, (order,), strategy=strategy)
    first, kept = attend_keeping(*leaves, scope=scope, sinks=sinks)
    with recorded() as (sent, called):
        second, _ = attend_keeping(*leaves, scope=scope, sinks=sinks, kept=kept)
        assert not sent and called == ["all_to_all_single"] * (2 * (strategy == "ulysses"))
    assert not kept.output.requires_grad and torch.equal(first, second)
    wanted = torch.autograd.grad(first, [*leaves, sinks], grad)
    for a, b in zip(torch.autograd.grad(second, [*leaves, sinks], grad), wanted):
        assert torch.equal(a, b)


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_recomputation_need_not_run_the_ring_again(strategy):
    run_ranks(2, recomputed, strategy)


def poisoned(rank, n, strategy, sides):
    """Padding full of NaN, in inputs and output gradient: results are those of padding full of zeros."""
    ids = [[PADDING] * a + [0] * (16 - a - b) + [PADDING] * b for a, b in sides]
    case = case_of(strategy=strategy, batch=len(ids))
    orders = orders_of(case, ids, n)
    results = []
    for filling in (0.0, float("nan")):
        leaves, grad = local(case, orders, rank)
        padding = cut(torch.tensor(ids)[:, None, :, None] == PADDING, orders, rank)
        leaves = [x.detach().masked_fill(padding, filling).requires_grad_() for x in leaves]
        sinks = inputs(case, 16)[4].requires_grad_()
        out = attend(*leaves, scope=Scope(dist.group.WORLD, orders, strategy=strategy), sinks=sinks)
        got = torch.autograd.grad(out, [*leaves, sinks], grad.masked_fill(padding, filling))
        assert not out[padding.expand_as(out)].any()
        assert all(not g[padding.expand_as(g)].any() for g in got[:3])
        results.append([out, *got])
    assert all(x.isfinite().all() for x in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses", "ring+ulysses"])
def test_padding_is_not_read(strategy):
    run_ranks(2, poisoned, 2, strategy, [(0, 5), (5, 0), (3, 9)])


def influence(rank, n, kind, mask, ids, changed):
    """Global positions whose output depends on the token at `changed`, by bits."""
    case = case_of(kind=kind, dtype="float32")
    orders = orders_of(case, [ids], n)
    outs = []
    for shift in (0.0, 1.0):
        q, k, v, _, _ = inputs(case, len(ids))
        k[:, :, changed] += shift
        v[:, :, changed] += shift
        leaves = [cut(x, orders, rank) for x in (q, k, v)]
        outs.append(attend(*leaves, scope=Scope(dist.group.WORLD, orders, mask)))
    moved = (outs[0] != outs[1]).any(-1).any(1)[0].tolist()
    return [p for p, m in zip(orders[0].positions(rank), moved) if m]


@pytest.mark.parametrize("kind", ["zigzag", "striped", "document", "none"])
def test_what_must_not_have_influence_has_none(kind):
    for mask, ids, changed, moved in (
        (Mask(), [0] * 3 + [1] * 13, 1, [1, 2]),
        (Mask(window=4), [0] * 16, 0, [0, 1, 2, 3]),
        (Mask(chunk=5), [PADDING] * 2 + [0] * 14, 8, [8, 9, 10, 11]),
    ):
        found = run_ranks(2, influence, 2, kind, mask, ids, changed)
        assert sorted(p for positions in found for p in positions) == moved


def smallest(rank, n):
    """One token on each rank; one document of one token; no rows at all."""
    for strategy in ("ring", "allgather", "ulysses", "ring+ulysses"):
        for ids in ([0] * n, list(range(n)), [0] + [PADDING] * (n - 1), [PADDING] * n):
            case = case_of(kind="none", strategy=strategy, heads=(4, 2), sinks=True)
            orders = orders_of(case, [ids], n)
            got = found_on_ranks(dist.group.WORLD, case, [ids], orders, Mask())
            got.pop("dsinks")
            for name, x in got.items():
                torch.testing.assert_close(x, cut(expected(case, [ids], Mask())[name], orders, rank))
        empty = [torch.zeros(0, h, 1, 8, requires_grad=True) for h in (4, 2, 2)]
        out = attend(*empty, scope=Scope(dist.group.WORLD, (make_order("none", n, n),), strategy=strategy))
        assert out.shape == (0, 4, 1, 8)
        assert [g.shape for g in torch.autograd.grad(out.sum(), empty)] == [x.shape for x in empty]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_smallest_inputs(n):
    run_ranks(n, smallest, n)


def wrong_scope(rank, options):
    order = make_order("zigzag", 24, options.pop("ranks", 2))
    Scope(dist.group.WORLD, (order,), **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ranks": 4}, r"orders for \[4\] ranks in a context group of 2"),
        ({"strategy": "star"}, "context='star'"),
        ({"strategy": "ring+ulysses", "ulysses": 4}, r"ulysses=4 with cp=2: must divide cp: \[1, 2\]"),
        ({"ulysses": 2}, "ulysses=2 with context='ring'"),
    ],
)
def test_scopes_that_do_not_fit(options, match):
    fails_on_ranks(2, wrong_scope, options, error=PlanError, match=match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"q": (1, 4, 11, 8)}, "11 tokens on this rank: the order of the scope has 12"),
        ({"k": (1, 3, 12, 8), "v": (1, 3, 12, 8)}, "4 query heads with 3 kv heads"),
        ({"v": (1, 2, 9, 8)}, "must agree in rows and tokens"),
        ({"q": (4, 12, 8)}, r"must be \[B, heads, tokens, head size\]"),
        ({"sinks": torch.zeros(3)}, r"must be \[4\], one per head"),
        ({"dropout": 0.1}, "attention dropout 0.1"),
        ({"back_end": "cuda_flash"}, "back ends that can take this"),
        ({"rows": 3}, "1 rows with 3 orders"),
    ],
)
def test_calls_that_do_not_fit(changes, match):
    shapes = {"q": (1, 4, 12, 8), "k": (1, 2, 12, 8), "v": (1, 2, 12, 8)}
    q, k, v = (torch.zeros(changes.pop(name, shape)) for name, shape in shapes.items())
    orders = (make_order("none", 12, 1),) * changes.pop("rows", 1)
    scope = Scope(None, orders, back_end=changes.pop("back_end", None))
    with pytest.raises(PlanError, match=match):
        attend(q, k, v, scope=scope, **changes)


def too_many_ranks(rank):
    order = make_order("none", 12, 4)
    q, k = torch.zeros(1, 6, 3, 8), torch.zeros(1, 2, 3, 8)
    attend(q, k, k, scope=Scope(dist.group.WORLD, (order,), strategy="ulysses"))


def test_heads_that_ulysses_cannot_share():
    fails_on_ranks(4, too_many_ranks, error=PlanError, match=r"Ulysses over 4 ranks with 6 query heads.*\[1, 2, 3, 6\]")


def half_documents(rank):
    """Documents of odd lengths, 4 + 3 of 8 tokens: the last real token counts (C3)."""
    ids = [0] * 4 + [1] * 3 + [PADDING]
    for kind in ("zigzag", "document"):
        case = case_of(kind=kind, dtype="float32", sizes=(4, 4))
        orders = (make_order(kind, 8, 2, documents_from_ids(ids)),)
        got = found_on_ranks(dist.group.WORLD, case, [ids], orders, Mask())
        for name, want in expected(case, [ids], Mask()).items():
            torch.testing.assert_close(got[name].double(), cut(want, orders, rank), atol=1e-5, rtol=1e-5)


def test_odd_documents_and_small_heads():
    run_ranks(2, half_documents)
