"""The rules of the expert axis for a model: which modules it cuts, and what the tensor axis leaves to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import Violation
from dtensor_5d.families.facts import facts_for
from dtensor_5d.plan import matches
from dtensor_5d.plan.patterns import specificity

__all__ = [
    "EXPERT_STYLES", "apart_violations", "auxiliary_coefficient", "auxiliary_violations", "cuts_experts",
    "expert_rules", "expert_units", "own_input_rules", "scoring_routers",
]  # fmt: skip

# Name -> what it says of a module: the experts, or the block around router and experts that take no indices.
EXPERT_STYLES: Mapping[str, str] = {
    "dispatch": "each expert on one rank of ep, inside cut over etp; tokens travel to it",
}


def cuts_experts(degrees: Degrees, decoder: Decoder) -> bool:
    """Whether the experts have ranks of their own (efsdp x ep x etp).

    Beside tp they always have: its ranks each bring the experts their part of the tokens.
    """
    has_experts = bool(decoder.experts or decoder.other_experts)
    return degrees.ep > 1 or degrees.etp > 1 or (degrees.tp != 1 and has_experts)


def expert_rules(model: nn.Module, decoder: Decoder, own: Mapping[str, Any]) -> dict[str, Any]:
    """Pattern of module names -> style. `own`: the user's, which go first.

    Experts whose forward takes no indices (llama4) stand under the block around them.
    """
    blocks = [name.rpartition(".")[0] for name in decoder.other_experts]
    names = [name for name, _ in model.named_modules()]
    return {**dict.fromkeys(_patterns([*decoder.experts, *blocks], names), "dispatch"), **own}


def expert_units(model: nn.Module, decoder: Decoder) -> list[str]:
    """Patterns of the modules that hold the experts' parameters: FSDP units of their own, over efsdp."""
    return _patterns([*decoder.experts, *decoder.other_experts], [name for name, _ in model.named_modules()])


def apart_violations(
    model: nn.Module, decoder: Decoder, rules: Mapping[str, Mapping[str, Any]], degrees: Degrees
) -> list[Violation]:
    """Rules of other axes that speak of experts which have ranks of their own. rules: axis -> {pattern: style}."""
    experts = {*decoder.experts, *decoder.other_experts}
    modules = dict(model.named_modules())
    found: dict[Violation, None] = {}
    for name, module in modules.items() if "dp" in rules else ():
        style = _style_of(name, rules["dp"])
        if name in experts and style != "experts":
            needs, change = "they are a unit over efsdp, as the ranks of ep and etp leave them", "use 'experts'"
        elif name not in experts and style == "experts":
            needs, change = "experts with ranks of their own are units over efsdp, nothing else", "use 'unit'"
        elif style not in (None, "root") and _inside(name, experts) and any(True for _ in module.parameters()):
            needs, change = "experts are 1 unit over efsdp", "leave the rule out"
        else:
            continue
        found[Violation(f"style {style!r} for {_generic(name)} on the data axis", needs, change)] = None
    layers = decoder.layers + "."
    for name in (*modules, *(name for name, _ in model.named_parameters())):
        style = _style_of(name, rules.get("tp", {}))
        around = name.startswith(layers) and any(e.startswith(name + ".") for e in experts)
        if style is None or not (around or name in experts or _inside(name, experts)):
            continue
        needs = "experts have ranks of their own (efsdp x ep x etp), and tokens go to them from the block around"
        example = f" (etp={degrees.tp})" if degrees.tp > 1 and degrees.ep == degrees.etp == 1 else ""
        change = f"leave the rule out; what cuts each expert inside is the degree etp{example}"
        found[Violation(f"style {style!r} for {_generic(name)} on the tensor axis", needs, change)] = None
    return list(found)


def _style_of(name: str, rules: Mapping[str, Any]) -> Any:
    fitting = [pattern for pattern in rules if matches(pattern, name)]
    return rules[max(fitting, key=specificity)] if fitting else None


def _inside(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(module + ".") for module in outer)


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def scoring_routers(decoder: Decoder, held: Iterable[str]) -> dict[str, str]:
    """Experts that take no indices -> the router beside them, "" where there is none. held: modules of this rank."""
    here = set(held)
    beside = {name.rpartition(".")[0]: name for name in decoder.routers}
    return {name: beside.get(name.rpartition(".")[0], "") for name in decoder.other_experts if name in here}


def auxiliary_coefficient(model: nn.Module) -> float | None:
    """The weight of the auxiliary loss that balances experts; None where the config does not ask for it."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "output_router_logits", False):
        return None
    return float(getattr(config, "router_aux_loss_coef", 0.0))


def auxiliary_violations(model: nn.Module, decoder: Decoder) -> list[Violation]:
    """Why the auxiliary loss that the config asks for cannot be had."""
    if auxiliary_coefficient(model) is None:
        return []
    kind = str(getattr(model.config, "model_type", ""))
    asked, change = f"output_router_logits=True for {kind!r}", "set config.output_router_logits = False"
    bad = []
    if not facts_for(kind).aux_loss or not hasattr(model.config, "router_aux_loss_coef"):
        bad.append(Violation(asked, "the family must have an auxiliary loss of its routers", change))
    elif len(decoder.routers) != len(decoder.experts) or not decoder.routers:
        needs = f"each of {len(decoder.experts)} experts modules needs a router beside it, {len(decoder.routers)} have"
        bad.append(Violation(asked, needs, change))
    return bad


def own_input_rules(model: nn.Module, decoder: Decoder, is_cut: Any) -> dict[str, str]:
    """What stands beside the experts, for the tensor axis.

        router, gates        "sequence": whole; under sequence parallelism on this rank's tokens, gradients summed
        shared experts       "block": its own input exchanged, its own output summed

    is_cut: of a module or parameter name, whether the tensor rules cut it.
    """
    named: dict[str, list[str]] = {"sequence": [], "block": []}
    for experts in (*decoder.experts, *decoder.other_experts):
        parent = experts.rpartition(".")[0]
        for child, module in model.get_submodule(parent).named_children():
            name = f"{parent}.{child}"
            if name == experts or not any(True for _ in module.parameters()):
                continue
            inside = [n for n, _ in (*module.named_modules(prefix=name), *module.named_parameters(prefix=name))]
            named["block" if any(is_cut(n) for n in inside if n != name) else "sequence"].append(name)
    every = [name for name, _ in model.named_modules()]
    return {pattern: style for style, names in named.items() for pattern in _patterns(names, every)}


def _patterns(wanted: Sequence[str], names: Iterable[str]) -> list[str]:
    """Patterns that fit the wanted names and no others: with `*` for the layer where all its matches are wanted."""
    found: dict[str, None] = {}
    every, chosen = list(names), set(wanted)
    for name in wanted:
        pattern = _generic(name)
        exact = all(other in chosen for other in every if matches(pattern, other))
        found[pattern if exact else name] = None
    return list(found)
