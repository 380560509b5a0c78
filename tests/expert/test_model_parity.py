"""Parity of the expert axis on whole models, through `plan_for` and `parallelize`: every gradient, norm, weights."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d import Degrees
from dtensor_5d.families.tensor import PROVED
from tests.families.tiny import tiny_config
from tests.pairwise import pairwise
from tests.parity import Case, check_parity, one_without_tokens, padded, ragged, uneven

OPTIONS = {
    "degrees": [
        Degrees(dp_shard=2, ep=2),
        Degrees(dp_shard=2, tp=2, ep=4),
        Degrees(dp_shard=4, ep=2),  # efsdp 2
        Degrees(tp=2, ep=2),
        Degrees(dp_shard=4, ep=4),
        Degrees(dp_replicate=2, dp_shard=2, ep=2),
        Degrees(dp_shard=2, tp=2, ep=2),  # experts on tp alone, efsdp 2
        Degrees(dp_shard=4, ep=2, etp=2),
        Degrees(dp_shard=2, tp=2, ep=2, etp=2),
        Degrees(tp=2, etp=2),
    ],
    "zero": [3, 2, 1],
    "grad_reduce": ["microbatch", "window"],
    "microbatches": [1, 3],
    "sequence_parallel": [None, False],
    "batches": [uneven, one_without_tokens, ragged, padded],
    "recompute": ["none", "block", "selective"],
}


def _case(row, family, dtype=torch.float32):
    names = ["zero", "grad_reduce", "microbatches", "recompute"] + ["sequence_parallel"] * (row["degrees"].tp > 1)
    return Case(family, row["degrees"], {n: row[n] for n in names}, {"num_hidden_layers": 2}, dtype, row["batches"])


def _name(value):
    if isinstance(value, dict):
        return "-".join(getattr(v, "__name__", str(v)) for v in value.values())
    return str(value)


ROWS = pairwise(OPTIONS)


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_gradients_equal_those_of_one_process(row):
    check_parity(_case(row, "qwen3_moe"))


FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "llama4_text",
    "granitemoe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "dots1", "flex_olmo", "afmoe", "glm4_moe_lite",
    "solar_open", "granitemoeshared", "minimax", "lfm2_moe", "jamba", "qwen3_next", "deepseek_v32",
)  # fmt: skip
BY_FAMILY = {
    "ep": Degrees(dp_shard=2, ep=2),
    "efsdp, etp": Degrees(dp_shard=4, ep=1, etp=2),
    "tp": Degrees(dp_shard=2, tp=2, ep=4),
    "tp, etp": Degrees(tp=2, etp=2),
}


def _family_case(family, degrees, options=None):
    return Case(family, degrees, options or {}, {"num_hidden_layers": 2})


@pytest.mark.slow
@pytest.mark.parametrize("degrees", BY_FAMILY.values(), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, degrees):
    if degrees.tp > 1 and tiny_config(family).model_type not in PROVED:
        pytest.skip("the tensor axis has no rules for it")
    check_parity(_family_case(family, degrees))
    if degrees.tp > 1:
        check_parity(_family_case(family, degrees, {"sequence_parallel": False}))
