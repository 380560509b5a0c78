"""Which styles have a meaning where: outside the layers, directly in a layer, inside a block that exchanges for it.

    outside the layers     tokens whole, computed alike on all ranks             embedding, head, replicate
    directly in a layer    the residual stream: whole, or cut over tokens        blocks, column, row, sequence, whole
    inside a block         a summand on each rank, of heads or channels          cut, or whole with its gradient summed
    inside what is whole   tokens whole, computed alike on all ranks             replicate

A style in the wrong place is silent: gradients come out n times too large, or short of the other ranks' share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.tensor_rules import rule_of, tensor_rules
from dtensor_5d.errors import Violation
from dtensor_5d.families.tensor import PROVED
from dtensor_5d.tensor.heads import heads_of

__all__ = ["around", "changed_violations", "is_cut", "stands_whole", "tie_violations", "zone_violations"]

_IN_LAYER = ("block", "sum_output", "sequence", "whole", "replicate", "column", "packed_column", "row")
_IN_BLOCK = (
    "column", "column_kv", "packed_column", "qkv", "row", "norm_column", "norm_column_kv", "block", "sum_output",
    "replicate_sum", "cut", "once",
)  # fmt: skip
_IN_WHOLE = ("replicate", "replicate_sum", "sequence")


def around(name: str) -> list[str]:
    """The modules that `name` is in, from the outermost one."""
    pieces = name.split(".")
    return [".".join(pieces[:i]) for i in range(1, len(pieces))]


def stands_whole(name: str, styles: Mapping[str, Any], layers: str) -> bool:
    """Whether this module, directly in a layer, is computed whole, from whole tokens, on every rank."""
    return styles.get(name) == "whole" or (styles.get(name) == "replicate" and _depth(name, layers) == 2)


def zone_violations(
    model: nn.Module, decoder: Decoder, rules: Mapping[str, Any], *, sequence: bool
) -> Iterator[Violation]:
    """Styles that have no meaning where they stand, and parameters of which nothing says what happens to them."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    styles = {name: rule_of(name, rules) for name in (*modules, *parameters)}
    experts = {*decoder.experts, *decoder.other_experts}
    cuts: dict[str, str] = {}  # module -> the first thing in it that is cut
    for name, style in styles.items():
        if is_cut(style):
            for outer in around(name):
                cuts.setdefault(outer, name)
    for name, style in styles.items():
        if not isinstance(style, str):
            continue
        yield from _place_violations(name, style, styles, decoder, sequence)
        kind, owner, first = style.partition("/")[0], name.rpartition(".")[0], cuts.get(name)
        if first is not None and not is_cut(style) and name.startswith(decoder.layers + "."):
            change = f"leave it out, or give 'replicate' to {_generic(first)} and every matrix beside it"
            yield _misplaced(name, style, f"around {_generic(first)}, which is cut", change, ("block",))
        elif kind == "sequence" and _depth(name, decoder.layers) == 2 and name in modules and any(
            p.dim() > 1 for p in modules[name].parameters()
        ):
            yield _misplaced(name, style, "that may mix tokens", "use 'replicate': it gets all tokens", ("replicate",))
        elif name in parameters and is_cut(style) and is_cut(styles[owner]) and styles[owner] != "block":
            yield _misplaced(name, style, f"beside {styles[owner]!r} for {_generic(owner)}", "give one of the two", ())
    for name in parameters if sequence else ():
        within = around(name)
        if experts.intersection(within):
            continue  # an axis of their own sums there
        if name.startswith(decoder.layers + ".") and all(styles.get(n) is None for n in (name, *within)):
            asked = f"{_generic(name)} under sequence parallelism, where each rank has a part of the tokens"
            needs = "1 rule on it or around it must say that its gradient is summed"
            yield Violation(asked, needs, "use sequence_parallel=False")


def _place_violations(
    name: str, style: str, styles: Mapping[str, Any], decoder: Decoder, sequence: bool
) -> Iterator[Violation]:
    """A style that has no meaning in the place of this name."""
    kind, depth = style.partition("/")[0], _depth(name, decoder.layers)
    inside = [outer for outer in around(name) if _depth(outer, decoder.layers) > 1]
    given = [styles[outer] for outer in inside]
    if depth < 0:
        allowed = ("head", "replicate") if name == decoder.head else ("embedding", "replicate")
        adapters = decoder.head is not None and name.startswith(decoder.head + ".")  # LoRA on the head
        if not adapters and kind not in allowed:
            yield _misplaced(name, style, "outside the layers", "leave the rule out", allowed)
    elif depth < 2:
        yield _misplaced(name, style, "on a whole layer", "give rules to the modules in it", ())
    elif any(stands_whole(outer, styles, decoder.layers) for outer in inside):
        if kind not in _IN_WHOLE:
            yield _misplaced(name, style, "inside a module that stays whole", "give 'replicate' to all of it",
                             ("replicate",))  # fmt: skip
    elif "block" in given:
        if kind not in _IN_BLOCK:
            change = "use 'replicate_sum', or 'replicate' for every matrix of the block"
            yield _misplaced(name, style, "in a block, where each rank computes a summand", change, _IN_BLOCK)
    elif depth == 2:
        if kind not in _IN_LAYER:
            change = "leave the rule out, or use 'replicate' for what stays whole"
            yield _misplaced(name, style, "directly in a layer", change, _IN_LAYER)
    elif sequence and kind == "replicate":
        change = "leave the rule out"
        yield _misplaced(name, style, "where each rank has a part of the tokens", change, ("sequence",))


def changed_violations(
    model: nn.Module, decoder: Decoder, rules: Mapping[str, Any], own: Mapping[str, Any], tp: int
) -> Iterator[Violation]:
    """A user's rules in the layers of a family whose rules are proved: they can leave a module whole.

    Other cuts of the same weight give the right shapes and wrong numbers (a gate cut otherwise than its up).
    """
    if getattr(getattr(model, "config", None), "model_type", "") not in PROVED:
        return
    proved = tensor_rules(model, decoder, {}, sequence=True)
    shares = heads_of(model).copies(tp) > 1
    names = [n for n, _ in (*model.named_modules(), *model.named_parameters()) if n.startswith(decoder.layers + ".")]
    said = {name: style for name in names if (style := rule_of(name, own)) is not None}
    styles = {outer: rule_of(outer, rules) for name in said for outer in (name, *around(name))}
    for name, style in said.items():
        ours = rule_of(name, proved)
        whole = any(stands_whole(n, styles, decoder.layers) for n in (name, *around(name)))
        if style == ours or ours is None or (whole and style == "replicate"):
            continue
        if not shares and {style, ours} in ({"column", "column_kv"}, {"norm_column", "norm_column_kv"}):
            continue
        if ours == "sequence" and style == "replicate":
            continue  # dearer, and as right
        asked = f"style {style!r} for {_generic(name)}"
        needs = f"the proved rule of this family is {ours!r}"
        yield Violation(asked, needs, "leave the rule out, or give 'replicate' to every matrix of its block")


def tie_violations(decoder: Decoder, rules: Mapping[str, Any]) -> Iterator[Violation]:
    """Names of one tensor whose owners have rules that cut it otherwise."""
    for names in decoder.ties:
        cut: dict[str, list[str]] = {}
        for name in names:
            style = rule_of(name, rules) or rule_of(name.rpartition(".")[0], rules)
            by_rows = style in ("embedding", "head", "column")
            cut.setdefault("vocabulary" if by_rows else str(style or "replicate"), []).append(f"{name}: {style!r}")
        if len(cut) > 1:
            asked = f"rules for one tied weight, {', '.join(one for group in cut.values() for one in group)}"
            needs = f"{len(names)} names of 1 tensor must be cut alike"
            yield Violation(asked, needs, "give 'replicate' to all of them or to none, or untie them in the config")


def _misplaced(name: str, style: str, where: str, change: str, allowed: tuple[str, ...]) -> Violation:
    needs = f"must be one of {', '.join(allowed)} there" if allowed else "no such rule has a meaning there"
    return Violation(f"style {style!r} for {_generic(name)} {where}", needs, change)


def is_cut(style: Any) -> bool:
    """Whether a style cuts something, or exchanges for what is cut in it."""
    return style is not None and style not in ("replicate", "replicate_sum", "sequence", "whole")


def _depth(name: str, layers: str) -> int:
    """0 for the list of layers, 1 for a layer, 2 for what is directly in it; -1 outside."""
    if name == layers:
        return 0
    return name.count(".") - layers.count(".") if name.startswith(layers + ".") else -1


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
