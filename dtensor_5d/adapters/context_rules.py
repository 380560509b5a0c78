"""The rules of the context axis for a model, what its batches must say, and why some models are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.batch import Explicit
from dtensor_5d.context.rotary import adapts_to_length
from dtensor_5d.context.same_mask import mask_violations
from dtensor_5d.context.style import ContextParallel, dispatches_attention
from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import Violation
from dtensor_5d.families.context import COUNTS_REAL, LAYER_TYPES, refusal
from dtensor_5d.families.facts import facts_for
from dtensor_5d.options import Options
from dtensor_5d.order import length_multiple
from dtensor_5d.plan import matches

__all__ = ["CONTEXT_STYLES", "context_rules", "context_violations", "explicit_rows", "rows_multiple"]

CONTEXT_STYLES: Mapping[str, str] = {
    "attention": "its queries attend to the keys of all ranks",
    "rotary": "frequencies as for the whole rows",
}

_DROPOUT = ("attention_dropout", "attn_dropout", "dropout")


def context_rules(model: nn.Module, decoder: Decoder, own: Mapping[str, Any]) -> dict[str, Any]:
    """Pattern of module names -> style. `own`: the user's, which go first."""
    rules: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name.startswith(decoder.layers + ".") and dispatches_attention(module):
            rules[_generic(name)] = "attention"
        elif adapts_to_length(module):
            rules[_generic(name)] = "rotary"
    return rules | dict(own)


def context_violations(
    model: nn.Module, decoder: Decoder, rules: Mapping[str, Any], degrees: Degrees, options: Options
) -> list[Violation]:
    """Everything that keeps `model` from running over this context axis; layers are told once."""
    found: dict[Violation, None] = {}
    for part in (_family(model, options), _styles(rules), _layers(model, decoder, rules)):
        found |= dict.fromkeys(part)
    found |= dict.fromkeys(_heads(model, degrees, options))
    return list(found)


def rows_multiple(degrees: Degrees, options: Options, *, sequence: bool) -> int:
    """What rows are padded to a multiple of: each rank of cp, and of tp under sequence parallelism, has as many."""
    parts = degrees.cp * degrees.tp if sequence else degrees.cp
    ordered = length_multiple(options.balance, degrees.cp) if degrees.cp > 1 else 1
    return parts * ordered // gcd(parts, ordered)


def explicit_rows(model: nn.Module) -> Explicit:
    """What the batches of this model must say where its rows are cut."""
    config: Any = model.config
    text = config.get_text_config()
    kind = getattr(config, "model_type", "")
    chunked = "chunked_attention" in (getattr(text, "layer_types", None) or ())
    return Explicit(
        any_jump=facts_for(kind).packs_by_position,
        blank_padding=config._attn_implementation == "sdpa",
        counts_real=kind in COUNTS_REAL,
        chunk=text.attention_chunk_size if chunked else None,
    )


def _family(model: nn.Module, options: Options) -> Iterator[Violation]:
    kind = str(getattr(model.config, "model_type", ""))
    why = refusal(kind)
    # The model may be wrapped by adapters.
    models = [type(module) for module in model.modules() if hasattr(type(module), "_can_set_attn_implementation")]
    can_set = bool(models) and models[0]._can_set_attn_implementation()
    if why is None and not can_set:
        why = "its attention is not dispatched by transformers"
    if why is not None and not (options.rules.get("cp") and can_set):
        change = "use dp_shard or tp, which leave the sequence whole"
        yield Violation(f"cp for the family {kind!r}", f"attention must run over a cut sequence, but {why}", change)


def _styles(rules: Mapping[str, Any]) -> Iterator[Violation]:
    for pattern, style in rules.items():
        if not isinstance(style, ContextParallel) and style not in CONTEXT_STYLES:
            needs = f"must be one of {', '.join(CONTEXT_STYLES)} or a ContextParallel"
            yield Violation(f"style {style!r} for {pattern!r} on the context axis", needs, "choose one of these")


def _layers(model: nn.Module, decoder: Decoder, rules: Mapping[str, Any]) -> Iterator[Violation]:
    named = [pattern for pattern, style in rules.items() if style != "rotary"]
    for number in range(decoder.n_layers):
        layer = decoder.layer(number)
        attending = 0
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            if not any(matches(pattern, name) for pattern in named):
                continue
            attending += 1
            yield from _attention(name, module)
        if not attending:
            asked = f"{type(model.get_submodule(layer)).__name__} without attention that transformers dispatches"
            yield Violation(asked, "every layer must see the sequence through attention", "use dp_shard or tp")


def _attention(name: str, module: Any) -> Iterator[Violation]:
    if not dispatches_attention(module):
        asked = f"ContextParallel for {_generic(name)} ({type(module).__name__})"
        yield Violation(asked, "must be an attention module that transformers dispatches", "name the attention module")
        return
    types, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is not None and index is not None and types[index] not in LAYER_TYPES:
        needs = f"must be one of {', '.join(LAYER_TYPES)}"
        yield Violation(f"layers of type {types[index]!r}", needs, "use dp_shard or tp")
    yield from mask_violations(module)
    for attribute in _DROPOUT:
        value = getattr(module, attribute, 0.0)
        chance = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(chance, (int, float)) and chance > 0:
            asked = f"attention dropout {chance} ({_generic(name)}.{attribute})"
            needs = "must be 0 where attention runs over the context axis"
            yield Violation(asked, needs, "set attention_dropout (attn_pdrop) to 0 in the config")


def _heads(model: nn.Module, degrees: Degrees, options: Options) -> Iterator[Violation]:
    cp, tp = degrees.cp, degrees.tp
    heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
    if cp < 2 or tp < 1 or heads % tp:
        return  # not known yet, or told by the tensor axis
    team = {"ulysses": cp, "ring+ulysses": options.ulysses or 1}.get(options.context, 1)
    if heads // tp % team:
        legal = [n for n in range(1, heads // tp + 1) if heads // tp % n == 0]
        shared = f" / tp {tp}" if tp > 1 else ""
        asked = f"context={options.context!r} over {team} ranks with {heads} query heads{shared}"
        needs = f"the {heads // tp} query heads of a rank must divide by them: {legal}"
        yield Violation(asked, needs, "use context='ring', or 'ring+ulysses' with one of these for ulysses")
    if options.ulysses is not None and cp % options.ulysses:
        legal = [n for n in range(1, cp + 1) if cp % n == 0]
        yield Violation(f"ulysses={options.ulysses} with cp={cp}", f"must divide cp: {legal}", "use one of these")


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
