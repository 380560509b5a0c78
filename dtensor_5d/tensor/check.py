"""What the rules of the tensor axis ask of a model, and where its sizes do not allow it, before any change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.tensor_rules import TENSOR_STYLES, rule_of, section_count
from dtensor_5d.errors import Violation
from dtensor_5d.families.tensor import REFUSED_SETTINGS
from dtensor_5d.tensor.heads import Heads, heads_of
from dtensor_5d.tensor.zones import changed_violations, tie_violations, zone_violations

__all__ = ["output_dim", "tensor_violations"]

_LINEAR = ("column", "column_kv", "packed_column", "qkv", "row", "head")
_BY_KV_HEADS = ("column_kv", "qkv", "norm_column_kv")


def tensor_violations(
    model: nn.Module, decoder: Decoder, rules: Mapping[str, Any], tp: int, *, own: Mapping[str, Any], sequence: bool,
) -> list[Violation]:  # fmt: skip
    """Everything that keeps `model` from being cut over `tp` ranks by these rules; layers are told once.

    own: the rules that the user gave. sequence: the tokens are cut as well.
    """
    found: dict[Violation, None] = {}
    for v in (*_unknown_styles(rules), *_head_violations(model, rules, tp), *_setting_violations(model, tp)):
        found[v] = None
    if found:
        return list(found)
    sizes = Sizes(tp)
    heads = heads_of(model)
    for name, module in model.named_modules():
        style = rule_of(name, rules)
        if style is not None:
            found |= dict.fromkeys(_module_violations(_generic(name), module, style, heads, sizes))
        for leaf, parameter in module._parameters.items():
            full = f"{name}.{leaf}" if name else leaf
            own_style = rule_of(full, rules)
            if parameter is not None and own_style is not None:
                found |= dict.fromkeys(_parameter_violations(_generic(full), tuple(parameter.shape), own_style, sizes))
    found |= dict.fromkeys(sizes.violations())
    found |= dict.fromkeys(_uncovered(model, decoder, rules))
    changed = dict.fromkeys(changed_violations(model, decoder, rules, own, tp))
    # What stands for another rule than the proved one says so, and not what that rule would need.
    found |= changed or dict.fromkeys(zone_violations(model, decoder, rules, sequence=sequence))
    found |= dict.fromkeys(tie_violations(decoder, rules))
    return list(found)


def output_dim(module: nn.Module) -> int:
    """Which dim of a linear layer's weight counts outputs: 0, and 1 in transformers' Conv1D."""
    return 1 if hasattr(module, "nf") else 0


def _unknown_styles(rules: Mapping[str, Any]) -> Iterator[Violation]:
    for pattern, style in rules.items():
        if isinstance(style, str) and (style in TENSOR_STYLES or re.fullmatch(r"cut/\d|packed_column/[1-9]", style)):
            continue
        needs = f"must be one of {', '.join(TENSOR_STYLES)}, packed_column/N with N > 0, or cut/N"
        yield Violation(f"style {style!r} for {pattern!r} on the tensor axis", needs, "see the README on rules of tp")


def _head_violations(model: nn.Module, rules: Mapping[str, Any], tp: int) -> Iterator[Violation]:
    heads = heads_of(model)
    if heads.query % tp:
        yield Violation(
            f"tp={tp} with {heads.query} query heads", f"tp must divide the {heads.query} query heads",
            f"use tp of {_spelt(_divisors(heads.query))}",
        )  # fmt: skip
        return
    packed = "qkv" in rules.values()
    by_kv = any(style in _BY_KV_HEADS for style in rules.values() if isinstance(style, str))
    if by_kv and heads.kv % tp and (packed or tp % heads.kv):
        good = [d for d in _divisors(heads.query) if heads.kv % d == 0 or (not packed and d % heads.kv == 0)]
        needs = f"tp must divide the {heads.kv} kv heads" + ("" if packed else f", or {heads.kv} must divide tp")
        yield Violation(f"tp={tp} with {heads.kv} kv heads", needs, f"use tp of {_spelt(good)}")


def _setting_violations(model: nn.Module, tp: int) -> Iterator[Violation]:
    config: Any = getattr(model, "config", None)
    for setting, why in REFUSED_SETTINGS.get(str(getattr(config, "model_type", "")), {}).items():
        value = getattr(config, setting, None)
        if value:
            change = f"set config.{setting} to {type(value)(0)!r}, or tp to 1"
            yield Violation(f"{setting}={value!r} with tp={tp}", why, change)


def _module_violations(name: str, module: nn.Module, style: str, heads: Heads, sizes: Sizes) -> Iterator[Violation]:
    if style in ("head", "embedding") and "base_layer" in dict(module.named_children()):
        return  # LoRA: what it adapts has a rule of its own
    weight = module._parameters.get("weight")
    if style.partition("/")[0] in _LINEAR:
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            asked = f"style {style!r} for {name} ({type(module).__name__})"
            yield Violation(asked, "must be a linear layer with a weight of 2 dims", "give the rule to its projections")
            return
        outputs = weight.shape[output_dim(module)]
        inputs = weight.shape[1 - output_dim(module)]
        if style == "qkv" and sum(heads.sections) != outputs:
            needs = f"q, k and v of {heads} make {sum(heads.sections)}"
            yield Violation(f"style 'qkv' for {name} with {outputs} outputs", needs, "use 'packed_column' or 'column'")
        elif style.startswith("packed_column"):
            yield from sizes.sections(name, outputs, section_count(style), "outputs")
        elif style == "row":
            sizes.note(name, inputs, "inputs")
        elif style == "column":
            sizes.note(name, outputs, "outputs")
    elif style == "embedding":
        if weight is None or weight.dim() != 2 or not hasattr(module, "num_embeddings"):
            asked = f"style 'embedding' for {name} ({type(module).__name__})"
            yield Violation(asked, "must be an embedding with a weight of 2 dims", "leave it whole: 'replicate'")
    elif style.startswith("norm_column"):
        size = heads.size * (heads.kv if style == "norm_column_kv" else heads.query)
        shape = tuple(weight.shape) if weight is not None else None
        kind = type(module).__name__
        if "RMS" not in kind or shape != (size,) or not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
            asked = f"style {style!r} for {name} ({kind}, weight {shape})"
            needs = f"must be an RMS norm with a weight of {size}, over all heads"
            yield Violation(asked, needs, "use 'replicate_sum' for per-head norms")
    elif style.startswith("cut/") or style == "once":
        inside = ", ".join(name + "." + leaf for leaf in module._parameters) or "its parameters"
        yield Violation(f"style {style!r} for the module {name}", "it is for bare parameters",
                        f"give the rule to {inside}")  # fmt: skip


def _parameter_violations(name: str, shape: tuple[int, ...], style: str, sizes: Sizes) -> Iterator[Violation]:
    if style in ("once", "replicate"):
        return
    if style.startswith("cut/"):
        dim, sections = int(style[4:]), 1
    elif style in ("column", "row") or style.startswith("packed_column"):
        dim = len(shape) - 1 if style == "row" else max(len(shape) - 2, 0)
        sections = section_count(style) if style.startswith("packed_column") else 1
    else:
        needs = "must be cut/N, column, row, packed_column or once"
        yield Violation(f"style {style!r} for the parameter {name}", needs, "give the rule to its module")
        return
    if dim >= len(shape):
        yield Violation(f"style {style!r} for {name}", f"it has {len(shape)} dims", "give another dim")
        return
    yield from sizes.sections(name, shape[dim], sections, f"along dim {dim}")


class Sizes:
    """Sizes that the ranks must divide, by number: all that is of one size is one thing to change."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.wrong: dict[int, dict[str, None]] = {}

    def note(self, name: str, size: int, what: str) -> None:
        """A size of which every rank gets a part."""
        if size % self.tp:
            self.wrong.setdefault(size, {})[f"{name} of {size} {what}"] = None

    def sections(self, name: str, size: int, count: int, what: str) -> Iterator[Violation]:
        """The same in `count` equal sections."""
        if size % count:
            yield Violation(f"{count} sections for {name} of {size} {what}", f"{count} must divide {size}",
                            "give packed_column/N for the N that are stored there")  # fmt: skip
        else:
            self.note(name, size // count, what + (f" in each of its {count} sections" if count > 1 else ""))

    def violations(self) -> Iterator[Violation]:
        """One for each number."""
        for size, found in self.wrong.items():
            asked = f"tp={self.tp} with {', '.join(found)}"
            yield Violation(asked, f"tp must divide {size}", f"use tp of {_spelt(_divisors(size))}")


def _uncovered(model: nn.Module, decoder: Decoder, rules: Mapping[str, Any]) -> Iterator[Violation]:
    """Parameters in a block of which no rule says whether they are cut, or whole and summed."""
    styled = {name: rule_of(name, rules) for name, _ in model.named_modules()}
    for name, _ in model.named_parameters():
        if not name.startswith(decoder.layers + ".") or rule_of(name, rules) is not None:
            continue
        pieces = name.split(".")
        around = [styled.get(".".join(pieces[:i])) for i in range(1, len(pieces))]
        blocks = [i for i, style in enumerate(around) if style == "block"]
        if blocks and all(style is None for style in around[blocks[0] + 1 :] if style != "block"):
            asked = f"{_generic(name)}, which no rule speaks of"
            needs = "every parameter beside cut ones is cut as well, or whole with its gradient summed"
            yield Violation(asked, needs, f"give rules={{'tp': {{{_generic(name.rpartition('.')[0])!r}: ...}}}}")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _spelt(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16])) if len(numbers) < 2 else (
        ", ".join(map(str, numbers[:-1][:16])) + f" or {numbers[-1]}"
    )  # fmt: skip


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
