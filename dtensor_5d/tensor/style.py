"""Tensor-parallel styles, each alone with torch's `parallelize_module`, and together as `apply.py` puts them.

    parallelize_module(model, mesh["tp"], {
        "model.layers.*.self_attn": BlockInput(),          # one exchange for q, k and v
        "model.layers.*.self_attn.q_proj": ColwiseParallel(own_input=False), ...
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),   # alone: it exchanges its own input
    })

Parameters become DTensors, computing is on plain local tensors: a DTensor costs several times the dispatch of a plain
one per operation. Names stay what they are. What is left of a size after cutting must be whole: ranks hold equal parts,
except of the vocabulary.

Letters: B batch, S sequence, M model size, V vocabulary, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_5d.adapters.stand_in import StandIn
from dtensor_5d.checkpoint.slices import chunk_sizes
from dtensor_5d.ops import added_once, all_gather_split, all_reduce_identity, identity_all_reduce
from dtensor_5d.random import SavedStream, draw_seed, switch_stream
from dtensor_5d.tensor.check import output_dim
from dtensor_5d.tensor.interpose import interposed, map_hidden, map_output
from dtensor_5d.tensor.loss import Vocabulary
from dtensor_5d.tensor.place import cut_parameter
from dtensor_5d.tensor.sequence import into_block, into_whole, out_of_block, out_of_whole
from dtensor_5d.tensor.state import TensorState

__all__ = [
    "BlockInput", "ColwiseParallel", "CutParameters", "HeadParallel", "NormParallel", "RowwiseParallel",
    "SequenceParallel", "SumOutput", "VocabularyEmbedding", "WholeParameters", "WholeTokens",
]  # fmt: skip


class _Style(ParallelStyle):
    """state: what it shares with the other styles of a model; alone it has its own."""

    def __init__(self, state: TensorState | None = None) -> None:
        self._state = state

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, StandIn):  # of a pipeline's stage: another rank has the weights
            self.apply(module, device_mesh, self._state or TensorState.on(device_mesh))
        return module

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        raise AssertionError(f"{type(self).__name__} does not say what it does")

    def __repr__(self) -> str:
        # The same on all ranks: plans are compared by it.
        own = {name: value for name, value in vars(self).items() if name not in ("_state", "src_data_rank", "grouped")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in own.items())})"


class ColwiseParallel(_Style):
    """A linear layer of which each rank computes a part of the outputs.

    own_input: it exchanges its own input (False: the block around it has done so for several).
    sections: lengths of outputs that are stored one after the other and cut each by itself (q, k and v), or the number
    of equal ones (gate and up). grouped: `with_copies(mesh, n)`, where n neighbouring ranks hold the same part (kv
    heads fewer than ranks).
    """

    def __init__(
        self, *, own_input: bool = True, sections: Sequence[int] | int | None = None,
        grouped: DeviceMesh | None = None, state: TensorState | None = None,
    ) -> None:  # fmt: skip
        super().__init__(state)
        self.own_input, self.sections, self.grouped = own_input, sections, grouped

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        mesh = self.grouped or mesh
        outputs: int = module.weight.shape[output_dim(module)]  # type: ignore[assignment,union-attr,index]
        sections = [outputs // self.sections] * self.sections if isinstance(self.sections, int) else self.sections
        for name in _own(module):
            _read_cut(module, name, mesh, 0 if name == "bias" else output_dim(module), state, sections)
        if hasattr(module, "nf"):  # transformers' Conv1D shapes its output by it
            module.nf = module.nf // mesh.size(0)
        if self.own_input:
            interposed(module).before.append(map_hidden(lambda x: into_block(x, state)))


class RowwiseParallel(_Style):
    """A linear layer whose inputs were cut by the layer before; outputs are summed, the bias is added once.

    sums: False where the block around it sums several outputs at once.
    """

    def __init__(self, *, sums: bool = True, state: TensorState | None = None) -> None:
        super().__init__(state)
        self.sums = sums

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        for name in _own(module):
            if name == "bias":
                interposed(module).reads[name] = lambda bias: added_once(bias, state.rank == 0)
            else:
                _read_cut(module, name, mesh, 1 - output_dim(module), state)
        if self.sums:
            interposed(module).after.append(lambda y: out_of_block(y, state))


class CutParameters(_Style):
    """Bare parameters of a module whose own forward computes with local ones: attention sinks.

    dims: parameter -> the dim to cut, or (dim, number of equal sections along it), or None: the same on all ranks, and
    added once (a bias of summed outputs).
    """

    def __init__(self, dims: dict[str, int | tuple[int, int] | None], *, state: TensorState | None = None) -> None:
        super().__init__(state)
        self.dims = dims

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        for name, dim in self.dims.items():
            if dim is None:
                interposed(module).reads[name] = lambda bias: added_once(bias, state.rank == 0)
            elif isinstance(dim, tuple):
                length = module._parameters[name].shape[dim[0]]  # type: ignore[union-attr]  # a rule names it
                _read_cut(module, name, mesh, dim[0], state, [length // dim[1]] * dim[1])
            else:
                _read_cut(module, name, mesh, dim, state)


class WholeParameters(_Style):
    """A module that stays whole, but runs on this rank's part: its heads, its summand, its tokens."""

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        for owner in module.modules():
            for name in _own(owner):
                _read_summand(owner, name, state, state.group)


class SequenceParallel(WholeParameters):
    """`WholeParameters` for a module that runs on this rank's part of the sequence (the norms between blocks)."""

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        for owner in module.modules():
            for name in _own(owner):
                _read_summand(owner, name, state, state.group, lambda: state.cut or not state.sequence)


class WholeTokens(_Style):
    """A module that stays whole and runs on all tokens, alike on every rank: attention that is not cut.

    name: tells its random numbers from those of other modules.
    """

    def __init__(self, *, name: str = "", state: TensorState | None = None) -> None:
        super().__init__(state)
        self.name = name

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        saved: list[SavedStream] = []

        def enter(x: Tensor) -> Tensor:
            if state.draws and module.training and state.cut:
                saved.append(switch_stream(x.device, "whole", state.seed, self.name))
            return into_whole(x, state)

        def leave(y: Tensor) -> Tensor:
            if saved:
                saved.pop().restore()
            return out_of_whole(y, state)

        interposed(module).before.append(map_hidden(enter))
        interposed(module).after.append(map_output(leave))


class NormParallel(_Style):
    """An RMS norm over a size of which each rank has a part (q and k norms over all heads together).

    The ranks sum their squares: one number a token.
    """

    def __init__(self, *, grouped: DeviceMesh | None = None, state: TensorState | None = None) -> None:
        super().__init__(state)
        self.grouped = grouped

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        copies = self.grouped.size(1) if self.grouped else 1
        whole: int = module.weight.shape[0]  # type: ignore[assignment,union-attr,index]
        eps = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)  # type: ignore[arg-type]
        _read_cut(module, "weight", self.grouped or mesh, 0, state)

        def norm(x: Tensor) -> Tensor:
            wide = x.float()
            squares = wide.square().sum(-1, keepdim=True)
            # The sum goes on into each rank's own heads, so its gradient is a sum over ranks as well.
            squares = identity_all_reduce(all_reduce_identity(squares, state.group), state.group)
            wide = wide * torch.rsqrt(squares / (whole * copies) + eps)
            return (module.weight * wide).to(x.dtype)

        interposed(module).compute = norm


class VocabularyEmbedding(_Style):
    """An embedding of which each rank holds some rows; the vocabulary need not divide."""

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        start, end = _vocabulary_part(module.weight.shape[0], state)  # type: ignore[union-attr,index]
        _read_cut(module, "weight", mesh, 0, state)
        between = interposed(module)
        local = between.reads["weight"]
        between.reads["weight"] = lambda w: _not_empty(local(w))
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            module.padding_idx = padding - start if start <= padding < end else None  # type: ignore[assignment]
        compute = between.compute

        def look_up(ids: Tensor) -> Tensor:
            mine = (ids >= start) & (ids < end)
            rows: Tensor = compute((ids - start).masked_fill(~mine, 0))
            return all_reduce_identity(rows.masked_fill(~mine.unsqueeze(-1), 0.0), state.group)

        between.compute = look_up


class HeadParallel(ColwiseParallel):
    """The projection to the vocabulary, which need not divide. Logits are gathered unless the loss takes them cut."""

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        vocabulary = module.weight.shape[0]  # type: ignore[union-attr,index]
        state.vocabulary = Vocabulary(state.group, *_vocabulary_part(vocabulary, state))
        sizes = chunk_sizes(vocabulary, state.size)
        for name in _own(module):
            _read_cut(module, name, mesh, 0, state)

        def gather(logits: Tensor) -> Tensor:
            return all_gather_split(logits, state.group, -1, sizes) if state.whole_logits else logits

        # A hook of the call: whoever runs forward chunk by chunk over tokens has its input exchanged once.
        module.register_forward_pre_hook(lambda _, args: (identity_all_reduce(args[0], state.group), *args[1:]))
        interposed(module).after.append(gather)


class BlockInput(_Style):
    """An attention or MLP module: its input is exchanged once, for all projections that read it.

    Dropout between here and the row-parallel layer is drawn anew on each rank, which has other heads and channels.
    """

    def __init__(self, *, row: str | None = None, state: TensorState | None = None) -> None:
        super().__init__(state)
        self.row = row

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        saved: list[SavedStream] = []

        def enter(x: Tensor) -> Tensor:
            if state.draws and module.training and not state.cut and self.row:
                saved.append(switch_stream(x.device, "block", draw_seed(x.device), state.rank))
            return into_block(x, state)

        def leave(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if saved:
                saved.pop().restore()
            return args, kwargs

        interposed(module).before.append(map_hidden(enter))
        if self.row:
            interposed(module.get_submodule(self.row)).before.append(leave)


class SumOutput(_Style):
    """A module whose output is a sum of several row-parallel parts that do not sum by themselves."""

    def apply(self, module: nn.Module, mesh: DeviceMesh, state: TensorState) -> None:
        interposed(module).after.append(map_output(lambda y: out_of_block(y, state)))


def _vocabulary_part(size: int, state: TensorState) -> tuple[int, int]:
    """The ids start <= id < end whose rows this rank holds."""
    sizes = chunk_sizes(size, state.size)
    start = sum(sizes[: state.rank])
    return start, start + sizes[state.rank]


def _own(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def _read_cut(
    module: nn.Module, name: str, mesh: DeviceMesh, dim: int, state: TensorState, sections: Sequence[int] | None = None
) -> None:
    cut_parameter(module, name, mesh, dim, sections=sections)
    placed = module._parameters[name]
    assert isinstance(placed, DTensor)
    placements = placed.placements
    read: Callable[[Tensor], Tensor] = lambda p: p.to_local(grad_placements=placements)  # type: ignore[attr-defined]  # noqa: E731
    if mesh.ndim == 2:
        group = mesh.get_group(1)
        state.sum_gradient(module, name, group)
        interposed(module).reads[name] = lambda p: state.summand(read(p), group)
    else:
        interposed(module).reads[name] = read


def _read_summand(
    module: nn.Module, name: str, state: TensorState, group: dist.ProcessGroup, sums: Callable[[], bool] = lambda: True
) -> None:
    """sums: whether the ranks see other parts in this forward."""
    state.sum_gradient(module, name, group)
    interposed(module).reads[name] = lambda p: state.summand(p, group) if sums() else p


def _not_empty(rows: Tensor) -> Tensor:
    """A rank without rows still looks something up: a row of zeros that counts for no id."""
    return rows if rows.shape[0] else torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
