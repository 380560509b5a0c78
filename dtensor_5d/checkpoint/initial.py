"""First weights, equal on every layout: Hugging Face's own initialisation, one unit at a time, slices kept.

Why not let every rank draw its own shard: the numbers would depend on the layout. Why not draw the whole model: it may
not fit. A unit (a decoder layer, or what is in none) does; its numbers come from a generator seeded by
(seed, module name), so they depend neither on the layout nor on the other modules.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtensor_5d.checkpoint.agree import agree, agree_on, short
from dtensor_5d.checkpoint.template import (
    Template,
    fill,
    materialise,
    named_tensors,
    reshard,
    swap_in,
    template_of,
    unit_of,
)
from dtensor_5d.errors import Violation
from dtensor_5d.sections import sections_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["init_weights", "rebuild_buffers", "strangers"]


@dataclass(frozen=True)
class _Visit:
    """One module, and the (sub)model whose `_init_weights` speaks for it."""

    path: str
    module: nn.Module
    owner: PreTrainedModel


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, *, device: torch.device | str | None = None) -> None:
    """Initialises every parameter and buffer as the family does, with the same numbers on any layout.

    Example: `init_weights(model, seed=0)` on 1 rank and on dp_shard 4 gives bit for bit the same whole model.

    The rules are those of the model's Hugging Face class (`_init_weights`: the config's initializer_range, scaled
    projections, zero-centred norms), the numbers are drawn in fp32 on CPU and rounded to the parameter's dtype.
    Parameters on meta get memory on `device` (None: where their mesh is, else CPU), others are overwritten
    in place. At any time one unit is held whole. torch's generators are left as they were. All ranks call it.

    Errors: `PlanError` naming the tensors for which the family has no rule.
    """
    usable = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63
    agree([] if usable else [Violation(f"seed={seed!r}", "an integer in [0, 2^63) is required", "give for example 0")])
    agree_on(seed, f"seed={seed}", "all ranks must draw the same weights", "give every rank the same seed")
    template = template_of(model)
    agree(strangers(template, model))
    reshard(model)
    materialise(model, _home(model) if device is None else device)
    wanted, packed = named_tensors(model), sections_of(model)
    unset = []
    for unit, visits in _units(template.model).items():
        names = [n for n, first in template.first_name.items() if unit_of(first) == unit and n in wanted]
        _initialise(template, visits, names, seed)
        for name in names:
            if _is_unset(template.tensors[name]):
                unset.append(name)
            else:
                fill(wanted[name], template.tensors[name], packed.get(name))
        _drop(template, names)
    agree(_no_rule(unset))


@torch.no_grad()
def rebuild_buffers(model: nn.Module, template: Template) -> list[Violation]:
    """Computes the buffers that no checkpoint stores (rotary frequencies, embedding scales) into `model`.

    Returns what could not be computed. No communication.
    """
    wanted = named_tensors(model)
    names = [n for n in template.tensors if n in template.rebuilt and n in wanted]
    owners = {n.rpartition(".")[0] for n in names}
    _initialise(template, [v for v in _visits(template.model) if v.path in owners], names, seed=0)
    unset = [n for n in names if _is_unset(template.tensors[n])]
    for name in names:
        if name not in unset:
            fill(wanted[name], template.tensors[name])
    _drop(template, names)
    return _no_rule(unset)


def _home(model: nn.Module) -> torch.device:
    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    kind = next((mesh.device_type for mesh in meshes), "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _initialise(template: Template, visits: list[_Visit], names: list[str], seed: int) -> None:
    """Gives memory to the template's `names` and runs the family's rules for `visits` on them.

    Everything else stays on meta, where drawing has no effect and takes no numbers.
    """
    from transformers.initialization import guard_torch_init_functions

    for name in names:
        _set(template, name, _unset_like(template.tensors[name]))
    with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        for visit in visits:
            # Only the CPU generator: `torch.manual_seed` would reach for every accelerator's.
            torch.default_generator.manual_seed(_module_seed(seed, visit.path))
            visit.owner._initialize_weights(visit.module, visit.owner.is_custom_code())
            for name, tensor in visit.module.named_parameters(visit.path, recurse=False):
                if name in template.tied:
                    tensor._is_hf_initialized = True  # the first module to draw it has the say


def _units(model: PreTrainedModel) -> dict[str, list[_Visit]]:
    units: dict[str, list[_Visit]] = {}
    for visit in _visits(model):
        units.setdefault(unit_of(visit.path), []).append(visit)
    return units


def _visits(model: PreTrainedModel) -> Iterator[_Visit]:
    """Modules in the order in which Hugging Face initialises them: children first, each by its own submodel's rules.

    Children first matters: gpt2's blocks draw the weight of `c_proj` anew, scaled, after the projection drew it.
    """
    from transformers import PreTrainedModel

    def walk(path: str, module: nn.Module, owner: PreTrainedModel) -> Iterator[_Visit]:
        for name, child in module.named_children():
            below = child if isinstance(child, PreTrainedModel) else owner
            yield from walk(f"{path}.{name}" if path else name, child, below)
        yield _Visit(path, module, owner)

    return walk("", model, model)


def _module_seed(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits, as the generator takes


def _unset_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, _mark(tensor.dtype), device="cpu")


def _is_unset(tensor: torch.Tensor) -> bool:
    mark = _mark(tensor.dtype)
    if math.isnan(mark):
        return bool(tensor.isnan().any())
    return mark != 0 and bool((tensor == mark).any())


def _mark(dtype: torch.dtype) -> float | int:
    """A value that no initialisation writes; 0 where a dtype has none to spare."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _set(template: Template, name: str, values: torch.Tensor) -> None:
    """Replaces a tensor of the template; a parameter stays the same object, so that ties hold."""
    path, _, leaf = name.rpartition(".")
    module = template.model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = values
        template.tensors[name] = values
    else:
        swap_in(template.tensors[name], values)


def _drop(template: Template, names: list[str]) -> None:
    for name in names:
        _set(template, name, template.tensors[name].to("meta"))


def strangers(template: Template, model: nn.Module) -> list[Violation]:
    """Tensors of `model` that its Hugging Face class does not know."""
    cls = type(template.model).__name__
    return [
        Violation(
            f"the model holds {name}",
            f"only what {cls} builds from the config is known here",
            "add such parameters after the weights are in",
        )
        for name in named_tensors(model)
        if name not in template.tensors
    ]


def _no_rule(names: list[str]) -> list[Violation]:
    return short(
        [
            Violation(
                f"{name} is left without values",
                "the family's _init_weights must set every tensor",
                "load weights that hold it: load_pretrained(folder)",
            )
            for name in names
        ]
    )
