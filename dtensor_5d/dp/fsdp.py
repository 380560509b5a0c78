"""FSDP2 over the data axis: which modules form a unit, and what happens inside a window of micro-batches.

Reductions only ever sum (contract C1): the loss is divided once, by the global token count.

zero  grad_reduce   parameters inside the window   gathers per unit    reductions per unit and window
----  -----------   ----------------------------   -----------------   ------------------------------
1, 2  window        gathered once                  1 per window        1
1, 2  microbatch    gathered once                  1 per window        1 per micro-batch
3     window        resharded after use            2 per micro-batch   1
3     microbatch    resharded after use            2 per micro-batch   1 per micro-batch

Experts that an axis of their own cuts are units over the ranks that it leaves (efsdp); everything else is over fsdp.

Where backward needs no second gather under zero 3 there is none: the unit that holds the head stays gathered between
forward and backward (backward starts with it), and so does the root; an embedding alone in its unit needs no weight
in backward. With dp_replicate > 1 the all-reduce across replicas comes once per window in every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.ops.whole_gradients import drop_gradients, zeros_for_unused
from dtensor_5d.plan.patterns import matches, specificity
from dtensor_5d.precision import split_fp32

__all__ = ["DataParallel", "shard", "units_of"]


def units_of(model: nn.Module, rules: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """(names of the modules, style) for every FSDP unit, inner units first, in model order otherwise.

    Errors: `PlanError` for a style that the data axis does not know.
    """
    bad = [
        Violation(f"style {style!r} for {pattern!r} on the data axis",
                  "must be unit, unit:NAME, unit/N, experts or root", "see the README on rules of the data axis")
        for pattern, style in rules.items()
        if not (isinstance(style, str) and _parse(style))
    ]  # fmt: skip
    if bad:
        raise PlanError(bad)
    units: dict[str, tuple[list[str], str]] = {}
    for name, _ in model.named_modules():
        fitting = [p for p in rules if matches(p, name)]
        if not name or not fitting:
            continue
        style = rules[max(fitting, key=specificity)]
        kind, label = _parse(style) or ("root", "")
        if kind != "root":
            key = f"unit:{label}" if kind == "named" else name
            units.setdefault(key, ([], style))[0].append(name)
    return sorted(units.values(), key=lambda unit: -max(name.count(".") for name in unit[0]))


def _parse(style: str) -> tuple[str, str] | None:
    if style in ("unit", "experts", "root"):
        return style, ""
    head, colon, label = style.partition(":")
    if head == "unit" and colon and label:
        return "named", label
    head, slash, count = style.partition("/")
    if head == "unit" and slash and count.isdigit() and int(count) >= 1:
        return "subgroup", count
    return None


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    rules: Mapping[str, str],
    *,
    zero: int,
    precision: torch.dtype | None,
    fp32_modules: Sequence[str] = (),
    embedding: str = "",
    layers: str = "",
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shards the parameters of `model` over `mesh` (1-D: fsdp; 2-D: dp_replicate x fsdp), unit by unit, root last.

    expert_mesh: that of units of the style `experts`; None: the same.

    precision: the dtype of compute and of gathered parameters; parameters, their gradients and reductions keep the
    dtype they are stored in (fp32 master weights). `fp32_modules` compute in fp32 whatever the precision.
    Errors: `PlanError` for a subgroup (`unit/N`) that torch cannot form.
    """
    size = mesh.size(mesh.ndim - 1)
    plain, exact, as_given = _policies(precision)
    tied = _shared_parameters(model)
    whole = _kept_whole(model, fp32_modules) if precision is not None or _mixed(model) else set()
    prefetchable: list[tuple[list[str], FSDPModule]] = []
    experts: dict[str, FSDPModule] = {}
    for names, style in units_of(model, rules):
        # Nothing to shard where another stage has the weights.
        names = [name for name in names if next(model.get_submodule(name).parameters(), None) is not None]
        if not names:
            continue
        modules = [model.get_submodule(name) for name in names]
        _refuse_split_ties(modules, names, tied)
        keep = zero < 3 or _runs_last(names, model)
        reshard: bool | int = False if keep else _subgroup(style, size, mesh) or True
        fp32 = all(name in fp32_modules for name in names)
        own = expert_mesh if style == "experts" and expert_mesh is not None else mesh
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=own,
            reshard_after_forward=reshard,
            mp_policy=exact if fp32 else as_given if style == "experts" else plain,
            shard_placement_fn=_placement(own.size(own.ndim - 1), style == "experts"),
            ignored_params=whole,
        )
        first = modules[0]
        assert isinstance(first, FSDPModule)
        if style == "experts":
            experts[names[0]] = first
        if names == [embedding]:
            first.set_unshard_in_backward(False)
        if layers and all(name.startswith(layers + ".") and name.count(".") == layers.count(".") + 1 for name in names):
            prefetchable.append((names, first))
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=plain,
        shard_placement_fn=_placement(size),
        ignored_params=whole,
    )
    for at, (names, here) in enumerate(prefetchable):
        inside = [unit for name, unit in experts.items() if name.startswith(tuple(f"{outer}." for outer in names))]
        # Not across pipeline stages: layers that do not follow on each other.
        following = [unit for others, unit in prefetchable[at + 1 : at + 2] if _follows(names, others)]
        if inside or following:
            here.set_modules_to_forward_prefetch(inside + following)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Sums need no premultiplied reduction, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
    assert isinstance(model, FSDPModule)
    # A parameter that this rank's batch did not use still takes part in the reduction, or ranks would disagree on it.
    model.set_reduce_scatter_unused_params(True)


class DataParallel:
    """Steers the units of a sharded model through a window; does nothing for a model that is not sharded."""

    def __init__(self, model: nn.Module, *, zero: int, grad_reduce: str) -> None:
        self._root = model if isinstance(model, FSDPModule) else None
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._keep = zero < 3
        self._once = grad_reduce == "window"
        self._steering = False
        if self._root is not None:
            model.register_forward_pre_hook(self._fresh, prepend=True)
            model.register_forward_hook(self._fresh, always_call=True)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around the micro-batches between two optimizer steps.

        After an exception the gradients of this window are not to be used; the next window starts clean.
        """
        self.reshard()
        self._steering = True
        try:
            yield
        except BaseException:
            if self._root is not None:
                self._root.reset_iter_state()
                self.micro_batch(is_last=True)
                for module in self._units:
                    for group in fully_shard.state(module)._fsdp_param_groups:
                        drop_gradients(group)
            raise
        finally:
            self._steering = False

    def micro_batch(self, is_last: bool) -> None:
        """Before the forward of a micro-batch: what its backward reduces and which parameters stay gathered."""
        if self._root is None:
            return
        self._root.set_requires_gradient_sync(is_last or not self._once)
        if is_last or not self._once:
            self._root.set_requires_all_reduce(is_last)
        self._root.set_reshard_after_backward(is_last or not self._keep)
        if is_last and self._once:
            for module in self._units:
                for group in fully_shard.state(module)._fsdp_param_groups:
                    zeros_for_unused(group)

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Around forwards without backward: afterwards every parameter is a stored shard again."""
        self.reshard()
        self._steering = True
        try:
            yield
        finally:
            self._steering = False
            self.reshard()

    def reshard(self) -> None:
        """Frees gathered parameters."""
        for module in self._units:
            module.reshard()

    def _fresh(self, *_: object) -> None:
        """Around a forward that the user calls, `generate` among them.

        Before it: it must not see parameters gathered before the last optimizer step. After it: an optimizer, a norm
        or a name looked up then must find the stored shards (a backward gathers again what it needs).
        """
        if not self._steering:
            self.reshard()


def _policies(precision: torch.dtype | None) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """For units as a rule; for those that stay fp32; for experts, whose tokens are cast already and whose routing
    weights stay what the router made them."""
    if precision is None:
        return (MixedPrecisionPolicy(),) * 3
    plain = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    as_given = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return plain, exact, as_given


def _placement(size: int, experts: bool = False) -> Any:
    """Shard along dim 0, except 3-D (expert) parameters whose dim 0 does not divide and whose last dim does.

    Not dim 1 by choice: there the gate and up halves of fused experts meet, and a loader that concatenates them along
    that dim would fill a plain shard with the wrong rows. experts: in a unit of experts only the dims after it are
    tried too, for biases as well, so that no rank is left without a part where there are fewer experts than ranks.
    """

    def choose(parameter: nn.Parameter) -> Shard | None:
        # What another axis has left on this rank is what gets sharded here.
        shape = parameter._local_tensor.shape if isinstance(parameter, DTensor) else parameter.shape
        if shape[0] % size == 0 or not (experts or len(shape) == 3):
            return None
        dims = range(len(shape) - 1, 0, -1) if experts else (2,)
        return next((Shard(dim) for dim in dims if shape[dim] % size == 0), None)

    return choose


def _mixed(model: nn.Module) -> bool:
    return len({p.dtype for p in model.parameters()}) > 1


def _kept_whole(model: nn.Module, fp32_modules: Sequence[str]) -> set[nn.Parameter]:
    """Parameters that stay fp32 although the rest of their module does not: they cannot be in a unit of their own.

    Hugging Face has such for corrections of a router that no gradient reaches. They stay whole on every rank.
    """
    whole = set()
    for name in split_fp32(model, fp32_modules)[1]:
        own = dict(model.get_submodule(name).named_parameters(recurse=False))
        trained = [key for key, p in own.items() if p.requires_grad]
        if trained:
            asked = f"the trainable fp32 parameter {name}.{trained[0]} beside others of another dtype in {name}"
            change = "freeze it (requires_grad=False), or train the model in fp32"
            raise PlanError(Violation(asked, "1 unit must have 1 dtype", change))
        whole |= set(own.values())
    return whole


def _subgroup(style: str, size: int, mesh: DeviceMesh) -> int | None:
    kind, count = _parse(style) or ("", "")
    if kind != "subgroup":
        return None
    n = int(count)
    if n == size:
        return None
    if n < 2 or size % n:
        legal = [d for d in range(2, size + 1) if size % d == 0]
        asked = f"style {style!r}: reshard to groups of {n}"
        raise PlanError(Violation(asked, f"the group must divide the {size} ranks of fsdp", f"use one of {legal}"))
    return n


def _shared_parameters(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


def _refuse_split_ties(modules: Sequence[nn.Module], names: Sequence[str], tied: Mapping[int, list[str]]) -> None:
    for module in modules:
        for parameter in module.parameters():
            owners = tied.get(id(parameter), [])
            outside = [o for o in owners if not any(o == n or o.startswith(n + ".") for n in names)]
            if outside:
                inside = [o for o in owners if o not in outside]
                asked = f"rules that put {inside[0]} into the unit {list(names)}"
                needs = f"its weight is tied to {outside}, and tied weights must be in 1 unit"
                raise PlanError(Violation(asked, needs, "give all of them the same 'unit:NAME', or 'root'"))


def _follows(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the second unit's first layer comes right after the first one's last."""
    return int(others[0].rpartition(".")[2]) == int(names[-1].rpartition(".")[2]) + 1


def _runs_last(names: Sequence[str], model: nn.Module) -> bool:
    """Whether this unit holds the head: backward starts there, so freeing it after forward gains nothing."""
    get = getattr(model, "get_output_embeddings", lambda: None)
    head = get()
    return head is not None and any(model.get_submodule(name) is head for name in names)
