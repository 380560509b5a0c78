"""What a family says with a mask only, which is not made over the context axis, is refused by the plan."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_5d import ContextParallel, Degrees, PlanError, build_mesh, parallelize, plan_for
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.parity import rows

CP = Degrees(cp=2)
WINDOW_2_MOE = dict(use_sliding_window=True, sliding_window=8, max_window_layers=4)


@pytest.mark.parametrize(
    "family, config, said",
    [
        ("phimoe", dict(sliding_window=8), ["sliding_window=8 in PhimoeAttention", "with a mask only", "=None in the"]),
        ("qwen2_moe", WINDOW_2_MOE, ["sliding_window=8 in Qwen2Moe", "with a mask only", "use_sliding_window=False"]),
        ("olmoe", dict(sliding_window=8), ["sliding_window=8 in Olmoe", "without a window", "sliding_window=None"]),
        ("gemma3_text", dict(use_bidirectional_attention=True), ["looks ahead (Gemma3Attention)", "must be causal"]),
        ("gemma", dict(use_bidirectional_attention=True), ["looks ahead (GemmaAttention)"]),
        ("llama", dict(is_causal=False), ["looks ahead (LlamaAttention)"]),
        ("gpt2", dict(attn_pdrop=1), ["attention dropout 1 "]),
    ],
)  # fmt: skip
def test_what_the_call_of_attention_does_not_say_is_refused(family, config, said):
    with pytest.raises(PlanError) as caught:
        plan_for(tiny_config(family, **config), CP)
    for part in said:
        assert part in str(caught.value)
    plan_for(tiny_config(family, **config), Degrees(dp_shard=2))


def test_a_window_changed_after_the_model_was_built_is_refused():
    model = tiny_model("qwen3_moe")
    model.config.sliding_window = 8
    with pytest.raises(PlanError, match="must be the window that the module was built with: None"):
        plan_for(model, CP)


@pytest.mark.parametrize(
    "family, config",
    [("mistral", dict(sliding_window=8)), ("qwen2_moe", dict(sliding_window=8)), ("qwen3_moe", WINDOW_2_MOE),
     ("gemma3_text", {}), ("exaone4", {}), ("phimoe", {}), ("olmoe", {})],
)  # fmt: skip
def test_what_both_say_is_not(family, config):
    plan_for(tiny_config(family, **config), CP)


def _alone(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    parallelize_module(tiny_model("phimoe", sliding_window=8), mesh, {"model.layers.*.self_attn": ContextParallel()})


def test_the_style_used_alone_refuses_too():
    fails_on_ranks(2, _alone, error=PlanError, match="sliding_window=8 in PhimoeAttention")


def _with_nan_at_0():
    model = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = math.nan
    batch = rows(0, 2, 13, VOCAB)
    batch["input_ids"][batch["input_ids"] == 0] = 1
    return model, batch


def _padded(rank):
    model, batch = _with_nan_at_0()
    run = parallelize(model, plan_for(model, CP), build_mesh(CP, "cpu"))
    run.step(batch)
    return run.full_gradients()


def test_padding_to_the_multiple_touches_no_embedding_that_the_batch_does_not_hold():
    model, batch = _with_nan_at_0()
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    model(**batch, use_cache=False, num_items_in_batch=tokens).loss.backward()
    for grads in run_ranks(2, _padded):
        assert all(grad.isfinite().all() for grad in grads.values())
        assert_same_gradients(grads, {n: p.grad for n, p in model.named_parameters()}, tol=1e-5)
