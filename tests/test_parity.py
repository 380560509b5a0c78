"""Parity of the data axis over families, degrees, zero stages, reductions, ties, micro-batches and uneven data."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d import Degrees
from tests.pairwise import pairwise
from tests.parity import Case, check_parity, one_without_tokens, padded, ragged, uneven

FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral_sw", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2", "gpt_neox", "opt",
    "smollm3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss",
]  # fmt: skip
OPTIONS = {
    "degrees": [Degrees(dp_shard=4), Degrees(dp_replicate=2, dp_shard=2), Degrees(dp_shard=2)],
    "zero": [3, 2, 1],
    "grad_reduce": ["microbatch", "window"],
    "tied": [False, True],
    "microbatches": [1, 3],
    "batches": [uneven, one_without_tokens, ragged, padded],
}


def _case(row, family, dtype=torch.float32):
    options = {name: row[name] for name in ("zero", "grad_reduce", "microbatches")}
    model = {"num_hidden_layers": 2, "tie_word_embeddings": row["tied"]}
    return Case(family, row["degrees"], options, model, dtype, row["batches"])


def _name(value):
    if isinstance(value, dict):
        return "-".join(getattr(v, "__name__", str(v)) for v in value.values())
    return str(value)


DEFAULT = [(row, FAMILIES[i % len(FAMILIES)]) for i, row in enumerate(pairwise(OPTIONS) + pairwise(OPTIONS)[:4])]
FULL = pairwise({"family": FAMILIES, **OPTIONS})


def test_the_default_rows_name_every_family():
    assert {family for _, family in DEFAULT} == set(FAMILIES)


@pytest.mark.parametrize("row, family", DEFAULT, ids=_name)
def test_gradients_equal_those_of_one_process(row, family):
    check_parity(_case(row, family))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("degrees", OPTIONS["degrees"][:2], ids=str)
def test_exact_in_fp64(family, degrees):
    check_parity(
        Case(family, degrees, {"microbatches": 2}, {"num_hidden_layers": 2}, torch.float64, one_without_tokens)
    )


def test_plain_replication():
    check_parity(Case("qwen3", Degrees(dp_replicate=2), {}, {"num_hidden_layers": 2}))


def test_one_rank_is_not_wrapped_and_exact():
    check_parity(Case("llama", Degrees(), {"microbatches": 3}, {"num_hidden_layers": 2}, batches=one_without_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("row", FULL, ids=_name)
def test_every_pair_of_family_and_option(row):
    check_parity(_case(row, row["family"]))
