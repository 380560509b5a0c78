"""Parity of models over the context axis: families, degrees, orders, strategies, masks, zero stages, recomputation."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d import Degrees
from tests.context.batches import long, one_without_tokens, packed, padded, ragged
from tests.harness import run_ranks
from tests.pairwise import pairwise
from tests.parity import Case, _trial, check_parity
from tests.tensor.doubles import StayDouble

FAMILIES = [
    "llama", "qwen3", "mistral_sw", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "olmo2", "gpt2", "phi3",
]  # fmt: skip
OPTIONS = {
    "degrees": [
        Degrees(cp=2), Degrees(cp=2, tp=2), Degrees(cp=4), Degrees(dp_shard=2, cp=2), Degrees(dp_replicate=2, cp=2),
    ],
    "batches": [long, padded, packed, one_without_tokens, ragged],
    "balance": ["zigzag", "striped", "document", "none"],
    "context": ["ring", "ring+ulysses", "allgather", "ulysses"],
    "zero": [3, 2, 1],
    "sequence_parallel": [True, False],
    "recompute": ["none", "selective", "block"],
    "microbatches": [1, 2],
    "tied": [False, True],
}  # fmt: skip
# transformers separates no documents in this family: tests/context/test_run.py compares them one by one.
UNPACKED = ("gpt_oss",)


def _case(row, family, dtype=torch.float32):
    options = {name: row[name] for name in ("balance", "context", "zero", "recompute", "microbatches")}
    if row["degrees"].tp > 1:
        options["sequence_parallel"] = row["sequence_parallel"]
    batches = long if row["batches"] is packed and family in UNPACKED else row["batches"]
    model = {"num_hidden_layers": 2, "tie_word_embeddings": row["tied"]}
    return Case(family, row["degrees"], options, model, dtype, batches)


def _name(value):
    if isinstance(value, dict):
        return "-".join(getattr(v, "__name__", str(v)) for v in value.values())
    return str(value)


ROWS = pairwise(OPTIONS)
DEFAULT = [(row, FAMILIES[i % len(FAMILIES)]) for i, row in enumerate(ROWS)]
FULL = pairwise({"family": FAMILIES, **OPTIONS})


@pytest.mark.parametrize("row, family", DEFAULT, ids=_name)
def test_gradients_equal_those_of_one_process(row, family):
    check_parity(_case(row, family))


@pytest.mark.parametrize(
    "family, degrees, batches, options",
    [
        ("llama", Degrees(cp=4), packed, {"balance": "document"}),
        ("gemma3_text", Degrees(cp=2, tp=2), padded, {"sequence_parallel": True}),
        ("qwen3", Degrees(cp=2), one_without_tokens, {"context": "ring+ulysses"}),
    ],
    ids=str,
)
def test_exact_in_fp64(family, degrees, batches, options):
    case = Case(family, degrees, options, {"num_hidden_layers": 2}, torch.float64, batches)
    run_ranks(degrees.world_size, _in_doubles, case)


def _in_doubles(rank, case):
    with StayDouble():
        return _trial(rank, case)


@pytest.mark.slow
@pytest.mark.parametrize("row", FULL, ids=_name)
def test_every_pair_of_family_and_option(row):
    check_parity(_case(row, row["family"]))
