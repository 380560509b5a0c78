"""Every gradient where axes meet: pipeline, data, context, tensor and expert over one model, against one process.

Three SGD steps each: loss, all gradients, norm and weights, fp32, relative 1e-5; lengths change from step to step.
"""

from __future__ import annotations

import pytest

from dtensor_5d import Degrees
from tests.parity import Case, check_parity, one_without_tokens, padded, ragged, uneven

MOE = ("qwen3_moe", "deepseek_v3")
DENSE = ("llama", "gemma2")
FOLDED = [
    Degrees(pp=2, cp=2, tp=2, ep=2),
    Degrees(pp=2, cp=2, tp=2, ep=4),
    Degrees(pp=2, dp_shard=2, tp=2, ep=2),
    Degrees(pp=2, dp_shard=2, cp=2, ep=4),
]
PLAIN = [Degrees(pp=2, cp=2, tp=2), Degrees(pp=2, dp_shard=2, tp=2), Degrees(pp=2, dp_shard=2, cp=2)]
SCHEDULES = ("zbv", "zb-h1")
ALL = [(f, d, s) for families, degrees in ((MOE, FOLDED), (DENSE, PLAIN)) for f in families for d in degrees
       for s in SCHEDULES]  # fmt: skip
FIRST = [(MOE[i % 2], d, SCHEDULES[(i + i // 2) % 2]) for i, d in enumerate(FOLDED)]
FIRST += [(DENSE[i % 2], d, SCHEDULES[i % 2]) for i, d in enumerate(PLAIN)]


def padded_inputs(step, rank, vocab):
    """Padding on the right, on odd ranks on the left; over cp no padding may predict a token."""
    (batch,) = padded(step, rank, vocab)
    batch["labels"][0, 5] = -100
    return [batch]


def _case(family, degrees, schedule, number):
    options = {"schedule": schedule, "microbatches": (4, 2, 3)[number % 3], "zero": 3}
    if number % 4 == 1:
        options["recompute"] = ("block", "selective")[number % 8 // 4]
    batches = (uneven, one_without_tokens, padded_inputs, ragged)[number % 4]
    model = {"num_hidden_layers": 4, "tie_word_embeddings": number % 2 == 0}
    return Case(family, degrees, options, model, batches=batches)


def _name(value):
    return str(value).removeprefix("Degrees")


@pytest.mark.parametrize("family, degrees, schedule", FIRST, ids=_name)
def test_every_gradient(family, degrees, schedule):
    check_parity(_case(family, degrees, schedule, ALL.index((family, degrees, schedule))), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("family, degrees, schedule", [c for c in ALL if c not in FIRST], ids=_name)
def test_every_gradient_of_the_rest(family, degrees, schedule):
    check_parity(_case(family, degrees, schedule, ALL.index((family, degrees, schedule))), timeout=120)


def test_the_first_cases_name_every_family_mesh_and_schedule():
    families, degrees, schedules = (set(map(str, column)) for column in zip(*FIRST))
    assert families == {*MOE, *DENSE} and schedules == set(SCHEDULES) and len(degrees) == len(FOLDED) + len(PLAIN)
