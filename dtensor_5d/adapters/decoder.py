"""Where the decoder of a Hugging Face causal language model is: found by structure, without a family's name.

    model.embed_tokens     embedding, before        ids [B, S] -> [B, S, M]
    model.layers.0 .. n-1  layers                   run by `base` = model
    model.norm             after
    lm_head                head, after              [B, S, M] -> [B, S, V]

Letters: B batch, S sequence, M model size, V vocabulary, E experts, T tokens, K experts per token.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dtensor_5d.adapters.trace import trace_order
from dtensor_5d.errors import PlanError, Violation

__all__ = ["Decoder", "find_decoder", "model_head", "parameter_ties"]

# The piece that a wrapper puts into its module's name: the wrapper, and what to do instead.
_WRAPPERS = {
    "_orig_mod": ("torch.compile", "give the plain model and the option compile=True"),
    "_fsdp_wrapped_module": ("FSDP1", "give the plain model; the data axis shards it"),
    "_checkpoint_wrapped_module": ("checkpoint_wrapper", "give the plain model and the option recompute"),
}


@dataclass(frozen=True)
class Decoder:
    """Names of the parts of a causal language model, as `named_modules()` and `named_parameters()` give them.

    layers, n_layers: the list of decoder layers and its length. base: the module whose forward runs it.
    before, between, after: modules outside the layers that own a parameter and run before the first layer, after the
    first and before the last one, after the last one; in the order they run. other: such modules that did not run on
    plain text (towers of other modalities).
    embedding, head: the input embedding, and the projection to the vocabulary (None: the model has none).
    ties: parameters that are one tensor under several names, Hugging Face's first name first.
    experts: modules with fused [E, ., .] parameters and forward(hidden [T, M], index [T, K], weights [T, K]).
    other_experts: modules with fused experts but another forward. routers: one beside each of `experts` and
    `other_experts`, where there is one.
    fp32_modules: owners of parameters that Hugging Face keeps in fp32 when the model is in bf16.
    buffers_only: modules outside the layers with buffers and no parameters (rotary tables).
    tuple_layers: the model takes element 0 of what a layer returns.
    in_order: every layer runs once, in the order of its number.
    hidden: the shape of what goes from layer to layer, behind [B, S].
    """

    layers: str
    n_layers: int
    base: str
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    other: tuple[str, ...]
    embedding: str
    head: str | None
    ties: tuple[tuple[str, ...], ...]
    experts: tuple[str, ...]
    other_experts: tuple[str, ...]
    routers: tuple[str, ...]
    fp32_modules: tuple[str, ...]
    buffers_only: tuple[str, ...]
    tuple_layers: bool
    in_order: bool
    hidden: tuple[int, ...]

    def layer(self, number: int) -> str:
        """The name of one layer.

        Example:
            >>> find_decoder(gpt2).layer(3)
            'transformer.h.3'
        """
        return f"{self.layers}.{number}"


def find_decoder(model: nn.Module) -> Decoder:
    """Find the decoder of a Hugging Face causal language model, on meta or in memory.

    The model is not changed, nothing is computed with its weights and no other rank is asked. Adapters such as LoRA
    may be in place already. Errors: `PlanError` for a model without decoder layers or input embedding, an
    encoder-decoder, a wrapped model, and one whose forward does not run from `input_ids` alone.

    Example:
        >>> find_decoder(AutoModelForCausalLM.from_config(gpt2_config)).before
        ('transformer.wte', 'transformer.wpe')
    """
    modules = dict(model.named_modules())
    _refuse_wrapped(model, modules)
    embedding = _embedding(model, modules)
    layers = _layer_list(model, modules, embedding)
    n_layers = len(list(modules[layers].children()))
    order = trace_order(model, layers)
    outside = {name: m for name, m in modules.items() if not name.startswith(layers + ".")}
    reached = {*order.before, *order.between, *order.after}
    experts, other_experts, routers = _experts(modules)
    return Decoder(
        layers=layers,
        n_layers=n_layers,
        base=order.base,
        before=order.before,
        between=order.between,
        after=order.after,
        other=tuple(name for name, m in outside.items() if _owned(m) and name not in reached),
        embedding=embedding,
        head=model_head(model),
        ties=parameter_ties(model),
        experts=experts,
        other_experts=other_experts,
        routers=routers,
        fp32_modules=_fp32_modules(model),
        buffers_only=tuple(
            name
            for name, m in outside.items()
            if any(b is not None for b in m._buffers.values()) and next(m.parameters(), None) is None
        ),
        tuple_layers=order.tuples,
        in_order=order.visits == tuple(range(len(order.visits))) and len(order.visits) == n_layers,
        hidden=order.hidden,
    )


def _owned(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _refuse_wrapped(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    found = [
        (wrapper, name, change)
        for piece, (wrapper, change) in _WRAPPERS.items()
        if (name := next((n for n in modules if piece in n.split(".")), None)) is not None
    ]
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        found.append((type(model).__name__, "module", "give its .module; the data axis replaces the wrapper"))
    sharded = next((name for name, module in modules.items() if isinstance(module, FSDPModule)), None)
    cut = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if sharded is not None:
        found.append(("fully_shard", sharded or "the model", "give the plain model; the data axis shards it"))
    elif cut is not None:
        change = "build the model anew; parallelize (or parallelize_module) has cut this one already"
        found.append(("parameters that are DTensors", cut, change))
    if found:
        raise PlanError(
            Violation(f"a model wrapped by {wrapper} ({name})", "must be the plain Hugging Face model", change)
            for wrapper, name, change in found
        )


def _name_of(module: nn.Module | None, modules: dict[str, nn.Module]) -> str | None:
    return next((name for name, m in modules.items() if m is module), None)


def _embedding(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    try:
        name = _name_of(model.get_input_embeddings(), modules)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        name = None
    if name is None:
        raise PlanError(
            Violation(
                f"{type(model).__name__} has no input embedding",
                "model.get_input_embeddings() must return one of its modules",
                "give a Hugging Face causal language model, e.g. AutoModelForCausalLM.from_config(config)",
            )
        )
    return name


def model_head(model: nn.Module) -> str | None:
    """The name of the projection to the vocabulary, or None for a model without one.

    Example:
        >>> model_head(llama)
        'lm_head'
    """
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    return None if head is None else _name_of(head, dict(model.named_modules()))


def _layer_list(model: nn.Module, modules: dict[str, nn.Module], embedding: str) -> str:
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(
            Violation(
                f"{type(model).__name__} is an encoder-decoder",
                "one list of decoder layers must make up the model",
                "give a decoder-only causal language model",
            )
        )
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    wanted: int | None = getattr(text, "num_hidden_layers", None)
    lists: list[str] = []
    for name, module in modules.items():
        outermost = not any(name.startswith(found + ".") for found in lists)
        if isinstance(module, nn.ModuleList) and outermost and any(list(m.children()) for m in module):
            lists.append(name)
    lengths = {name: len(list(modules[name].children())) for name in lists}
    # A config can count otherwise (two sublayers as two, or the layers of another part), so one list alone is the one.
    fitting = [name for name in lists if wanted in (None, lengths[name]) or len(lists) == 1]
    if not fitting:
        seen = ", ".join(f"{name} ({length})" for name, length in lengths.items()) or "none"
        raise PlanError(
            Violation(
                f"{type(model).__name__} has no decoder layers: its lists of modules with submodules are: {seen}",
                "must have an nn.ModuleList of decoder layers"
                + ("" if wanted is None else f", config.num_hidden_layers = {wanted} of them"),
                "give a Hugging Face causal language model, e.g. AutoModelForCausalLM.from_config(config)",
            )
        )

    # Beside the input embedding: the towers of a multimodal model can have as many layers as its text model.
    def closeness(name: str) -> tuple[int, int]:
        shared = 0
        for one, two in zip(name.split("."), embedding.split(".")):
            if one != two:
                break
            shared += 1
        return shared, sum(parameter.numel() for parameter in modules[name].parameters())

    return max(fitting, key=closeness)


def parameter_ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that are one tensor, Hugging Face's first name first.

    Example:
        >>> parameter_ties(gpt2)
        (('transformer.wte.weight', 'lm_head.weight'),)
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _experts(modules: dict[str, nn.Module]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    ours: list[str] = []
    others: list[str] = []
    routers: list[str] = []
    for name, module in modules.items():
        fused = [parameter for parameter in _owned(module) if parameter.dim() == 3]
        if len(fused) < 2 or len({parameter.shape[0] for parameter in fused}) > 1:
            continue
        # forward may take *args after a wrapper; `signature` looks through to the wrapped one.
        taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
        positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        (ours if len(positional) >= 3 else others).append(name)
        routers.extend(_router(name, fused[0].shape[0], modules))
    return tuple(ours), tuple(others), tuple(routers)


def _router(experts: str, count: int, modules: dict[str, nn.Module]) -> list[str]:
    """The router beside these experts: the smallest module with an [E, M] parameter that is no plain Linear.

    A router hands out weights and indices, so it has a class of its own; a Linear with E rows is some other gate.
    """
    parent = experts.rpartition(".")[0]
    sizes: dict[str, int] = {}
    for child, module in modules[parent].named_children():
        name = f"{parent}.{child}" if parent else child
        matrices = [p for p in module.parameters() if p.dim() == 2]
        if name != experts and type(module) is not nn.Linear and any(p.shape[0] == count for p in matrices):
            sizes[name] = sum(p.numel() for p in matrices)
    return [min(sizes, key=sizes.__getitem__)] if sizes else []


def _fp32_modules(model: nn.Module) -> tuple[str, ...]:
    # The patterns of transformers' own loader: searched anywhere in a parameter's name, `*` for anything.
    patterns = [p.replace("*", ".*") for p in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    kept = [name for name, _ in model.named_parameters() if any(re.search(pattern, name) for pattern in patterns)]
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in kept))
