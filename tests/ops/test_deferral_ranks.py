"""Weight gradients that wait, under FSDP2 that reshards between F, I and W, and with tensor-parallel weights."""

from __future__ import annotations

import contextlib
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


def _groups(model):
    state = fully_shard.state(model)
    return [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]


@contextlib.contextmanager
def _gathers():
    """The calls of FSDP2's all-gather inside."""
    seen, plain = [], dist.all_gather_single
    dist.all_gather_single = lambda *a, **k: seen.append(1) or plain(*a, **k)
    try:
        yield seen
    finally:
        dist.all_gather_single = plain


def _keep(model):
    """After each W: a unit's gradients in the reduction's dtype, as FSDP2 keeps those that came at once."""
    for group in _groups(model):
        for p in group.fsdp_params:
            if hasattr(p, "_unsharded_param"):
                p.accumulate_unsharded_grad_if_needed()
                p.to_accumulated_grad_if_needed()


def _reduce(model):
    """What the REDUCE_GRAD of a schedule does (dp/ owns the real one)."""
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    for group in _groups(model):
        group.post_backward()
    fully_shard.state(model)._root_post_backward_final_callback()


def _sharded(reference, mesh, names, tp, zero3, recompute, dtype, store):
    model = copy.deepcopy(reference)
    if tp > 1:
        for b in model.blocks:
            parallelize_module(b, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if store is not None:
        deferral = ops.make_deferrable(model, store)
        assert set(deferral.waits) == {n for n, p in reference.named_parameters() if p.dim() == 2}
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    units = [*model.blocks, model]
    for unit in units:
        fully_shard(unit, mesh=mesh[names[:-1]], reshard_after_forward=zero3, mp_policy=policy)
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.recompute = recompute
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    return model


def _step(rank, dp_shape, tp, zero3, recompute, dtype):
    names = (*("replicate", "shard")[2 - len(dp_shape) :], "tp")
    mesh = init_device_mesh("cpu", (*dp_shape, tp), mesh_dim_names=names)
    torch.manual_seed(0)
    reference = Model() if dtype else Model().double()
    batches = torch.randint(0, 11, (3, mesh.size() // tp, 2, 5), generator=torch.Generator().manual_seed(1))
    mine = batches[:, rank // tp]
    store = ops.WeightGradients()
    results = []
    for waits in (store, None):
        model = _sharded(reference, mesh, names, tp, zero3, recompute, dtype, waits)
        with _gathers() as gathers:
            losses = [model(ids) for ids in mine]  # F F F
        assert gathers
        for i, loss in enumerate(losses):  # I I I, or B B B
            with store.deferring(i) if waits else contextlib.nullcontext():
                loss.backward()
        if waits:
            if zero3:
                for unit in [*model.blocks, model]:
                    unit.reshard()
            with _gathers() as gathers:
                for i in range(3):  # W W W
                    assert store.run(i) == 7
                    _keep(model)
            assert not gathers, "a weight product gathered parameters"
        _reduce(model)
        results.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    got, at_once = results
    # In fp32 sums of bf16 gradients, or in fp64: the same additions in the same order.
    assert all(torch.equal(got[n], at_once[n]) for n in got)
    replicas = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, {name: g.sum().item() for name, g in got.items()})
    assert all(r == replicas[0] for r in replicas)
    if dtype is None:
        for ids in batches:
            reference(ids.flatten(0, 1)).backward()
        assert_same_gradients(got, {name: p.grad for name, p in reference.named_parameters()}, tol=1e-12)


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
        p = nn.Parameter(distribute_tensor(w.transpose(1, 2).contiguous(), mesh, [Shard(0)]))
        y = ops.grouped_matmul(rows, p, mine, store)
        with store.deferring(0) if defer else contextlib.nullcontext():
            y.square().sum().backward()
        assert (p.grad is None) == defer
        if defer:
            assert store.run(0) == 1
        torch.testing.assert_close(p.grad.full_tensor().transpose(1, 2), full.grad)


@pytest.mark.parametrize("check", [_local_products, _partial_gradients, _expert_shards])
def test_plain_inputs_and_sharded_weights(check):
    run_ranks(2, check)
