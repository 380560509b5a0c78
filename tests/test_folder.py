"""From a Hugging Face folder to a Hugging Face folder through `Run`."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import Case, compare, rows, train, train_alone

TINY = {"num_hidden_layers": 2}


def _on_meta(family, degrees, **options):
    config = tiny_config(family, **TINY)
    plan = plan_for(config, degrees, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return parallelize(model, plan, build_mesh(degrees, "cpu"))


def _folder_to_folder(rank, case, source, out):
    run = _on_meta(case.family, case.degrees, **case.options)
    run.load_pretrained(source)
    got = train(run, case)
    run.save_pretrained(out)
    if rank == 0:
        compare(got, train_alone(AutoModelForCausalLM.from_pretrained(source).train(), case), case.tol)
    return run.full_parameters()


def test_a_folder_is_loaded_trained_and_saved(tmp_path):
    """Field fault K11: the folder is whole. From meta, every rank its slices; rotary buffers rebuilt (I1)."""
    for family in ("qwen3", "mixtral"):
        source, out = str(tmp_path / f"{family}-in"), str(tmp_path / f"{family}-out")
        tiny_model(family, **TINY).save_pretrained(source)
        case = Case(family, Degrees(dp_replicate=2, dp_shard=2), {"zero": 2, "microbatches": 2}, TINY)
        whole = run_ranks(4, _folder_to_folder, case, source, out)[0]
        model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        for name, value in model.named_parameters():
            assert torch.equal(value, whole[name]), name


def _interrupted(rank, out, looks):
    run = _on_meta("llama", Degrees(dp_shard=2), zero=2)
    run.init_weights(seed=3)
    optim = torch.optim.AdamW(run.parameters(), lr=1e-2)
    for step in range(4):
        run.step(rows(step + 10 * rank, 2, 8, VOCAB))
        optim.step()
        optim.zero_grad()
        if looks and step == 1:
            run.evaluate([rows(5, 2, 8, VOCAB)])
            run.save_pretrained(out)
            run.logits(rows(6, 1, 8, VOCAB))
    return run.full_parameters()


def test_k10_evaluating_and_saving_in_between_changes_nothing(tmp_path):
    plain = run_ranks(2, _interrupted, str(tmp_path / "out"), False)[0]
    looked = run_ranks(2, _interrupted, str(tmp_path / "out"), True)[0]
    assert all(torch.equal(plain[name], looked[name]) for name in plain)


def _first_weights(rank, degrees, precision):
    run = _on_meta("gpt2", degrees, precision=precision)
    run.init_weights(seed=11)
    loss = run.evaluate([rows(rank, 2, 16, VOCAB)])[0]
    return run.full_parameters(), loss, {p.dtype for p in run.parameters()}


def test_the_same_seed_gives_the_same_weights_on_any_layout():
    """Contract C11; field fault I3: the loss starts at about ln(V)."""
    alone, loss, _ = run_ranks(1, _first_weights, Degrees(), None)[0]
    assert abs(loss - torch.tensor(float(VOCAB)).log().item()) < 0.05 * loss
    for degrees, precision in ((Degrees(dp_shard=4), None), (Degrees(dp_replicate=2, dp_shard=2), "bf16")):
        other, _, dtypes = run_ranks(4, _first_weights, degrees, precision)[0]
        assert dtypes == {torch.float32}
        assert_same_gradients(other, alone, tol=0.0)
        assert all(torch.equal(other[name], alone[name]) for name in alone)


def _wrong_folder(rank, folder):
    _on_meta("llama", Degrees(dp_shard=2)).load_pretrained(folder)


def test_folders_that_do_not_fit_are_refused_on_every_rank(tmp_path):
    fails_on_ranks(2, _wrong_folder, str(tmp_path / "none"), error=PlanError, match="none")
    other = str(tmp_path / "other")
    tiny_model("llama", hidden_size=32, **TINY).save_pretrained(other)
    error = fails_on_ranks(2, _wrong_folder, other, error=PlanError, match="32")[0]
    assert "64" in str(error)
    empty = tmp_path / "empty"
    empty.mkdir()
    tiny_config("llama", **TINY).save_pretrained(empty)
    fails_on_ranks(2, _wrong_folder, str(empty), error=PlanError, match="weights")
