"""The rules of the tensor axis for a model: what it ships, what `families/tensor.py` adds, the blocks around both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.expert_rules import own_input_rules
from dtensor_5d.adapters.rules import read_rules
from dtensor_5d.errors import Violation
from dtensor_5d.families.tensor import PROVED, TENSOR_RULES
from dtensor_5d.plan import matches
from dtensor_5d.plan.patterns import specificity

__all__ = ["TENSOR_STYLES", "can_cut_tokens", "family_violations", "rule_of", "section_count", "tensor_rules"]

# Name -> what it says of a module or a bare parameter. `packed_column/N`: N equal sections. `cut/N` cuts a bare
# parameter along dim N.
TENSOR_STYLES: Mapping[str, str] = {
    "column": "outputs cut",
    "column_kv": "outputs cut by kv heads, which neighbouring ranks share where there are fewer than ranks",
    "packed_column": "outputs in two equal sections (gate and up), each cut",
    "qkv": "outputs in three sections (q, k and v), each cut by heads",
    "row": "inputs cut, outputs summed, bias once",
    "norm_column": "an RMS norm over all heads, cut like them",
    "norm_column_kv": "the same over kv heads",
    "embedding": "vocabulary cut",
    "head": "vocabulary cut",
    "block": "input exchanged once",
    "sum_output": "output summed once, of several parts",
    "replicate_sum": "whole, used on a part: gradient summed",
    "sequence": "whole, used on a part of the sequence: gradient summed",
    "replicate": "whole, used on the whole",
    "whole": "whole, used on the whole: cut tokens are gathered before it, and cut again after it",
    "once": "whole, added on one rank",
}

# Styles that models ship and what they become here: a block sums once for all that is in it.
_SHIPPED: Mapping[str, str | None] = {"experts_sum": None, "local": None, "latent": "replicate_sum"}


# The style of the linear layer that LoRA adapts -> that of the wrapper around both ("block" for all others).
_AROUND_ADAPTERS: Mapping[str, str] = {"row": "sum_output", "head": "head", "embedding": "replicate"}


def family_violations(
    model: nn.Module, decoder: Decoder, own: Mapping[str, Any], sequence: bool | None
) -> list[Violation]:
    """A family whose rules nobody has proved, unless the user has a word on every matrix in its layers; layers that
    cannot run on a part."""
    bad = []
    kind = _kind(model)
    missing = [] if kind in PROVED else list(_without_a_word(model, decoder, own))
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        asked = f"tp for the family {kind!r}, with no rule of yours for {', '.join(missing[:4])}{more}"
        needs = f"every matrix in a layer needs one, or a family whose rules are proved: {', '.join(PROVED)}"
        change = "use dp_shard, or give rules={'tp': {pattern: style}} ('replicate' for what stays whole)"
        bad.append(Violation(asked, needs, change))
    if sequence and not can_cut_tokens(decoder):
        needs = "every layer must run once, in the order of its number, to hand on a part of the sequence"
        bad.append(Violation("sequence_parallel=True", needs, "use sequence_parallel=False for this model"))
    return bad


def _without_a_word(model: nn.Module, decoder: Decoder, own: Mapping[str, Any]) -> dict[str, None]:
    """Patterns of the owners of matrices in the layers of which no rule of the user's speaks."""
    found: dict[str, None] = {}
    experts = (*decoder.experts, *decoder.other_experts)  # an axis of their own cuts them
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        if not name.startswith(decoder.layers + ".") or parameter.dim() < 2 or owner in experts:
            continue
        pieces = owner.split(".")
        around = [".".join(pieces[:i]) for i in range(1, len(pieces))]
        spoken = any(rule_of(n, own) is not None for n in (name, owner, *_adapted(owner)))
        if not spoken and all(rule_of(outer, own) != "replicate" for outer in around):
            found[_generic(owner)] = None
    return found


def _adapted(name: str) -> list[str]:
    """The layer around a LoRA adapter (peft's names), which has the word on it."""
    return [name.rpartition(f".{piece}")[0] for piece in ("base_layer", "lora_A", "lora_B") if f".{piece}" in name]


def can_cut_tokens(decoder: Decoder) -> bool:
    """Whether the hidden states can be cut before the first layer and joined after the last one."""
    return decoder.in_order


def tensor_rules(model: nn.Module, decoder: Decoder, own: Mapping[str, Any], *, sequence: bool) -> dict[str, Any]:
    """Pattern of module or parameter names -> style. `own`: the user's, which go first.

    Experts have none: an axis of their own cuts them, which takes the tokens as it finds them.
    """
    head = f"{decoder.layers}.*."
    rules: dict[str, Any] = {decoder.embedding: "embedding"}
    if decoder.head is not None:
        rules[decoder.head] = "head"
    for pattern, style in read_rules(model)["tp"].items():
        ours = _SHIPPED.get(style, style)
        if ours is not None and pattern.startswith(head):
            rules[pattern] = "column_kv" if ours == "column" and pattern.endswith((".k_proj", ".v_proj")) else ours
    names = _names(model)
    for suffix, added in TENSOR_RULES.get(_kind(model), {}).items():
        if any(matches(head + suffix, name) for name in names):
            rules[head + suffix] = added
    experts = (*decoder.experts, *decoder.other_experts)
    rules = {p: s for p, s in rules.items() if not any(_fits_into(p, name) for name in experts)}
    rules |= {**_below_whole(own, names, rules, decoder), **own}
    adapters = _adapters(model, rules)
    rules |= adapters
    blocks = _blocks(model, decoder, rules, sequence)
    blocks |= own_input_rules(model, decoder, lambda name: _cuts(rule_of(name, rules)))
    rules |= {p: s for p, s in blocks.items() if p not in own and p not in adapters}
    return rules


def _below_whole(
    own: Mapping[str, Any], names: Sequence[str], rules: Mapping[str, Any], decoder: Decoder
) -> dict[str, str]:
    """What a user's 'replicate' for a whole attention or MLP says of that which would have a rule in there."""
    found: dict[str, str] = {}
    depth = decoder.layers.count(".") + 3
    for pattern, style in own.items():
        if style == "replicate" and pattern.count(".") == depth - 1:
            for name in names:
                pieces = name.split(".")
                if matches(pattern, ".".join(pieces[:depth])) and len(pieces) > depth and rule_of(name, rules):
                    found[".".join([pattern, *pieces[depth:]])] = "replicate"
    return found


def _fits_into(pattern: str, module: str) -> bool:
    """Whether a pattern names this module, something below it, or one of its parameters."""
    depth = module.count(".") + 1
    pieces = pattern.split(".")
    return len(pieces) >= depth and matches(".".join(pieces[:depth]), module)


def rule_of(name: str, rules: Mapping[str, Any]) -> Any:
    """The style for a name: that of the most specific pattern that fits, or None."""
    fitting = [pattern for pattern in rules if matches(pattern, name)]
    return rules[max(fitting, key=specificity)] if fitting else None


def _adapters(model: nn.Module, rules: Mapping[str, Any]) -> dict[str, Any]:
    """LoRA around a linear layer (peft's names): the adapters follow the layout of the layer that they adapt.

        column   A whole, B cut as the layer          row   A cut as the layer, B whole; both parts summed once
        head     as column, gathered once after the sum of both
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        style = rule_of(name, rules)
        if not _cuts(style) or "base_layer" not in dict(module.named_children()):
            continue  # a rule for what stays whole holds for the adapters too
        outer = _generic(name)
        inner = "column" if style == "head" else style
        first, second = ("row", "replicate_sum") if style == "row" else ("replicate_sum", inner)
        found |= {outer: _AROUND_ADAPTERS.get(style, "block"), f"{outer}.base_layer": inner}
        for below, _ in module.named_modules():
            for piece, its in (("lora_A.", first), ("lora_B.", second)):
                if below.startswith(piece):
                    found[f"{outer}.{_generic(below)}"] = its
    return found


def section_count(style: str) -> int:
    """Equal sections of a `packed_column` or `packed_column/N`."""
    return int(style.partition("/")[2] or 2)


def _blocks(model: nn.Module, decoder: Decoder, rules: Mapping[str, Any], sequence: bool) -> dict[str, str]:
    """Children of the layers that have cut weights inside; under sequence parallelism also those that have none, and
    always those whose rules leave them whole. Blocks around experts are left out: what is in them has its own word.
    """
    around = {name.rpartition(".")[0] for name in (*decoder.experts, *decoder.other_experts)}
    modules = dict(model.named_modules())
    found: dict[str, dict[int, str]] = {}
    for number in range(decoder.n_layers):
        layer = decoder.layer(number)
        for child, module in modules[layer].named_children():
            name = f"{layer}.{child}"
            if name in around:
                continue
            inside = [n for n in _names(module, name) if n != name]
            if any(_cuts(rule_of(n, rules)) for n in inside):
                found.setdefault(child, {})[number] = "block"
            elif rule_of(name, rules) is not None or not any(True for _ in module.parameters()):
                continue
            elif any(parameter.dim() > 1 for parameter in module.parameters()):
                # It may mix tokens (attention that stays whole), so it gets all of them.
                if sequence or any(rule_of(n, rules) is not None for n in inside):
                    found.setdefault(child, {})[number] = "whole"
            elif sequence:
                found.setdefault(child, {})[number] = "sequence"
    blocks: dict[str, str] = {}
    for child, by_layer in found.items():
        if len(by_layer) == decoder.n_layers and len(set(by_layer.values())) == 1:
            blocks[f"{decoder.layers}.*.{child}"] = by_layer[0]
        else:
            blocks |= {f"{decoder.layer(number)}.{child}": style for number, style in by_layer.items()}
    return blocks


def _cuts(style: Any) -> bool:
    return style is not None and style not in ("replicate", "replicate_sum", "sequence", "whole")


def _names(module: nn.Module, prefix: str = "") -> list[str]:
    return [n for n, _ in module.named_modules(prefix=prefix)] + [n for n, _ in module.named_parameters(prefix=prefix)]


def _kind(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
