"""FSDP2's units, steered by the parameter actions of a pipeline schedule.

unit             between UNSHARD and RESHARD of a stage
---------------  ----------------------------------------------------------------------------------------------
comes and goes   by FSDP2's own hooks: one gather for F and one for I. RESHARD frees what stays longer (a head
                 whose I follows its F, tied weights)
stays            gathered in its first F; freed after the last I of the stages that use it, or with the window

Gradients stay whole, added up in place, until REDUCE_GRAD: the reduction of a unit comes when all stages that use it
have asked for it. One that two stages of a rank share (tied weights in a V) is reduced once, whatever `grad_reduce` is.

A unit is open where its forward is not that of one stage: the root and all around the layers, whose forward ends in the
middle, and modules of several stages in one unit. FSDP2's own hooks are taken off it, and what belongs to it (tied
weights) is gathered and freed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtensor_5d.ops.whole_gradients import drop_gradients, zeros_for_unused

__all__ = ["StagedUnits"]


class StagedUnits:
    """Steers the units of a model whose root is sharded, or does nothing where it is not.

    owners: by stage of this rank, the modules whose parameters it uses. resharding: whether units come and go with each
    visit; None: each as its `reshard_after_forward` says (weights must be there then). visits: whether any does.
    """

    def __init__(self, model: nn.Module, owners: Mapping[int, set[nn.Module]], *, resharding: bool | None) -> None:
        self._root = model if isinstance(model, FSDPModule) else None
        self._parts: list[_Unit] = []
        if self._root is not None and resharding is None:
            fully_shard.state(model)._lazy_init()  # settles what was left open: the root stays
        seen: set[int] = set()
        for module in model.modules():
            state: Any = fully_shard.state(module) if isinstance(module, FSDPModule) else None
            if state is None or id(state) in seen:
                continue
            seen.add(id(state))
            is_open = not any(used.issuperset(state._modules) for used in owners.values())
            if is_open:
                state._pre_forward_hook_handle.remove()
                state._post_forward_hook_handle.remove()
            for group in state._fsdp_param_groups:
                held = {m for p in group.fsdp_params for m in _owners(p)}
                stages = {stage for stage, used in owners.items() if held & used}
                visits = group.post_forward_mesh_info is not None if resharding is None else resharding
                self._parts.append(_Unit(module, group, stages, is_open, visits))
        self._units = [unit.module for unit in self._parts]
        self.visits = any(unit.visits for unit in self._parts)
        self._prefetch_backward()

    def described(self) -> list[object]:
        """What ranks that shard the same modules must have alike, or their gathers and reductions would not meet."""
        number = {id(fully_shard.state(unit.module)): at for at, unit in enumerate(self._parts)}
        return [unit.described(number) for unit in self._parts]

    def reshard(self) -> None:
        """Frees gathered parameters."""
        for module in self._units:
            module.reshard()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around the actions of a window. After an exception its gradients are void; the next one starts clean."""
        root = self._root
        if root is None:
            yield
            return
        self._begin(root)
        for unit in self._parts:
            # An open unit stays: no hook of its own would gather it again.
            unit.group.reshard_after_backward = unit.visits and not unit.is_open
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        try:
            yield
        except BaseException:
            root.reset_iter_state()
            for unit in self._parts:
                drop_gradients(unit.group)
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
            if unit.is_open:
                unit.module.unshard()

    def release(self, stage: int) -> None:
        """RESHARD."""
        for unit in self._of(stage):
            unit.users.discard(stage)
            # Among units that come and go, one that stays does so until the window ends.
            if not unit.users and (unit.visits or not self.visits):
                unit.module.reshard()

    def keep(self, stage: int) -> None:
        """After an I or W: gradients are kept in the dtype of the reduction, those added by hand as FSDP2's own."""
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
        """Backward gathers the layer before early, where nobody has said otherwise.

        FSDP2 by itself takes the unit whose forward ran before, which may be another stage's. A unit that names itself
        asks for nothing.
        """
        before: dict[int, FSDPModule] = {}
        for unit in self._parts:
            for following in fully_shard.state(unit.module)._states_to_forward_prefetch:
                before[id(following)] = unit.module
        for unit in self._parts:
            state = fully_shard.state(unit.module)
            if not state._states_to_backward_prefetch:
                unit.module.set_modules_to_backward_prefetch([before.get(id(state), unit.module)])

    def _begin(self, root: FSDPModule) -> None:
        self.reshard()
        fully_shard.state(root)._lazy_init()  # FSDP2 does so in the first forward of the root
        for unit in self._parts:
            unit.users.clear()
            unit.pending = set(unit.stages)

    def _of(self, stage: int) -> list[_Unit]:
        return [unit for unit in self._parts if stage in unit.stages]


class _Unit:
    """stages: of this rank that use it. is_open: see above. visits: whether it comes and
    goes. users: stages that have it gathered now. pending: those that will ask for a reduction again."""

    def __init__(self, module: FSDPModule, group: Any, stages: set[int], is_open: bool, visits: bool) -> None:
        self.module, self.group, self.stages, self.is_open, self.visits = module, group, stages, is_open, visits
        self.users: set[int] = set()
        self.pending = set(stages)

    def described(self, number: Mapping[int, int]) -> tuple[object, ...]:
        """number: of every unit, by its state."""
        group, state = self.group, fully_shard.state(self.module)
        weights = [(p._param_fqn, tuple(p._orig_size), p.sharded_param.dtype, p.sharded_param.requires_grad)
                   for p in group.fsdp_params]  # fmt: skip
        kept = group.post_forward_mesh_info
        early = [[number.get(id(other)) for other in states]
                 for states in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)]  # fmt: skip
        reduction = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        return (weights, sorted(self.stages), self.is_open, self.visits, kept and kept.shard_mesh_size, early,
                state._mp_policy, reduction)  # fmt: skip

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
