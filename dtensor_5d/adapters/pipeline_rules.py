"""How a model is cut into the stages of a pipeline, and which models cannot be."""

from __future__ import annotations

from typing import Any

from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.options import Options
from dtensor_5d.pipeline.split import Cut
from dtensor_5d.planner.cut import cut_layers, split_layers
from dtensor_5d.schedule.chosen import schedule_of, stage_ranks_of

__all__ = ["cut_for", "pipeline_rules", "pipeline_violations"]


def cut_for(model: nn.Module, decoder: Decoder, options: Options, pp: int) -> Cut:
    """The stages of every rank: as the options say, or by what layers cost.

    Errors: `PlanError` for layers that do not suffice or add up.
    """
    rank_of = stage_ranks_of(options, ranks=pp)
    counts = options.layers_per_stage or _by_cost(model, decoder, len(rank_of))
    if len(counts) != len(rank_of) or sum(counts) != decoder.n_layers:
        asked = f"layers_per_stage={list(counts)} (sum {sum(counts)})"
        needs = f"must be {len(rank_of)} numbers that add up to the {decoder.n_layers} layers"
        example = (
            f"for example {list(split_layers(decoder.n_layers, len(rank_of)))}"
            if decoder.n_layers >= len(rank_of)
            else f"use pp x chunks <= {decoder.n_layers}"
        )
        raise PlanError(Violation(asked, needs, example))
    return Cut(tuple(counts), rank_of)


def _by_cost(model: nn.Module, decoder: Decoder, stages: int) -> tuple[int, ...]:
    """As the planner cuts this model; by count where it has no shape for it."""
    even = split_layers(decoder.n_layers, stages)
    try:
        shape = ModelShape.from_config(model.config)  # type: ignore[arg-type]
    except PlanError:
        return even
    return cut_layers(shape, stages) if len(shape.layers) == decoder.n_layers else even


def pipeline_violations(model: nn.Module, decoder: Decoder, degrees: Degrees, options: Options) -> list[Violation]:
    """Everything that keeps this model from running as a pipeline of these degrees; `degrees.pp` may be open (-1)."""
    kind = str(getattr(model.config, "model_type", type(model).__name__))
    bad = [
        Violation(f"pp > 1 for the family {kind!r}", needs, "use dp_shard, tp or cp for this model")
        for needs in _unfit(model, decoder)
    ]
    if degrees.pp > 1:
        try:
            cut = cut_for(model, decoder, options, degrees.pp)
        except PlanError as error:
            bad += error.violations
        else:
            bad += _tied_too_often(decoder, cut)
        if options.schedule != "dualpipe":  # refused by name already
            try:
                schedule_of(options, ranks=degrees.pp)
            except PlanError as error:
                bad += [violation for violation in error.violations if violation not in bad]
    return bad


def pipeline_rules(model: nn.Module, decoder: Decoder, options: Options, pp: int) -> dict[str, str]:
    """Module -> stage and rank, to be read in the plan."""
    cut = cut_for(model, decoder, options, pp)
    rules: dict[str, str] = {}
    for stage, rank in enumerate(cut.rank_of):
        where = f"stage {stage} on rank {rank}"
        own = cut.layers(stage)
        if stage == 0:
            rules |= dict.fromkeys(decoder.before, where)
        rules[f"{decoder.layers}.{{{own.start}..{own.stop - 1}}}"] = where
        if stage == cut.stages - 1:
            rules |= dict.fromkeys(decoder.after, where)
    return rules


def _unfit(model: nn.Module, decoder: Decoder) -> list[str]:
    text: Any = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    found = []
    if getattr(text, "hidden_size_per_layer_input", 0):
        found.append(
            "its layers read embeddings of their own (hidden_size_per_layer_input), which every stage would need"
        )
    if not decoder.in_order:
        found.append("every layer must run once, in the order of its number")
    if decoder.between:
        found.append(f"{decoder.between[0]} runs between its layers, and a stage hands on hidden states only")
    ends = sorted(set(decoder.before) & set(decoder.after))
    if ends:
        found.append(f"{ends[0]} runs before and after the layers, so 2 stages would need it")
    around = [n for n in (*decoder.before, *decoder.after) if decoder.layers.startswith(f"{n}." if n else "")]
    if around:
        found.append(f"{around[0] or 'the model'} has parameters of its own around the layers")
    if len(decoder.hidden) != 1:
        found.append(f"its layers hand on {2 + len(decoder.hidden)}-dimensional hidden states instead of [B, S, M]")
    return found


def _tied_too_often(decoder: Decoder, cut: Cut) -> list[Violation]:
    bad = []
    for group in decoder.ties:
        ranks = {cut.rank_of[cut.owner(decoder, name)] for name in group}
        if len(ranks) > 2:
            asked = f"{group[0]}, one tensor under {len(group)} names"
            needs = f"its names are on {len(ranks)} ranks of the pipeline, and 2 can share it"
            bad.append(Violation(asked, needs, "untie it, or use fewer stages"))
    return bad
