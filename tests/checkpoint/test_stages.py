"""Weights over the pipeline axis: each stage takes its own, one folder comes out, whole tensors on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from dtensor_5d import Degrees, PlanError
from dtensor_5d.adapters.decoder import find_decoder
from dtensor_5d.agree import Agreement
from dtensor_5d.checkpoint import sources
from dtensor_5d.checkpoint.gather import whole, whole_model
from dtensor_5d.checkpoint.pretrained import init_weights, load_pretrained, save_pretrained
from dtensor_5d.checkpoint.slices import local_part
from dtensor_5d.checkpoint.template import named_tensors
from dtensor_5d.dp.grads import clip_grads_, grad_norm
from dtensor_5d.mesh import build_mesh
from dtensor_5d.names import Names
from dtensor_5d.sections import sections_of
from dtensor_5d.weights import same_weights
from tests.checkpoint.layouts import differing, on_meta
from tests.checkpoint.stages import cut, stage
from tests.checkpoint.test_load import counted_reads
from tests.families.tiny import tiny_config, tiny_model
from tests.harness import fails_on_ranks, run_ranks
from tests.traces import Trace

FOUR = {"num_hidden_layers": 4}
TIED = {**FOUR, "tie_word_embeddings": True}
TP = Degrees(pp=2, tp=2)
EP = Degrees(pp=2, dp_shard=2, ep=2)

# Ties on two stages and on one, positions of their own, scaled projections, experts as DTensors of another mesh and
# one key per expert in the folder, dense layers beside a stage of experts, corrections that are buffers, packed ones.
CASES = [
    ("gemma2", "halves", TIED, None),
    ("gpt2", "V", TIED, None),
    ("qwen3_moe", "uneven", TIED, EP),
    ("deepseek_v3", "halves", {**FOUR, "first_k_dense_replace": 2}, None),
    ("phi3", "halves", {**FOUR, "num_key_value_heads": 4}, TP),
]


def wrong_names(model, want):
    packed = sections_of(model)
    got = {n: whole(tensor, packed.get(n)) for n, tensor in named_tensors(model).items()}
    return differing(got, {n: want[n] for n in got})


def in_and_out(rank, cases):
    problems = []
    for family, shape, overrides, degrees, source, out in cases:
        config = tiny_config(family, **overrides)
        model, names, mesh = stage(on_meta(config), shape, degrees)
        stored = sum(local_part(p).numel() for p in model.parameters())
        log, counting = counted_reads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources.FileTensor, "read", counting)
            load_pretrained(model, source, device="cpu")
        want = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        buffers = sum(b.numel() for n, b in model.named_buffers() if n in model.state_dict())
        found = {f"loaded {n}" for n in wrong_names(model, named_tensors(want))}
        if sum(log) != stored + buffers:
            found.add(f"{sum(log)} elements read, {stored} + {buffers} stored")
        tensors = dict(model.named_parameters())
        full = whole_model(tensors, names, mesh["pp"], sections_of(model))
        if list(full) != [n for n, _ in want.named_parameters()]:
            found.add("names of the whole model")
        found |= {f"whole {n}" for n in differing(full, dict(want.named_parameters()))}
        if not 0 < len(tensors) < len(full):
            found.add(f"{len(tensors)} of {len(full)} parameters: no stage")
        save_pretrained(model, out, config=model.config, source=source, max_shard_bytes=150_000)
        init_weights(model, 5)
        alone = on_meta(config)
        init_weights(alone, 5)
        found |= {f"initialised {n}" for n in wrong_names(model, named_tensors(alone))}
        problems += [f"{family} {shape}: {what}" for what in sorted(found)]
    return problems


def test_stages_take_their_own_weights_and_write_one_folder(tmp_path):
    """I2, C11: load, whole tensors, save, first weights, on pp 2 x dp_shard 2, with ep 2 and with tp 2."""
    cases = []
    for i, case in enumerate(CASES):
        tiny_model(case[0], **case[2]).save_pretrained(tmp_path / f"in{i}")
        cases.append((*case, str(tmp_path / f"in{i}"), str(tmp_path / f"out{i}")))
    assert run_ranks(4, in_and_out, cases, timeout=100) == [[]] * 4
    for *case, source, out in cases:
        got, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), (case, info)
        assert differing(named_tensors(got), named_tensors(AutoModelForCausalLM.from_pretrained(source))) == [], case
        assert keys(out) == keys(source), case


def keys(folder):
    return sorted(key for file in Path(folder).glob("*.safetensors") for key in load_file(file))


# --- gradients


def gradients(rank, family, shape, overrides):
    """Known gradients by name; the final norm has none, as if it were frozen."""
    torch.manual_seed(0)
    full = {n: torch.randn(p.shape) for n, p in on_meta(tiny_config(family, **overrides)).named_parameters()}
    absent = [n for n in full if n.endswith(("model.norm.weight", "ln_f.weight"))]
    model, names, mesh = stage(tiny_model(family, **overrides), shape)
    for name, p in model.named_parameters():
        if name not in absent:
            assert isinstance(p, DTensor)
            p.grad = distribute_tensor(full[names.first[name]], p.device_mesh, p.placements, src_data_rank=None)
    with Trace() as trace:
        norm = grad_norm(names.counted(model.named_parameters()), group=mesh["world"].get_group(), stages=2)
    calls = len(trace.events), trace.count("all_reduce")
    clip_grads_(model.parameters(), 1.0, norm)
    after = grad_norm(names.counted(model.named_parameters()), stages=2)
    grads = {n: torch.zeros(p.shape) if p.grad is None else p.grad for n, p in model.named_parameters()}
    got = whole_model(grads, names, mesh["pp"], {})
    for name in absent:
        full[name] = torch.zeros_like(full[name])
    want = torch.cat([g.flatten().double() for g in full.values()]).norm().item()
    wrong = [n for n in full if not torch.allclose(got[n], full[n] / want, rtol=1e-5, atol=0)]
    return norm.item(), after.item(), want, calls, list(got) == list(full), wrong, len(absent)


@pytest.mark.parametrize("family, shape", [("llama", "halves"), ("gpt2", "V")])
def test_the_norm_counts_every_parameter_once_and_gradients_are_looked_at_whole(family, shape):
    results = run_ranks(4, gradients, family, shape, TIED)
    assert len({(r[0], r[1]) for r in results}) == 1
    norm, after, want, calls, in_order, wrong, absent = results[0]
    assert all(r[2:] == results[0][2:] for r in results)
    assert norm == pytest.approx(want, rel=1e-6) and after == pytest.approx(1.0, rel=1e-5)
    assert calls == (1, 1), "one collective"
    assert in_order and wrong == [] and absent == 1


# --- what does not fit


def loads_wrong(rank, folder):
    model, _, _ = stage(on_meta(tiny_config("llama", **TIED)))
    try:
        load_pretrained(model, folder, device="cpu")
    finally:
        assert all(p.is_meta for p in model.parameters()), "touched"


def test_a_name_that_one_stage_misses_is_an_error_on_every_rank(tmp_path):
    """And keys of other stages are none that nobody knows, but a key that no stage knows is."""
    tiny_model("llama", **TIED).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.9.more"] = tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    match = r"1 of 38 tensors.*missing.*layers.3.mlp.up_proj(.|\n)*1 of 38 tensors.*unknown.*\(model.layers.9.more\)"
    fails_on_ranks(4, loads_wrong, str(tmp_path), error=PlanError, match=match)


def at_set_up(rank, staged, other_seeds, changed):
    model = tiny_model("llama", seed=int(rank in other_seeds), **TIED)
    names = Names.of(model)
    mesh = build_mesh(Degrees(pp=2, dp_shard=2), "cpu")
    if staged:
        cut(model, find_decoder(model), {0, 1} if rank < 2 else {2, 3})
    if rank in changed:
        model.lm_head.weight.data[5, 5] += 1
    same_weights(model, names, Agreement(mesh["world"].get_group(), 4, mesh.device))


def test_weights_are_compared_where_they_must_be_equal():
    run_ranks(4, at_set_up, False, (), ())
    run_ranks(4, at_set_up, True, (), ())
    tie = r"model.embed_tokens.weight = lm_head.weight on ranks \[2, 3\] differ from those on rank 0"
    for case, match in [
        ((False, (3,), ()), r"weights on ranks \[3\] differ from those on rank 0"),
        ((True, (3,), ()), r"weights on ranks \[3\] differ from those on rank 2"),
        ((True, (), (2, 3)), tie),
    ]:
        fails_on_ranks(4, at_set_up, *case, error=PlanError, match=match)
