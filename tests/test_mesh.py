"""The live mesh: real gloo groups on 4 ranks, fake ones up to 4,096, and every way to start a job."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError
from dtensor_5d.layout import axes_of, groups_of
from dtensor_5d.mesh import build_mesh
from tests.harness import run_ranks


@pytest.fixture
def fake_world():
    """Starts a world of any size in this process, seen from one rank; nothing is communicated."""

    def start(world_size, rank=0):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    assert not dist.is_initialized()
    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 5, 23])
def test_meshes_hold_the_ranks_of_the_tables(fake_world, rank):
    degrees = Degrees(dp_replicate=3, dp_shard=2, cp=2, tp=2, ep=2)
    fake_world(24, rank)
    mesh = build_mesh(degrees, "cpu")
    for name, axis in axes_of(degrees).items():
        (group,) = (g for g in groups_of(degrees, name) if rank in g)
        assert mesh[name].mesh.tolist() == group
        assert mesh[name].mesh_dim_names == (name,)
        assert mesh[name].get_local_rank() == axis.index(rank) == mesh.coordinate()[name] == mesh.coordinate(rank)[name]
        assert mesh[name].get_group().size() == mesh[name].size() == axis.size
    assert (mesh.data_rank, mesh.data_size) == (mesh.coordinate()["data"], 6)
    both = mesh["dp_replicate", "fsdp"]
    assert both.shape == (3, 4)
    assert both.mesh.tolist() == [[8 * node + 2 * i + rank % 2 for i in range(4)] for node in range(3)]
    assert both["fsdp"].mesh.tolist() == mesh["fsdp"].mesh.tolist()
    assert mesh["dp_replicate", "efsdp"].shape == (3, 4)
    assert mesh["pp", "dp_replicate", "efsdp", "ep", "etp"].shape == (1, 3, 4, 2, 1)
    assert mesh["dp_replicate", "fsdp"] is both


def test_all_degrees_with_product_4_build_size_1_axes_included(fake_world):
    """Field fault M2."""
    fake_world(4)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    sizes = [s for s in itertools.product((1, 2, 4), repeat=5) if torch.tensor(s).prod() == 4]
    assert len(sizes) == 15
    for size in sizes:
        mesh = build_mesh(Degrees(**dict(zip(names, size))), "cpu")
        assert mesh[names].shape == size


def test_axes_whose_traffic_overlaps_share_no_communicator(fake_world):
    fake_world(4)
    mesh = build_mesh(Degrees(dp_shard=4, ep=4), "cpu")
    groups = {name: mesh[name].get_group() for name in mesh.axes}
    assert groups["fsdp"] is groups["loss"] is groups["data"] is groups["world"]
    assert groups["ep"] is not groups["fsdp"]
    assert groups["tp"] is groups["pp"] is groups["cp"], "size 1: nothing to overlap"
    ring = build_mesh(Degrees(cp=4), "cpu")
    assert ring["cp"].get_group() is not ring["fsdp"].get_group()


@pytest.mark.parametrize("world_size", [512, 4096])
def test_a_large_mesh_is_built_in_a_moment(fake_world, world_size):
    fake_world(world_size, rank=world_size - 1)
    start = time.process_time()
    mesh = build_mesh(Degrees(pp=4, dp_replicate=2, dp_shard=-1, cp=4, tp=8, ep=16), "cpu")
    assert time.process_time() - start < 5
    assert mesh.degrees.dp_shard == world_size // 256
    assert mesh["dp_replicate", "fsdp"].shape == (2, world_size // 64)
    assert mesh["world"].size() == world_size


def test_a_mesh_can_be_built_and_cut_on_the_meta_device_and_under_fake_mode(fake_world):
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_world(8, rank=3)
    with torch.device("meta"):
        assert build_mesh(Degrees(dp_replicate=2, dp_shard=4), "cpu")["dp_replicate", "fsdp"].get_coordinate() == (0, 3)
    with FakeTensorMode():
        assert build_mesh(Degrees(dp_replicate=2, dp_shard=4), "cpu")["dp_replicate", "fsdp"].get_coordinate() == (0, 3)


def test_a_tensor_parallel_group_that_crosses_nodes_is_a_warning_on_rank_0(fake_world):
    fake_world(24)
    with pytest.warns(UserWarning, match=r"2 of 8 .*\(tp=3\) cross nodes of 8 ranks.*first is ranks 6 to 8.*divides 8"):
        build_mesh(Degrees(dp_shard=8, tp=3), "cpu", ranks_per_node=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_mesh(Degrees(dp_shard=3, tp=8), "cpu", ranks_per_node=8)
        build_mesh(Degrees(dp_shard=8, tp=3), "cpu")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: build_mesh(Degrees(dp_shard=3, tp=2), "cpu"), "multiply to 6, which must equal the world size 8"),
        (lambda: build_mesh(Degrees(dp_shard=-1, tp=3), "cpu"), "multiply to 3, which must divide 8"),
        (lambda: build_mesh(Degrees(dp_shard=8), "cpu", ranks_per_node=0), "ranks_per_node=0: must be >= 1"),
        (lambda: build_mesh(Degrees(dp_shard=8), "cpu")["dp"], "the axes are pp, dp_replicate"),
        (lambda: build_mesh(Degrees(dp_shard=8), "cpu").coordinate(8), "ranks are 0 to 7"),
    ],
)
def test_mistakes_name_both_numbers_and_the_way_out(fake_world, call, message):
    fake_world(8)
    with pytest.raises(PlanError, match=message):
        call()
    assert dist.is_initialized(), "a group that the user made is the user's to end"


def start(code, *arguments, **environment):
    """Starts a program of one process as a user would, with nothing of a launcher but `environment`."""
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    command = [sys.executable, "-c", "from dtensor_5d import Degrees, PlanError, build_mesh\n" + code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**plain, **environment}, stdout=pipe, stderr=pipe, text=True)


ONE_PROCESS = """
import torch
mesh = build_mesh(Degrees(dp_shard=-1), "cpu")
assert all(mesh[name].size() == 1 for name in mesh.axes)
total = torch.ones(1)
torch.distributed.all_reduce(total, group=mesh["loss"].get_group())
print(mesh, total.item())
torch.distributed.destroy_process_group()
try:
    build_mesh(Degrees(dp_shard=2, tp=2), "cpu")
except PlanError as error:
    print(error)
print(torch.distributed.is_initialized())
try:
    build_mesh(Degrees(), "xpu")
except PlanError as error:
    print(error)
"""


def test_one_process_needs_no_launcher_and_several_are_told_to_use_one():
    out, err = start(ONE_PROCESS).communicate(timeout=60)
    assert len(out.splitlines()) == 4, err
    first, several, left, device = out.splitlines()
    assert first == "Mesh(Degrees(), world 1, 'cpu', rank 0) 1.0"
    assert re.search(r"multiply to 4 ranks, but this is 1 process; start with: torchrun --nproc-per-node 4", several)
    assert left == "False"
    assert re.search(r"device_type='xpu'.*sees 'cpu'.*use 'cpu'", device)


def test_half_a_launch_is_told_what_is_missing():
    _, err = start('build_mesh(Degrees(), "cpu")', RANK="0").communicate(timeout=60)
    assert re.search(r"PlanError: an incomplete launch .*variable WORLD_SIZE expected", err)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


LAUNCHED = """
import os, sys, torch
try:
    build_mesh(Degrees(dp_shard=3), "cpu")
except PlanError as error:
    print(error)
print(torch.distributed.is_initialized())
os.environ["MASTER_PORT"] = sys.argv[1]
mesh = build_mesh(Degrees(dp_shard=-1), "cpu")
total = torch.tensor([mesh.rank + 1.0])
torch.distributed.all_reduce(total, group=mesh["fsdp"].get_group())
print(mesh["fsdp"].size(), total.item())
torch.distributed.destroy_process_group()
"""


def test_a_launched_job_of_2_starts_by_itself_and_refuses_other_degrees_on_both_ranks():
    first, second = free_port(), free_port()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first)}
    ranks = [start(LAUNCHED, str(second), **place, RANK=str(rank)) for rank in range(2)]
    for out, err in (rank.communicate(timeout=60) for rank in ranks):
        refusal, left, sums = (out.splitlines() + [err] * 3)[:3]
        assert "multiply to 3, which must equal the world size 2" in refusal
        assert (left, sums) == ("False", "2 3.0")


def test_groups_of_every_axis_hold_the_ranks_of_the_tables():
    run_ranks(4, check_groups, Degrees(pp=2, dp_shard=-1, ep=2))
    run_ranks(4, check_groups, Degrees(cp=2, tp=2, ep=4))


def test_fully_shard_takes_the_meshes_of_hsdp_and_tensor_parameters():
    run_ranks(4, check_fully_shard)


def test_an_old_mesh_that_dtensor_remembers_still_means_the_same_ranks():
    """`ep` is the 3rd axis with a group of its own in the first world and the 2nd in the other."""
    for degrees in (Degrees(dp_replicate=2, dp_shard=2, ep=2), Degrees(dp_shard=4, ep=2)):
        assert run_ranks(4, whole_from_ep, degrees) == [list(range(0, 16, 2))] * 4


def whole_from_ep(rank, degrees):
    mesh = build_mesh(degrees, "cpu")
    cut = distribute_tensor(torch.arange(8.0), mesh["ep"], [Shard(0)])
    return (cut * 2).redistribute(placements=[Replicate()]).to_local().tolist()


def check_fully_shard(rank):
    check_hsdp(build_mesh(Degrees(dp_replicate=2, dp_shard=2), "cpu"))
    mesh = build_mesh(Degrees(dp_shard=2, tp=2, ep=2), "cpu")
    check_tensor_parameters_below_fsdp(mesh)
    check_experts_beside_tensor_parameters(mesh)


def check_groups(rank, degrees):
    """Adding up the ranks of a group gives the sum of the table."""
    mesh = build_mesh(degrees, "cpu")
    for name in mesh.axes:
        total = torch.tensor([float(mesh.rank)])
        dist.all_reduce(total, group=mesh[name].get_group())
        (group,) = (g for g in groups_of(mesh.degrees, name) if mesh.rank in g)
        assert total.item() == sum(group), (name, mesh.rank, group)


def reference():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8, bias=False)).double()
    rows = torch.randn(4, 8, dtype=torch.float64)
    model(rows).square().sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return model, rows, want


def assert_gradients(model, want):
    got = [p.grad.full_tensor() for p in model.parameters()]
    assert all(torch.allclose(g, w, rtol=1e-12, atol=0) for g, w in zip(got, want))


def check_hsdp(mesh):
    model, rows, want = reference()
    fully_shard(model, mesh=mesh["dp_replicate", "fsdp"])
    (model(rows[mesh.data_rank : mesh.data_rank + 1]).square().sum() * mesh.data_size).backward()
    assert model[0].weight.placements == (Replicate(), Shard(0))
    assert_gradients(model, want)


def check_tensor_parameters_below_fsdp(mesh):
    """Column then row parallel weights on mesh["tp"], sharded once more by fully_shard over mesh["fsdp"]."""
    model, rows, want = reference()
    for module, dim in ((model[0], 0), (model[2], 1)):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tp"], [Shard(dim)]))
    fully_shard(model, mesh=mesh["fsdp"])
    mine = rows.chunk(mesh.data_size)[mesh.data_rank]
    x = DTensor.from_local(mine, mesh["tp"], [Replicate()])
    (model(x).redistribute(placements=[Replicate()]).square().sum() * mesh.data_size).to_local().backward()
    weight = model[2].weight
    assert weight.device_mesh.mesh_dim_names == ("fsdp", "tp")
    assert weight.device_mesh == mesh["fsdp", "tp"]
    assert weight.placements == (Shard(0), Shard(1))
    assert_gradients(model, want)


def check_experts_beside_tensor_parameters(mesh):
    """Dense and expert weights in one fully_shard tree: (fsdp, tp) and (efsdp, ep) are views of one world."""
    model, _, _ = reference()
    expert, dense = model[0], model[2]
    expert.weight = nn.Parameter(distribute_tensor(expert.weight.detach(), mesh["ep"], [Shard(0)]))
    dense.weight = nn.Parameter(distribute_tensor(dense.weight.detach(), mesh["tp"], [Shard(1)]))
    whole = [p.full_tensor() for p in model.parameters()]
    fully_shard(expert, mesh=mesh["efsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    assert expert.weight.device_mesh.mesh_dim_names == ("efsdp", "ep")
    assert dense.weight.device_mesh.mesh_dim_names == ("fsdp", "tp")
    assert expert.weight.device_mesh._get_root_mesh() == dense.weight.device_mesh._get_root_mesh() == mesh["world"]
    assert all(torch.equal(p.full_tensor(), w) for p, w in zip(model.parameters(), whole))
