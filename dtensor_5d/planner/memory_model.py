"""What a layout needs of every pipeline rank's memory, by cause, before anything is launched. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.plan import Plan
from dtensor_5d.planner.activity import Activity, Tokens, activity_of_stage
from dtensor_5d.planner.memory_report import CAUSES, Device, MemoryReport, RankMemory, StageMemory
from dtensor_5d.planner.moments import fullest_moments
from dtensor_5d.planner.stages import Stage, stages_by_rank
from dtensor_5d.planner.state import Widths, shard_numel, state_terms, whole_numel
from dtensor_5d.planner.units import units_of_stage

__all__ = ["memory", "memory_violations"]


def memory(
    shape: ModelShape,
    plan: Plan,
    *,
    micro_batch: int,
    seq_len: int,
    attention: str = "flash",
    optimizer_numbers: int = 2,
    device: Device | None = None,
) -> MemoryReport:
    """What every pipeline rank needs, by cause.

    micro_batch: sequences of one micro-batch on one data rank; seq_len: of the whole sequence, before cp cuts it.
    attention: "flash", or "eager" where scores are written out. optimizer_numbers: numbers that the optimizer keeps
    per parameter (Adam 2, SGD with momentum 1, SGD 0). Routing to experts is taken to be even.

    Example:
        >>> report = memory(ModelShape.preset("llama-3.1-8b"), Plan(Degrees(dp_shard=8), Options(precision="bf16",
        ...                 recompute="selective")), micro_batch=1, seq_len=8192)
        >>> print(report)

    Errors: `PlanError` listing all that does not fit together.
    """
    bad = memory_violations(shape, plan, micro_batch=micro_batch, seq_len=seq_len)
    if isinstance(optimizer_numbers, bool) or not isinstance(optimizer_numbers, int) or optimizer_numbers < 0:
        asked, change = f"optimizer_numbers={optimizer_numbers!r}", "use 2 for Adam, 1 for momentum, 0 for plain SGD"
        bad.append(Violation(asked, "must be an integer >= 0", change))
    if device is not None and not isinstance(device, Device):
        asked = f"device of type {type(device).__name__}"
        bad.append(Violation(asked, "must be a Device", "give Device(memory=80 * 2**30), or none"))
    if bad:
        raise PlanError(bad)
    plan = Plan(plan.degrees, plan.options.settled(plan.degrees.pp), plan.rules, plan.model)
    device = device or Device()
    count = micro_batch * -(-seq_len // plan.degrees.cp)
    widths = _widths(shape, plan, optimizer_numbers)
    tokens = Tokens(count, seq_len, widths.compute or widths.shard, attention)
    by_rank, schedule = stages_by_rank(shape, plan)
    whole = {s.number: activity_of_stage(shape, plan, s, tokens) for stages in by_rank for s in stages}
    ranks: list[RankMemory] = []
    for rank, stages in enumerate(by_rank):
        moments = fullest_moments(schedule, rank, whole)
        ranks.append(_rank_memory(shape, plan, rank, stages, whole, moments, widths, device))
    return MemoryReport(tuple(ranks), device, shape.notes)


def memory_violations(shape: ModelShape, plan: Plan, *, micro_batch: int, seq_len: int) -> list[Violation]:
    """What keeps a plan from being weighed: sizes that are no counts, degrees that do not divide the model."""
    bad = [
        Violation(f"{name}={value!r}", "must be an integer >= 1", f"give {name} a count")
        for name, value in (("micro_batch", micro_batch), ("seq_len", seq_len))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    degrees = plan.degrees
    if not degrees.is_resolved:
        axis = degrees.open_axes[0]
        return [*bad, Violation(f"{axis}=-1", "the world size must be known", "use degrees.resolve(world_size)")]
    heads = {layer.mixer.heads for layer in shape.layers if layer.mixer.kind != "linear"} or {shape.heads}
    for count in sorted(heads):
        if count % degrees.tp:
            legal = [d for d in range(1, count + 1) if count % d == 0]
            bad.append(
                Violation(f"tp={degrees.tp} with {count} query heads", f"tp must divide the {count} query heads",
                          f"use tp among {legal}")
            )  # fmt: skip
    experts = {layer.experts for layer in shape.layers if layer.experts}
    if (degrees.ep > 1 or degrees.etp > 1) and not experts:
        bad.append(
            Violation(f"ep={degrees.ep}, etp={degrees.etp} for {shape.model_type or 'a model'} without experts",
                      "ep and etp must be 1 where there are no experts", "use ep=1, etp=1")
        )  # fmt: skip
    for count in sorted(experts):
        if count % degrees.ep:
            legal = [d for d in range(1, count + 1) if count % d == 0]
            bad.append(
                Violation(f"ep={degrees.ep} with {count} experts", f"ep must divide the {count} experts",
                          f"use ep among {legal}")
            )  # fmt: skip
    return bad


def _widths(shape: ModelShape, plan: Plan, optimizer_numbers: int) -> Widths:
    precision = plan.options.precision
    stored = shape.bytes_per_number if precision is None else 4
    if precision in ("bf16", "fp16"):
        return Widths(2, 4, 4, 4 * optimizer_numbers)
    return Widths(0 if _is_plain(shape, plan) else stored, stored, 0, stored * optimizer_numbers, shard=stored)


def _is_plain(shape: ModelShape, plan: Plan) -> bool:
    """Whether parameters are computed with as they are stored: nothing to gather and nothing to cast.

    Experts are left to other ranks than the rest (all those of tp, where ep and etp do not cut them).
    """
    degrees = plan.degrees
    experts = degrees.efsdp if any(layer.experts for layer in shape.layers) else 1
    return degrees.fsdp * degrees.dp_replicate * experts == 1 and plan.options.precision in (None, "fp32")


def _state(shape: ModelShape, plan: Plan, stages: tuple[Stage, ...], widths: Widths) -> list[dict[str, int]]:
    """The state terms of dense parameters and of experts."""
    options, made = plan.options, []
    several = options.microbatches > 1
    for expert in (False, True):
        params = [p for stage in stages for p in stage.params if p.is_expert == expert]
        whole, shard = whole_numel(params, plan.degrees), shard_numel(params, plan.degrees)
        terms = state_terms(
            whole, shard, options.zero, widths, whole_gradients=several and options.grad_reduce == "window"
        )
        if not widths.master:
            # The stored shard is what is updated; the gathered copy of zero 1 and 2 comes on top.
            terms["gathered"] = terms["parameters"] if options.zero < 3 else 0
            terms["parameters"] = shard * widths.shard
        else:
            terms["gathered"], terms["parameters"] = terms["parameters"], 0
        terms["shard gradients"] = shard * widths.gradient
        made.append(terms)
    return made


def _rank_memory(
    shape: ModelShape,
    plan: Plan,
    rank: int,
    stages: tuple[Stage, ...],
    activity: Mapping[int, Activity],
    moments: Mapping[str, Mapping[str, int]],
    widths: Widths,
    device: Device,
) -> RankMemory:
    dense, experts = _state(shape, plan, stages, widths)
    state = {name: dense[name] + experts[name] for name in dense}
    own = [activity[s.number] for s in stages]
    gathered, unit_gradients, reduce_buffer = _unit_terms(shape, plan, stages, widths, state["gathered"])
    groups = sum(1 for axis, degree in plan.degrees.items() if degree > 1)
    stored = {"parameters": state["parameters"], "master": state["master"]}
    context = {"context": device.context + groups * device.communicator}
    during = {
        "gradients": state["gradients"],
        "buffers": max(a.buffers for a in own),
        "gathered": gathered,
    }
    loss = {**during, **moments["loss"]}
    backward = {**during, **moments["backward"], "reduce buffer": reduce_buffer}
    backward["working"] += unit_gradients
    optimizer = {"optimizer": state["optimizer"]}
    # A foreach optimizer makes one temporary the size of what it updates.
    update = {"gradients": state["shard gradients"], "temporary": state["parameters"] + state["master"], **optimizer}
    phases = {
        "step 1: rest": {**stored, **context},
        "step 1: loss": {**stored, **loss, **context},
        "step 1: backward": {**stored, **backward, **context},
        "step 1: optimizer": {**stored, **update, **context},
        "step 2: rest": {**stored, **optimizer, **context},
        "step 2: loss": {**stored, **loss, **optimizer, **context},
        "step 2: backward": {**stored, **backward, **optimizer, **context},
        "step 2: optimizer": {**stored, **update, **context},
    }
    shown = []
    for stage in stages:
        parts = _state(shape, plan, (stage,), widths)
        total = sum(p[name] for p in parts for name in ("parameters", "master", "gradients", "optimizer"))
        layers = tuple(layer.index for layer in stage.layers)
        numel = shard_numel(stage.params, plan.degrees)
        shown.append(StageMemory(stage.number, layers, numel, total, activity[stage.number].kept))
    names = ("parameters", "gradients", "master", "optimizer")
    return RankMemory(
        rank,
        tuple(shown),
        {phase: {c: causes.get(c, 0) for c in CAUSES} for phase, causes in phases.items()},
        {n: dense[n] for n in names},
        {n: experts[n] for n in names},
    )


def _unit_terms(
    shape: ModelShape, plan: Plan, stages: tuple[Stage, ...], widths: Widths, whole_copy: int
) -> tuple[int, int, int]:
    """Bytes of gathered parameters; of the largest unit's gradients as backward makes them; of the copy in the dtype of
    the master that the reduction sends."""
    if _is_plain(shape, plan):
        return 0, 0, 0
    prefix = f"{shape.recipe.root}.{shape.recipe.layers}."
    rules = plan.rules.get("dp", {})
    units = [u for stage in stages for u in units_of_stage(stage, rules, plan.degrees, shape.tied, prefix)]
    degrees = plan.degrees
    gradients = max((u.numel for u in units), default=0) * widths.compute
    reduced = [u for u in units if (degrees.efsdp if u.is_experts else degrees.fsdp) * degrees.dp_replicate > 1]
    reduce_buffer = max((u.numel for u in reduced), default=0) * widths.gradient
    if plan.options.zero < 3:
        return whole_copy, gradients, reduce_buffer
    if plan.options.regather == "window":
        return sum(u.numel for u in units) * widths.compute, gradients, reduce_buffer
    staying = sum(u.numel for u in units if u.stays)
    passing = [u.numel for u in units if not u.stays]
    # While one unit computes the next one is gathered, from a buffer of its size.
    pair = max((a + b for a, b in zip(passing, [*passing[1:], 0])), default=0)
    return (staying + pair + max(passing, default=0)) * widths.compute, gradients, reduce_buffer
