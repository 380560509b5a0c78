"""What layers keep for backward: against the tensors that real models save, and against published tables."""

from __future__ import annotations

import pytest
import torch

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError
from dtensor_5d.families.activations import stashed_tensors
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan
from dtensor_5d.planner.activity import cut_bytes
from tests.families.tiny import VOCAB, tiny_config, tiny_model

ROWS, LENGTH = 2, 32


def saved_bytes(name: str, layers: int, dtype: torch.dtype, attn: str, length: int = LENGTH) -> int:
    """Bytes of storages that autograd keeps, parameters and buffers left out."""
    model = tiny_model(name, dtype=dtype, attn=attn, num_hidden_layers=layers)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(3, VOCAB, (ROWS, length), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens, use_cache=False).logits
    assert logits.requires_grad
    return sum(storages.values())


# tolerance: 2 % covers what is left out on purpose (statistics of layer norms, gates of one number)
REAL = [
    ("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("gemma2", "eager"), ("gemma3_text", "eager"),
    ("olmo2", "sdpa"), ("gpt2", "sdpa"), ("gpt2", "eager"), ("gpt_neox", "eager"), ("phi3", "eager"),
    ("cohere2", "eager"), ("starcoder2", "sdpa"), ("mixtral", "sdpa"), ("qwen3_moe", "sdpa"), ("qwen2_moe", "sdpa"),
    ("deepseek_v3", "eager"), ("hunyuan_v1_moe", "sdpa"), ("glm4_moe", "eager"),
    ("olmoe", "sdpa"), ("dots1", "sdpa"), ("arcee", "sdpa"), ("helium", "sdpa"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "attn"), REAL)
def test_a_layer_keeps_what_real_layers_save(name, attn, dtype):
    layers = 4
    real = saved_bytes(name, 2 * layers, dtype, attn) - saved_bytes(name, layers, dtype, attn)
    shape = ModelShape.from_config(tiny_config(name, num_hidden_layers=2 * layers).to_dict())
    how = {"sdpa": "flash"}.get(attn, attn)
    terms = [
        shape.activations(layer, LENGTH, width=dtype.itemsize, attention=how) for layer in range(layers, 2 * layers)
    ]
    assert ROWS * LENGTH * sum(t.bytes for layer in terms for t in layer) == pytest.approx(real, rel=0.02)


# Recurrences depend on the kernels that are installed: without any, transformers writes the delta rule out.
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "minimax", "lfm2", "lfm2_moe"])
def test_layers_with_a_state_come_close(name):
    length = 128  # whole chunks of 64 for the delta rule
    real = saved_bytes(name, 4, torch.bfloat16, "sdpa", length) - saved_bytes(name, 2, torch.bfloat16, "sdpa", length)
    shape = ModelShape.from_config(tiny_config(name).to_dict())
    terms = [t for layer in (2, 3) for t in shape.activations(layer, length)]
    assert ROWS * length * sum(t.bytes for t in terms) == pytest.approx(real, rel=0.08)


def gpt(hidden: int, heads: int, layers: int = 1, inner: int | None = None) -> ModelShape:
    """A GPT as the papers mean it: dropout, fused GELU."""
    return ModelShape.from_config(
        dict(
            model_type="gpt2", n_embd=hidden, n_head=heads, n_layer=layers, vocab_size=51200, n_positions=2048,
            n_inner=inner, activation_function="gelu_pytorch_tanh", resid_pdrop=0.1, attn_pdrop=0.1,
        )
    )  # fmt: skip


def plan_of(tp: int, sequence_parallel: bool) -> Plan:
    return Plan(Degrees(tp=tp), Options(sequence_parallel=sequence_parallel))


def per_layer(shape: ModelShape, seq_len: int, tp: int = 1, parallel: bool = False, core: bool = True) -> float:
    """Bytes per token; without `core` as Korthikanti's selective recomputation leaves it."""
    terms = [t for t in shape.activations(0, seq_len, attention="eager") if core or not t.core]
    return cut_bytes(terms, plan_of(tp, parallel))


# (name, M, H, micro-batch) -> MB per layer: no parallelism, TP, TP+SP, TP+selective, TP+SP+selective, full (tp 8)
KORTHIKANTI = [
    ("22B", 6144, 64, 4, (7080, 1325.4, 885.0, 654.3, 213.9, 100.7)),
    ("175B", 12288, 96, 1, (2868.9, 578.8, 358.6, 327.2, 107.0, 50.3)),
    ("530B", 20480, 128, 1, (4110.4, 880.8, 513.8, 545.3, 178.3, 83.9)),
    ("1T", 25600, 160, 1, (5138.0, 1101.0, 642.3, 681.6, 222.8, 104.9)),
]


@pytest.mark.parametrize(("name", "hidden", "heads", "batch", "want"), KORTHIKANTI, ids=[k[0] for k in KORTHIKANTI])
def test_korthikanti_table_2(name, hidden, heads, batch, want):
    shape, s = gpt(hidden, heads), 2048
    block = shape.activations(0, s, recompute="block", attention="eager")
    got = (
        per_layer(shape, s),
        per_layer(shape, s, 8),
        per_layer(shape, s, 8, True),
        per_layer(shape, s, 8, core=False),
        per_layer(shape, s, 8, True, core=False),
        sum(t.bytes for t in block),
    )
    for ours, theirs in zip(got, want, strict=True):
        assert ours * s * batch / 1e6 == pytest.approx(theirs, abs=0.06, rel=1e-4)


@pytest.mark.parametrize(("hidden", "heads", "percent"), [(12288, 96, 70.2), (20480, 128, 65.3)])
def test_selective_recomputation_saves_the_scores(hidden, heads, percent):
    shape = gpt(hidden, heads)
    whole = per_layer(shape, 2048)
    assert 100 * (whole - per_layer(shape, 2048, core=False)) / whole == pytest.approx(percent, abs=0.06)


# The playbook's plots: (L, M, H, S) -> GiB with nothing, the scores, or everything recomputed (each with a tail of one
# hidden state); published-numbers 1.3
PLAYBOOK = [
    (16, 2048, 32, 1024, (3.5645, 1.0645, 0.0645)),
    (16, 2048, 32, 8192, (168.516, 8.5156, 0.5156)),
    (28, 3072, 32, 4096, (63.668, None, None)),
    (32, 4096, 32, 1024, (9.254, None, None)),
    (32, 4096, 32, 4096, (97.016, 17.016, 1.0156)),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "s", "want"), PLAYBOOK)
def test_playbook_activation_plots(layers, hidden, heads, s, want):
    shape = gpt(hidden, heads)
    if hidden == 3072:
        shape = gpt(hidden, 24)  # the plot's 3B has 24 heads
    tail = 1 * s * hidden
    block = sum(t.bytes for t in shape.activations(0, s, recompute="block", attention="eager"))
    for ours, theirs in zip((per_layer(shape, s), per_layer(shape, s, core=False), block), want, strict=True):
        if theirs is not None:
            assert (ours * s * layers + tail) / 2**30 == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize(("tp", "parallel", "s", "want"), [
    (8, False, 1024, 8.125), (16, False, 4096, 28.75), (8, True, 4096, 10.625), (16, True, 16384, 21.25),
])  # fmt: skip
def test_playbook_tensor_parallel_plots(tp, parallel, s, want):
    # 70B, selective
    got = per_layer(gpt(8192, 64), s, tp, parallel, core=False) * s * 80 / 2**30
    assert got == pytest.approx(want, rel=1e-6)


def test_megatron_activation_estimate():
    # Llama-3-8B, s 8192, dp 8, "SP+sel": F6 with its embedding and loss terms; MiB
    s, hidden, vocab = 8192, 4096, 128256
    blocks = 32 * s * per_layer(gpt(hidden, 32, inner=14336), s, core=False)
    ends = 8 * s + s * hidden + 4 * s * hidden * (1 + vocab / hidden)
    assert (blocks + ends) / 2**20 == pytest.approx(36936.1, abs=0.1)


def test_weight_gradient_stash_is_the_one_of_the_zero_bubble_paper():
    shape = gpt(4096, 32)
    stash = stashed_tensors(shape.layers[0], shape.recipe, shape.numbers(1024))
    assert sum(t.bytes for t in stash) == 32 * 4096  # M_W
    assert per_layer(shape, 1024) == 34 * 4096 + 5 * 32 * 1024  # M_B


def test_every_policy_keeps_less_than_the_one_before():
    for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-27b"):
        shape = ModelShape.preset(name)
        kept = [
            sum(t.bytes for layer in range(6) for t in shape.activations(layer, 4096, recompute=policy))
            for policy in ("none", "every=3", "every=2", "selective", "block")
        ]
        assert kept[0] > kept[1] > kept[2] > kept[4]
        assert kept[0] > kept[3] > kept[4] == 6 * 2 * shape.hidden


def test_every_k_recomputes_every_kth_layer():
    shape = ModelShape.preset("llama-3.1-8b")
    names = [[t.name for t in shape.activations(i, 128, recompute="every=2")] for i in range(4)]
    assert [n == ["layer input"] for n in names] == [True, False, True, False]


def test_a_wrong_kind_of_attention_is_refused():
    with pytest.raises(PlanError, match="must be 'flash' or 'eager'"):
        ModelShape.preset("llama-3.1-8b").activations(0, 128, attention="sdpa")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(layer=99, seq_len=128), ["layer=99", "0 to 31"]),
        (dict(layer=-1, seq_len=128), ["layer=-1"]),
        (dict(layer=0, seq_len=-1), ["seq_len=-1", ">= 1"]),
        (dict(layer=0, seq_len=128, width=0), ["width=0", ">= 1"]),
        (dict(layer="x", seq_len=True, width=1.5), ["layer='x'", "seq_len=True", "width=1.5"]),
    ],
)
def test_numbers_that_are_none_get_an_answer(arguments, said):
    with pytest.raises(PlanError) as caught:
        ModelShape.preset("llama-3.1-8b").activations(**arguments)
    assert all(text in str(caught.value) for text in said)
