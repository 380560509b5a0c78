"""From rules to styles: what each module and parameter of a model becomes, checked before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.stand_in import StandIn
from dtensor_5d.adapters.tensor_rules import rule_of, section_count
from dtensor_5d.mesh import with_copies
from dtensor_5d.random import is_random
from dtensor_5d.tensor.heads import Heads, heads_of
from dtensor_5d.tensor.sequence import cut_between, whole_for_routers
from dtensor_5d.tensor.state import TensorState
from dtensor_5d.tensor.style import (
    BlockInput,
    ColwiseParallel,
    CutParameters,
    HeadParallel,
    NormParallel,
    RowwiseParallel,
    SequenceParallel,
    SumOutput,
    VocabularyEmbedding,
    WholeParameters,
    WholeTokens,
)
from dtensor_5d.tensor.zones import around, is_cut, stands_whole

__all__ = ["apply_rules"]


@dataclass(frozen=True)
class _Place:
    """Where a module stands: inside a block that exchanges for it, and one that sums for it."""

    in_block: bool
    summed: bool


def apply_rules(
    model: nn.Module, decoder: Decoder, rules: Mapping[str, Any], mesh: DeviceMesh, *, sequence: bool,
    stages: Sequence[range] | None = None,
) -> TensorState:  # fmt: skip
    """Cuts `model` over `mesh` (the tp axis) as the rules say; they must have passed `tensor_violations`.

    stages: the layers of every pipeline stage on this rank; other layers and modules are stand-ins.
    """
    state = TensorState(mesh.get_group(), sequence=sequence, draws=is_random(model))
    heads = heads_of(model)
    shared = any(style in ("column_kv", "norm_column_kv") for style in rules.values() if isinstance(style, str))
    copies = heads.copies(mesh.size()) if shared else 1
    grouped = with_copies(mesh, copies) if copies > 1 else None
    modules = {name: module for name, module in model.named_modules() if not isinstance(module, StandIn)}
    styled = {name: rule_of(name, rules) for name in modules}
    for name, style in styled.items():
        if style is None:
            continue
        outer = around(name)
        given = [styled.get(n) for n in outer]
        if any(stands_whole(n, styled, decoder.layers) for n in outer):
            continue  # computed alike on all ranks: nothing is summed in there
        in_block = "block" in given or "head" in given
        place = _Place(in_block, "sum_output" in given)
        if style == "block" and in_block:
            continue  # what is around it has exchanged its input already
        if stands_whole(name, styled, decoder.layers):
            style = "whole"
        made = _style_of(style, name, styled, place, heads, grouped, state)
        if made is not None:
            made._apply(modules[name], mesh)
        if style == "block":
            _local_heads(modules[name], [styled.get(n) for n in styled if n.startswith(name + ".")], heads, mesh.size())
    _bare_parameters(model, modules, rules, mesh, state)
    inner = tuple(f"{name}." for name, style in styled.items() if style == "block")
    inner += (f"{decoder.layers}.",) if sequence else ()
    state.whole_outputs = frozenset(n for n in modules if n and not n.startswith(inner)) - {decoder.head}
    if sequence:
        for layers in stages or [range(decoder.n_layers)]:
            ends = (layers.start == 0, layers.stop == decoder.n_layers)
            cut_between([modules[decoder.layer(n)] for n in layers], state, *ends)
        if decoder.routers and stages in (None, [range(decoder.n_layers)]):  # one in stages is not called by hand
            whole_for_routers(model, modules[decoder.layers.rpartition(".")[0]], state)
    return state


def _style_of(
    style: str, name: str, styled: Mapping[str, Any], place: _Place, heads: Heads, grouped: DeviceMesh | None,
    state: TensorState,
) -> ParallelStyle | None:  # fmt: skip
    own_input = not place.in_block
    if style == "column":
        return ColwiseParallel(own_input=own_input, state=state)
    if style == "column_kv":
        return ColwiseParallel(own_input=own_input, grouped=grouped, state=state)
    if style.startswith("packed_column"):
        return ColwiseParallel(own_input=own_input, sections=section_count(style), state=state)
    if style == "qkv":
        return ColwiseParallel(own_input=own_input, sections=heads.sections, state=state)
    if style == "row":
        return RowwiseParallel(sums=not place.summed, state=state)
    if style == "norm_column":
        return NormParallel(state=state)
    if style == "norm_column_kv":
        return NormParallel(grouped=grouped, state=state)
    if style == "embedding":
        return VocabularyEmbedding(state=state)
    if style == "head":
        return HeadParallel(state=state)
    if style == "block":
        ends = [n for n, s in styled.items() if s in ("row", "sum_output") and n.startswith(name + ".")]
        ends = [n for n in ends if not any(outer in ends for outer in around(n))]  # LoRA: the wrapper
        return BlockInput(row=ends[0][len(name) + 1 :] if len(ends) == 1 else None, state=state)
    if style == "sum_output":
        return None if place.summed else SumOutput(state=state)
    if style == "replicate_sum":
        return WholeParameters(state)
    if style == "sequence":
        return SequenceParallel(state) if state.sequence else None
    if style == "whole":
        return WholeTokens(name=name, state=state) if state.sequence else None
    assert style == "replicate", style
    return None


def _bare_parameters(
    model: nn.Module, modules: Mapping[str, nn.Module], rules: Mapping[str, Any], mesh: DeviceMesh, state: TensorState
) -> None:
    """Parameters that have a rule of their own: attention sinks."""
    for owner, module in modules.items():
        dims: dict[str, int | tuple[int, int] | None] = {}
        for leaf, parameter in module._parameters.items():
            style = rule_of(f"{owner}.{leaf}", rules) if parameter is not None else None
            if style is not None and is_cut(style):
                assert parameter is not None
                dims[leaf] = parameter_dim(style, parameter.dim())
        if dims:
            CutParameters(dims, state=state)._apply(module, mesh)


def parameter_dim(style: str, ndim: int) -> int | tuple[int, int] | None:
    """How a bare parameter is cut: a dim, (dim, sections), None for `once`. [E, out, in] experts have 3 dims."""
    if style.startswith("cut/"):
        return int(style[4:])
    if style == "once":
        return None
    if style.startswith("packed_column"):
        return ndim - 2, section_count(style)
    assert style in ("column", "row"), style
    return ndim - 1 if style == "row" else max(ndim - 2, 0)


def _local_heads(block: nn.Module, inside: list[Any], heads: Heads, tp: int) -> None:
    """Attention modules that shape by a count of heads get the rank's own counts; most take what is there."""
    if not any(isinstance(style, str) and _cuts_outputs(style) for style in inside):
        return
    for module in block.modules():
        for attribute, (whole, local) in heads.attributes(tp).items():
            if getattr(module, attribute, None) == whole:
                setattr(module, attribute, local)
        if "qkv" in inside and hasattr(module, "config") and not hasattr(module, "num_heads"):
            # Its forward asks the config, which the other modules share.
            config: Any = copy.copy(module.config)
            config.num_attention_heads = heads.query // tp
            module.config = config


def _cuts_outputs(style: str) -> bool:
    return style in ("column", "column_kv", "qkv") or style.startswith("packed_column")
