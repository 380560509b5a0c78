"""`parallelize`: the order in which the axes are applied to a model, and why.

 1. Check everything that can be known without a collective; then let all ranks agree that they got here.
 2. Stages: what other ranks of the pipeline have leaves the model first, so that nothing else is made of it.
 3. Stored dtype: master weights are made before they are sharded, so that no rank ever holds both copies whole.
 4. Experts: parameters become DTensors of ep (and etp). Before the tensor axis, which leaves them alone then.
 5. Tensor and sequence: parameters become DTensors of the tp axis. Before the data axis, which shards what is left.
    Then context: attention modules, with the heads that the tensor axis has left them.
 6. Products whose weight gradient can wait, where a schedule asks for that: on the weights that the axes have left.
 7. Recomputation: what runs again is the layer as the axes above have made it, their exchanges too.
 8. fully_shard, inner units first and the root last: FSDP2 takes what no inner unit has taken. Its hooks stand outside
    of what is recomputed.
 9. The weights follow later (`run.load_pretrained`, `run.init_weights`) when the model is on meta.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_5d.adapters.context_rules import context_violations, explicit_rows, rows_multiple
from dtensor_5d.adapters.decoder import Decoder, find_decoder
from dtensor_5d.adapters.expert_rules import (
    apart_violations,
    auxiliary_coefficient,
    auxiliary_violations,
    cuts_experts,
    scoring_routers,
)
from dtensor_5d.adapters.pipeline_rules import pipeline_violations
from dtensor_5d.adapters.planning import cuts_tokens, derive_rules
from dtensor_5d.agree import Agreement
from dtensor_5d.batch import BatchRules
from dtensor_5d.context.apply import apply_attention
from dtensor_5d.context.rows import RowCutter
from dtensor_5d.degrees import Degrees
from dtensor_5d.dp.fsdp import DataParallel, shard, units_of
from dtensor_5d.dp.stages import StagedData
from dtensor_5d.engine import Loop
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.apply import apply_rules as apply_expert_rules
from dtensor_5d.expert.check import expert_violations, node_violations
from dtensor_5d.expert.keep import is_routing
from dtensor_5d.expert.watch import RouterWatch
from dtensor_5d.families.facts import facts_for
from dtensor_5d.mesh import Mesh
from dtensor_5d.names import Names
from dtensor_5d.ops import WeightGradients, make_deferrable
from dtensor_5d.pipeline.staging import stage_model
from dtensor_5d.plan import Plan, built_violations
from dtensor_5d.precision import apply_stored_dtype, compute_dtype
from dtensor_5d.random import RandomStreams, stream_seed
from dtensor_5d.reading import Reader
from dtensor_5d.recompute import recompute_layers
from dtensor_5d.run import Parts, Run
from dtensor_5d.staged import Messages, Pipeline
from dtensor_5d.tensor.apply import apply_rules
from dtensor_5d.tensor.check import tensor_violations
from dtensor_5d.tensor.names import by_name
from dtensor_5d.weights import same_weights

__all__ = ["parallelize"]


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh) -> Run:
    """Shards `model` in place as `plan` says and returns the `Run` that trains it.

    model: a Hugging Face causal language model, on meta (weights come later) or in memory (the same on all ranks).
    Errors: `PlanError` on every rank, before the model is changed, listing all that is wrong.
    """
    agreement = Agreement(mesh["world"].get_group(), mesh.world_size, mesh.device)
    decoder: Decoder | None = None
    error: Exception | None = None
    try:
        decoder = _checked(model, plan, mesh)
        plan = _completed(model, plan, decoder, mesh)
        units_of(model, plan.rules.get("dp", {}))
    except Exception as problem:
        error = problem
    own_seed = torch.initial_seed() & (2**63 - 1)
    every = agreement.check(error, 0 if error else _signature(model, plan), own_seed)
    assert decoder is not None
    other = [rank for rank, row in enumerate(every) if row[0] != every[0][0]]
    if other:
        asked = f"a model or plan on ranks {other[:8]} that is not that of rank 0"
        needs = "all ranks must give the same plan, config and parameters (shapes, dtypes, trainable, on meta)"
        raise PlanError(Violation(asked, needs, "build model and plan from the same settings on every rank"))
    names = Names.of(model)
    if not any(p.is_meta for p in model.parameters()):
        same_weights(model, names, agreement)

    options = plan.options.settled(plan.degrees.pp)
    # Rank 0's seed for all: ranks that hold copies must draw alike. Other tokens, other dropout.
    streams = RandomStreams(model, mesh.coordinate()["loss"], mesh.device, seed=every[0][1])
    sequence = mesh.degrees.tp > 1 and cuts_tokens(decoder, options)
    multiple = rows_multiple(mesh.degrees, options, sequence=sequence)
    batches = _batch_rules(model, decoder, multiple=multiple, cut=mesh.degrees.cp > 1)
    dtype = compute_dtype(options.precision) or model.get_submodule(decoder.embedding).weight.dtype
    staging = stage_model(model, decoder, options, mesh["pp"]) if mesh.degrees.pp > 1 else None
    apply_stored_dtype(model, options.precision)
    stages = [range(decoder.n_layers)] if staging is None else [staging.cut.layers(v.number) for v in staging.views]
    tensor = experts = None
    store = WeightGradients()
    apart = cuts_experts(mesh.degrees, decoder)
    if apart:
        experts = apply_expert_rules(
            model,
            plan.rules["ep"],
            mesh["ep", "etp"] if mesh.degrees.etp > 1 else mesh["ep"],
            dispatch=options.dispatch,
            capacity=options.capacity,
            same_tokens=mesh["tp"],
            # Tokens whose number tp does not divide stay whole, in a forward that is called by hand.
            alike=lambda: tensor is None or not tensor.cut,
            lanes=mesh.lanes("ep"),
            store=store if staging is not None else None,
            overlap=facts_for(str(getattr(model.config, "model_type", ""))).shared_after,
        )
    if mesh.degrees.tp > 1:
        tensor = apply_rules(model, decoder, plan.rules["tp"], mesh["tp"], sequence=sequence, stages=stages)
    context = None
    if mesh.degrees.cp > 1:
        keeps = options.recompute == "selective" and decoder.in_order  # attention is as dear as a matrix product
        context = apply_attention(model, plan.rules["cp"], mesh["cp"], mesh.device, keeps=keeps)
    if staging is not None:
        make_deferrable(model, store)
    for layers in stages:
        own = [model.get_submodule(decoder.layer(n)) for n in layers]
        recompute_layers(own, options.recompute, is_routing if apart else None)
    present = {name for name, _ in model.named_modules()}  # the rest is on other stages
    if _has_shards(mesh.degrees, apart) or options.precision is not None:
        shard(
            model,
            _with_replicas(mesh, "fsdp"),
            plan.rules.get("dp", {}),
            zero=2 if options.regather == "window" else options.zero,
            precision=compute_dtype(options.precision),
            fp32_modules=[name for name in decoder.fp32_modules if name in present],
            embedding=decoder.embedding,
            layers=decoder.layers,
            expert_mesh=_with_replicas(mesh, "efsdp") if apart else None,
        )
    elif mesh.device_type != "cpu" and not any(p.is_meta for p in model.parameters()):
        model.to(mesh.device)
    routers = None
    if decoder.experts or decoder.other_experts:
        held = dict(model.named_modules())
        routers = RouterWatch(
            model,
            [name for name in (*decoder.experts, *decoder.other_experts) if name in held],
            [name for name in decoder.routers if name in held],
            mesh["loss"].get_group(),
            cut=mesh["tp"].get_group() if sequence else None,
            stages=mesh["pp"].get_group(),
            coefficient=auxiliary_coefficient(model),
            scored={} if apart else scoring_routers(decoder, held),
        )
    rows = None
    if context is not None:
        group = mesh["cp"].get_group()
        rows = RowCutter(group, multiple, options.balance, options.context, options.ulysses)
    surroundings = [context.around] if context is not None else []
    data: DataParallel
    if staging is None:
        data = DataParallel(model, zero=options.zero, grad_reduce=str(options.grad_reduce))
        engine = Loop(
            model,
            decoder,
            data,
            streams,
            mesh.device,
            multiple=multiple // mesh.degrees.cp,
            tensor=tensor,
            surroundings=surroundings,
            routers=routers,
        )
    else:
        visits = options.zero == 3 and options.regather == "visit"
        data = StagedData(model, staging.owners, resharding=visits)
        engine = Pipeline(
            model,
            decoder,
            data,
            streams,
            mesh.device,
            multiple=multiple // mesh.degrees.cp,
            world=mesh["world"].get_group(),
            staging=staging,
            store=store,
            options=options,
            messages=Messages(decoder.hidden, dtype, mesh.degrees.tp if sequence else 1),
            gather=("visit" if visits else "window") if data.shards else None,
            reduce=options.grad_reduce if data.shards else None,
            tensor=tensor,
            surroundings=surroundings,
            routers=routers,
        )
    parts = Parts(
        decoder=decoder,
        names=names,
        reader=Reader(mesh, batches, agreement, options.microbatches, rows.local if rows is not None else None),
        engine=engine,
        data=data,
        tensor=tensor,
        experts=experts,
        context=rows,
        routers=routers,
        agreement=agreement,
    )
    return Run(model, plan, mesh, parts)


def _checked(model: nn.Module, plan: Plan, mesh: Mesh) -> Decoder:
    """The decoder of a model that this plan and this mesh fit. Errors: `PlanError` with all that does not."""
    bad = built_violations(plan.degrees, plan.options)
    try:
        resolved = plan.degrees.resolve(mesh.world_size)
    except PlanError as error:
        bad += error.violations
    else:
        if resolved != mesh.degrees:
            asked = f"a plan for {plan.degrees} on a mesh of {mesh.degrees}"
            bad.append(Violation(asked, "both must have the same degrees", "build the mesh from plan.degrees"))
    if plan.options.dispatch == "two_step":
        bad += node_violations(mesh.ranks_per_node, mesh.lanes("ep"), mesh.degrees.ep)
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    if plan.model and kind != plan.model:
        bad.append(Violation(f"a plan for {plan.model!r}", f"the model is {kind!r}", "make the plan from this model"))
    meta = [p.is_meta for p in model.parameters()]
    if any(meta) and not all(meta):
        asked = f"{sum(meta)} of {len(meta)} parameters on meta"
        bad.append(Violation(asked, "all or none must be there", "build the whole model under torch.device('meta')"))
    try:
        decoder = find_decoder(model)
    except PlanError as error:
        raise PlanError([*bad, *error.violations]) from None
    bad += auxiliary_violations(model, decoder)
    if decoder.head is None:
        asked, needs = f"{type(model).__name__} without a head", "1 projection to the vocabulary is required"
        bad.append(Violation(asked, needs, "build it with AutoModelForCausalLM"))
    if any(p.dtype == torch.float16 for p in model.parameters()) and plan.options.precision is None:
        asked, needs = "a model in fp16", "fp16 needs loss scaling, which is not in this version"
        bad.append(Violation(asked, needs, "load it in bf16 or fp32, or use precision='bf16'"))
    if bad:
        raise PlanError(bad)
    return decoder


def _with_replicas(mesh: Mesh, axis: str) -> DeviceMesh:
    """Ranks that shard parameters, with those that hold the same shards where there are any (HSDP)."""
    return mesh["dp_replicate", axis] if mesh.degrees.dp_replicate > 1 else mesh[axis]


def _has_shards(degrees: Degrees, apart: bool) -> bool:
    """Whether any parameter is left to several ranks by the axes that cut the model."""
    return degrees.dp_replicate * degrees.fsdp > 1 or (apart and degrees.efsdp > 1)


def _completed(model: nn.Module, plan: Plan, decoder: Decoder, mesh: Mesh) -> Plan:
    """The plan with rules, where it was made without a model; checked where it was made for open degrees."""
    apart = cuts_experts(mesh.degrees, decoder)
    on = {"pp": mesh.degrees.pp > 1, "tp": mesh.degrees.tp > 1, "cp": mesh.degrees.cp > 1, "ep": apart}
    if not plan.rules or any(on[axis] and axis not in plan.rules for axis in on):
        rules = derive_rules(model, decoder, mesh.degrees, plan.options)
        return replace(plan, rules=rules, model=getattr(getattr(model, "config", None), "model_type", ""))
    bad: list[Violation] = []
    if on["tp"]:
        own, bad = by_name(plan.options.rules.get("tp", {}))
        bad += tensor_violations(
            model, decoder, plan.rules["tp"], mesh.degrees.tp, own=own,
            sequence=cuts_tokens(decoder, plan.options),
        )  # fmt: skip
    bad += context_violations(model, decoder, plan.rules["cp"], mesh.degrees, plan.options) if on["cp"] else []
    bad += expert_violations(model, plan.rules["ep"], mesh.degrees, plan.options) if apart else []
    bad += apart_violations(model, decoder, plan.rules, mesh.degrees) if apart else []
    bad += pipeline_violations(model, decoder, mesh.degrees, plan.options) if on["pp"] else []
    if bad:
        raise PlanError(bad)
    return plan


def _signature(model: nn.Module, plan: Plan) -> int:
    """A number that is the same where plan, config and parameters (not their values) are."""
    parameters = [(n, tuple(p.shape), p.dtype, p.requires_grad, p.is_meta) for n, p in model.named_parameters()]
    # Where a config came from may differ between ranks.
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    facts = json.dumps(config, sort_keys=True, default=str)
    return stream_seed(repr(plan), repr(parameters), type(model).__name__, facts)


def _batch_rules(model: nn.Module, decoder: Decoder, *, multiple: int, cut: bool) -> BatchRules:
    kind = getattr(model.config, "model_type", "this family")
    embedding = model.get_submodule(decoder.embedding)
    tables = [
        module.num_embeddings - int(getattr(module, "offset", 0))
        for name in decoder.before
        if name != decoder.embedding
        and isinstance(module := model.get_submodule(name), nn.Embedding)
        and any(word in name.rpartition(".")[2] for word in ("pos", "wpe"))  # not a table of token types
    ]
    vocab = getattr(embedding, "num_embeddings", None) or model.config.get_text_config().vocab_size
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    return BatchRules(
        vocab=int(vocab),
        positions=min(tables, default=None),
        packs=cut or facts_for(kind).packs_by_position,  # what cuts rows separates their documents itself
        family=kind,
        multiple=multiple,
        adaptive=bool(kinds & {"dynamic", "longrope"}),
        explicit=explicit_rows(model) if cut else None,
    )
