"""Every collective against the same thing done in one process: forward, and backward by autograd's own chain rule."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from dtensor_5d import ops
from tests.harness import run_ranks

UNEVEN = {2: (3, 0), 3: (2, 0, 5), 4: (1, 4, 0, 3)}
PAIRS = [
    "identity_all_reduce", "all_reduce_identity", "all_gather_reduce_scatter", "reduce_scatter_all_gather",
    "split_all_gather", "all_gather_split",
]  # fmt: skip


def _data(n, dim, sizes, dtype):
    """Per rank: a part along dim, a whole, and an output gradient for each."""
    gen = torch.Generator().manual_seed(1)

    def draw(length):
        shape = [3, 2, 4]
        shape[dim] = length
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    return ([draw(s) for s in sizes], [draw(sum(sizes)) for _ in range(n)],
            [draw(s) for s in sizes], [draw(sum(sizes)) for _ in range(n)])  # fmt: skip


def _reference(name, n, dim, sizes, dtype):
    """(x, y, g, dx) by rank: one graph over all ranks' inputs in one process."""
    parts, wholes, part_grads, whole_grads = _data(n, dim, sizes, dtype)
    same_x, same_y = [wholes[0]] * n, [whole_grads[0]] * n
    ways = {  # the ranks' inputs, what each computes, and the gradients of the outputs
        "identity_all_reduce": (same_x, lambda x: list(x), whole_grads),
        "all_reduce_identity": (wholes, lambda x: [sum(x)] * n, same_y),
        "all_gather_reduce_scatter": (parts, lambda x: [torch.cat(x, dim)] * n, whole_grads),
        "reduce_scatter_all_gather": (wholes, lambda x: list(sum(x).split(sizes, dim)), part_grads),
        "split_all_gather": (same_x, lambda x: [t.split(sizes, dim)[r] for r, t in enumerate(x)], part_grads),
        "all_gather_split": (parts, lambda x: [torch.cat(x, dim)] * n, same_y),
    }
    values, way, grads = ways[name]
    if values is same_x:  # one variable that every rank reads
        leaf = wholes[0].clone().requires_grad_()
        leaves, xs = [leaf], [leaf] * n
    else:
        xs = leaves = [v.clone().requires_grad_() for v in values]
    ys = way(xs)
    if grads is same_y:  # one result that every rank reads: its gradient counts once
        dx = torch.autograd.grad(ys[0], leaves, grads[0])
    else:
        dx = torch.autograd.grad(ys, leaves, grads)
    return values, [y.detach() for y in ys], grads, list(dx) * (n if len(dx) == 1 else 1)


def _compare(rank, n, dtype):
    group = dist.group.WORLD
    tol = {torch.float64: 1e-13, torch.bfloat16: 3e-2}[dtype]
    for name, dim, sizes in itertools.product(PAIRS, (0, 1, -1), (None, UNEVEN[n])):
        lengths = (2,) * n if sizes is None else sizes
        x, y, g, dx = (t[rank] for t in _reference(name, n, dim, lengths, dtype))
        for layout in (lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)):
            leaf = layout(x.clone()).requires_grad_()
            before, extra = leaf.detach().clone(), () if name in PAIRS[:2] else (dim, sizes)
            out = getattr(ops, name)(leaf, group, *extra)
            grad = layout(g.clone())
            out.backward(grad)
            case = f"{name} dim {dim} sizes {sizes}"
            torch.testing.assert_close(out, y, rtol=tol, atol=tol, msg=case)
            torch.testing.assert_close(leaf.grad, dx, rtol=tol, atol=tol, msg=case)
            assert torch.equal(grad, g) and torch.equal(leaf, before), f"{case} wrote to its input"
            if name != "identity_all_reduce":
                assert out.is_contiguous() and (not out.numel() or out.data_ptr() != leaf.data_ptr()), case


@pytest.mark.parametrize("n, dtype", [(2, torch.float64), (3, torch.float64), (4, torch.float64), (4, torch.bfloat16)])
def test_every_pair_equals_one_process(n, dtype):
    run_ranks(n, _compare, n, dtype)


def _exchange(rank, n):
    group, gen = dist.group.WORLD, torch.Generator().manual_seed(2)
    table = torch.randint(0, 4, (n, n), generator=gen)
    table[1] = 0  # a rank that sends nothing
    table[:, 0] = 0  # and one that receives nothing
    rows = [torch.randn(int(table[r].sum()), 3, generator=gen, dtype=torch.float64) for r in range(n)]
    blocks = [t.split(table[r].tolist()) for r, t in enumerate(rows)]
    grads = [torch.randn(int(table[:, r].sum()), 3, generator=gen, dtype=torch.float64) for r in range(n)]
    back = [t.split(table[:, r].tolist()) for r, t in enumerate(grads)]
    x = rows[rank].clone().requires_grad_()
    y = ops.all_to_all(x, group, table[rank].tolist(), table[:, rank].tolist())
    assert torch.equal(y, torch.cat([blocks[s][rank] for s in range(n)]))
    y.backward(grads[rank])
    assert torch.equal(x.grad, torch.cat([back[r][rank] for r in range(n)]))
    nothing = torch.zeros(0, 3, requires_grad=True)
    ops.all_to_all(nothing, group, [0] * n, [0] * n).sum().backward()
    assert nothing.grad.shape == (0, 3)


@pytest.mark.parametrize("n", [2, 4])
def test_all_to_all_equals_one_process(n):
    run_ranks(n, _exchange, n)


def _gradcheck(rank):
    """Numerical derivatives through the collective, of a loss that all ranks share."""
    group, n = dist.group.WORLD, dist.get_world_size()
    sizes = UNEVEN[n]
    weight = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def loss(x):
        whole = ops.all_gather_reduce_scatter(x, group, 0, sizes)  # [7, 3]
        part = ops.reduce_scatter_all_gather((whole @ weight.t()).sin(), group, 0, sizes)
        return ops.all_reduce_identity(part.square().sum(), group)

    gen = torch.Generator().manual_seed(9)
    parts = [torch.randn(s, 3, dtype=torch.float64, generator=gen) for s in sizes]
    x = parts[rank].clone().requires_grad_()
    loss(x).backward()
    for r, row, column in ((0, 1, 2), (2, 4, 0), (2, 0, 1)):  # ranks disturb one element in turn
        values = []
        for eps in (1e-6, -1e-6):
            y = parts[rank].clone()
            if r == rank:
                y[row, column] += eps
            values.append(loss(y).item())
        if r == rank:
            assert abs((values[0] - values[1]) / 2e-6 - x.grad[row, column].item()) < 1e-7


def test_gradcheck_over_three_ranks():
    run_ranks(3, _gradcheck)


def _alone_and_wrong(rank):
    alone = [dist.new_group([r]) for r in range(2)][rank]
    x = torch.randn(3, 2, requires_grad=True)
    for name in PAIRS:
        extra = () if name in PAIRS[:2] else (0, None)
        assert getattr(ops, name)(x, alone, *extra) is x
    assert ops.all_to_all(x, alone, [3], [3]) is x
    group, said = dist.group.WORLD, []
    for call in (
        lambda: ops.all_gather_split(x, group, 0, (3, 4) if rank else (4, 3)),
        lambda: ops.split_all_gather(x, group, 0),
        lambda: ops.reduce_scatter_all_gather(x, group, 0, (1, 1)),
        lambda: ops.split_all_gather(x, group, 0, (4, -1)),
        lambda: ops.all_gather_split(x, group, 2),
        lambda: ops.all_to_all(x, group, [1, 1], [1, 1]),
        lambda: ops.all_to_all(x, alone, [3], [2]),
    ):
        try:
            call()
        except ValueError as e:
            said.append(str(e))
    return said


def test_groups_of_one_are_free_and_disagreements_are_told_before_the_collective():
    for said in run_ranks(2, _alone_and_wrong):
        assert len(said) == 7
        assert "holds 3 along dim 0" in said[0] and "length 3 in 2 equal parts" in said[1]
        assert "together 2" in said[2] and "3 rows" in said[5]


def test_a_collective_on_the_way_keeps_a_weight_from_waiting():
    run_ranks(2, _weight_through_a_collective)


def _weight_through_a_collective(rank):
    group, store = dist.group.WORLD, ops.WeightGradients()
    w = torch.nn.Parameter(torch.ones(2, 3))
    y = ops.linear(torch.full((1, 3), float(rank + 1)), ops.identity_all_reduce(w, group), None, store)
    with store.deferring(0):
        y.sum().backward()
    assert store.run(0) == 0 and torch.equal(w.grad, torch.full((2, 3), 3.0))
