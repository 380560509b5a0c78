"""Parity of the tensor axis over families, degrees, sequence parallelism, zero stages, ties, data and vocabularies."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d import Degrees
from dtensor_5d.families.tensor import PROVED
from tests.families.tiny import tiny_config
from tests.harness import run_ranks
from tests.pairwise import pairwise
from tests.parity import Case, _trial, check_parity, one_without_tokens, padded, ragged, uneven
from tests.tensor.doubles import StayDouble

FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral_sw", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "gpt2", "gpt_neox",
    "smollm3", "starcoder2", "granite", "cohere", "glm4", "stablelm", "opt", "mixtral", "qwen2_moe", "qwen3_moe",
    "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe",
]  # fmt: skip
# In the slow rows and in the README's table.
MORE = [
    "apertus", "arcee", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "glm",
    "glm4_moe_lite", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3", "minimax_m2", "ministral", "nanochat",
    "nemotron", "olmo", "phi", "seed_oss", "solar_open", "vaultgemma",
]  # fmt: skip
TWO_KV_HEADS = {"num_key_value_heads": 2}
OPTIONS = {
    "degrees": [Degrees(dp_shard=2, tp=2), Degrees(tp=4), Degrees(dp_replicate=2, tp=2), Degrees(tp=2)],
    "sequence_parallel": [True, False],
    "zero": [3, 2, 1],
    "grad_reduce": ["microbatch", "window"],
    "tied": [False, True],
    "microbatches": [1, 3],
    "batches": [uneven, one_without_tokens, ragged, padded],
    "vocab": [128, 125],
}
# Several query heads share a kv head in eager attention, and latent attention has no kv heads of its own.
OWN_KV_HEADS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt2", "gpt_neox", "opt")
FUSED = ("phi3",)
NO_DROPOUT = {"seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0}}


def _case(row, family, dtype=torch.float32):
    options = {name: row[name] for name in ("zero", "grad_reduce", "microbatches", "sequence_parallel")}
    model = {"num_hidden_layers": 2, "tie_word_embeddings": row["tied"], "vocab_size": row["vocab"]}
    model |= NO_DROPOUT.get(family, {})
    if row["degrees"].tp == 4 and family not in (*OWN_KV_HEADS, *FUSED):
        model |= TWO_KV_HEADS  # two ranks for each
    return Case(family, row["degrees"], options, model, dtype, row["batches"])


def _name(value):
    if isinstance(value, dict):
        return "-".join(getattr(v, "__name__", str(v)) for v in value.values())
    return str(value)


ROWS = pairwise(OPTIONS)
DEFAULT = [(ROWS[i % len(ROWS)], family) for i, family in enumerate(FAMILIES)]
FULL = pairwise({"family": FAMILIES + MORE, **OPTIONS})


def test_every_proved_family_is_among_these():
    assert {tiny_config(family).model_type for family in FAMILIES + MORE} == set(PROVED)
    assert len(FAMILIES) >= len(ROWS), "every pair of options is in the default rows"


@pytest.mark.parametrize("row, family", DEFAULT, ids=_name)
def test_gradients_equal_those_of_one_process(row, family):
    check_parity(_case(row, family))


@pytest.mark.parametrize(
    "family, sequence",
    [
        ("qwen3", True), ("gemma2", False),
        *(pytest.param(*row, marks=pytest.mark.slow)
          for row in (("llama", True), ("llama", False), ("qwen3", False), ("gemma2", True))),
    ],
)  # fmt: skip
def test_exact_in_fp64(family, sequence):
    options = {"microbatches": 2, "sequence_parallel": sequence}
    model = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    degrees = Degrees(tp=4) if sequence else Degrees(dp_shard=2, tp=2)
    case = Case(family, degrees, options, model, torch.float64, one_without_tokens)
    run_ranks(4, _in_doubles, case, timeout=90.0)


def _in_doubles(rank, case):
    with StayDouble():
        return _trial(rank, case)


@pytest.mark.slow
@pytest.mark.parametrize("row", FULL, ids=_name)
def test_every_pair_of_family_and_option(row):
    check_parity(_case(row, row["family"]))
