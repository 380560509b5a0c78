"""The units of a sharded model, steered by the parameter actions of a pipeline schedule.

zero  regather   between UNSHARD and RESHARD of a stage
----  --------   ----------------------------------------------------------------------------------------
3     visit      units come and go one by one, by FSDP2's own hooks: one gather for F and one for I. RESHARD
                 frees what stays longer (head, tied weights)
1, 2  any        each unit is gathered in its first F and stays; RESHARD, after the last I, frees it
3     window

Gradients stay whole, added up in place, until REDUCE_GRAD: the reduction of a unit comes when all stages that use it
have asked for it. One that two stages of a rank share (tied weights in a V) is reduced once, whatever `grad_reduce` is.

The root's own hooks are taken off: a stage's forward ends in the middle of the root's, so what belongs to the root
(tied weights) is gathered and freed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtensor_5d.dp.fsdp import DataParallel
from dtensor_5d.dp.unused import zeros_for_unused

__all__ = ["StagedData"]


class StagedData(DataParallel):
    """Steers a model that `shard` has sharded, or does nothing for one that it has not.

    owners: by stage of this rank, the modules whose parameters it uses. resharding: zero 3 with regather "visit".
    """

    def __init__(self, model: nn.Module, owners: Mapping[int, set[nn.Module]], *, resharding: bool) -> None:
        self._root = model if isinstance(model, FSDPModule) else None
        self._resharding = resharding
        self._parts: list[_Unit] = []
        seen: set[int] = set()
        for module in model.modules():
            state: Any = fully_shard.state(module) if isinstance(module, FSDPModule) else None
            if state is None or id(state) in seen:
                continue
            seen.add(id(state))
            for group in state._fsdp_param_groups:
                held = {m for p in group.fsdp_params for m in _owners(p)}
                stages = {stage for stage, used in owners.items() if held & used}
                self._parts.append(_Unit(module, group, stages, module is model))
        self._units = [unit.module for unit in self._parts]
        if self._root is not None:
            state = fully_shard.state(model)
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            self._prefetch_backward()

    @property
    def shards(self) -> bool:
        """Whether there is anything to gather and to reduce."""
        return self._root is not None

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around the actions of a window. After an exception its gradients are void; the next one starts clean."""
        root = self._root
        if root is None:
            yield
            return
        self._begin(root)
        root.set_reshard_after_backward(self._resharding)
        root.set_reshard_after_backward(False, recurse=False)  # no hook of its own would gather it again
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        try:
            yield
        except BaseException:
            root.reset_iter_state()
            raise
        finally:
            root.set_is_last_backward(True)
        # Waits for the reductions; all units that had any are done by now.
        fully_shard.state(root)._root_post_backward_final_callback()
        self.reshard()

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Around forwards without backward."""
        if self._root is None:
            yield
            return
        self._begin(self._root)
        try:
            yield
        finally:
            self.reshard()

    def gather(self, stage: int) -> None:
        """UNSHARD."""
        for unit in self._of(stage):
            unit.users.add(stage)
            if unit.is_root:
                unit.module.unshard()

    def release(self, stage: int) -> None:
        """RESHARD."""
        for unit in self._of(stage):
            unit.users.discard(stage)
            if not unit.users:
                unit.module.reshard()

    def keep(self, stage: int) -> None:
        """After a W: gradients added by hand are kept in the dtype of the reduction, as FSDP2 keeps the others."""
        for unit in self._of(stage):
            for parameter in unit.group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def reduce(self, stage: int, last: bool) -> None:
        """REDUCE_GRAD."""
        for unit in self._of(stage):
            if last:
                unit.pending.discard(stage)
            if not unit.pending or len(unit.stages) == 1:
                unit.reduce(last)

    def _prefetch_backward(self) -> None:
        """Backward gathers the layer before early.

        FSDP2 by itself takes the unit whose forward ran before, which may be another stage's. A unit that names itself
        asks for nothing.
        """
        before: dict[int, FSDPModule] = {}
        for unit in self._parts:
            for following in fully_shard.state(unit.module)._states_to_forward_prefetch:
                before[id(following)] = unit.module
        for unit in self._parts:
            earlier = before.get(id(fully_shard.state(unit.module)), unit.module)
            unit.module.set_modules_to_backward_prefetch([earlier])

    def _begin(self, root: FSDPModule) -> None:
        self.reshard()
        fully_shard.state(root)._lazy_init()  # FSDP2 does so in the first forward of the root
        for unit in self._parts:
            unit.users.clear()
            unit.pending = set(unit.stages)

    def _of(self, stage: int) -> list[_Unit]:
        return [unit for unit in self._parts if stage in unit.stages]


class _Unit:
    """stages: of this rank that use it. users: those that have it gathered now. pending: those that will ask
    for a reduction again."""

    def __init__(self, module: FSDPModule, group: Any, stages: set[int], is_root: bool) -> None:
        self.module, self.group, self.stages, self.is_root = module, group, stages, is_root
        self.users: set[int] = set()
        self.pending = set(stages)

    def reduce(self, last: bool) -> None:
        group = self.group
        group.reduce_grads, group.all_reduce_grads, resharding = True, last, group.reshard_after_backward
        group.reshard_after_backward = False
        zeros_for_unused(group)
        try:
            group.post_backward()
        finally:
            group.reduce_grads, group.reshard_after_backward = False, resharding


def _owners(parameter: Any) -> list[nn.Module]:
    info = parameter._module_info
    return [info.module, *info.shared_modules]
