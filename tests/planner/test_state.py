"""Parameters, gradients, master and optimizer: the tables of ZeRO, the playbook and Megatron, from our terms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.degrees import Degrees
from dtensor_5d.families.blocks import Param
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.planner.state import Widths, shard_numel, state_terms, whole_numel

ZERO_PAPER = Widths(2, 2, 4, 8, shard=2)
MEGATRON = Widths(2, 4, 4, 8)
GIB = 2**30

# psi in billions -> ranks -> GB under zero 1, 2, 3 (published-numbers 1.2)
ZERO_TABLE = [
    (7.5, 1, 120, 120, 120), (7.5, 4, 52.5, 41.25, 30), (7.5, 16, 35.625, 21.5625, 7.5), (7.5, 64, 31.4, 16.6, 1.88),
    (7.5, 256, 30.3516, 15.4102, 0.4688), (7.5, 1024, 30.1, 15.1, 0.12),
    (128, 1, 2048, 2048, 2048), (128, 4, 896, 704, 512), (128, 16, 608, 368, 128), (128, 64, 536, 284, 32),
    (128, 256, 518, 263, 8), (128, 1024, 513.5, 257.75, 2),
    (1000, 4, 7000, 5500, 4000), (1000, 16, 4750, 2875, 1000), (1000, 64, 4187.5, 2218.75, 250),
    (1000, 256, 4046.875, 2054.6875, 62.5), (1000, 1024, 4011.7, 2013.7, 15.6),
]  # fmt: skip


@pytest.mark.parametrize(("psi", "ranks", "one", "two", "three"), ZERO_TABLE)
def test_zero_table(psi, ranks, one, two, three):
    whole = int(psi * 1e9)
    shard = whole // ranks
    for zero, want in ((0, 16 * psi), (1, one), (2, two), (3, three)):
        got = sum(state_terms(whole, shard, zero, ZERO_PAPER, whole_gradients=zero < 2).values()) / 1e9
        assert got == pytest.approx(want, rel=2e-3, abs=0.05 if want > 1 else 5e-3)


@pytest.mark.parametrize(("zero", "want"), [
    (0, (15, 15, 60)), (1, (15, 15, 7.5)), (2, (15, 1.875, 7.5)), (3, (1.875, 1.875, 7.5)),
])  # fmt: skip
def test_playbook_zero_plot(zero, want):
    # 8B on 8 ranks, GiB of parameters, gradients and Adam's state
    terms = state_terms(15 * GIB // 2, 15 * GIB // 16, zero, ZERO_PAPER, whole_gradients=zero < 2)
    got = (terms["parameters"], terms["gradients"], terms["optimizer"])
    assert tuple(g / GIB for g in got) == want


def bf16(count: int) -> tuple[float, float]:
    """GiB of bf16 parameters, and of Adam's state."""
    terms = state_terms(count, count, 0, ZERO_PAPER, whole_gradients=True)
    return terms["parameters"] / GIB, terms["optimizer"] / GIB


@pytest.mark.parametrize(("name", "tp", "parameters", "optimizer"), [
    ("llama-3.1-8b", 1, 14.957, 59.828), ("llama-3.1-8b", 2, 7.479, 29.914), ("llama-3.1-70b", 1, 131.5, 526),
    ("llama-3.1-70b", 8, 16.438, 65.75), ("llama-3.1-70b", 16, 8.219, 32.875),
])  # fmt: skip
def test_playbook_tensor_parallel_plots(name, tp, parameters, optimizer):
    params = list(ModelShape.preset(name).named_parameters())
    count = whole_numel(params, Degrees(tp=tp))
    # The plots divide everything; 16 ranks repeat each of the 8 key-value heads of 70B once.
    repeated = 80 * 2 * (1024 // 8 - 1024 // 16) * 8192 if tp == 16 else 0
    got = bf16(count - repeated)
    assert got == (pytest.approx(parameters, rel=1e-3), pytest.approx(optimizer, rel=1e-3))


def test_playbook_pipeline_plot():
    shape = ModelShape.preset("llama-3.1-8b")
    worst = shape.embedding_parameters + sum(shape.layer_parameters()[:4])
    assert bf16(worst) == (pytest.approx(2.604, abs=1e-3), pytest.approx(10.414, abs=3e-3))


@pytest.mark.parametrize(("name", "tp", "dp", "mib"), [
    ("llama-3.1-8b", 1, 8, 57436.9), ("llama-3.1-8b", 2, 64, 23693.5), ("llama-3.1-70b", 8, 32, 53625.0),
])  # fmt: skip
def test_megatron_estimates_with_distributed_optimizer(name, tp, dp, mib):
    whole = whole_numel(ModelShape.preset(name).named_parameters(), Degrees(tp=tp))
    got = sum(state_terms(whole, whole // dp, 1, MEGATRON, whole_gradients=True).values()) / 2**20
    assert got == pytest.approx(mib, rel=2e-4)


def tiny_arcee(inner: int) -> ModelShape:
    """Plain MLP, RMS norms, tied: the unit tests' Megatron model without its experts."""
    return ModelShape.from_config(
        dict(
            model_type="arcee", hidden_size=8, intermediate_size=inner, num_attention_heads=2, num_hidden_layers=1,
            num_key_value_heads=2, head_dim=4, vocab_size=32, tie_word_embeddings=True,
        )
    )  # fmt: skip


def parts(shape: ModelShape) -> dict[str, int]:
    layer = shape.layers[0]
    return {part: sum(p.numel for p in layer.of(part)) for part in ("attention", "mlp", "norm")}


def distributed(count: int, ranks: int) -> float:
    """Bytes under Megatron's distributed optimizer, exact for any count."""
    terms = state_terms(count * ranks, count, 1, MEGATRON, whole_gradients=True)
    return sum(terms.values()) / ranks


@pytest.mark.parametrize(("pp", "latent", "dp", "want"), [(2, 0, 16, 3195), (1, 4, 16, 5382)])
def test_megatron_unit_values(pp, latent, dp, want):
    """h 8, ffn 16, 4 experts of 16, shared 8, two layers, the second with experts, V 32 tied, TP 2, EP 2, ETP 4."""
    dense, shared = parts(tiny_arcee(16)), parts(tiny_arcee(8))
    norms, router, final = 2 * dense["norm"], 4 * 8, 8
    assert (dense["attention"], dense["mlp"], shared["mlp"], norms) == (256, 256, 128, 32)
    cut = 2 * dense["attention"] + dense["mlp"] + shared["mlp"]  # over tp
    embedding = tiny_arcee(16).embedding_parameters
    whole = norms + router + final + 2 * latent * 8
    # With a latent size the experts work on 4 numbers of each token.
    experts = 4 * dense["mlp"] * (latent or 8) // 8
    if pp == 2:
        on_rank = (cut // pp + embedding) // 2 + whole // pp
    else:
        on_rank = (cut + embedding) // 2 + whole
    assert distributed(on_rank, dp) + distributed(experts // pp // 8, 4) == want


def test_megatron_is_monotone():
    shape = ModelShape.preset("qwen3-30b-a3b")
    by_tp = [whole_numel(shape.named_parameters(), Degrees(tp=tp)) for tp in (1, 2, 4)]
    assert by_tp == sorted(by_tp, reverse=True)
    assert len(set(by_tp)) == 3
    folds = [Degrees(dp_shard=8, ep=ep, etp=etp) for ep, etp in ((1, 1), (2, 1), (2, 2), (4, 2))]
    by_ep = [whole_numel(shape.named_parameters(), d) for d in folds]
    assert by_ep == sorted(by_ep, reverse=True)
    assert len(set(by_ep)) == 4


@settings(deadline=None, max_examples=80)
@given(rows=st.integers(1, 40), columns=st.integers(1, 5), ranks=st.integers(1, 9), tp=st.sampled_from([1, 2, 4]))
def test_a_shard_is_the_first_chunk_that_torch_would_cut(rows, columns, ranks, tp):
    import torch

    param = Param("w", (rows, columns), "mlp", 0)
    local = torch.zeros(rows, columns).chunk(tp)[0]
    want = local.chunk(ranks)[0].numel()
    assert shard_numel([param], Degrees(dp_shard=ranks, tp=tp)) == want


def test_experts_that_do_not_divide_are_cut_along_their_last_dim():
    experts = Param("e", (6, 16, 8), "expert", 1)
    assert shard_numel([experts], Degrees(dp_shard=4)) == 6 * 16 * 2
    assert shard_numel([experts], Degrees(dp_shard=4, ep=2)) == 3 * 16 * 4
    assert shard_numel([experts], Degrees(dp_shard=3)) == 2 * 16 * 8
