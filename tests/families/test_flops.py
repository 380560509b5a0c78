"""Floating-point operations by product: against torch's counter on real models, and against published conventions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dtensor_5d.errors import PlanError
from dtensor_5d.families.blocks import Mixer
from dtensor_5d.families.shape import ModelShape
from tests.families.tiny import VOCAB, tiny_config, tiny_model

ROWS, LENGTH = 2, 32

COUNTED = [
    ("llama", {}),
    ("llama", dict(tie_word_embeddings=True)),
    ("qwen3", {}),
    ("mistral_sw", {}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("phi3", {}),
    ("gemma3_text", dict(tie_word_embeddings=True)),
    ("mixtral", {}),
    ("qwen2_moe", {}),
    ("qwen3_moe", dict(mlp_only_layers=[1])),
    ("gpt_oss", {}),
    ("deepseek_v3", {}),
    ("deepseek_v2", dict(q_lora_rank=None)),
    ("glm4_moe_lite", {}),
]


def counted(name: str, attn: str, fields: dict, backward: bool) -> int:
    model = tiny_model(name, attn=attn, experts="eager", **fields)
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("name", "fields"), COUNTED, ids=lambda v: str(v)[:40])
def test_equal_to_torch_counter_forward_and_backward(name, fields):
    shape = ModelShape.from_config(tiny_config(name, **fields).to_dict())
    tokens = ROWS * LENGTH
    # Rotary tables are made by a matrix product of positions and frequencies: 2 per position and frequency, no weight.
    rotary = counted(name, "eager", fields, False) - tokens * shape.flops_per_token(LENGTH, "full", backward=False)
    tables = 2 if name == "gemma3_text" else 1
    sizes = [m.mixer.qk_size for m in shape.layers]
    assert 0 <= rotary <= tables * 2 * LENGTH * max(sizes) / 2
    assert rotary == int(rotary)
    assert counted(name, "eager", fields, True) - rotary == tokens * shape.flops_per_token(LENGTH, "full")


@pytest.mark.parametrize(
    ("name", "seq_len", "causal", "full"),
    [("llama-3.1-8b", 8192, 51.5, 57.9), ("llama-3.1-70b", 8192, 449.2, 481.4), ("llama-3.1-405b", 8192, 2524, 2625)],
)
def test_published_flops_per_token(name, seq_len, causal, full):
    # published-numbers 4.1, in GFLOP
    shape = ModelShape.preset(name)
    assert shape.flops_per_token(seq_len) / 1e9 == pytest.approx(causal, rel=2e-3)
    assert shape.flops_per_token(seq_len, "full") / 1e9 == pytest.approx(full, rel=2e-3)


# (heads, model size, layers, GPUs, global batch, seconds with full recomputation, MFU): Korthikanti et al., 1.3
KORTHIKANTI = [
    (64, 6144, 48, 8, 4, 1.10, 0.415),
    (96, 12288, 96, 64, 64, 13.75, 0.514),
    (128, 20480, 105, 280, 280, 37.83, 0.560),
    (160, 25600, 128, 512, 512, 71.49, 0.563),
]


@pytest.mark.parametrize(("heads", "hidden", "layers", "gpus", "batch", "seconds", "mfu"), KORTHIKANTI)
def test_published_utilisation_follows(heads, hidden, layers, gpus, batch, seconds, mfu):
    s, v = 2048, 51200
    shape = ModelShape.from_config(
        dict(model_type="gpt2", n_embd=hidden, n_head=heads, n_layer=layers, vocab_size=v, n_positions=s)
    )
    work = batch * s * shape.flops_per_token(s, "full")
    # F8 of the same paper, and the utilisation of an A100 (312 TFLOP/s)
    formula = 72 * batch * layers * s * hidden**2 * (1 + s / (6 * hidden) + v / (12 * hidden * layers))
    assert work == pytest.approx(formula)
    assert work / (seconds * gpus * 312e12) == pytest.approx(mfu, abs=2.5e-3)


def test_experts_count_when_they_are_chosen_and_embeddings_never():
    flops = ModelShape.preset("mixtral-8x7b").flops_by_product(4096)
    assert flops["mlp.experts.gate_up_proj"] == 32 * 2 * 2 * (2 * 14336 * 4096)
    assert not any("embed" in name for name in flops)
    assert flops["lm_head"] == 2 * 32000 * 4096


@settings(deadline=None, max_examples=60)
@given(seq_len=st.integers(1, 80), window=st.integers(0, 100), kind=st.sampled_from(["full", "sliding", "chunked"]))
def test_keys_per_query_are_the_ones_that_the_mask_lets_through(seq_len, window, kind):
    window = 0 if kind == "full" else max(1, window)
    seen = 0
    for i in range(seq_len):
        for j in range(i + 1):
            near = kind == "full" or (i - j < window if kind == "sliding" else i // window == j // window)
            seen += near
    mixer = Mixer(kind, window=window)
    assert mixer.keys(seq_len, "causal") == pytest.approx(seen / seq_len)
    assert mixer.keys(seq_len, "full") == seq_len


def test_a_window_saves_what_it_hides():
    full = ModelShape.from_config(tiny_config("mistral").to_dict())
    window = ModelShape.from_config(tiny_config("mistral_sw").to_dict())
    assert window.flops_per_token(64, "full") == full.flops_per_token(64, "full")
    assert window.flops_per_token(64) < full.flops_per_token(64)
    # 64 and 24 keys of 4 layers with 8 heads of size 8, two products: the average of min(i + 1, 16)
    hidden_keys = (64 + 1) / 2 - (16 * 17 / 2 + 48 * 16) / 64
    assert full.flops_per_token(64) - window.flops_per_token(64) == pytest.approx(3 * 4 * 4 * 8 * 8 * hidden_keys)


@pytest.mark.parametrize("arguments", [(0,), (2.5,), (True,), (8, "causall")])
def test_bad_arguments_get_an_answer(arguments):
    with pytest.raises(PlanError, match="must be"):
        ModelShape.preset("smollm2-135m").flops_by_product(*arguments)
