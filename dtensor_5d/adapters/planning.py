"""`plan_for`: from a Hugging Face config or model to a plan, with the rules of every axis that is on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dtensor_5d.adapters.context_rules import context_rules, context_violations
from dtensor_5d.adapters.decoder import Decoder, find_decoder
from dtensor_5d.adapters.expert_rules import apart_violations, cuts_experts, expert_rules, expert_units
from dtensor_5d.adapters.pipeline_rules import pipeline_rules, pipeline_violations
from dtensor_5d.adapters.tensor_rules import can_cut_tokens, family_violations, tensor_rules
from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.check import expert_violations
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan, built_violations, rule_violations
from dtensor_5d.precision import split_fp32
from dtensor_5d.tensor.check import tensor_violations
from dtensor_5d.tensor.names import by_name

__all__ = ["cuts_tokens", "data_rules", "derive_rules", "plan_for"]


def plan_for(config_or_model: Any, degrees: Degrees, **options: Any) -> Plan:
    """The plan for a model: degrees and options checked, rules derived from the model's structure.

    Example:
        >>> plan = plan_for(AutoConfig.from_pretrained(folder), Degrees(dp_shard=-1), precision="bf16")

    A config is built on meta to see its structure; no weights are made. Errors: `PlanError` listing all violations.
    """
    bad: list[Violation] = []
    try:
        chosen = Options.of(**options)
    except PlanError as error:
        bad += error.violations
        known = {n: v for n, v in options.items() if n in Options().to_dict()}
        chosen = Options()
        bad += built_violations(degrees, _lenient(known))
    else:
        bad += built_violations(degrees, chosen)
    if bad:
        raise PlanError(bad)
    model = config_or_model if isinstance(config_or_model, nn.Module) else _on_meta(config_or_model)
    rules = derive_rules(model, find_decoder(model), degrees, chosen)
    return Plan(degrees=degrees, options=chosen, rules=rules, model=getattr(model.config, "model_type", ""))


def derive_rules(model: nn.Module, decoder: Decoder, degrees: Degrees, options: Options) -> dict[str, dict[str, Any]]:
    """Axis -> {pattern: style}: what the structure says, with the user's rules on top.

    Errors: `PlanError` for a user's rule that matches no module.
    """
    modules = [name for name, _ in model.named_modules()]
    names = {axis: modules for axis in options.rules}
    names["tp"] = [*modules, *(name for name, _ in model.named_parameters())]  # bare parameters have rules there
    bad = [v for axis, table in options.rules.items() for v in rule_violations(axis, table, names[axis])]
    own, unnamed = by_name(options.rules.get("tp", {}))
    apart = cuts_experts(degrees, decoder)
    if degrees.tp != 1:
        bad += unnamed
        bad += family_violations(model, decoder, own, options.sequence_parallel)
    if degrees.pp != 1:
        bad += pipeline_violations(model, decoder, degrees, options)
    if bad:
        raise PlanError(bad)
    rules: dict[str, dict[str, Any]] = {}
    if degrees.pp > 1:  # else known when the degrees are resolved
        rules["pp"] = pipeline_rules(model, decoder, options, degrees.pp)
    cut = any(d != 1 for n, d in degrees.items() if n in ("dp_replicate", "dp_shard", "cp"))
    cut |= apart and degrees.tp != degrees.ep * degrees.etp  # the experts leave ranks of tp
    if cut or options.precision is not None:
        rules["dp"] = {**data_rules(model, decoder, options, apart=apart), **options.rules.get("dp", {})}
    if apart:
        rules["ep"] = expert_rules(model, decoder, options.rules.get("ep", {}))
        bad += expert_violations(model, rules["ep"], degrees, options)
    if degrees.tp != 1:
        sequence = cuts_tokens(decoder, options)
        rules["tp"] = tensor_rules(model, decoder, own, sequence=sequence)
        if degrees.tp > 1:  # else known when the degrees are resolved
            bad += tensor_violations(model, decoder, rules["tp"], degrees.tp, own=own, sequence=sequence)
    if degrees.cp != 1:
        rules["cp"] = context_rules(model, decoder, options.rules.get("cp", {}))
        bad += context_violations(model, decoder, rules["cp"], degrees, options)
    if apart:
        bad += apart_violations(model, decoder, rules, degrees)
    if bad:
        raise PlanError(bad)
    return rules


def cuts_tokens(decoder: Decoder, options: Options) -> bool:
    """Whether tp > 1 also cuts the tokens between blocks."""
    asked = options.sequence_parallel
    return can_cut_tokens(decoder) if asked is None else asked


def data_rules(model: nn.Module, decoder: Decoder, options: Options, *, apart: bool = False) -> dict[str, str]:
    """The FSDP units: every decoder layer; the embedding with what is small beside it; the head with the final norm.

    Tied weights must be in one unit: they stay in the root, which is gathered from the first to the last layer anyway.
    Routers that are fp32 are units of their own when the rest is not: a unit has 1 dtype. apart: so are experts, which
    an axis of their own cuts, over the ranks that it leaves.
    """
    rules = {f"{decoder.layers}.*": "unit"}
    if apart:
        rules |= dict.fromkeys(expert_units(model, decoder), "experts")
    tied = {owner.rpartition(".")[0] for group in decoder.ties for owner in group}
    for side, names in (("embedding", decoder.before), ("head", decoder.after)):
        if tied.intersection(names):
            continue  # all of this side stays with the tied weight in the root
        style = "unit" if len(names) == 1 else f"unit:{side}"
        rules |= {name: style for name in names}
    if options.precision == "bf16" or any(p.dtype != torch.float32 for p in model.parameters()):
        rules |= {_over_layers(name, decoder): "unit" for name in split_fp32(model, decoder.fp32_modules)[0]}
    return rules


def _over_layers(name: str, decoder: Decoder) -> str:
    head = decoder.layers + "."
    if not name.startswith(head):
        return name
    rest = name[len(head) :].partition(".")[2]
    return f"{head}*.{rest}" if rest else f"{head}*"


def _on_meta(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM, PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        asked = f"plan_for of a {type(config).__name__}"
        change = "give AutoConfig.from_pretrained(folder) or the model"
        raise PlanError(Violation(asked, "needs a transformers config or model", change))
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _lenient(options: dict[str, Any]) -> Options:
    """The options that are legal one by one, so that one bad value does not hide what else is to be said."""
    good = {}
    for name, value in options.items():
        try:
            Options.of(**{name: value})
        except PlanError:
            continue
        good[name] = value
    return Options.of(**good)
