"""Auxiliary loss, bias updates and load statistics of whole runs against one process of transformers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.families.tiny import tiny_config, tiny_model
from tests.harness import fails_on_ranks, run_ranks
from tests.parity import Case, compare, padded, rows, train, train_alone

AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_hidden_layers": 2}


def four_rows(step, rank, vocab):
    return [rows(100 * step + rank, 4, 12, vocab, supervised=(0.9, 0.3)[rank % 2])]


def padded_rows(step, rank, vocab):
    """More padding on odd ranks; one row is all padding but for a token."""
    batch = rows(100 * step + rank, 4, 12, vocab)
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1], [12 - 5 * rank]])).long()
    return [batch | {"attention_mask": mask, "labels": batch["labels"].where(mask.bool(), -100)}]


def _of_all_ranks(case, micro):
    """The case of one process with the micro-batches of all data ranks: an auxiliary loss is over each of them."""

    def batches(step, _rank, vocab):
        own = [case.batches(step, rank, vocab)[0] for rank in range(case.degrees.data)]
        cut = [{key: value.tensor_split(micro) for key, value in batch.items()} for batch in own]
        return [{key: torch.cat([batch[key][part] for batch in cut]) for key in cut[0]} for part in range(micro)]

    return replace(case, degrees=Degrees(), batches=batches)


def _auxiliary(rank, case, micro):
    model = tiny_model(case.family, **case.model)
    reference = copy.deepcopy(model) if rank == 0 else None
    plan = plan_for(model, case.degrees, microbatches=micro, **case.options)
    got = train(parallelize(model, plan, build_mesh(case.degrees, "cpu")), case)
    if reference is not None:
        alone = _of_all_ranks(case, micro)
        want = train_alone(reference, alone)
        compare(got, want, case.tol)
        reference.config.output_router_logits = False
        plain = train_alone(reference, alone)
        assert abs(plain["steps"][0]["loss"] - want["steps"][0]["loss"]) > 1e-3, "the auxiliary loss is no part of it"


LAYOUTS = [
    (Degrees(dp_shard=2), {}, 1, four_rows),
    (Degrees(dp_shard=2, ep=2), {}, 4, padded_rows),
    (Degrees(dp_shard=2, tp=2), {}, 1, padded_rows),  # experts cut inside by the tensor rules
    (Degrees(dp_shard=2, tp=2), {"sequence_parallel": False}, 2, four_rows),
    (Degrees(dp_shard=2, tp=2, ep=4), {"recompute": "block"}, 2, padded_rows),
    (Degrees(tp=2, ep=2), {"sequence_parallel": False}, 1, padded_rows),
    (Degrees(cp=2, ep=2), {}, 2, padded_rows),
    (Degrees(dp_shard=2, cp=2), {"recompute": "block"}, 1, four_rows),
]


@pytest.mark.parametrize(("degrees", "options", "micro", "batches"), LAYOUTS)
def test_auxiliary_loss_is_that_of_one_process(degrees, options, micro, batches):
    case = Case("qwen3_moe", degrees, options, AUXILIARY, batches=batches)
    run_ranks(degrees.world_size, _auxiliary, case, micro)


STAGED = [
    (Degrees(pp=2), {"schedule": "1f1b"}, 2, padded_rows, {}),
    (Degrees(pp=2), {"schedule": "zbv"}, 4, four_rows, {"num_hidden_layers": 4}),
    (Degrees(pp=2, dp_shard=2, ep=2), {"schedule": "zb-h1", "recompute": "block"}, 4, padded_rows, {}),
    # A stage without routers, between which and the first one nothing is told.
    (Degrees(pp=3), {"schedule": "1f1b"}, 3, four_rows, {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
]
STAGED_TAIL = [
    (Degrees(pp=2, tp=2), {"schedule": "zbv"}, 2, padded_rows, {"num_hidden_layers": 4}),
    (Degrees(pp=2, tp=2, ep=2), {"schedule": "1f1b", "sequence_parallel": False}, 2, four_rows, {}),
    (Degrees(pp=2, cp=2, ep=2), {"schedule": "zb-h1"}, 2, padded_rows, {}),
    (Degrees(pp=4), {"schedule": "interleaved", "chunks": 2}, 4, four_rows, {"num_hidden_layers": 8}),
    (Degrees(pp=2, dp_shard=2), {"schedule": "gpipe", "zero": 1}, 4, four_rows, {}),
    (Degrees(pp=2, cp=2, tp=2, ep=2), {"schedule": "zbv", "recompute": "selective"}, 2, padded_rows,
     {"num_hidden_layers": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("degrees", "options", "micro", "batches", "model"), STAGED)
def test_auxiliary_loss_over_stages_is_that_of_one_process(degrees, options, micro, batches, model):
    case = Case("qwen3_moe", degrees, options, AUXILIARY | model, batches=batches)
    run_ranks(degrees.world_size, _auxiliary, case, micro)


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "options", "micro", "batches", "model"), STAGED_TAIL)
def test_auxiliary_loss_over_stages_and_other_axes(degrees, options, micro, batches, model):
    test_auxiliary_loss_over_stages_is_that_of_one_process(degrees, options, micro, batches, model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe", "minimax_m2"])
def test_auxiliary_loss_over_stages_of_other_families(family):
    case = Case(family, Degrees(pp=2), {"schedule": "zb-h1"}, AUXILIARY, batches=padded_rows)
    run_ranks(2, _auxiliary, case, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen2_moe", "olmoe", "ernie4_5_moe", "gpt_oss", "minimax_m2", "granitemoe", "granitemoeshared",
     "flex_olmo", "jamba", "minimax"],
)  # fmt: skip
def test_auxiliary_loss_of_every_family_that_has_one(family):
    """Not qwen3_next: its recurrence magnifies the rounding of two steps to 1e-5 over the data axis already."""
    batches = four_rows if family in ("jamba", "minimax") else padded_rows
    run_ranks(2, _auxiliary, Case(family, Degrees(dp_shard=2, ep=2), {}, AUXILIARY, batches=batches), 2)


def _update(rank, family, degrees, micro, batches):
    """(load of the last window, biases) after two windows and two updates."""
    model = tiny_model(family, num_hidden_layers=2)
    run = parallelize(model, plan_for(model, degrees, microbatches=micro), build_mesh(degrees, "cpu"))
    every = [[b for r in range(2) for b in batches(step, r, 128)] for step in range(2)]
    for step in range(2):
        mine = every[step] if run.data_size == 1 else every[step][run.data_rank :: run.data_size]
        run.step(mine)
        run.update_expert_bias(0.01)
    held = {n: t for n, t in (*run.full_parameters().items(), *run.model.named_buffers()) if n.endswith("_bias")}
    return run.expert_load(), {n: t.clone() for n, t in held.items() if "expert_bias" in n or "correction" in n}


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_load_and_bias_do_not_depend_on_the_layout(family):
    (alone,) = run_ranks(1, _update, family, Degrees(), 1, padded)
    load, biases = alone
    real = sum(int(b["attention_mask"].sum()) for rank in range(2) for b in padded(1, rank, 128))
    assert load and biases
    for counts in load.values():
        assert int(counts.sum()) == 2 * real, "two choices for each token, none for padding"
    layouts = [(Degrees(dp_shard=2, ep=2), 4), (Degrees(tp=2, ep=2), 1), (Degrees(dp_shard=2, tp=2), 1)]
    for degrees, micro in [*layouts, (Degrees(cp=2, ep=2), 4)]:
        for other, moved in run_ranks(degrees.world_size, _update, family, degrees, micro, padded):
            for name, counts in load.items():
                assert torch.equal(other[name], counts), (degrees, name)
            for name, bias in biases.items():
                torch.testing.assert_close(moved[name], bias, msg=f"{degrees} {name}")
                assert abs(bias.mean().item()) < 1e-6


def _documents(rank, degrees, options):
    """(load, biases after an update) of packed rows with padding, said by a mask or by documents."""
    found = []
    documents = torch.tensor([[0] * 12, [0] * 5 + [1] * 4 + [-1] * 3, [0] * 7 + [-1] * 5, [0] * 10 + [-1] * 2])
    for named in (True, False):
        model = tiny_model("deepseek_v3", num_hidden_layers=2)
        run = parallelize(model, plan_for(model, degrees, **options), build_mesh(degrees, "cpu"))
        batch = rows(3, 4, 12, 128)
        given = documents.where(documents == -1, 0)
        real = given == 0
        batch["labels"] = batch["labels"].where(real, -100)
        run.step(batch | ({"document_ids": given} if named else {"attention_mask": real.long()}))
        run.update_expert_bias(0.01)
        biases = {n: b.clone() for n, b in run.model.named_buffers() if n.endswith("correction_bias")}
        found.append((run.expert_load(), biases))
    return found


@pytest.mark.parametrize(
    ("degrees", "options"), [(Degrees(), {}), (Degrees(tp=2, ep=2), {}), (Degrees(cp=2), {}), (Degrees(pp=2), {})]
)
def test_padding_among_documents_is_no_load(degrees, options):
    for (load, biases), (want, wanted) in run_ranks(degrees.world_size, _documents, degrees, options):
        assert sum(int(counts.sum()) for counts in load.values()) == 2 * 38  # two choices of the tokens that are there
        for name, counts in want.items():
            assert torch.equal(load[name], counts), name
        for name, bias in wanted.items():
            assert torch.equal(biases[name], bias), name


def _failed_window(rank):
    """Biases after a window that failed and one that did not; and after the good one alone."""
    found = []
    for fails in (True, False):
        model = tiny_model("deepseek_v3", num_hidden_layers=2)
        degrees = Degrees(dp_shard=2, ep=2)
        run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
        if fails:
            with pytest.raises(PlanError, match=r"cannot go on|mine"):
                run.step(rows(rank, 2, 12, 128), loss=_mine)
        run.step(rows(10 + rank, 2, 12, 128))
        with pytest.raises(PlanError, match="same rate"):
            run.update_expert_bias(0.1 * (1 + rank))
        with pytest.raises(PlanError, match="must be > 0"):
            run.update_expert_bias(0.1 if rank else -1.0)
        run.update_expert_bias(0.1)
        found.append({n: b.clone() for n, b in run.model.named_buffers() if n.endswith("correction_bias")})
    return found


def _mine(logits, labels):
    raise PlanError("mine")


def test_a_window_that_failed_is_no_load_and_all_ranks_take_the_same_step():
    for after, want in run_ranks(2, _failed_window):
        assert want
        for name, bias in want.items():
            assert torch.equal(after[name], bias), name


def _changed_config(rank):
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    degrees = Degrees(dp_shard=2)
    run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
    run.model.config.output_router_logits = rank == 1
    run.step(rows(rank, 2, 12, 128))


def test_an_auxiliary_loss_asked_for_too_late_is_refused():
    fails_on_ranks(2, _changed_config, error=PlanError, match="before parallelize")


def _refused(rank, what):
    if what == "dense":
        model = tiny_model("llama", num_hidden_layers=1)
        run = parallelize(model, plan_for(model, Degrees(dp_shard=2)), build_mesh(Degrees(dp_shard=2), "cpu"))
        run.expert_load()
    elif what == "no bias":
        model = tiny_model("qwen3_moe", num_hidden_layers=1)
        run = parallelize(model, plan_for(model, Degrees(dp_shard=2)), build_mesh(Degrees(dp_shard=2), "cpu"))
        run.update_expert_bias(0.1)
    else:
        model = tiny_model("deepseek_v3", num_hidden_layers=2)
        model.config.output_router_logits = True
        parallelize(model, plan_for(model, Degrees(dp_shard=2)), build_mesh(Degrees(dp_shard=2), "cpu"))


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("dense", "run.expert_load of a dense model"),
        ("no bias", r"model.layers.0.mlp.experts: a router with a correction bias is required"),
        ("no auxiliary", "output_router_logits=True for 'deepseek_v3': the family must have an auxiliary loss"),
    ],
)
def test_what_a_family_does_not_have_is_refused(what, match):
    fails_on_ranks(2, _refused, what, error=PlanError, match=match)


def test_families_with_an_auxiliary_loss_have_its_coefficient():
    assert tiny_config("qwen3_moe").router_aux_loss_coef > 0
