"""`ContextParallel`: the attention of a Hugging Face model over a sequence that is cut over ranks.

    parallelize_module(model, mesh["cp"], {"model.layers.*.self_attn": ContextParallel()})
    loss = model(**cut_batch(batch, mesh["cp"])).loss       # this rank's part of the sum, see `cut_batch`

transformers hands every attention module's q, k and v to the function that its config names. Ours is registered under
one name and without a mask function, so transformers makes no masks: what a query sees follows from the rows' `Scope`
(positions and documents) and from what the module asks for (window, soft-cap, sinks, chunks, scale).

Which rows are run is an argument where the family hands arguments on (`context_rows`), else what `ContextState.around`
says. The model's own attention is in place where no rows are run: called by hand on whole rows it is what it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._python_dispatch import _disable_current_modes

from dtensor_5d.batch import MicroBatch
from dtensor_5d.context.rotary import adapts_to_length, on_whole_range
from dtensor_5d.context.rows import LocalRows
from dtensor_5d.context.same_mask import mask_violations
from dtensor_5d.context.scope import attend_keeping
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.context import ATTENTION, COUNTS_REAL, refusal

__all__ = ["ATTENTION", "ContextParallel", "ContextState", "dispatches_attention"]

_NOTE = "_dtensor_5d_context"


class ContextState:
    """What the attention modules of one model share: the group, which rows are being run, and who was reached.

    modules: those that attend. configs: every config that names an attention to them or to what makes masks. keeps: a
    forward keeps its outputs for the recomputation that follows in backward, which then sends nothing. alone: the
    modules run cut rows only.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, keeps: bool = False, alone: bool = False
    ) -> None:
        self.group = group
        self.keeps = keeps
        self.alone = alone
        self.rows: LocalRows | None = None
        self.modules: list[nn.Module] = []
        self.configs: list[Any] = []
        self._reached: set[int] = set()
        self._missed: set[nn.Module] = set()
        if group.size() > 1:  # p2p of NCCL needs a communicator that all ranks have joined
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextState:
        return self  # process groups are not copied; a copied model runs over the same ranks

    def attach(self, module: nn.Module) -> None:
        """Counts this module among those that attend; each of its calls must reach our attention."""
        self.modules.append(module)
        module.register_forward_pre_hook(lambda called, _: self._reached.discard(id(called)))
        module.register_forward_hook(self._note_call)

    def reach(self, module: nn.Module) -> None:
        """Notes that the attention of this module ran over the axis."""
        self._reached.add(id(module))

    def _note_call(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._reached:
            return
        if self.alone:
            raise self._missing([module])
        if self.rows is not None:
            self._missed.add(module)

    def _missing(self, missed: Collection[nn.Module]) -> PlanError:
        layers = [getattr(module, "layer_idx", None) for module in self.modules if module in missed]
        asked = f"{len(layers)} of {len(self.modules)} attention modules (layers {layers[:4]}) attended otherwise"
        needs = "all must hand q, k and v to the function that their config names"
        return PlanError(Violation(asked, needs, "leave model.config._attn_implementation alone while the model runs"))

    @contextmanager
    def around(self, micro: MicroBatch) -> Iterator[None]:
        """Forward and backward, or one of them, of rows that were cut.

        Errors: `PlanError` where the attention of a module that was called ran otherwise.
        """
        before = [config._attn_implementation for config in self.configs]
        for config in self.configs:
            config._attn_implementation = ATTENTION
        tuning = [getattr(module, "attn_temperature_tuning", False) for module in self.modules]
        tuned: list[tuple[Any, Any]] = [(module, value) for module, value in zip(self.modules, tuning) if value]
        for module, _ in tuned:  # ours, from the positions in the whole row
            module.attn_temperature_tuning = False
        self.rows, self._missed = micro.local, set()
        try:
            yield
        finally:
            self.rows = None
            for module, value in tuned:
                module.attn_temperature_tuning = value
            for config, attention in zip(self.configs, before):
                config._attn_implementation = attention
        if self._missed:
            raise self._missing(self._missed)


class ContextParallel(ParallelStyle):
    """Lets attention modules attend over the axis.

    state: what the modules of a model share; None for a style that is used alone: then the modules run rows from
    `cut_batch` only. With a state, rotary embeddings that depend on the length may be named too.
    Errors: `PlanError` for a module whose attention transformers does not dispatch, and for families that cannot run
    over the axis.
    """

    def __init__(self, *, state: ContextState | None = None) -> None:
        self.state = state
        self._alone: ContextState | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        state = self.state or self._alone
        if state is None:
            device = torch.device(device_mesh.device_type)
            state = self._alone = ContextState(device_mesh.get_group(), device, alone=True)
        if adapts_to_length(module) and self.state is not None:
            on_whole_range(module, lambda: state.rows.longest if state.rows is not None else None)
            return module
        if not dispatches_attention(module):
            raise PlanError(
                Violation(f"ContextParallel for {type(module).__name__}",
                          "must be an attention module that transformers dispatches",
                          'name the attention of the layers, for example {"model.layers.*.self_attn": style}')
            )  # fmt: skip
        why = refusal(str(getattr(module.config, "model_type", ""))) if self.state is None else None
        if why is not None:
            asked = f"ContextParallel for {type(module).__name__}"
            raise PlanError(Violation(asked, f"attention must run over a cut sequence, but {why}", "use another axis"))
        if bad := mask_violations(module):
            raise PlanError(bad)
        _register()
        module.__dict__[_NOTE] = _Layer(state, module)
        state.attach(module)
        if self.state is None:
            module.config._attn_implementation = ATTENTION  # type: ignore[union-attr]  # also of what makes masks
            if module.__dict__[_NOTE].tuned:
                module.attn_temperature_tuning = False  # type: ignore[assignment]
        return module


def dispatches_attention(module: nn.Module) -> bool:
    """Whether this module's own forward hands q, k and v to the function that its config names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_interface" in code.co_names and hasattr(module, "config")


class _Layer:
    """What one attention module asks for that it does not say in its call."""

    def __init__(self, state: ContextState, module: nn.Module) -> None:
        self.state = state
        config: Any = module.config
        types = getattr(config, "layer_types", None)
        index = getattr(module, "layer_idx", None)
        kind = types[index] if types is not None and index is not None else None
        self.windowed = kind == "sliding_attention"
        self.chunk: int | None = config.attention_chunk_size if kind == "chunked_attention" else None
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = {rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}
        self.needs_run = None
        if kinds & {"dynamic", "longrope"}:
            self.needs_run = "rotary embeddings that depend on the length"
        elif getattr(config, "model_type", "") in COUNTS_REAL:
            self.needs_run = "positions that do not count padding"
        # llama4, layers without rotary embedding: queries grow with their place in the row
        self.tuned = bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
    context_rows: LocalRows | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: q `[B, H, L, D]`, k, v `[B, K, L, D]` -> (`[B, L, H, D]`, no weights)."""
    layer: _Layer | None = module.__dict__.get(_NOTE)
    if layer is None:
        raise PlanError(
            Violation(f"attention over the context axis in {type(module).__name__}, which no rule speaks of",
                      "every attention module of the model must attend over the same axis",
                      "name all of them in the rules of ContextParallel")
        )  # fmt: skip
    rows = context_rows if context_rows is not None else layer.state.rows
    bad = []
    if rows is None:
        bad.append(
            Violation(f"{type(module).__name__} with rows that were not cut",
                      "attention over the context axis needs the documents and positions of the whole rows",
                      "use run.step, run.evaluate or run.logits; alone: model(**cut_batch(batch, mesh['cp'], ...))")
        )  # fmt: skip
    if context_rows is not None and layer.needs_run is not None:
        bad.append(
            Violation(f"ContextParallel alone for {type(module).__name__}",
                      f"{layer.needs_run}: the whole model must be prepared", "use plan_for and parallelize")
        )  # fmt: skip
    if attention_mask is not None:
        bad.append(
            Violation(f"an attention_mask of shape {tuple(attention_mask.shape)}",
                      "a mask over a sequence that is cut is made from positions and documents",
                      "give attention_mask [B, S], position_ids or document_ids to the run or to cut_batch")
        )  # fmt: skip
    if layer.windowed and sliding_window is None:
        bad.append(
            Violation(f"a layer of type sliding_attention in {type(module).__name__} without a window in its call",
                      "the window must reach the attention function", "this family cannot run over the context axis")
        )  # fmt: skip
    if bad:
        raise PlanError(bad)
    assert rows is not None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scope = rows.scope.masked(causal=causal, window=sliding_window, chunk=layer.chunk)
    if layer.tuned:
        query = _tempered(module, query, rows.places)
    layer.state.reach(module)
    keeps = layer.state.keeps and torch.is_grad_enabled()
    kept = rows.kept.pop(id(module), None) if keeps else None
    # What a recomputation keeps of operations is kept here as a whole.
    with _disable_current_modes() if keeps else nullcontext():
        out, found = attend_keeping(
            query, key, value, scope=scope, scale=scaling, softcap=softcap, sinks=s_aux, dropout=dropout, kept=kept
        )
    if keeps and kept is None:
        rows.kept[id(module)] = found
    return out.transpose(1, 2).contiguous(), None


def _tempered(module: Any, query: Tensor, places: Tensor) -> Tensor:
    """llama4's temperature (arXiv 2501.19399), which its own code would take from places within the cut row."""
    scale = torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return (query * scale.view(-1, 1, places.shape[-1], 1)).to(query.dtype)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
