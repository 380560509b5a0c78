"""`PipelineParallel` without the rest of the package, and what changes in a model after it was cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM

from dtensor_5d import ContextParallel, Degrees, PlanError, build_mesh, cut_batch, parallelize, plan_for
from dtensor_5d.loss import token_loss_sum
from dtensor_5d.pipeline import PipelineParallel
from dtensor_5d.tensor import ColwiseParallel, HeadParallel
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import rows


def _cut(model, schedule="zbv"):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    return parallelize_module(model, mesh["pp"], PipelineParallel(schedule=schedule, microbatches=2))


def _one_process(model, batch):
    """Gradients of this batch by one process, and its loss."""
    ids, labels = batch["input_ids"], torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = token_loss_sum(model(input_ids=ids, use_cache=False).logits, labels) / int((labels != -100).sum())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def _check(model, ref, loss, batch, tol=1e-5):
    want_loss, want = _one_process(ref, batch)
    assert abs(loss.item() - want_loss) < tol * abs(want_loss)
    got = {n: p.grad for n, p in model.named_parameters()}
    assert got
    assert_same_gradients(got, {n: want[n] for n in got}, tol=tol)


def _fails(logits, labels):
    raise KeyError("mine")


def _refusals(rank):
    model = tiny_model("llama")
    ref = copy.deepcopy(model)
    model = _cut(model)
    good = rows(1, 4, 8, VOCAB)
    outside = {k: v.clone() for k, v in good.items()}
    outside["input_ids"][0, 0] = VOCAB
    wrong = {  # on rank 1 only
        "values": (rows(2, 4, 8, VOCAB), "another batch"),
        "length": (rows(1, 4, 9, VOCAB), "another batch"),
        "rows": (rows(1, 5, 8, VOCAB), "another batch"),
        "count": ([good, good], "another batch"),
        "labels": ({"input_ids": good["input_ids"]}, "labels"),
        "ids": (outside, f"id {VOCAB}"),
    }
    for batch, words in wrong.values():
        with pytest.raises(PlanError, match=words):
            model.step(batch if rank == 1 else good)
    with pytest.raises(PlanError, match="another `tokens`"):
        model.step(good, tokens=10 + rank)
    own = int((good["labels"][:, 1:] != -100).sum())
    with pytest.raises(PlanError, match=f"tokens={own - 1}: this pipeline alone has {own} supervised tokens"):
        model.step(good, tokens=own - 1)
    with pytest.raises(PlanError, match="a window without a batch: must hold at least 1"):
        model.step([])
    with pytest.raises(PlanError, match="no_grad"), torch.set_grad_enabled(rank == 0):
        model.step(good)
    with pytest.raises(PlanError, match=r"use model\.step"):
        model(**good)
    with pytest.raises((KeyError, PlanError), match="mine"):
        model.step(good, loss=_fails)
    with pytest.raises(PlanError, match=r"returned 1\.0"):
        model.step(good, loss=lambda logits, labels: 1.0)
    for p in model.parameters():
        p.grad = None
    _check(model, ref, model.step(good), good)
    model.requires_grad_(False)
    with pytest.raises(PlanError, match="all frozen"):
        model.step(good)


def test_what_one_rank_cannot_run_is_every_ranks_error_and_the_next_step_is_exact():
    run_ranks(2, _refusals)


def _other_settings(rank):
    """What is another on rank 1."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    mixed = {
        "layers_per_stage": {"layers_per_stage": [[1, 3], [2, 2]][rank]},
        "schedule": {"schedule": ["1f1b", "gpipe"][rank]},
        "microbatches": {"microbatches": [2, 4][rank]},
        "requires_grad": {},
        "tie_word_embeddings": {},
        "model": {},
    }
    for name, options in mixed.items():
        model = tiny_model("llama", tie_word_embeddings=name == "tie_word_embeddings" and rank == 0)
        if name == "requires_grad" and rank == 1:
            for parameter in (*model.model.embed_tokens.parameters(), *model.model.layers[:2].parameters()):
                parameter.requires_grad_(False)
        if name == "model" and rank == 1:
            model.config.rms_norm_eps = 1e-3
        model = parallelize_module(model, mesh["pp"], PipelineParallel(**{"microbatches": 4, **options}))
        with pytest.raises(PlanError, match=f"{name}.* on rank 1 of the pipeline, not as on rank 0"):
            model.step(rows(1, 4, 8, VOCAB))
    model = tiny_model("llama")
    ref = copy.deepcopy(model)
    model.config._name_or_path = f"/node{rank}/llama"  # where it lies is each rank's own
    batch = rows(1, 4, 8, VOCAB)
    model = _cut(model)
    _check(model, ref, model.step(batch), batch)


def test_settings_that_are_not_the_same_on_all_stages_are_refused_before_the_first_message():
    run_ranks(2, _other_settings)


def _with_others(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "other"))
    model = _cut(tiny_model("llama"))
    if rank == 1:
        fully_shard(model, mesh=mesh["other"])
    with pytest.raises(PlanError, match="fully_shard on some stages"):
        model.step(rows(1, 4, 8, VOCAB))
    mine = {"model.layers.*.mlp.gate_proj": ColwiseParallel(own_input=False)}
    model = parallelize_module(tiny_model("llama"), mesh["other"], mine)
    with pytest.raises(PlanError, match="apply PipelineParallel first"):
        _cut(model)


def test_fully_shard_on_one_stage_and_styles_before_it_are_refused():
    run_ranks(2, _with_others)


def _cut_head(rank):
    """A style that leaves each rank some columns of the logits, and one that gathers them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    ref, batch = tiny_model("llama"), rows(1, 4, 8, VOCAB)
    for style in (ColwiseParallel(), HeadParallel()):
        cut = PipelineParallel(schedule="1f1b", microbatches=2)
        model = parallelize_module(tiny_model("llama"), mesh["pp"], cut)
        model = parallelize_module(model, mesh["tp"], {"lm_head": style})
        if isinstance(style, HeadParallel):
            loss = model.step(batch).item()
            assert abs(loss - _one_process(ref, batch)[0]) < 1e-5 * loss
            return
        with pytest.raises(PlanError, match=f"logits with {VOCAB // 2} of {VOCAB} columns"):
            model.step(batch)


def test_logits_of_some_columns_are_every_ranks_error():
    run_ranks(4, _cut_head)


def _changed(rank, how):
    ref = tiny_model("llama")
    batch = rows(1, 4, 8, VOCAB)
    if how == "meta":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        model = _cut(model)
        with pytest.raises(PlanError, match="on meta"):
            model.step(batch)
        model.to_empty(device="cpu")
        model.load_state_dict({k: v for k, v in ref.state_dict().items() if k in model.state_dict()})
        model.model.rotary_emb = copy.deepcopy(ref.model.rotary_emb)  # its buffers are not in a state dict
        _check(model, ref, model.step(batch), batch)
    else:
        model = _cut(copy.deepcopy(ref))
        model.step(batch)
        model.zero_grad()
        model.double(), ref.double()
        _check(model, ref, model.step(batch), batch, tol=1e-10)


@pytest.mark.parametrize("how", ["meta", "double"])
def test_device_and_dtype_are_those_at_the_step(how):
    run_ranks(2, _changed, how)


# --- run: what is trained, and biases of routers


def _half_frozen(rank, schedule):
    model = tiny_model("llama")
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1.")))
    model.enable_input_require_grads()
    ref = copy.deepcopy(model)
    plan = plan_for(model, Degrees(pp=2), schedule=schedule, microbatches=2)
    run = parallelize(model, plan, build_mesh(Degrees(pp=2), "cpu"))
    batch = rows(1, 4, 8, VOCAB)
    run.step(batch)
    assert_same_gradients(run.full_gradients(), _one_process(ref, batch)[1], tol=1e-5)
    run.model.requires_grad_(True)
    with pytest.raises(PlanError, match="stage 0, which was frozen when the model was cut"):
        run.step(batch)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_frozen_stage_with_input_gradients_is_exact_and_may_not_be_trained_later(schedule):
    run_ranks(2, _half_frozen, schedule)


def _biases(rank, pp, family):
    model = tiny_model(family, num_hidden_layers=2)
    run = parallelize(model, plan_for(model, Degrees(pp=pp), microbatches=2), build_mesh(Degrees(pp=pp), "cpu"))
    run.step(rows(1, 4, 8, VOCAB))
    if family == "qwen3_moe":
        with pytest.raises(PlanError, match="correction bias"):
            run.update_expert_bias(0.01)
        return {}
    run.update_expert_bias(0.01)
    return {n: b for n, b in run.model.named_buffers() if n.endswith("e_score_correction_bias")}


def test_a_stage_of_dense_layers_has_no_bias_to_update():
    (want,) = run_ranks(1, _biases, 1, "deepseek_v3")
    dense, sparse = run_ranks(2, _biases, 2, "deepseek_v3")
    assert want and not dense and set(sparse) == set(want)
    assert all(torch.equal(sparse[n], b) and b.any() for n, b in want.items())
    run_ranks(2, _biases, 2, "qwen3_moe")


def _with_routers_loss(rank):
    model = tiny_model("qwen3_moe")
    model.config.output_router_logits = True
    with pytest.raises(PlanError, match="the auxiliary loss spans all stages"):
        _cut(model)
    model.config.output_router_logits = False
    model = _cut(model)
    model.config.output_router_logits = rank == 1
    with pytest.raises(PlanError, match="the auxiliary loss spans all stages"):
        model.step(rows(1, 4, 8, VOCAB))


def _beside_context(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    style, words = {"model.layers.*.self_attn": ContextParallel()}, "PipelineParallel beside ContextParallel"
    cut = PipelineParallel(schedule="zbv", microbatches=2)
    model = parallelize_module(tiny_model("llama"), mesh["pp"], cut)
    model = parallelize_module(model, mesh["cp"], style)
    batch = rows(1, 4, 8, VOCAB)
    for given in (batch, cut_batch(batch, mesh["cp"])):
        with pytest.raises(PlanError, match=words):
            model.step(given)
    model = parallelize_module(tiny_model("llama"), mesh["cp"], style)
    with pytest.raises(PlanError, match=words):
        parallelize_module(model, mesh["pp"], cut)


def test_a_cut_sequence_is_sent_to_parallelize():
    run_ranks(4, _beside_context)


def test_a_model_with_an_auxiliary_loss_is_sent_to_parallelize():
    run_ranks(2, _with_routers_loss)
