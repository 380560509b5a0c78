"""Field faults K1, K12 (position), M6, M7 (who reads what)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.errors import PlanError
from dtensor_5d.loader import (
    END,
    VOCABULARY,
    PackedLoader,
    read_documents,
    split_documents,
    tokenize,
    write_byte_tokenizer,
)

# --- text


def test_a_folder_in_a_fixed_order_without_what_is_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("zwei")
    (tmp_path / "a.txt").write_text("eins é")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "y.txt").write_text("no")
    assert read_documents(tmp_path) == ["eins é", "zwei"]
    assert read_documents(tmp_path / "a.txt") == ["eins é"]
    assert read_documents(tmp_path, max_bytes=6) == ["eins "]  # é has two bytes: not cut in half
    assert read_documents(tmp_path, max_bytes=9) == ["eins é", "zw"]


def test_the_standard_library_is_always_there():
    documents = read_documents(max_bytes=300_000)
    assert sum(len(d.encode()) for d in documents) == 300_000 and len(documents) > 3
    assert any("import " in d for d in documents)


def test_text_that_cannot_be_used(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    (tmp_path / "none").mkdir()
    for path, match in (("missing", "must be a file or a folder"), ("bad.txt", r"byte 0xff at 2.*UTF-8"),
                        ("none", "at least 1 byte")):  # fmt: skip
        with pytest.raises(PlanError, match=match):
            read_documents(tmp_path / path)
    with pytest.raises(PlanError, match="max_bytes=0"):
        read_documents(max_bytes=0)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=12), st.floats(0.01, 0.99), st.integers(0, 3))
def test_a_split_is_a_partition(documents, share, seed):
    if sum(map(len, documents)) < 2:
        with pytest.raises(PlanError, match="at least 2"):
            split_documents(documents, share, seed=seed)
        return
    train, held = split_documents(documents, share, seed=seed)
    assert "".join(train) and "".join(held)
    if len(documents) == 1:
        assert train[0] + held[0] == documents[0]
    else:
        assert sorted(train + held) == sorted(documents)
    assert (train, held) == split_documents(documents, share, seed=seed)


def test_a_split_has_about_the_share_asked_for():
    documents = [str(i) * (i % 17 + 1) for i in range(400)]
    _, held = split_documents(documents, 0.1, seed=1)
    total, got = sum(map(len, documents)), sum(map(len, held))
    assert abs(got / total - 0.1) < 0.01
    assert held != split_documents(documents, 0.1, seed=2)[1]
    for share in (0, 1, -0.5):
        with pytest.raises(PlanError, match="between 0 and 1"):
            split_documents(documents, share)


# --- tokens


def test_the_tokenizer_folder_is_ordinary_and_its_ids_are_the_bytes(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    write_byte_tokenizer(tmp_path)
    texts = ["plain\n\ttext  ", "é 漢字 🙂 \x00\x7f", " <|endoftext", "'s it's", ""]
    # With and without a model beside it: transformers looks at the model's type for its tokenizer class.
    for model_type in (None, "qwen3", "qwen3_moe", "llama", "gpt2"):
        if model_type is not None:
            AutoConfig.for_model(model_type).save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert len(tokenizer) == VOCABULARY and tokenizer.eos_token_id == tokenizer.pad_token_id == END
        for text in texts:
            ids = tokenizer(text).input_ids
            assert ids == list(text.encode()), (model_type, text)
            assert tokenizer.decode(ids) == text
    ours = tokenize(texts)
    theirs = tokenize(texts, lambda t: tokenizer(t).input_ids, tokenizer.eos_token_id)
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.ends, theirs.ends)
    assert tokenizer.decode(ours.tokens[: ours.ends[0]]) == texts[0] + "<|endoftext|>"


# --- rows


def _text(tokens=100, documents=7):
    cuts = torch.linspace(0, tokens, documents + 1).long()
    text = tokenize(["x" * int(b - a - 1) for a, b in pairwise(cuts)])
    text.tokens[:] = torch.arange(tokens)  # so that a token says where it is from
    return text


def _loader(rank=0, size=1, *, batch=4, seed=0, tokens=100, length=9, **options):
    return PackedLoader(_text(tokens), sequence_length=length, batch_size=batch, data_rank=rank, data_size=size,
                        seed=seed, **options)  # fmt: skip


def test_every_token_once_per_epoch_and_another_order_next():
    loader = _loader()
    epochs = [list(loader), list(loader)]
    assert loader.epoch == 2 and loader.rows == 12 and len(loader) == len(epochs[0]) == 3
    orders = []
    for batches in epochs:
        labels = torch.cat([b["labels"] for b in batches])
        orders.append(labels[:, 0].tolist())
        assert sorted(labels[labels >= 0].tolist()) == list(range(100))
        for b in batches:
            real = b["labels"] >= 0
            assert torch.equal(b["input_ids"][real], b["labels"][real])
            assert b["input_ids"].dtype == torch.int64 and int(b["input_ids"].max()) < 100
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert orders[0] == [b for x in _loader() for b in x["labels"][:, 0].tolist()]
    assert orders[0] != [b for x in _loader(seed=1) for b in x["labels"][:, 0].tolist()]
    straight = [b for x in _loader(shuffle=False) for b in x["labels"][:, 0].tolist()]
    assert straight == [9 * i for i in range(12)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_data_ranks_share_a_global_batch_and_its_order_does_not_depend_on_them(size):
    """M7: equal data ranks read the same, others disjoint rows; also the short last batch (2 rows)."""
    whole = [b["input_ids"] for b in _loader(batch=5)]
    shares = [[b["input_ids"] for b in _loader(r, size, batch=5)] for r in range(size)]
    for i, batch in enumerate(whole):
        parts = [shares[r][i] for r in range(size)]
        assert torch.equal(torch.cat(parts), batch)
        lengths = [len(p) for p in parts]
        assert max(lengths) - min(lengths) <= 1 and all(p.shape[1:] == (9,) for p in parts)
    assert len(whole[-1]) == 2 and (size < 3 or any(len(shares[r][-1]) == 0 for r in range(size)))
    again = [b["input_ids"] for b in _loader(1, size, batch=5)]
    assert all(torch.equal(a, b) for a, b in zip(again, shares[1]))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 4), st.integers(4, 6))
def test_resuming_in_the_middle_goes_on_with_the_same_rows(stop, before, after, batch):
    """K1, K12: the position is global, so any number of data ranks may load it, and the next epoch is the same."""

    def rows(size, steps, state=None):
        loaders = [_loader(r, size, batch=batch) for r in range(size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        seen = []
        for batches in zip(*(loader.steps(steps) for loader in loaders)):
            seen += torch.cat([b["input_ids"] for b in batches])[:, 0].tolist()
        states = [loader.state_dict() for loader in loaders]
        assert all(s == states[0] for s in states)
        return seen, states[0]

    straight, _ = rows(1, stop + 6)
    first, state = rows(before, stop)
    second, _ = rows(after, 6, state)
    assert first + second == straight


def test_a_position_of_something_else_is_refused():
    loader = _loader()
    next(loader.steps(1))
    state = loader.state_dict()
    assert state["row"] == 4 and all(isinstance(v, int) for v in state.values())
    for other, match in ((_loader(seed=1), "seed=1 in this loader"), (_loader(length=10), "sequence_length"),
                         (_loader(tokens=200), "checksum"), (_loader(shuffle=False), "shuffle=0")):  # fmt: skip
        before = other.state_dict()
        with pytest.raises(PlanError, match=match):
            other.load_state_dict(state)
        assert other.state_dict() == before
    with pytest.raises(PlanError, match="row from 0 to 11"):
        loader.load_state_dict({**state, "row": 12})
    with pytest.raises(PlanError, match="row=None"):
        loader.load_state_dict({k: v for k, v in state.items() if k != "row"})
    with pytest.raises(PlanError, match="saved position has seed=None"):
        loader.load_state_dict({})


def test_documents_positions_and_what_is_not_supervised():
    loader = _loader(documents=True, shuffle=False, batch=12)
    (batch,) = list(loader)
    ids, labels, documents, positions = (
        batch[k].flatten() for k in ("input_ids", "labels", "document_ids", "position_ids")
    )
    begins = [0, *_text().ends.tolist()]
    for place in range(100):
        begin = max(b for b in begins if b <= place)
        assert positions[place] == place - max(begin, place // 9 * 9)
        assert labels[place] == (-100 if place == begin else place)
        row_start = place // 9 * 9
        assert documents[place] == sum(row_start < b <= place for b in begins)
    assert documents[100:].tolist() == [-1] * 8 and labels[100:].tolist() == [-100] * 8
    assert ids[100:].tolist() == [99] * 8


def test_bad_sizes_are_told_all_at_once():
    with pytest.raises(PlanError, match=r"batch_size=0(.|\n)*data_size=-1"):
        _loader(batch=0, size=-1)
    with pytest.raises(PlanError, match="batch_size=1: must be at least data_size=2"):  # M6
        _loader(batch=1, size=2)
    with pytest.raises(PlanError, match="data_rank=2: must be from 0 to 1"):
        _loader(rank=2, size=2)
    with pytest.raises(PlanError, match=r"100 tokens: 12 rows of sequence_length 9.*batch_size=20"):
        _loader(batch=20)
    with pytest.raises(PlanError, match="a text of 0 tokens"):
        PackedLoader(tokenize([]), sequence_length=4, batch_size=1)
