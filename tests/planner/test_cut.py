"""Stages by cost: the dearest one is as cheap as any cut can make it."""

from __future__ import annotations

import itertools
import random

import pytest

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan
from dtensor_5d.planner import ModelShape, cut_layers, split_layers
from dtensor_5d.planner.cut import _cheapest_bound, _costs, _nearest
from dtensor_5d.planner.stages import stages_by_rank


def _every_cut(layers, stages):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        places = (0, *ends, layers)
        yield tuple(b - a for a, b in itertools.pairwise(places))


def _dearest(costs, counts):
    ends = list(itertools.accumulate(counts))
    return max(sum(costs[end - n : end]) for n, end in zip(counts, ends))


def test_no_cut_is_better_and_of_equal_ones_it_is_the_most_even():
    drawn = random.Random(0)
    for _ in range(300):
        layers = drawn.randint(1, 9)
        stages = drawn.randint(1, layers)
        costs = [drawn.choice([1, 1, 2, 5, 0]) for _ in range(layers)]
        even = split_layers(layers, stages)
        bound = _cheapest_bound(costs, stages)
        got = _nearest(costs, even, bound)
        cuts = list(_every_cut(layers, stages))
        least = min(_dearest(costs, cut) for cut in cuts)
        assert bound == least == _dearest(costs, got)
        assert got in cuts

        def far(cut, even=even):
            return sum((a - b) ** 2 for a, b in zip(cut, even))

        assert far(got) == min(far(cut) for cut in cuts if _dearest(costs, cut) == least)


def test_a_head_is_worth_layers():
    """The last stage has fewer layers: the head of smollm2-135m costs 4.8 of its 30 layers, llama's 2.2 of 32."""
    assert cut_layers(ModelShape.preset("smollm2-135m"), 2) == (17, 13)
    assert cut_layers(ModelShape.preset("llama-3.1-8b"), 4) == (9, 9, 8, 6)
    costs = _costs(ModelShape.preset("smollm2-135m"))
    assert 4.5 < costs[-1] / costs[0] - 1 < 5


def test_a_long_model_is_cut_in_no_time():
    shape = ModelShape.preset("llama-3.1-405b")
    counts = cut_layers(shape, 63)
    assert (len(counts), sum(counts), min(counts) > 0) == (63, 126, True)


LINEAR = dict(
    model_type="qwen3_next", hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=128, num_experts=0, layer_types=["linear_attention"] * 4
    + ["full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip
SPARSE = dict(
    model_type="deepseek_v3", hidden_size=64, intermediate_size=4096, moe_intermediate_size=32, num_hidden_layers=6,
    num_attention_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=2,
    vocab_size=128, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("config, want", [(LINEAR, (5, 1)), (SPARSE, (2, 4))], ids=["linear mixers", "dense layers"])
def test_layers_differ(config, want):
    """Full attention beside a recurrence, and dense layers beside experts of which a token meets two."""
    assert cut_layers(ModelShape.from_config(config), 2) == want


def test_what_is_not_known_is_cut_by_count():
    config = dict(model_type="nobody", hidden_size=64, intermediate_size=128, num_hidden_layers=6,
                  num_attention_heads=4, vocab_size=100_000)  # fmt: skip
    assert cut_layers(ModelShape.from_config(config), 2) == (3, 3)
    with pytest.raises(PlanError, match="7 pipeline stages for 6 layers"):
        cut_layers(ModelShape.from_config(config), 7)


def test_the_planner_cuts_by_cost():
    shape = ModelShape.preset("smollm2-135m")
    plan = Plan(Degrees(pp=2), Options(schedule="zbv", microbatches=4))
    ranks, _ = stages_by_rank(shape, plan)
    counts = {stage.number: len(stage.layers) for rank in ranks for stage in rank}
    assert tuple(counts[n] for n in range(4)) == cut_layers(shape, 4) != split_layers(30, 4)
