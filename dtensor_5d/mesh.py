"""`Mesh`: the live process groups of some degrees, every axis by name, all cut from one world mesh.

`layout.py` says which ranks belong together; here they get process groups. What touches torch's private
interfaces is in `_mesh_of`, `_register` and `_outside_fake_mode`.

Which axes share a communicator: backends run the collectives of one communicator one after the other, so an axis whose
traffic should overlap with others (pp, cp, tp, ep, etp) never shares one, even where it spans the same ranks. The data
axes (dp_shard, fsdp, efsdp, loss, ...) follow one another anyway and share one where their ranks are equal. Axes of
size 1 share a group of this rank alone. A second mesh over the same world finds the groups that are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.layout import Axis, axes_of, select

__all__ = ["Mesh", "build_mesh", "with_copies"]

# These run at other times than the layers' own traffic, or after one another on the same stream.
_MAY_SHARE = ("world", "dp_replicate", "dp_shard", "data", "loss", "fsdp", "efsdp")


class Mesh:
    """Every axis as a torch `DeviceMesh`. Made by `build_mesh`; the same on all ranks.

    Example: `mesh["tp"]`; `mesh["dp_replicate", "fsdp"]`, the two-dimensional mesh of HSDP; `mesh["loss"].size()`.

    Names: pp, dp_replicate, dp_shard, cp, tp (dense view); efsdp, ep, etp (expert view, with pp and dp_replicate);
    fsdp = dp_shard x cp, data = dp_replicate x dp_shard, loss = dp_replicate x dp_shard x cp, world. Axes of size 1
    exist as well. Any independent axes can be joined, outer to inner.

    Errors: `PlanError` for an unknown name and for axes that are not independent.
    """

    def __init__(self, degrees: Degrees, root: DeviceMesh, ranks_per_node: int | None = None) -> None:
        self.degrees = degrees
        self.ranks_per_node = ranks_per_node
        self.device_type: str = root.device_type
        self.rank: int = dist.get_rank()
        self.axes: dict[str, Axis] = axes_of(degrees)
        names = _groups_by_name(self.axes, self.rank)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {("world",): root}
        for name, axis in self.axes.items():
            if name != "world":
                self._meshes[name,] = _mesh_of(root, axis, names[name])

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        key = (names,) if isinstance(names, str) else tuple(names)
        if key not in self._meshes:
            chosen = select(self.axes, key)
            with _outside_fake_mode():
                self._meshes[key] = DeviceMesh._concatenate([self._meshes[axis.name,] for axis in chosen])
        return self._meshes[key]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    @property
    def world_size(self) -> int:
        return self.degrees.world_size

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank reads: ranks that differ only in pp, cp and tp read the same one."""
        return self.axes["data"].index(self.rank)

    @property
    def data_size(self) -> int:
        """Into how many shares the data is cut: dp_replicate x dp_shard."""
        return self.axes["data"].size

    def lanes(self, axis: str) -> int | None:
        """How many neighbouring ranks of an axis' group share a node; None where all do, or nobody said.

        Example: ep 16 on nodes of 8 ranks: `mesh.lanes("ep")` is 8; with etp 2 it is 4.
        """
        here = self.axes[axis]
        lanes = max((self.ranks_per_node or 0) // here.stride, 1)
        return None if self.ranks_per_node is None or lanes >= here.size else lanes

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Where a rank (this one by default) stands on every axis.

        Example: `mesh.coordinate(5)["tp"]`.
        """
        at = self.rank if rank is None else rank
        if not 0 <= at < self.world_size:
            raise PlanError(
                Violation(f"rank {at}", f"ranks are 0 to {self.world_size - 1}", "give the rank of a process")
            )
        return {name: axis.index(at) for name, axis in self.axes.items()}

    def __repr__(self) -> str:
        return f"Mesh({self.degrees}, world {self.world_size}, {self.device_type!r}, rank {self.rank})"


def build_mesh(degrees: Degrees, device_type: str, *, ranks_per_node: int | None = None) -> Mesh:
    """The mesh of these degrees over all ranks of the job. Every rank calls it, with the same arguments.

    Example: `mesh = build_mesh(Degrees(dp_shard=-1, tp=2), "cuda", ranks_per_node=8)`

    Initialises torch.distributed if that was not done: from what a launcher such as torchrun set up, or in memory for
    a world of one rank. `ranks_per_node`: warns on rank 0 when a tensor-parallel group crosses nodes.

    Errors: `PlanError` on every rank, before any collective, when the degrees do not multiply to the world size; for a
    world of several ranks without a launcher; for a device that this torch does not have.
    """
    if ranks_per_node is not None and ranks_per_node < 1:
        raise PlanError(Violation(f"ranks_per_node={ranks_per_node}", "must be >= 1", "give None when not known"))
    _require_device(device_type)
    ours = not dist.is_initialized()
    if ours:
        _initialise(degrees, device_type)
    try:
        resolved = degrees.resolve(dist.get_world_size())
    except PlanError:
        if ours:  # leave nothing behind that the next attempt would trip over
            dist.destroy_process_group()
        raise
    if ranks_per_node is not None and dist.get_rank() == 0:
        _warn_if_tp_crosses_nodes(resolved, ranks_per_node)
    with _outside_fake_mode(), warnings.catch_warnings():
        # Without a launcher there is one rank, and its device is the current one: nothing to warn about.
        warnings.filterwarnings("ignore", message="It seems like you did not set/select the default device")
        root = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("world",))
        return Mesh(resolved, root, ranks_per_node)


def with_copies(mesh: DeviceMesh, copies: int) -> DeviceMesh:
    """The ranks of a one-dimensional mesh as (parts, copies): each part on `copies` neighbouring ranks.

    Collective: every rank of the job calls it for its own mesh of that axis, in the same order.

    Example: 2 kv heads on tp 4: `with_copies(mesh["tp"], 2)`; ranks 0 and 1 hold the first, ranks 2 and 3 the second.
    """
    size = mesh.size()
    assert mesh.ndim == 1 and size % copies == 0, (mesh, copies)
    root, rank = mesh._get_root_mesh(), dist.get_rank()
    stride = int(mesh.mesh[1] - mesh.mesh[0]) if size > 1 else 1
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "axis"
    axes = (Axis(f"{name}_part", size // copies, stride * copies), Axis(f"{name}_copy", copies, stride))
    with _outside_fake_mode():
        made = []
        for axis in axes:
            group = f"dtensor_5d {axis.name} {axis.size}x{axis.stride}"
            if not _is_registered(group):
                _register(group, _create_group(axis, rank, dist.get_world_size()))
            made.append(_mesh_of(root, axis, group))
        return DeviceMesh._concatenate(made)


def _groups_by_name(axes: dict[str, Axis], rank: int) -> dict[str, str]:
    """Axis -> the registered name of this rank's group. Collective: all ranks create all groups in one order."""
    names: dict[str, str] = {}
    for axis in axes.values():
        family = "data" if axis.name in _MAY_SHARE else axis.name
        name = "dtensor_5d alone" if axis.size == 1 else f"dtensor_5d {family} {axis.size}x{axis.stride}"
        if not _is_registered(name):
            _register(name, _create_group(axis, rank, axes["world"].size))
        names[axis.name] = name
    return names


def _create_group(axis: Axis, rank: int, world_size: int) -> dist.ProcessGroup:
    if axis.size == world_size and (axis.name in _MAY_SHARE or world_size == 1):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if axis.size == 1:  # no other rank is in it, so none need take part
        return dist.new_group([rank], use_local_synchronization=True, group_desc="mesh_alone")
    mine = None
    for first in (r for r in range(world_size) if axis.index(r) == 0):
        ranks = axis.ranks(first)
        group = dist.new_group(list(ranks), group_desc=f"mesh_{axis.name}")
        if rank in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup), (axis, rank)
    return mine


def _is_registered(name: str) -> bool:
    try:
        _resolve_process_group(name)
    except RuntimeError:  # never registered, or destroyed since
        return False
    return True


def _register(name: str, group: dist.ProcessGroup) -> None:
    """Gives a group a name that says which ranks it has.

    DTensor remembers meshes and hands out an old, equal one for a new one, and a mesh knows its groups by name. Torch
    numbers groups in the order in which they are made; after torch.distributed was ended and started again, the number
    of an old mesh would stand for other ranks.
    """
    _unregister_process_group(name)
    _register_process_group(name, group)


def _mesh_of(root: DeviceMesh, axis: Axis, group_name: str) -> DeviceMesh:
    """A one-dimensional mesh of `axis` below `root`: what DeviceMesh._unflatten does, with a group of our choice.

    fully_shard joins the mesh of a parameter with its own, which needs one root; DeviceMesh.from_group would make a
    root of each.
    """
    mesh = DeviceMesh(
        root.device_type,
        mesh_dim_names=(axis.name,),
        _layout=_MeshLayout.from_sizes_strides((axis.size,), (axis.stride,)),
        _rank_map=root._rank_map,
        _root_mesh=root,
        _init_backend=False,
    )
    mesh._dim_group_names = [group_name]
    root._pg_registry[group_name] = _resolve_process_group(group_name)
    return mesh


@contextmanager
def _outside_fake_mode() -> Iterator[None]:
    """A mesh needs real, small CPU tensors, also when it is built under FakeTensorMode or on the meta device."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


def _require_device(device_type: str) -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = ["cpu"] + ([accelerator.type] if accelerator is not None and torch.accelerator.is_available() else [])
    fake = dist.is_initialized() and dist.get_backend() == "fake"  # plays a machine that need not be here
    if device_type not in here and not fake:
        raise PlanError(
            Violation(
                f"device_type={device_type!r}",
                f"this torch ({torch.__version__}) sees {' and '.join(map(repr, here))}",
                f"use {' or '.join(map(repr, here))}, or install a torch for that device",
            )
        )


def _initialise(degrees: Degrees, device_type: str) -> None:
    """torch.distributed from the launcher's set-up, which torch reads itself; without a launcher one rank in memory."""
    backend = dist.get_default_backend_for_device(device_type)
    if device_type != "cpu":
        backend = f"cpu:gloo,{device_type}:{backend}"  # checkpoints and messages travel in CPU memory
    try:
        dist.init_process_group(backend)
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        missing = str(error)
    else:
        return
    if "variable RANK " not in missing:
        raise PlanError(
            Violation(f"an incomplete launch ({missing})", "a launcher sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
                      "start with torchrun, or set all of them")
        )  # fmt: skip
    needed = 1 if degrees.open_axes else degrees.world_size
    if needed > 1:
        raise PlanError(
            Violation(
                f"{degrees} in a process that no launcher started",
                f"the degrees multiply to {needed} ranks, but this is 1 process",
                f"start with: torchrun --nproc-per-node {needed} script.py (or use degrees of 1)",
            )
        )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _warn_if_tp_crosses_nodes(degrees: Degrees, ranks_per_node: int) -> None:
    tp = axes_of(degrees)["tp"]
    world = degrees.world_size
    firsts = range(0, world, tp.size)
    crossing = [r for r in firsts if r // ranks_per_node != (r + tp.size - 1) // ranks_per_node]
    if crossing:
        warnings.warn(
            f"{len(crossing)} of {len(firsts)} tensor-parallel groups (tp={tp.size}) cross nodes of {ranks_per_node} "
            f"ranks, the first is ranks {crossing[0]} to {crossing[0] + tp.size - 1}: tensor parallelism needs the "
            f"fastest link; choose a tp that divides {ranks_per_node}",
            stacklevel=3,
        )
