"""Rows of the collection of field faults whose axes name EP and no PP. Each test names its row.

Rows that are proved elsewhere: T1, E2, E5, E15 by tests/expert/test_model_parity.py (every gradient, experts over efsdp
and over tp); E6, E8 by tests/expert/test_dispatch.py and test_compute.py; E9, E10, E11 by test_balanced_runs.py; E12 by
test_style.py, and for whole runs here. K5 and E16 (planner) by tests/checkpoint and tests/planner.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from dtensor_5d.checkpoint.slices import local_part
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import Case, check_parity, rows

TINY = {"num_hidden_layers": 2}
EP2 = Degrees(dp_shard=2, ep=2)


def _run(family="qwen3_moe", degrees=EP2, model=None, prepare=None, **options):
    made = tiny_model(family, **{**TINY, **(model or {})})
    if prepare:
        prepare(made)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _alone(window, family="qwen3_moe", prepare=None, **model):
    made = tiny_model(family, **{**TINY, **model})
    if prepare:
        prepare(made)
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    for batch in window:
        made(**batch, use_cache=False, num_items_in_batch=tokens).loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in made.named_parameters()}


def _drift(rank, sequence):
    run = _run(degrees=Degrees(tp=2, ep=2), sequence_parallel=sequence)
    optim = torch.optim.SGD(run.parameters(), lr=0.1)
    for step in range(3):
        run.step(rows(step, 2, 8, VOCAB))
        optim.step()
        optim.zero_grad()
    return {n: p.detach().clone() for n, p in run.named_parameters() if not isinstance(p, DTensor)}


@pytest.mark.parametrize("sequence", [True, False])
def test_t2_replicated_parameters_stay_bit_equal_over_tp(sequence):
    first, second = run_ranks(2, _drift, sequence)
    assert "model.layers.0.mlp.gate.weight" in first
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _all_to_expert_0(model):
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.weight.data[0] = 0.0
            module.e_score_correction_bias[0] = 100.0


def _one_expert(rank, degrees):
    run = _run("deepseek_v3", degrees, {"n_group": 1, "num_experts_per_tok": 1}, _all_to_expert_0)
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    (load,) = run.expert_load().values()
    assert load[0] == load.sum() > 0
    return run.full_gradients()


@pytest.mark.parametrize("degrees", [Degrees(dp_shard=4, ep=4), Degrees(dp_shard=2, tp=2, ep=4)], ids=str)
def test_e3_all_tokens_to_one_expert(degrees):
    window = [rows(rank, 2, 8, VOCAB) for rank in range(degrees.data)]
    want = _alone(window, "deepseek_v3", _all_to_expert_0, n_group=1, num_experts_per_tok=1)
    for got in run_ranks(4, _one_expert, degrees, timeout=60):
        assert_same_gradients(got, want, tol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
def test_e7_router_gradients_with_weights_that_sum_up_to_one_and_not(norm):
    check_parity(Case("qwen3_moe", EP2, {}, {**TINY, "norm_topk_prob": norm}))


def _noisy_routers(model):
    """Each call of a router answers a little differently, in the order of its calls."""
    for name, module in model.named_modules():
        if not name.endswith("mlp.gate"):
            continue
        forward, calls = module.forward, iter(range(1000))

        def noisy(hidden, forward=forward, calls=calls):
            noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(next(calls)))
            return forward(hidden + 0.5 * noise)

        module.forward = noisy


def _noise(rank, recompute):
    run = _run(prepare=_noisy_routers, recompute=recompute)
    run.step(rows(rank, 2, 8, VOCAB))
    # Further down the gradients also come through the router, whose second run is noisy as well.
    return {n: g for n, g in run.full_gradients().items() if "layers.1.mlp.experts" in n}


@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_e12_recomputation_keeps_the_routing(recompute):
    want = run_ranks(2, _noise, "none")[0]
    for name, got in run_ranks(2, _noise, recompute)[0].items():
        torch.testing.assert_close(got, want[name], msg=name)


def _shards(rank):
    degrees = Degrees(dp_shard=4, tp=2, ep=2)
    run = _run(degrees=degrees, model={"num_experts": 4})
    assert degrees.efsdp == 4
    return [local_part(p).numel() for n, p in run.named_parameters() if "experts" in n]


@pytest.mark.slow
def test_e13_no_rank_is_left_without_a_part_of_the_experts():
    assert all(size for held in run_ranks(8, _shards) for size in held)


def _clipped(rank):
    run = _run(degrees=Degrees(dp_shard=4, ep=2))
    run.step(rows(rank, 2, 8, VOCAB))
    for name, p in run.named_parameters():
        if name == "model.layers.1.mlp.experts.down_proj":
            local_part(p.grad).fill_(100.0 if run.mesh.coordinate()["ep"] == 1 else 0.5)
    squares = sum(g.double().square().sum() for g in run.full_gradients().values())
    norm = run.clip_grad_norm_(1.0)
    after = sum(g.double().square().sum() for g in run.full_gradients().values()).sqrt()
    torch.testing.assert_close(norm, squares.sqrt())
    torch.testing.assert_close(after, torch.ones((), dtype=torch.float64))
    return norm.item()


def test_e14_one_norm_for_all_ranks():
    assert len(set(run_ranks(4, _clipped))) == 1


def _attention_flops(counter):
    counts = counter.get_flop_counts()
    kinds = next(kinds for name, kinds in counts.items() if name.endswith("model.layers.0.self_attn"))
    return {str(kind): count for kind, count in kinds.items()}


def _flops(rank):
    run = _run()
    with FlopCounterMode(run.model, display=False) as counter:
        run.step(rows(rank, 4, 16, VOCAB))
    return _attention_flops(counter)


def test_e17_each_rank_runs_its_own_rows_only():
    model = tiny_model("qwen3_moe", **TINY)
    with FlopCounterMode(model, display=False) as counter:
        for rank in range(2):
            model(**rows(rank, 4, 16, VOCAB), use_cache=False).loss.backward()
    whole = _attention_flops(counter)
    for mine in run_ranks(2, _flops):
        for kind, count in whole.items():
            assert mine[kind] * 2 == count, kind


@pytest.mark.parametrize(
    ("degrees", "micro"), [(EP2, 1), (Degrees(tp=2, ep=2), 1), (EP2, 4), (Degrees(dp_shard=2, etp=2), 4)], ids=str
)
def test_f6_f7_size_one_groups_neither_divide_nor_add_up(degrees, micro):
    """Experts over one rank of efsdp, in units of their own: a divisor or a buffer used twice would show."""
    assert degrees.efsdp == 1
    options = {"microbatches": micro, "precision": "fp32", "grad_reduce": "microbatch"}
    check_parity(Case("qwen3_moe", degrees, options, TINY, batches=_four))


def _four(step, rank, vocab):
    return [rows(10 * step + rank, 4, 8, vocab)]


def _folder(rank, family, degrees, source, out):
    config = tiny_model(family, **TINY).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    run = parallelize(model, plan_for(config, degrees), build_mesh(degrees, "cpu"))
    run.load_pretrained(source)
    optim = torch.optim.SGD(run.parameters(), lr=0.1)
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    optim.step()
    run.save_pretrained(out)
    return run.logits(rows(7, 1, 9, VOCAB))


@pytest.mark.parametrize(
    ("family", "degrees"),
    [("qwen3_moe", Degrees(dp_shard=4, ep=2)), ("mixtral", Degrees(dp_shard=2, tp=2, ep=2, etp=2)),
     ("gpt_oss", Degrees(dp_shard=4, ep=2, etp=2))],
)  # fmt: skip
def test_k8_folder_in_train_folder_out(tmp_path, family, degrees):
    source, out = str(tmp_path / "in"), str(tmp_path / "out")
    model = tiny_model(family, **TINY)
    model.save_pretrained(source)
    logits = run_ranks(4, _folder, family, degrees, source, out)
    saved, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    keys = [_keys(folder) for folder in (source, out)]
    assert keys[0] == keys[1] and (family == "gpt_oss" or any(".experts.7." in key for key in keys[1]))
    with torch.no_grad():
        want = saved.eval()(rows(7, 1, 9, VOCAB)["input_ids"], use_cache=False).logits
    for got in logits:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(saved.lm_head.weight, model.lm_head.weight), "it was not trained"


def _keys(folder):
    from tests.checkpoint.test_save import keys_of

    return keys_of(folder)


def _adamw(rank, degrees):
    whole = tiny_model("qwen3_moe", **TINY, dtype=torch.float64, experts="eager")
    run = parallelize(copy.deepcopy(whole), plan_for(whole, degrees), build_mesh(degrees, "cpu"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, foreach=False) for m in (whole, run)]
    for step in range(3):
        window = [rows(10 * step + r, 1, 4, VOCAB) for r in range(run.data_size)]  # few tokens for 8 experts
        run.step(window[run.data_rank])
        tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
        for batch in window:
            logits = whole(batch["input_ids"], use_cache=False).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            (nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens).backward()
        for parameter in whole.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    want = {n: p.detach() for n, p in whole.named_parameters()}
    assert_same_gradients(run.full_parameters(), want, tol=1e-6)


@pytest.mark.parametrize("degrees", [EP2, Degrees(dp_shard=2, tp=2, ep=2, etp=2)], ids=str)
def test_fc18_adamw_with_weight_decay_equals_one_process_where_experts_have_no_tokens(degrees):
    run_ranks(degrees.world_size, _adamw, degrees)


def _bad_routing(rank, what):
    run = _run(degrees=Degrees(dp_shard=4, ep=2))
    gate = dict(run.model.named_modules())["model.layers.1.mlp.gate"]
    forward = gate.forward

    def wrong(hidden):
        logits, weights, index = forward(hidden)
        if rank == 3:
            index = index + 8 if what == "index" else index
            weights = weights * float("nan") if what == "weight" else weights
        return logits, weights, index

    gate.forward = wrong
    run.step(rows(rank, 2, 8, VOCAB))


@pytest.mark.parametrize(
    ("what", "match"), [("index", "has the router index .*must be 0 to 7"), ("weight", "weights that are not finite")]
)
def test_fc5_routing_that_is_wrong_on_one_rank_ends_all_of_them(what, match):
    """Also the ranks of other expert-parallel groups, which would wait for it in the next reduction."""
    fails_on_ranks(4, _bad_routing, what, error=ValueError, match=match)
