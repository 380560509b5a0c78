"""Every way and every transport against the plain reference: all awkward routings, in fp64, with poisoned memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.expert.dispatch import combine, dispatch
from dtensor_5d.expert.route import by_expert, capacity_of, find_route
from dtensor_5d.expert.style import _two_steps
from dtensor_5d.expert.transport import TRANSPORTS, Auto, Buffers
from dtensor_5d.expert.variants import AllGatherDispatch, AllToAllDispatch, TwoStepDispatch
from tests.expert.routing import EXPERTS, KINDS, MODEL, Layer, poisoned, routing
from tests.harness import fails_on_ranks, run_ranks


def _ways(ranks):
    group = dist.group.WORLD
    ways = {name: AllToAllDispatch(group, EXPERTS, transport) for name, transport in TRANSPORTS.items()}
    ways["all_gather"] = AllGatherDispatch(group, EXPERTS)
    lanes = ranks // 2
    ways["two_step"] = TwoStepDispatch(group, *_two_steps(group, lanes), EXPERTS, TRANSPORTS["direct"])
    return ways


def _all_routings(rank, ranks):
    ways = _ways(ranks)
    for seed, kind in enumerate(KINDS):
        layer = Layer(routing(kind, ranks, seed))
        for name, way in ways.items():
            for turn in range(2):  # the second time in memory that the first has used
                try:
                    with poisoned():
                        layer.check(rank, ranks, way, 1e-12)
                except Exception as error:
                    raise AssertionError(f"{name}, {kind}, turn {turn}: {error!r}") from error


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_equals_the_reference_for_every_routing(ranks):
    run_ranks(ranks, _all_routings, ranks)


def test_one_rank_alone():
    for kind in KINDS:
        layer = Layer(routing(kind, 1))

        def way(hidden, index, weights, compute):
            route = find_route(index, weights, EXPERTS, None)
            rows = dispatch(hidden, route, Auto(), Buffers())
            return combine(compute(rows, route.ends), weights, route, Auto(), Buffers())

        layer.check(0, 1, way, 1e-12)


def _dtypes(rank):
    for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 0.3)):
        for name, way in _ways(2).items():
            layer = Layer(routing("top3", 2), dtype)
            try:
                layer.check(rank, 2, way, tol)
                # Routers that answer in fp32: weighted in fp32, handed back in the dtype of the rows.
                layer.weights = [w.float() for w in layer.weights]
                out = layer.ours(rank, 2, way)[0]
                assert (out[0].dtype, out[2].dtype) == (dtype, torch.float32), [t.dtype for t in out]
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}: {error}") from error


def test_other_dtypes():
    run_ranks(2, _dtypes)


def _random_routings(rank, count):
    ways = _ways(4)
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        k = int(torch.randint(1, EXPERTS + 1, (), generator=g))
        sizes = torch.randint(0, 30, (4,), generator=g).tolist()
        skew = torch.randn(EXPERTS, generator=g) * 3
        index = [(skew + torch.randn(n, EXPERTS, generator=g)).topk(k).indices for n in sizes]
        for way in ways.values():
            Layer(index, seed=seed).check(rank, 4, way, 1e-11)


@pytest.mark.slow
def test_many_random_routings():
    run_ranks(4, _random_routings, 60, timeout=300)


def _capacity(rank, ranks, factor):
    group = dist.group.WORLD
    index = routing("top3", ranks, seed=5)
    flat = torch.cat(index).flatten()
    most = capacity_of(flat.numel(), EXPERTS, factor)
    keeps = torch.ones(flat.numel())
    for e in range(EXPERTS):  # the same rule where all tokens are in one process: first come, first served
        keeps[(flat == e).nonzero().flatten()[most:]] = 0
    keeps = keeps.view(-1, 3)
    assert 0 < keeps.sum() < keeps.numel()
    for way in (
        AllToAllDispatch(group, EXPERTS, TRANSPORTS["direct"], capacity=factor),
        AllToAllDispatch(group, EXPERTS, TRANSPORTS["all_to_all"], capacity=factor),
        AllGatherDispatch(group, EXPERTS, capacity=factor),
    ):
        with poisoned():
            Layer(index).check(rank, ranks, way, 1e-12, keeps.double())


@pytest.mark.parametrize("factor", [0.3, 1.0])
def test_capacity_drops_what_one_process_would_drop(factor):
    run_ranks(4, _capacity, 4, factor)


def _bad(rank, ranks, what, way):
    index, layer = routing("top2", ranks), None
    layer = Layer(index)
    if rank == 1 and what == "index":
        layer.index[rank][2, 1] = EXPERTS + 1
    if rank == 1 and what == "negative":
        layer.index[rank][2, 1] = -1
    if rank == 1 and what == "weight":
        layer.weights[rank][0, 0] = float("nan")
    layer.ours(rank, ranks, _ways(ranks)[way])


@pytest.mark.parametrize("way", ["direct", "all_gather", "two_step"])
@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("index", r"rank 1 has the router index 9, must be 0 to 7 \(8 experts\)"),
        ("negative", "rank 1 has the router index -1, must be 0 to 7"),
        ("weight", "rank 1 has 1 routing weights that are not finite"),
    ],
)
def test_bad_routing_is_an_error_on_every_rank(way, what, match):
    fails_on_ranks(4, _bad, 4, what, way, error=ValueError, match=match)


def _bytes(rank, ranks):
    """What each call moves to other ranks, counted where it leaves this process."""
    group = dist.group.WORLD
    layer = Layer(routing("top2", ranks, seed=3))
    real_all, real_batch = dist.all_to_all_single, dist.batch_isend_irecv
    moved: list[tuple[int, int]] = []  # (peer in the world, bytes)

    def count_all(out, rows, sizes_out, sizes_in, group, async_op):
        peers = dist.get_process_group_ranks(group)
        moved.extend((p, n * rows[0].numel() * rows.element_size()) for p, n in zip(peers, sizes_in) if n and p != rank)
        return real_all(out, rows, sizes_out, sizes_in, group=group, async_op=async_op)

    def count_batch(ops):
        moved.extend((o.peer, o.tensor.numel() * o.tensor.element_size()) for o in ops if o.op is dist.isend)
        return real_batch(ops)

    dist.all_to_all_single, dist.batch_isend_irecv = count_all, count_batch
    try:
        row = MODEL * 8
        route = find_route(layer.index[rank], layer.weights[rank], EXPERTS, group)
        there = sum(sum(r) for peer, r in enumerate(route.sent) if peer != rank)
        here = sum(sum(r) for peer, r in enumerate(route.received) if peer != rank)
        owner = layer.index[rank] // (EXPERTS // ranks)
        assert route.rows_sent == there == (owner != rank).sum()
        for name in ("all_to_all", "direct"):
            moved.clear()
            layer.ours(rank, ranks, AllToAllDispatch(group, EXPERTS, TRANSPORTS[name]))
            # dispatch and the transpose of combine send what we have, the other two what we got
            assert sum(n for _, n in moved) == 2 * (there + here) * row, name
        lanes = ranks // 2
        across, inside = _two_steps(group, lanes)
        for name in ("all_to_all", "direct"):
            moved.clear()
            layer.ours(rank, ranks, TwoStepDispatch(group, across, inside, EXPERTS, TRANSPORTS[name]))
            crossed = sum(n for peer, n in moved if peer // lanes != rank // lanes)
            elsewhere = [(i // (EXPERTS // 2) != r // lanes).any(1).sum().item() for r, i in enumerate(layer.index)]
            twin = (rank + lanes) % ranks
            assert elsewhere[rank] < (owner // lanes != rank // lanes).sum(), "no token chooses a node twice"
            rows = 2 * (elsewhere[rank] + elsewhere[twin])
            # besides: the weights there, their gradients back, the choices there
            besides = (elsewhere[rank] * 2 + elsewhere[twin]) * 2 * 8
            assert crossed == rows * row + besides, name
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = real_all, real_batch


def test_bytes_sent_equal_the_closed_form():
    run_ranks(4, _bytes, 4)


def test_auto_chooses_by_the_mean_block():
    index = torch.zeros(100, 1, dtype=torch.long)
    route = find_route(index, torch.ones(100, 1), 4, None)
    rows = torch.empty(1, 10)  # 100 rows of 40 bytes for 4 experts: 1000 bytes a block
    assert Auto(1000).choice(route, rows) is not Auto(1001).choice(route, rows)
    assert type(Auto(1000).choice(route, rows)).__name__ == "Direct"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_are_laid_out_by_expert_then_sender(received):
    lies = [(e, r, i) for r, row in enumerate(received) for e, n in enumerate(row) for i in range(n)]
    assert [lies[at] for at in by_expert(received).tolist()] == sorted(lies)


def _at_once(rank, transport):
    """A dispatch inside another one, and both again: neither writes into the memory that the other travels in."""
    group, buffers = dist.group.WORLD, Buffers()
    layers = [Layer(routing(kind, 2, seed)) for seed, kind in enumerate(("top3", "top2", "top1"))]
    routes = [find_route(layer.index[rank], layer.weights[rank], EXPERTS, group) for layer in layers]
    want = [dispatch(layer.hidden[rank], route, transport, Buffers()) for layer, route in zip(layers, routes)]
    for _ in range(2):
        got = {}

        def send(at, got=got):
            inner = (lambda: send(at + 1)) if at < 2 else None
            got[at] = dispatch(layers[at].hidden[rank], routes[at], transport, buffers, inner)

        with poisoned():
            send(0)
        for at, rows in enumerate(want):
            torch.testing.assert_close(got[at], rows, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("transport", ["all_to_all", "direct"])
def test_rows_on_their_way_keep_their_memory(transport):
    run_ranks(2, _at_once, TRANSPORTS[transport])


def test_frozen_parts_get_no_gradient_and_the_rest_does():
    layer = Layer(routing("top2", 1))
    route = find_route(layer.index[0], layer.weights[0], EXPERTS, None)
    hidden, weights = layer.hidden[0], layer.weights[0].requires_grad_()
    rows = dispatch(hidden, route, Auto(), Buffers())
    assert not rows.requires_grad
    out = combine(rows, weights, route, Auto(), Buffers())
    out.sum().backward()
    torch.testing.assert_close(weights.grad, hidden.sum(1, keepdim=True).expand_as(weights))
