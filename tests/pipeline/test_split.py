"""The cut by itself, in one process: stages one after the other compute what the whole model computes, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from dtensor_5d import Degrees, Plan, PlanError, plan_for
from dtensor_5d.adapters.decoder import find_decoder
from dtensor_5d.adapters.pipeline_rules import cut_for, pipeline_violations
from dtensor_5d.adapters.stand_in import StandIn
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.options import Options
from dtensor_5d.pipeline.split import Cut, keep_stages, view_of
from dtensor_5d.pipeline.staging import _refuse_whole
from dtensor_5d.planner.stages import stages_by_rank
from tests.families.tiny import FAMILIES, tiny_config, tiny_model

SOME = ("llama", "gemma3_text", "gpt2", "opt", "bloom", "olmo", "deepseek_v3", "nanochat")
# Their layers read embeddings of their own, or are called in another way; each is refused by name.
REFUSED = ("gemma3n_text", "gemma4_text")
# Dropout and jitter that a config does not switch off would draw other numbers in the two runs.
IN_EVAL = ("seed_oss", "phimoe")
CUT = Cut((1, 2, 1), (0, 1, 2))


def _inputs(packed=False):
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in SOME else pytest.mark.slow) for f in FAMILIES if f not in REFUSED]
)
def test_stages_compute_what_the_model_computes(family):
    model = tiny_model(family).train(family not in IN_EVAL)
    decoder = find_decoder(model)
    assert pipeline_violations(model, decoder, Degrees(pp=3), Options()) == []
    inputs = _inputs()
    want = model(**inputs, use_cache=False).logits
    want.float().square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    hidden, parts, received = None, [], []
    for stage in range(CUT.stages):
        part = copy.deepcopy(model)
        part.zero_grad()
        keep_stages(part, decoder, CUT, stage)
        view = view_of(part, decoder, CUT, stage)
        view.refresh()
        if hidden is not None:
            hidden = hidden.detach().requires_grad_()
        received.append(hidden)
        hidden = view(inputs, hidden)
        parts.append((part, hidden))
    logits = parts[-1][1].logits
    assert torch.equal(logits, want)
    parts[-1] = (parts[-1][0], logits.float().square().mean())
    gradient = None
    for (_part, out), came in zip(reversed(parts), reversed(received)):
        torch.autograd.backward(out, gradient)
        gradient = came.grad if came is not None else None
    found = {}
    for part, _ in parts:
        for name, p in part.named_parameters(remove_duplicate=False):
            found[name] = p.grad if found.get(name) is None else found[name] + p.grad
    assert set(found) == set(grads)
    tied = {name for group in decoder.ties for name in group}
    for name, g in grads.items():
        if name not in tied and g is not None:
            assert torch.equal(found[name], g), name
    for group in decoder.ties:
        copies = [found[name] for name in group]
        torch.testing.assert_close(sum(copies), grads[group[0]], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_layers_read_embeddings_of_their_own_is_refused(family):
    with pytest.raises(PlanError, match="pp > 1 for the family"):
        plan_for(tiny_config(family), Degrees(pp=2), microbatches=2)


def test_names_stay_and_no_rank_has_the_others_parameters():
    """Field faults P11, P17, P21: the map comes from the schedule, every name is on exactly one rank."""
    model = tiny_model("llama", num_hidden_layers=8)
    decoder = find_decoder(model)
    cut = cut_for(model, decoder, Options(schedule="zbv"), 4)
    assert [cut.of(rank) for rank in range(4)] == [(r, 7 - r) for r in range(4)]
    whole = [n for n, _ in model.named_parameters()]
    seen = []
    for rank in range(4):
        part = copy.deepcopy(model)
        keep_stages(part, decoder, cut, rank)
        assert len(part.model.layers) == 8
        assert list(dict(part.named_modules()))[:3] == list(dict(model.named_modules()))[:3]
        seen += [n for n, _ in part.named_parameters()]
        assert isinstance(part.lm_head, StandIn) == (rank != 0)
    assert sorted(seen) == sorted(whole)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in SOME else pytest.mark.slow) for f in FAMILIES if f not in REFUSED]
)
def test_runtime_and_planner_cut_alike(family):
    config = tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    decoder, shape = find_decoder(model), ModelShape.from_config(config)
    for options in (Options(), Options(schedule="zbv", microbatches=4)):
        ranks, _ = stages_by_rank(shape, Plan(Degrees(pp=2), options))
        planned = {stage.number: len(stage.layers) for rank in ranks for stage in rank}
        counts = cut_for(model, decoder, options, 2).counts
        assert counts == tuple(planned[n] for n in range(len(planned)))


def test_a_view_follows_the_model():
    model = tiny_model("llama")
    decoder = find_decoder(model)
    keep_stages(model, decoder, Cut((2, 2), (0, 1)), 1)
    view = view_of(model, decoder, Cut((2, 2), (0, 1)), 1)
    model.eval()
    assert view.module.training
    view.refresh()
    assert not view.module.training and not view.module.model.training
    assert view.module.model.layers[2] is model.model.layers[2]


def test_what_is_left_of_a_model_does_not_run_as_if_it_were_whole():
    model = tiny_model("llama")
    decoder, cut = find_decoder(model), Cut((2, 2), (0, 1))
    keep_stages(model, decoder, cut, 0)
    _refuse_whole(model, "run.step")
    view = view_of(model, decoder, cut, 0)
    ids = torch.ones(1, 4, dtype=torch.long)
    assert view({"input_ids": ids}, None).shape == (1, 4, 64)
    with pytest.raises(PlanError, match="no rank has all layers"):
        model(input_ids=ids)
    with pytest.raises(PlanError, match="a forward of a model"):
        model.generate(ids, max_new_tokens=1)
