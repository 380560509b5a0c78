"""LoRA on the tensor axis: adapters follow the layout of the layer that they adapt, wherever it stands."""

from __future__ import annotations

import pytest

from dtensor_5d import Degrees, PlanError, plan_for
from tests.families.tiny import tiny_model
from tests.harness import run_ranks
from tests.parity import Case
from tests.tensor.adapted import Adapt, prepared_parity

TINY = {"num_hidden_layers": 2}
TP, BOTH = Degrees(tp=2), Degrees(dp_shard=2, tp=2)


@pytest.mark.parametrize(
    "family, names, degrees, sequence, model",
    [
        # A shared expert's output is summed by the block around it, once.
        ("deepseek_v3", ("down_proj",), TP, True, {}),
        ("deepseek_v3", ("down_proj", "up_proj", "q_b_proj", "o_proj"), BOTH, False, {}),
        ("qwen2_moe", ("down_proj", "shared_expert_gate"), TP, False, {}),
        # The head: its own input is exchanged once, logits gathered after the sum of both.
        ("llama", ("lm_head",), TP, True, {}),
        ("llama", ("lm_head", "o_proj"), BOTH, False, {"tie_word_embeddings": True}),
        # Directly in a layer, without a block around.
        ("opt", ("fc2",), TP, False, {}),
        pytest.param("opt", ("fc1", "fc2", "out_proj"), BOTH, True, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_have_the_gradients_of_one_process(family, names, degrees, sequence, model):
    case = Case(family, degrees, {"sequence_parallel": sequence}, {**TINY, **model})
    run_ranks(degrees.world_size, prepared_parity, case, Adapt(*names), timeout=90)


def test_an_adapted_head_of_a_size_that_does_not_divide_is_refused():
    model = tiny_model("llama", **TINY, vocab_size=125)
    Adapt("lm_head")(model)
    with pytest.raises(PlanError, match=r"lm_head\.base_layer of 125 outputs.*tp must divide 125"):
        plan_for(model, TP)
