"""From a user's batch to micro-batches: shifted before anything is cut, and what the model would misread is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.batch import BatchRules, cut_window
from dtensor_5d.errors import PlanError
from dtensor_5d.loss import nothing, token_loss_sum

CPU = torch.device("cpu")
RULES = BatchRules(vocab=50, family="test")


def ids(b=2, s=6):
    return torch.arange(b * s).view(b, s)


def cut(batch, parts=1, rules=RULES, **kwargs):
    return cut_window(batch, parts, rules, CPU, **kwargs)


def refused(batch, rules=RULES, **kwargs):
    with pytest.raises(PlanError) as caught:
        cut(batch, rules=rules, **kwargs)
    return str(caught.value)


def test_labels_are_shifted_over_the_whole_sequence():
    (micro,) = cut({"input_ids": ids(), "labels": ids()})
    assert micro.labels.tolist() == [[1, 2, 3, 4, 5, -100], [7, 8, 9, 10, 11, -100]]
    assert micro.tokens == 10
    (micro,) = cut({"input_ids": ids(), "shift_labels": ids()})
    assert micro.labels.tolist() == ids().tolist() and micro.tokens == 12


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 7), st.integers(1, 5), st.integers(1, 6))
def test_rows_are_cut_into_parts_that_differ_by_one_at_most_and_lose_nothing(rows, length, parts):
    batch = {"input_ids": torch.randint(0, 50, (rows, length)), "labels": torch.randint(0, 50, (rows, length))}
    micros = cut(batch, parts)
    assert len(micros) == parts
    sizes = [m.rows for m in micros]
    assert sum(sizes) == rows and max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([m.inputs["input_ids"] for m in micros]), batch["input_ids"])
    assert sum(m.tokens for m in micros) == rows * (length - 1)
    assert all(m.runnable()["input_ids"].numel() > 0 for m in micros)


def test_a_window_is_all_parts_of_all_batches():
    window = cut([{"input_ids": ids(2, 6), "labels": ids(2, 6)}, {"input_ids": ids(1, 3), "labels": ids(1, 3)}], 2)
    assert [(m.rows, m.tokens) for m in window] == [(1, 5), (1, 5), (1, 2), (0, 0)]


def test_a_mask_of_ones_is_dropped_and_one_with_zeros_is_kept():
    ones = torch.ones(2, 6, dtype=torch.long)
    (micro,) = cut({"input_ids": ids(), "labels": ids(), "attention_mask": ones})
    assert "attention_mask" not in micro.inputs
    ones[0, 4:] = 0
    (micro,) = cut({"input_ids": ids(), "labels": ids(), "attention_mask": ones})
    assert torch.equal(micro.inputs["attention_mask"], ones)


def test_documents_become_positions_that_restart():
    documents = torch.tensor([[0, 0, 0, 5, 5, 2], [1, 1, 1, 1, 1, 1]])
    (micro,) = cut({"input_ids": ids(), "labels": ids(), "document_ids": documents})
    assert micro.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    (micro,) = cut({"input_ids": ids(), "labels": ids(), "document_ids": torch.ones(2, 6, dtype=torch.long)})
    assert "position_ids" not in micro.inputs


def test_packed_rows_are_refused_where_the_family_would_mix_them():
    rules = BatchRules(vocab=50, packs=False, family="gpt_oss")
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    assert "gpt_oss does not separate" in refused({"input_ids": ids(), "labels": ids(), "position_ids": packed}, rules)
    plain = torch.arange(6).expand(2, 6)
    assert cut({"input_ids": ids(), "labels": ids(), "position_ids": plain}, rules=rules)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]] * 2)
    assert "either packed or padded" in refused(
        {"input_ids": ids(), "labels": ids(), "position_ids": packed, "attention_mask": mask}
    )


def test_positions_of_left_padding_are_no_documents():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # what generate() and collators make
    (micro,) = cut({"input_ids": ids(), "labels": ids(), "position_ids": positions, "attention_mask": mask})
    assert torch.equal(micro.inputs["position_ids"], positions)


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"input_ids": torch.full((2, 6), 50)}, ["id 50", "[0, 50)"]),
        ({"input_ids": torch.full((2, 6), -1)}, ["id -1", "[0, 50)"]),
        ({"labels": torch.full((2, 6), 99)}, ["id 99", "-100"]),
        ({"labels": torch.full((2, 6), -5)}, ["id -5"]),
        ({"labels": ids(1, 6)}, ["(1, 6)", "(2, 6)"]),
        ({"labels": None}, ["needs labels"]),
        ({"labels": ids().float()}, ["float32", "whole numbers"]),
        ({"input_ids": ids()[0]}, ["(6,)", "[B, S]"]),
        ({"input_ids": None}, ["[B, S]"]),
        ({"attention_mask": torch.full((2, 6), 2)}, ["value 2", "0 (padding) or 1"]),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, ["4-D"]),
        ({"position_ids": torch.full((2, 6), -3)}, ["-3", ">= 0"]),
        ({"position_ids": torch.arange(6).expand(2, 6), "document_ids": ids() // 3}, ["differ from document_ids"]),
        ({"loss_mask": ids()}, ["'loss_mask'", "remove"]),
        ({"shift_labels": ids()}, ["both labels and shift_labels"]),
        ({"labels": [1, 2]}, ["list", "torch.tensor"]),
    ],
)
def test_wrong_batches_name_what_was_given_and_what_is_needed(change, parts):
    said = refused({"input_ids": ids(), "labels": ids()} | change)
    for part in parts:
        assert part in said


def test_other_wrong_batches():
    assert "dict of [B, S]" in refused(3)
    assert "dict of [B, S]" in refused("text")
    assert "batch 1" in refused([{"input_ids": ids(), "labels": ids()}, {"input_ids": ids()}])
    rules = BatchRules(vocab=50, positions=5)
    said = refused({"input_ids": ids(), "labels": ids()}, rules)
    assert "position 5" in said and "0 to 4" in said
    assert cut({"input_ids": ids()}, need_labels=False)[0].labels is None


# --- loss


def test_the_loss_and_its_gradient_are_those_of_torch():
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 50, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (2, 6))
    labels[0, 3:] = -100
    ours = token_loss_sum(logits, labels)
    (got,) = torch.autograd.grad(ours, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(ours, logits)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(ours, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(got, torch.autograd.grad(want, logits)[0], rtol=1e-12, atol=1e-15)


def test_bf16_logits_give_an_fp32_loss():
    logits = torch.randn(1, 4, 50, dtype=torch.bfloat16, requires_grad=True)
    loss = token_loss_sum(logits, torch.tensor([[1, 2, 3, -100]]))
    loss.backward()
    assert loss.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    assert (logits.grad[0, 3] == 0).all()


def test_nan_where_nothing_is_supervised_reaches_neither_loss_nor_gradient():
    """Field fault L17: select, do not multiply."""
    logits = torch.randn(1, 4, 50)
    logits[0, 2:] = float("nan")
    logits.requires_grad_()
    loss = token_loss_sum(logits, torch.tensor([[1, 2, -100, -100]]))
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all() and (logits.grad[0, 2:] == 0).all()
    assert (logits.grad[0, :2] != 0).any()
    logits.grad = None
    nothing(logits * 1.0).backward()
    assert (logits.grad == 0).all()


def test_positions_of_padding_in_packed_rows_are_arbitrary():
    """As the package's own loader fills up its last row."""
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]] * 2)
    positions = torch.tensor([[0, 1, 0, 1, 0, 0]] * 2)
    (micro,) = cut({"input_ids": ids(), "labels": ids(), "document_ids": documents, "position_ids": positions})
    assert micro.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1]] * 2
    assert "position_ids that differ" in refused(
        {"input_ids": ids(), "labels": ids(), "document_ids": documents, "position_ids": positions.flip(1)}
    )


def test_documents_told_by_offsets():
    batch = {"input_ids": ids(), "labels": ids()}
    (micro,) = cut(batch | {"cu_seqlens": torch.tensor([0, 2, 6, 9, 12])})
    assert micro.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]]
    for offsets in ([0, 2, 2, 12], [1, 12], [0, 11], [0]):
        assert "go up from 0 to B x S = 12" in refused(batch | {"cu_seqlens": torch.tensor(offsets)})
    over = refused(batch | {"cu_seqlens": torch.tensor([0, 4, 8, 12])})
    assert "over the end of a row (at [6])" in over and "lay all documents into one row" in over
    assert "told once" in refused(batch | {"cu_seqlens": torch.tensor([0, 12]), "document_ids": ids()})
