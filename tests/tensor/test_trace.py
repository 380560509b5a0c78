"""How often the ranks of a tensor-parallel model exchange anything, layer by layer."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import run_ranks
from tests.parity import rows
from tests.traces import Trace

KINDS = ("gather", "reduce_scatter", "all_reduce")


def _counts(rank, family, sequence, n_layers, microbatches=1):
    model = tiny_model(family, num_hidden_layers=n_layers)
    degrees = Degrees(tp=2)
    plan = plan_for(model, degrees, sequence_parallel=sequence, microbatches=microbatches)
    run = parallelize(model, plan, build_mesh(degrees, "cpu"))
    batch = rows(0, 2, 8, VOCAB)
    with Trace() as forward, torch.no_grad():
        run.model(input_ids=batch["input_ids"], use_cache=False)
    with Trace() as step:
        run.step(batch)
    return [forward.count(kind) for kind in KINDS], [step.count(kind) for kind in KINDS]


def _per_layer(family, sequence):
    two, four = (run_ranks(2, _counts, family, sequence, n) for n in (2, 4))
    assert two[0] == two[1] and four[0] == four[1]
    forward, step = ([(b - a) // 2 for a, b in zip(two[0][i], four[0][i])] for i in (0, 1))
    return forward, [b - a for a, b in zip(forward, step)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_layer_gathers_twice_and_reduces_twice_under_sequence_parallelism(family):
    forward, backward = _per_layer(family, True)
    assert forward == [2, 2, 0]
    assert backward == [2, 2, 0]  # norms, routers, latent projections: once a window, not once a layer


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_reduces_twice_forward_and_twice_backward_with_whole_tokens(family):
    assert _per_layer(family, False) == ([0, 0, 2], [0, 0, 2])


@pytest.mark.parametrize(
    "family, sequence, forward, backward",
    [
        # Attention 1 gather and 1 reduction each way. The weights of experts: 1 gather each way, 1 reduction.
        ("mixtral", True, [2, 1, 0], [2, 2, 0]),
        ("qwen2_moe", True, [3, 2, 0], [3, 3, 0]),  # and shared experts, like attention
        # Whole tokens: each rank's share of the outputs is gathered; backward gradients of tokens and of their weights.
        ("mixtral", False, [2, 0, 1], [3, 1, 1]),
        ("deepseek_v2", False, [2, 0, 2], [3, 1, 2]),
    ],
)
def test_a_mixture_of_experts_gathers_weights_and_no_tokens_that_ranks_have(family, sequence, forward, backward):
    assert _per_layer(family, sequence) == (forward, backward)


def test_norms_over_all_heads_take_one_small_reduction_each():
    forward, backward = _per_layer("olmo2", False)
    assert forward == [0, 0, 4] and backward == [0, 0, 4]


def test_summed_gradients_are_exchanged_once_a_window():
    """5 norms of 2 layers, one all-reduce; however many micro-batches."""
    one, three = (run_ranks(2, _counts, "llama", True, 2, m)[0][1] for m in (1, 3))
    outside = 2  # of a step without layers: the embedding, forward; the head's input, backward
    assert one[2] == 1 + outside and three[2] == 1 + 3 * outside
