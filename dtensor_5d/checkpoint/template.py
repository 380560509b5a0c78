"""The pristine model on meta: what Hugging Face's class would hold for this config, before anything was cut.

Names, whole shapes, ties, key conversions and initialisation rules are asked of the template. The model that trains
may lack layers (other pipeline stages), carry FSDP's class and hold DTensors; names are what both share.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtensor_5d.checkpoint.slices import cut, local_part, local_slices
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.sections import Sections

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Template", "fill", "materialise", "named_tensors", "reshard", "swap_in", "template_of", "unit_of"]


@dataclass(frozen=True)
class Template:
    """The whole model on meta, in fp32 unless its class asks for another dtype."""

    model: PreTrainedModel

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by every name it has (a tied one by several)."""
        return named_tensors(self.model)

    @cached_property
    def first_name(self) -> dict[str, str]:
        """Each name -> the first name of the same tensor, under which Hugging Face stores it."""
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in self.tensors.items()}

    @cached_property
    def tied(self) -> frozenset[str]:
        """Every name of the tensors that have more than one."""
        several = {first for name, first in self.first_name.items() if name != first}
        return frozenset(name for name, first in self.first_name.items() if first in several)

    @cached_property
    def rebuilt(self) -> frozenset[str]:
        """Names of the non-persistent buffers: never stored, computed from the config (rotary frequencies)."""
        return frozenset(name for name, _ in self.model.named_non_persistent_buffers(remove_duplicate=False))

    @cached_property
    def stored(self) -> tuple[str, ...]:
        """What a checkpoint holds: first names of parameters and persistent buffers, in the model's order."""
        ignored = tuple(self.model._keys_to_ignore_on_save or ())
        return tuple(n for n in self.model.state_dict() if self.first_name[n] == n and n not in ignored)


def template_of(model: nn.Module) -> Template:
    """The template for a model that may be sharded, cut or on meta. Errors: `PlanError` if it is not Hugging Face's."""
    from transformers import PreTrainedModel

    cls = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    if not issubclass(cls, PreTrainedModel):
        raise PlanError(
            Violation(
                f"a model of class {cls.__name__}",
                "weights are loaded, initialised and saved by the rules of a transformers PreTrainedModel",
                "give the Hugging Face model itself, not a wrapper around it",
            )
        )
    build: Any = cls
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        return Template(build._from_config(config, dtype=torch.float32, attn_implementation="eager"))


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones under each of their names."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return named


def unit_of(name: str) -> str:
    """The unit a tensor or module belongs to: its numbered block (a decoder layer), or "" for all that is in none.

    Example:
        >>> unit_of("model.layers.3.mlp.experts.down_proj"), unit_of("model.norm.weight")
        ('model.layers.3', '')
    """
    numbered = re.match(r"(.*?\.\d+)(\.|$)", name)
    return numbered.group(1) if numbered else ""


def reshard(model: nn.Module) -> None:
    """Puts FSDP's stored shards back in place of gathered parameters: names then lead to what the optimizer holds."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Gives memory on `device` to what is on meta; the `Parameter` objects stay the same ones, ties included.

    The values are arbitrary afterwards. Hooks registered on a parameter while it was on meta do not survive, as with
    `Module.to_empty`. FSDP2 looks at the new memory (and pads uneven shards) before its first forward.
    """
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                swap_in(parameter, torch.empty_like(parameter, device=device))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def swap_in(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Makes the object `parameter` hold `values`, its attributes kept: who knows the object need not be told."""
    new = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for key, value in vars(parameter).items():
        if key not in vars(new):
            setattr(new, key, value)
    torch.utils.swap_tensors(parameter, new)


@torch.no_grad()
def fill(tensor: torch.Tensor, whole: torch.Tensor, sections: Sections | None = None) -> None:
    """Copies this rank's slices of `whole` into `tensor`, in place and into its dtype."""
    local_part(tensor).copy_(cut(whole, local_slices(tensor, sections)))
