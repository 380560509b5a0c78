"""The plans that Hugging Face models ship, read into our rules: axis -> {pattern of names -> style name}.

Nothing is applied here: rules are data, printed in the plan and open to the user's overrides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dtensor_5d.adapters.decoder import model_head, parameter_ties
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.plan import matches

__all__ = ["STYLES", "Style", "read_rules"]


@dataclass(frozen=True)
class Style:
    """One style of transformers: the axes whose plan may hold it, our name for it, and why it is right."""

    axes: tuple[str, ...]
    name: str
    why: str


# Every style string of transformers 5.24 (`ALL_PARALLEL_STYLES` and `ALL_FSDP_STYLES`).
STYLES: Mapping[str, Style] = {
    # products
    "colwise": Style(("tp",), "column", "output features cut; the input's gradient is summed"),
    "rowwise": Style(("tp",), "row", "input features cut as the column before left them; outputs summed, bias once"),
    "colwise_gather_output": Style(("tp",), "column_gather", "column, and whole outputs: what follows needs them all"),
    "colwise_rep": Style(("tp",), "column_gather", "an older name of colwise_gather_output"),
    "rowwise_split_input": Style(("tp",), "row_split", "row, after whole inputs: each rank takes its slice first"),
    "rowwise_rep": Style(("tp",), "row_split", "an older name of rowwise_split_input"),
    "packed_colwise": Style(("tp",), "packed_column", "column, each of the two halves (gate | up) cut by itself"),
    "packed_rowwise": Style(("tp",), "packed_row", "the same along the last dim, of weights stored transposed"),
    # embeddings
    "embedding_rowwise": Style(("tp",), "embedding", "vocabulary cut; a token of another rank adds 0 to the sum"),
    "embedding_colwise": Style(("tp",), "embedding_column", "model size cut; the slices are gathered"),
    # what stays whole
    "replicate": Style(("tp",), "replicate", "whole on every rank, with whole inputs: nothing to exchange"),
    "replicated_with_grad_allreduce": Style(
        ("tp", "ep"), "replicate_sum", "whole, but each rank uses it on its own part: gradients are summed"
    ),
    "mla_kv_a_proj": Style(("tp",), "latent", "whole; the part that no cut projection follows sums its gradient"),
    "sequence_parallel": Style(("tp",), "sequence", "whole, run on this rank's part of the sequence"),
    "local_params": Style(("tp",), "local", "its forward reads a bare parameter that a rule of its own cuts"),
    "all_reduce": Style(("tp",), "sum_output", "its output is one summand of tp: summed"),
    # experts
    "moe_tp_experts": Style(("tp",), "experts_sum", "every expert cut inside: outputs summed, so are input gradients"),
    "moe_identity_expert": Style(("tp",), "identity_share", "an expert without weights gives 1/tp: the sum follows"),
    "ep_dispatch_experts": Style(("ep",), "dispatch", "whole experts, each on one rank: tokens travel to them"),
    "grouped_gemm": Style(("ep",), "experts", "the expert dim of a fused weight cut"),
    # FSDP units
    "free_full_weight": Style(("dp",), "unit", "gathered for its visit, and freed when zero is 3"),
    "keep_full_weight": Style(("dp",), "unit:last", "last in forward, so first in backward: one unit, kept between"),
}


# Axis -> the model's attribute, and the axes whose styles it may hold, the first one first.
_PLANS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tp": ("tp_plan", ("tp",)),
    "ep": ("ep_plan", ("ep", "tp")),
    "dp": ("fsdp_plan", ("dp",)),
}


def read_rules(model: nn.Module) -> dict[str, dict[str, str]]:
    """The rules that a Hugging Face model ships, for the axes tp, ep and dp, in our style names.

    Patterns are whole module (or parameter) names with `*` for the layer number, in the order of the model's plan.
    Rules that fit nothing in this model are left out, as transformers does. The head's `column_gather` becomes
    `head`. An ep plan can hold tensor styles for dense modules; they stand under tp unless tp has its own word on them.
    A model that ships no plan gets empty tables. Errors: `PlanError` naming every style that is not known.

    Example:
        >>> read_rules(qwen3)["tp"]["model.layers.*.self_attn.q_norm"]
        'replicate_sum'
    """
    names = {_generic(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    head = model_head(model)
    rules: dict[str, dict[str, str]] = {axis: {} for axis in _PLANS}
    unknown: list[Violation] = []
    for axis, (attribute, allowed) in _PLANS.items():
        for pattern, given in (getattr(model, attribute, None) or {}).items():
            style = STYLES.get(given)
            homes = [home for home in allowed if style is not None and home in style.axes]
            if style is None or not homes:
                known = [key for key, s in STYLES.items() if set(allowed) & set(s.axes)]
                unknown.append(
                    Violation(
                        f"{attribute}[{pattern!r}] = {given!r}",
                        f"must be one of {', '.join(known)}",
                        f"give this pattern a style of ours with the option rules={{{axis!r}: {{{pattern!r}: ...}}}}, "
                        f"and take it out of model.{attribute}",
                    )
                )
            elif any(matches(pattern, name) for name in names):
                name = "head" if pattern == head and style.name == "column_gather" else style.name
                rules[homes[0]].setdefault(pattern, name)
    if unknown:
        raise PlanError(unknown)
    # FSDP cannot hold one tensor in two units.
    for group in parameter_ties(model):
        owners = [_generic(name.rpartition(".")[0]) for name in group]
        if any(owner in rules["dp"] for owner in owners):
            rules["dp"].update(dict.fromkeys(owners, "unit:last"))
    return rules


def _generic(name: str) -> str:
    """A name with `*` for every piece that is a number: how the plans of transformers name layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
