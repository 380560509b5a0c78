"""`Run` over the context axis: order and padding undone, who may influence whom, what travels, what batches may say."""

from __future__ import annotations

import math

import pytest
import torch

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.context.batches import packed, padded
from tests.context.cases import recorded
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import Case, check_parity, rows

TINY = {"num_hidden_layers": 2}


def _run(family="llama", degrees=None, model=None, **options):
    made = tiny_model(family, **{**TINY, **(model or {})})
    degrees = degrees or Degrees(cp=2)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


# --- order and padding are undone


def _looked(rank, family, balance, batches):
    (batch,) = batches(0, 0, VOCAB)
    run = _run(family, balance=balance)
    alone = tiny_model(family, **TINY).eval()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    got, want = run.logits(batch), alone(**inputs, use_cache=False).logits
    assert got.shape == want.shape
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-5)
    mean, count = run.evaluate([batch, batch])
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    loss = alone(**batch, use_cache=False, num_items_in_batch=tokens).loss.item()
    assert count == 2 * tokens and math.isclose(mean, loss, rel_tol=1e-5)
    assert run.sequence_multiple == (4 if balance == "zigzag" else 2)


@pytest.mark.parametrize(
    "family, balance, batches",
    [("llama", "zigzag", padded), ("qwen3", "document", packed), ("gemma2", "striped", packed)],
)
def test_logits_and_evaluation_are_those_of_whole_rows(family, balance, batches):
    run_ranks(2, _looked, family, balance, batches)


def _by_hand(rank, folder):
    """Called on whole rows the model is the family's own: any implementation, a cache, a saved config."""
    run, alone = _run(), tiny_model("llama", **TINY)
    batch = rows(0, 2, 13, VOCAB)
    run.step(batch)
    run.full_parameters()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": torch.ones(2, 13)}
    with torch.no_grad():
        assert torch.equal(run.model(**inputs).logits, alone(**inputs).logits)
        made = [m.eval().generate(**inputs, max_new_tokens=3, do_sample=False) for m in (run.model, alone)]
    assert torch.equal(*made)
    run.save_pretrained(folder)
    return run.model.config._attn_implementation


def test_the_model_called_by_hand_is_what_it_was(tmp_path):
    assert run_ranks(2, _by_hand, tmp_path / "out") == ["sdpa"] * 2
    assert "dtensor_5d" not in (tmp_path / "out" / "config.json").read_text()


def _one_token(rank, at):
    run, losses, grads = _run("qwen3", model={"num_hidden_layers": 1}), [], []
    for place in at:
        batch = rows(0, 1, 9, VOCAB, supervised=0.0)
        batch["labels"][0, place] = batch["input_ids"][0, place]
        losses.append(run.step(batch).item())
        grads.append(run.full_gradients())
        run.model.zero_grad()
    return losses, grads


def test_one_supervised_token_in_turn_at_every_position():
    """Position 0 has no token that could predict it."""
    found = run_ranks(2, _one_token, range(1, 9))
    for number, place in enumerate(range(1, 9)):
        alone = tiny_model("qwen3", num_hidden_layers=1)
        batch = rows(0, 1, 9, VOCAB, supervised=0.0)
        batch["labels"][0, place] = batch["input_ids"][0, place]
        loss = alone(**batch, use_cache=False, num_items_in_batch=1).loss
        loss.backward()
        for losses, grads in found:
            assert math.isclose(losses[number], loss.item(), rel_tol=1e-5)
            assert_same_gradients(grads[number], {n: p.grad for n, p in alone.named_parameters()}, tol=1e-5)


# --- who may influence whom


def _influence(rank, family, model, batch, changed, degrees):
    """(places whose logits changed), bit for bit, when token `changed` of the row does."""
    run = _run(family, degrees, model, balance="zigzag")
    before = run.logits(batch)
    other = batch["input_ids"].clone()
    other[0, changed] = (other[0, changed] + 1) % VOCAB
    after = run.logits(batch | {"input_ids": other})
    return [place for place in range(other.shape[1]) if not torch.equal(before[0, place], after[0, place])]


def test_a_packed_document_has_no_influence_on_the_next():
    batch = {"input_ids": rows(0, 1, 21, VOCAB)["input_ids"], "document_ids": torch.tensor([[3] * 10 + [5] * 11])}
    for changed in run_ranks(2, _influence, "llama", {}, batch, 2, Degrees(cp=2)):
        assert changed == list(range(2, 10))


@pytest.mark.parametrize("degrees", [Degrees(cp=2), Degrees(cp=2, tp=2)], ids=str)
def test_c7_a_token_outside_the_window_has_no_influence(degrees):
    model = {"num_hidden_layers": 1, "sliding_window": 4}
    batch = {"input_ids": rows(0, 1, 16, VOCAB)["input_ids"]}
    for changed in run_ranks(degrees.world_size, _influence, "mistral_sw", model, batch, 0, degrees):
        assert changed == [0, 1, 2, 3]


def test_c15_the_last_token_depends_on_the_first():
    batch = {"input_ids": rows(0, 1, 16, VOCAB)["input_ids"]}
    for changed in run_ranks(2, _influence, "llama", {}, batch, 0, Degrees(cp=2)):
        assert changed == list(range(16))


# --- what travels


def _traffic(rank, n, recompute):
    run = _run(degrees=Degrees(cp=n), recompute=recompute)
    batch = rows(0, 3, 16 * n, VOCAB)
    with recorded() as (sent, called):
        run.evaluate([batch])
        forward = [size for size, _ in sent]
        run.step(batch)
        return forward, [size for size, _ in sent[len(forward) :]], called


@pytest.mark.parametrize("n", [2, 4])
def test_c15_c24_the_ring_is_used_in_every_layer_with_the_kv_heads_only(n):
    hop = 3 * 16 * 4 * (8 + 8) * 4  # B x S/cp x kv heads x (Dk + Dv) x bytes
    for forward, step, _ in run_ranks(n, _traffic, n, "none"):
        assert forward == [hop] * (2 * (n - 1))
        assert step == [hop] * (3 * 2 * (n - 1))  # forward; backward: keys and values once more, and their gradients


def test_what_recomputation_sends():
    """Selective keeps attention, as it keeps matrix products; a recomputed block runs the ring once more."""
    sent = {policy: [len(step) for _, step, _ in run_ranks(2, _traffic, 2, policy)] for policy in
            ("none", "selective", "block")}  # fmt: skip
    assert sent["selective"] == sent["none"] == [6, 6]
    assert sent["block"] == [8, 8]


# --- families that do more than attend by the mask they are given


def _separate(rank, family):
    """A packed row against its documents one by one, where transformers itself cannot pack."""
    run, alone = _run(family), tiny_model(family, **TINY)
    batch = rows(0, 1, 30, VOCAB)
    lengths = (11, 4, 15)
    batch["document_ids"] = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
    batch["labels"][0, [0, 11, 15]] = -100
    tokens = int((batch["labels"] != -100).sum())
    total, at = 0.0, 0
    for n in lengths:
        part = {key: batch[key][:, at : at + n] for key in ("input_ids", "labels")}
        loss = alone(**part, use_cache=False, num_items_in_batch=tokens).loss
        loss.backward()
        total, at = total + loss.item(), at + n
    assert math.isclose(run.step(batch).item(), total, rel_tol=1e-5)
    assert_same_gradients(run.full_gradients(), {n: p.grad for n, p in alone.named_parameters()}, tol=1e-5)


@pytest.mark.parametrize("family", ["gpt_oss", "opt", "afmoe"])
def test_families_that_transformers_cannot_pack_are_packed(family):
    run_ranks(2, _separate, family)


def _beyond(step, rank, vocab):
    """Rows around the length at which frequencies change."""
    return [rows(100 * step + rank, 2, (40, 20, 33)[step], vocab)]


_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 9.0]}


@pytest.mark.parametrize(
    "family, model",
    [
        ("phi3", {"original_max_position_embeddings": 32, "max_position_embeddings": 256,
                  "rope_parameters": {**_LONG, "original_max_position_embeddings": 32}}),
        ("llama", {"max_position_embeddings": 32,
                   "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama4_text", {"floor_scale": 4, "attn_scale": 0.5, "attention_chunk_size": 8, "no_rope_layers": [1, 0],
                         "layer_types": ["chunked_attention", "full_attention"]}),
    ],
    ids=["longrope", "dynamic", "llama4"],
)  # fmt: skip
@pytest.mark.parametrize("balance", ["zigzag", "none"])
def test_what_depends_on_the_place_in_the_whole_row(family, model, balance):
    check_parity(Case(family, Degrees(cp=2), {"balance": balance}, {**TINY, **model}, batches=_beyond))


def _left_padded(step, rank, vocab):
    """Labels as users set them: the first real token is supervised, predicted by padding that sees nothing."""
    batch = rows(100 * step + rank, 2, 21, vocab, supervised=1.0)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    batch["labels"][0, :6] = -100
    return [batch | {"attention_mask": mask}]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_left_padding_that_predicts_the_first_token(family):
    check_parity(Case(family, Degrees(cp=2), {}, TINY, batches=_left_padded))


# --- randomness


def _dropped(rank, degrees):
    run = _run("gpt2", degrees, {"resid_pdrop": 0.5, "embd_pdrop": 0.5})
    seen = []
    run.model.transformer.drop.register_forward_hook(lambda module, args, out: seen.append(out == 0))
    run.step(rows(run.data_rank, 2, 16, VOCAB))
    return torch.cat([x.flatten() for x in seen])


def test_dropout_is_other_where_tokens_are_other_and_the_same_where_they_are_the_same():
    found = run_ranks(4, _dropped, Degrees(cp=2, tp=2))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


# --- what batches may say


def _step(rank, family, options, batch, change):
    run = _run(family, **options)
    batch = dict(batch)
    if change == "other rows" and rank == 1:
        batch["input_ids"] = batch["input_ids"].flip(1)
    if change == "other mask" and rank == 1:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"]).index_fill_(1, torch.tensor([11]), 0)
        batch["labels"] = batch["labels"].index_fill(1, torch.tensor([11]), -100)
    run.step(batch)


def _batch(**more):
    return {**rows(0, 2, 12, VOCAB, supervised=1.0), **more}


def _mask(*zeros):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, list(zeros)] = 0
    return mask


@pytest.mark.parametrize("change", ["other rows", "other mask"])
def test_c27_peers_that_read_other_rows_are_told(change):
    said = "other rows on rank 1 than on rank 0"
    fails_on_ranks(2, _step, "llama", {}, _batch(), change, error=PlanError, match=said)


@pytest.mark.parametrize(
    "family, options, batch, said",
    [
        ("llama", {}, _batch(attention_mask=_mask(3, 4)), "zeros between ones"),
        ("llama", {}, _batch(attention_mask=_mask(10, 11)), "1 supervised tokens that padding would predict"),
        ("gemma2", {"model": {}}, _batch(attention_mask=_mask(0, 1)), "2 supervised tokens that padding"),
        ("llama", {}, _batch(attention_mask=torch.ones(2, 1, 12, 12)), "4-D masks say nothing about documents"),
        ("gpt_oss", {}, _batch(position_ids=torch.arange(0, 24, 2).expand(2, 12)), "jump to another number than 0"),
        ("llama4_text", {"model": {"attention_chunk_size": 8}}, _batch(document_ids=torch.arange(24).view(2, 12) // 5),
         "rows longer than a chunk of 8 tokens"),
        ("llama", {}, _batch(position_ids=torch.zeros(3, 1, 12).long()), "must have the shape of input_ids"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_read_as_documents_are_refused(family, options, batch, said):
    fails_on_ranks(2, _step, family, options, batch, "", error=PlanError, match=said)


def _positions_without_sense(step, rank, vocab):
    """transformers takes every jump for a new document, and so does the ring."""
    return [rows(step, 1, 12, vocab) | {"position_ids": torch.tensor([[0, 1, 2, 5, 6, 4, 5, 6, 7, 0, 0, 1]])}]


def test_positions_that_jump_are_documents_as_transformers_reads_them():
    check_parity(Case("llama", Degrees(cp=2), {}, TINY, batches=_positions_without_sense))


def _poisoned(rank):
    batch = rows(0, 2, 13, VOCAB)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    batch["input_ids"][mask == 0] = 1
    batch["input_ids"][mask == 1] += batch["input_ids"][mask == 1] == 1
    batch["labels"][:, :5] = -100
    results = []
    for value in (0.0, math.nan):
        made = tiny_model("llama", **TINY)
        with torch.no_grad():
            made.model.embed_tokens.weight[1] = value
        run = parallelize(made, plan_for(made, Degrees(cp=2)), build_mesh(Degrees(cp=2), "cpu"))
        results.append(run.evaluate([batch | {"attention_mask": mask}]))
    return results, run.logits(batch | {"attention_mask": mask})[1, :4].isnan().all().item()


def test_nan_at_padding_does_not_reach_the_loss():
    for (zero, nan), was_there in run_ranks(2, _poisoned):
        assert was_there and zero == nan and math.isfinite(nan[0])
