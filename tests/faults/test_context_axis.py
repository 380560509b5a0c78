"""Rows of the collection of field faults whose axes name CP and none of PP and EP. Each test names its row.

Rows that are proved elsewhere, in tests/context: C7, C14, C15, C24, C27, L17 by test_run.py; C12 by test_families.py;
C18 by test_parity.py; C19, C24 by test_ring.py; L18 by test_alone.py. L22: test_alone.py gives a model its labels
shifted, and all others divide by the tokens of the whole batch.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.batch import BatchRules, Explicit, cut_window
from dtensor_5d.context.rows import RowCutter
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import Case, check_parity, rows

TINY = {"num_hidden_layers": 2}


def _run(family="llama", degrees=None, model=None, prepare=None, **options):
    made = tiny_model(family, **{**TINY, **(model or {})})
    if prepare:
        prepare(made)
    degrees = degrees or Degrees(cp=2)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _alone(window, family="llama", **model):
    made = tiny_model(family, **{**TINY, **model})
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    loss = sum(made(**b, use_cache=False, num_items_in_batch=tokens).loss for b in window)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in made.named_parameters()}


def _norm(grads):
    return torch.cat([g.flatten() for g in grads.values() if g is not None]).double().norm().item()


def _stepped(rank, family, degrees, window, options):
    run = _run(family, degrees, **options)
    share = window[run.data_rank :: run.data_size]
    loss = run.step(share).item()
    return loss, run.grad_norm().item(), run.full_gradients(), run.evaluate(share)


def _check(window, degrees=None, family="llama", **options):
    """One window on these degrees: loss, norm, every gradient and the evaluation are those of one process."""
    degrees = degrees or Degrees(cp=2)
    loss, want = _alone(window, family)
    for got, norm, grads, (mean, _) in run_ranks(degrees.world_size, _stepped, family, degrees, window, options):
        assert math.isclose(got, loss, rel_tol=1e-5) and math.isclose(mean, loss, rel_tol=1e-5)
        assert math.isclose(norm, _norm(want), rel_tol=1e-5)
        assert_same_gradients(grads, want, tol=1e-5)


# --- one divisor


MESHES = [Degrees(dp_shard=2, cp=2), Degrees(cp=4), Degrees(cp=2, tp=2), Degrees(cp=2)]


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_l1_l10_one_batch_on_every_mesh_gives_one_loss_and_norm(degrees):
    _check([rows(n, 2, 16, VOCAB) for n in range(2)], degrees)


def test_l7_each_supervised_token_counts_once():
    """dp 2 x cp 2: 15 tokens in one row, 1 in the other."""
    window = [rows(0, 1, 16, VOCAB, supervised=1.0), rows(1, 1, 16, VOCAB, supervised=0.0)]
    window[1]["labels"][0, 11] = 7
    _check(window, Degrees(dp_shard=2, cp=2))


def test_l12_norm_of_a_mixture_of_experts():
    _check([rows(0, 2, 20, VOCAB)], family="qwen3_moe")


def _copied(rank):
    config = copy.deepcopy(tiny_config("llama", **TINY))
    made = copy.deepcopy(tiny_model("llama", **TINY))
    made.config = copy.deepcopy(made.config)  # the model makes its masks by a copy that its layers do not know
    run = parallelize(made, plan_for(config, Degrees(cp=2)), build_mesh(Degrees(cp=2), "cpu"))
    loss = run.step(rows(0, 2, 12, VOCAB)).item()
    again = copy.deepcopy(run._parts.engine.surroundings[0].__self__)
    assert again is run._parts.engine.surroundings[0].__self__
    return loss


def test_l13_hooks_follow_the_object_that_runs():
    loss, _ = _alone([rows(0, 2, 12, VOCAB)])
    for got in run_ranks(2, _copied):
        assert math.isclose(got, loss, rel_tol=1e-5)


def _uneven_shards(rank):
    run = _run(balance="none")
    half = rows(0, 1, 16, VOCAB, supervised=1.0)
    half["labels"][:, 8:] = -100
    none = rows(0, 1, 16, VOCAB, supervised=0.0)
    return run.evaluate([half]), run.evaluate([none])


def test_l14_a_rank_without_supervised_tokens():
    half = rows(0, 1, 16, VOCAB, supervised=1.0)
    half["labels"][:, 8:] = -100
    loss, _ = _alone([half])
    for (mean, tokens), none in run_ranks(2, _uneven_shards):
        assert math.isclose(mean, loss, rel_tol=1e-5) and tokens == 7 and none == (0.0, 0)
    _check([half], balance="none")


def test_l15_a_short_row_padded_to_a_long_one():
    """8 tokens in 32 on 4 ranks: three ranks may hold nothing but padding."""
    short = rows(0, 1, 8, VOCAB, supervised=1.0)
    long = {
        "input_ids": F.pad(short["input_ids"], (0, 24), value=5),
        "labels": F.pad(short["labels"], (0, 24), value=-100),
        "attention_mask": F.pad(torch.ones(1, 8).long(), (0, 24)),
    }
    loss, want = _alone([short])
    for balance in ("none", "zigzag"):
        for got, _, grads, _ in run_ranks(4, _stepped, "llama", Degrees(cp=4), [long], {"balance": balance}):
            assert math.isclose(got, loss, rel_tol=1e-5)
            assert_same_gradients(grads, want, tol=1e-5)


def _two_ahead(rank):
    run = _run()
    run.step(_mtp())
    return run.full_gradients()


def _mtp():
    """Targets two tokens ahead, none across the border of two documents of 5 and 11 tokens."""
    ids = rows(0, 1, 16, VOCAB)["input_ids"]
    documents = torch.tensor([[0] * 5 + [1] * 11])
    ahead = F.pad(ids[:, 2:], (0, 2), value=-100)
    crosses = F.pad(documents[:, 2:], (0, 2), value=-1) != documents
    return {"input_ids": ids, "shift_labels": ahead.masked_fill(crosses, -100), "document_ids": documents}


def test_l19_targets_further_ahead_are_shifted_by_whoever_knows_them():
    made, batch = tiny_model("llama", **TINY), _mtp()
    positions = torch.tensor([[*range(5), *range(11)]])
    logits = made(batch["input_ids"], position_ids=positions, use_cache=False).logits
    F.cross_entropy(logits[0], batch["shift_labels"][0]).backward()
    assert int((batch["shift_labels"] != -100).sum()) == 3 + 9
    for got in run_ranks(2, _two_ahead):
        assert_same_gradients(got, {n: p.grad for n, p in made.named_parameters()}, tol=1e-5)


def _worst(rank):
    run, seen = _run(), []

    def loss(logits, labels):
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        seen.append(each.max().detach())
        return each.sum()

    run.step(rows(0, 2, 12, VOCAB), loss=loss)
    dist.all_reduce(seen[0], op=dist.ReduceOp.MAX)
    return seen[0].item()


def test_l20_the_largest_loss_of_a_token():
    made, batch = tiny_model("llama", **TINY), rows(0, 2, 12, VOCAB)
    logits = made(batch["input_ids"], use_cache=False).logits[:, :-1]
    want = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none").max().item()
    assert run_ranks(2, _worst) == pytest.approx([want] * 2, rel=1e-5)


# --- order, positions, documents


def _round_trip(rank):
    """What the tokens of a rank are, and the whole row that all of them make together again."""
    group = dist.group.WORLD
    cutter = RowCutter(group, 4)
    ids = torch.arange(16).view(1, 16)
    rules = BatchRules(vocab=100, multiple=4, explicit=Explicit())
    (whole,) = cut_window({"input_ids": ids}, 1, rules, torch.device("cpu"), need_labels=False)
    micro = cutter.local(whole)
    assert torch.equal(cutter.joined(micro.inputs["input_ids"], micro), ids)
    return micro.inputs["input_ids"].tolist()


def test_c1_cut_and_joined_is_what_it_was():
    assert run_ranks(2, _round_trip) == [[[0, 1, 2, 3, 12, 13, 14, 15]], [[4, 5, 6, 7, 8, 9, 10, 11]]]


def _heads_of_4(step, rank, vocab):
    return [rows(step, 1, 8, vocab)]


def test_c2_small_heads_on_the_cpu():
    check_parity(Case("qwen3", Degrees(cp=2), {}, {**TINY, "head_dim": 4}, batches=_heads_of_4))


def _of_documents(*lengths):
    batch = rows(sum(lengths), 1, sum(lengths), VOCAB, supervised=1.0)
    positions = torch.tensor([[p for n in lengths for p in range(n)]])
    batch["labels"][positions == 0] = -100
    return batch | {"position_ids": positions}


@pytest.mark.parametrize("balance", ["zigzag", "document", "striped", "none"])
def test_c3_c11_c21_documents_that_no_rank_holds_whole(balance):
    """4 + 3 filled up to 8; 3 + 13; 8 + 8, where the second one starts a rank's own tokens."""
    for lengths in ((4, 3), (3, 13), (8, 8)):
        _check([_of_documents(*lengths)], balance=balance)


@pytest.mark.parametrize("tokens", [10, 2])
def test_c5_lengths_that_the_ranks_do_not_divide(tokens):
    _check([rows(0, 2, tokens, VOCAB, supervised=1.0)], Degrees(cp=3))


@pytest.mark.parametrize("context", ["ring", "allgather", "ulysses", "ring+ulysses"])
def test_c6_c10_a_length_that_is_filled_up(context):
    _check([rows(0, 2, 13, VOCAB)], Degrees(cp=4), context=context)


def test_c9_padding_on_either_side():
    batch = rows(0, 2, 16, VOCAB, supervised=1.0)
    mask = torch.ones(2, 16).long()
    mask[0, 11:], mask[1, :5] = 0, 0
    batch["labels"][mask == 0] = -100
    _check([batch | {"attention_mask": mask}])


@pytest.mark.parametrize("attn", ["eager", "sdpa", "flex_attention"])
def test_c16_any_attention_that_the_model_was_built_with(attn):
    loss, want = _alone([rows(0, 2, 12, VOCAB)])
    for got, _, grads, _ in run_ranks(2, _stepped_with, attn):
        assert math.isclose(got, loss, rel_tol=1e-5)
        assert_same_gradients(grads, want, tol=1e-5)


def _stepped_with(rank, attn):
    made = tiny_model("llama", attn=attn, **TINY)
    run = parallelize(made, plan_for(made, Degrees(cp=2)), build_mesh(Degrees(cp=2), "cpu"))
    loss = run.step(rows(0, 2, 12, VOCAB)).item()
    assert run.model.config._attn_implementation == attn
    return loss, None, run.full_gradients(), None


def test_c17_c20_rows_of_other_lengths():
    batch = rows(0, 4, 16, VOCAB, supervised=1.0)
    mask = (torch.arange(16) < torch.tensor([[9], [16], [5], [12]])).long()
    batch["labels"][mask == 0] = -100
    _check([batch | {"attention_mask": mask}])
    _check([{key: value[:3] for key, value in (batch | {"attention_mask": mask}).items()}], Degrees(cp=2, tp=2))


def _spread(rank):
    run, seen = _run(balance="zigzag"), []

    def loss(logits, labels):
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        seen.append((each / (labels != -100).sum()).item())
        return each

    ids = torch.arange(3, 11).repeat(1, 8)
    run.step({"input_ids": ids, "labels": ids}, loss=loss)
    return seen[0]


def test_c22_every_rank_has_about_the_same_loss_on_uniform_text():
    low, high = sorted(run_ranks(2, _spread))
    assert high < 1.1 * low


def _other_cp(rank):
    made = tiny_model("llama", **TINY)
    parallelize(made, plan_for(made, Degrees(cp=2, dp_shard=2)), build_mesh(Degrees(cp=4), "cpu"))


def test_c25_a_plan_and_a_mesh_of_other_degrees():
    said = r"plan for Degrees\(dp_shard=2, cp=2\) on a mesh of Degrees\(cp=4\)"
    fails_on_ranks(4, _other_cp, error=PlanError, match=said)


def _unknown_key(rank):
    _run().step(rows(0, 1, 8, VOCAB) | {"token_type_ids": torch.zeros(1, 8).long()})


def test_c26_what_is_not_known_is_not_cut_by_guess():
    fails_on_ranks(2, _unknown_key, error=PlanError, match="'token_type_ids' in a batch")


# --- recomputation and adapters


class _Adapted(nn.Module):
    """LoRA as peft puts it around a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def _adapt(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            setattr(layer.self_attn, name, _Adapted(getattr(layer.self_attn, name)))


def _adapted(rank, recompute):
    run = _run("llama", Degrees(cp=2, tp=2), prepare=_adapt, recompute=recompute)
    run.step(rows(0, 2, 16, VOCAB))
    grads = run.full_gradients()
    return {name: grads[name] for name, p in run.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_m11_recomputation_with_cp_tp_and_adapters(recompute):
    made = tiny_model("llama", **TINY)
    _adapt(made)
    batch = rows(0, 2, 16, VOCAB)
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    made(**batch, use_cache=False, num_items_in_batch=tokens).loss.backward()
    want = {n: p.grad for n, p in made.named_parameters() if p.requires_grad}
    for got in run_ranks(4, _adapted, recompute):
        assert_same_gradients(got, want, tol=1e-5)
