"""Weight gradients that wait, under FSDP2 that reshards between F, I and W, and with tensor-parallel weights."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_5d import ops
from tests.harness import assert_same_gradients, run_ranks


class Block(nn.Module):
    recompute = False

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def mlp(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(3)])

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def _reduce(model):
    """What the REDUCE_GRAD of a schedule does (dp/fsdp owns the real one)."""
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    state = fully_shard.state(model)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def _step(rank, dp_shape, tp, zero3, recompute, dtype):
    dp = len(dp_shape)
    names = ("replicate", "shard")[2 - dp :] + ("tp",)
    mesh = init_device_mesh("cpu", (*dp_shape, tp), mesh_dim_names=names)
    torch.manual_seed(0)
    reference = Model().double()
    model, store = copy.deepcopy(reference), ops.WeightGradients()
    if tp > 1:
        for b in model.blocks:
            parallelize_module(b, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    deferral = ops.make_deferrable(model, store)
    assert set(deferral.waits) == {n for n, p in reference.named_parameters() if p.dim() == 2}
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh[names[:-1]], reshard_after_forward=zero3, mp_policy=policy)
    for unit in [*model.blocks, model]:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.recompute = recompute
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    n = mesh.size() // tp
    batches = torch.randint(0, 11, (3, n, 2, 5), generator=torch.Generator().manual_seed(1))
    mine = (rank // tp) if tp > 1 else rank
    losses = [model(batches[i, mine]) for i in range(3)]  # F F F
    for i, loss in enumerate(losses):  # I I I
        with store.deferring(i):
            loss.backward()
    if zero3:
        model.reshard()
        for b in model.blocks:
            b.reshard()
    gathers = []
    plain = dist.all_gather_into_tensor
    try:
        dist.all_gather_into_tensor = lambda *a, **k: gathers.append(1) or plain(*a, **k)
        assert [store.run(i) for i in range(3)] == [7, 7, 7]  # W W W
    finally:
        dist.all_gather_into_tensor = plain
    assert not gathers, "a weight product gathered parameters"
    _reduce(model)
    for i in range(3):
        reference(batches[i].flatten(0, 1)).backward()
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    tol = 1e-12 if dtype is None else 4e-2
    assert_same_gradients(got, {name: p.grad for name, p in reference.named_parameters()}, tol=tol)
    replicas = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, {name: g.sum().item() for name, g in got.items()})
    assert all(r == replicas[0] for r in replicas)


@pytest.mark.parametrize(
    "dp_shape, tp, zero3, recompute, dtype",
    [((4,), 1, True, False, None), ((4,), 1, False, True, None), ((2, 2), 1, True, True, None),
     ((2,), 2, True, False, None), ((2,), 2, False, False, None), ((2,), 1, True, False, torch.bfloat16)],
)  # fmt: skip
def test_fsdp_and_tensor_parallel(dp_shape, tp, zero3, recompute, dtype):
    n = tp
    for size in dp_shape:
        n *= size
    run_ranks(n, _step, dp_shape, tp, zero3, recompute, dtype)


def _local_products(rank):
    """Plain inputs, DTensor weights: a column and a row product on local shards, at once and deferred."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    gen = torch.Generator().manual_seed(3)
    x, w, b, v, table = (
        torch.randn(s, generator=gen, dtype=torch.float64) for s in ((5, 4), (6, 4), (6,), (3, 6), (8, 4))
    )
    ids = torch.randint(0, 8, (5,), generator=gen)
    leaves = [t.clone().requires_grad_() for t in (x, w, b, v, table)]
    want_y = nn.functional.linear(
        nn.functional.linear(leaves[0] + nn.functional.embedding(ids, leaves[4]), leaves[1], leaves[2]).sin(), leaves[3]
    )
    want_y.square().sum().backward()
    want = [t.grad for t in leaves]
    for defer in (False, True):
        store = ops.WeightGradients()
        places = (Shard(0), Shard(0), Shard(1), Shard(0))
        params = [nn.Parameter(distribute_tensor(t, mesh, [p])) for t, p in zip((w, b, v, table), places)]
        leaf = x.clone().requires_grad_()
        own = (ids >= 4 * rank) & (ids < 4 * rank + 4)
        found = ops.embedding((ids - 4 * rank) * own, params[3], store) * own.unsqueeze(1)
        h = leaf + ops.all_reduce_identity(found, group)
        h = ops.linear(ops.identity_all_reduce(h, group), params[0], params[1], store).sin()
        y = ops.all_reduce_identity(ops.linear(h, params[2], None, store), group)
        assert not isinstance(y, DTensor)
        if defer:
            with store.deferring(0):
                y.square().sum().backward()
            assert params[1].grad is not None and [p.grad for p in (params[0], *params[2:])] == [None] * 3
            assert store.run(0) == 3
        else:
            y.square().sum().backward()
        torch.testing.assert_close(y, want_y)
        got = [leaf.grad] + [p.grad.full_tensor() for p in params]
        for p, place in zip(params, places):
            assert p.grad.placements == (place,)
        for g, r in zip(got, want):
            torch.testing.assert_close(g, r, rtol=1e-12, atol=1e-12)


def _partial_gradients(rank):
    """A replicated weight that sees other rows on each rank: its gradient lands whole, on every rank (C2)."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    want = torch.ones(6, 3, dtype=torch.float64).t() @ x
    for defer, local in itertools.product((False, True), (False, True)):
        store = ops.WeightGradients()
        w = nn.Parameter(distribute_tensor(torch.zeros(3, 4, dtype=torch.float64), mesh, [Replicate()]))
        rows = x[3 * rank : 3 * rank + 3] if local else distribute_tensor(x, mesh, [Shard(0)])
        for _ in range(2):
            y = ops.linear(rows, w, None, store, grad_placements=[Partial()] if local else None)
            if defer:
                with store.deferring(0):
                    y.sum().backward()
            else:
                y.sum().backward()
        if defer:
            assert w.grad is None and store.run(0) == 2
        if defer or local:
            assert w.grad.placements == (Replicate(),)
        torch.testing.assert_close(w.grad.full_tensor(), 2 * want)


def _expert_shards(rank):
    """Experts cut over ep (Shard(0)), rows already exchanged: grouped products on the local experts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    gen = torch.Generator().manual_seed(5)
    w, x = torch.randn(4, 8, 16, generator=gen), torch.randn(9, 16, generator=gen)
    ends = torch.tensor([2, 2, 6, 9], dtype=torch.int32)
    full = w.clone().requires_grad_()
    ops.grouped_matmul(x, full.transpose(1, 2), ends).square().sum().backward()
    rows, mine = (x[:2], ends[:2]) if rank == 0 else (x[2:], ends[2:] - 2)
    for defer in (False, True):
        store = ops.WeightGradients()
        p = nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]))
        y = ops.grouped_matmul(rows, p.to_local(grad_placements=p.placements).transpose(1, 2), mine, store)
        if defer:
            y = ops.grouped_matmul(rows, distribute_tensor(w.transpose(1, 2), mesh, [Shard(0)]).requires_grad_(), mine)
            q = nn.Parameter(distribute_tensor(w.transpose(1, 2).contiguous(), mesh, [Shard(0)]))
            y = ops.grouped_matmul(rows, q, mine, store)
            with store.deferring(0):
                y.square().sum().backward()
            assert q.grad is None and store.run(0) == 1
            got = q.grad.full_tensor().transpose(1, 2)
        else:
            y.square().sum().backward()
            got = p.grad.full_tensor()
        torch.testing.assert_close(got, full.grad)


@pytest.mark.parametrize("check", [_local_products, _partial_gradients, _expert_shards])
def test_plain_inputs_and_sharded_weights(check):
    run_ranks(2, check)
