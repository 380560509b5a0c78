"""Every family runs over the context axis, every gradient equal to one process, or is refused with its reason."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d import Degrees, PlanError, plan_for
from dtensor_5d.families.context import REFUSED, refusal
from dtensor_5d.families.facts import FACTS
from tests.context.batches import long
from tests.context.test_model_parity import FAMILIES as OFTEN
from tests.families.tiny import FAMILIES, tiny_config, tiny_model
from tests.harness import run_ranks
from tests.parity import Case, _trial, check_parity
from tests.tensor.doubles import StayDouble

CHANGES = {
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "gemma3n_text": {"num_hidden_layers": 4},  # the last two use keys of the first two
}
# Rounding of fp32 grows beyond 1e-5 in these, on one process as well: compared in fp64 instead, at 1e-10.
ILL_CONDITIONED = ("gemma3n_text", "gemma4_text")
RUN = [name for name in FAMILIES if refusal(tiny_config(name).model_type) is None]


# phimoe, which draws lots in training: tests/context/test_alone.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN if name not in (*OFTEN, "phimoe")])
def test_gradients_equal_those_of_one_process(name):
    model = {"num_hidden_layers": 2, **CHANGES.get(name, {})}
    if name in ILL_CONDITIONED:
        run_ranks(2, _in_doubles, Case(name, Degrees(cp=2), {}, model, torch.float64, long))
    else:
        check_parity(Case(name, Degrees(cp=2), {}, model, batches=long))


def _in_doubles(rank, case):
    with StayDouble():
        return _trial(rank, case)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RUN])
def test_the_others_are_refused_with_their_reason(name):
    config = tiny_config(name)
    with pytest.raises(PlanError) as caught:
        plan_for(config, Degrees(cp=2))
    assert REFUSED[config.model_type] in str(caught.value)


def test_the_data_speak_of_families_that_are_measured():
    assert set(REFUSED) <= set(FACTS)
    assert {tiny_config(name).model_type for name in RUN} | set(REFUSED) == set(FACTS)


def test_what_a_family_lacks_is_found_without_its_name():
    """A layer without attention, a mask of another kind, a family that nobody has compared."""
    model = tiny_model("lfm2")
    model.config.model_type = "never_heard_of"
    with pytest.raises(PlanError) as caught:
        plan_for(model, Degrees(cp=2))
    said = str(caught.value)
    assert "nobody has compared this family" in said and "without attention that transformers dispatches" in said
    model = tiny_model("llama")
    model.config.layer_types = ["sliding_attention", "block_sparse"] * 2
    with pytest.raises(PlanError, match="layers of type 'block_sparse'"):
        plan_for(model, Degrees(cp=2))
