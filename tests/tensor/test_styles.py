"""Each style alone, through torch's own `parallelize_module`, with torch's own mesh and FSDP2 around it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import dtensor_5d
from dtensor_5d.checkpoint.gather import whole
from dtensor_5d.sections import Sections, sections_of
from dtensor_5d.tensor import (
    BlockInput,
    ColwiseParallel,
    CutParameters,
    HeadParallel,
    RowwiseParallel,
    SequenceParallel,
    SumOutput,
    VocabularyEmbedding,
    WholeParameters,
)
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import rows

# DTensor remembers meshes and hands out an old, equal one. Workers have run other tests with meshes of this package,
# whose groups are gone by now; other names of dims make these ones different.


def _plan(block):
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan = {attention: BlockInput(), mlp: BlockInput()} if block else {}
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"{attention}.{name}"] = ColwiseParallel(own_input=not block)
    for name in ("gate_proj", "up_proj"):
        plan[f"{mlp}.{name}"] = ColwiseParallel(own_input=not block)
    for name in ("q_norm", "k_norm"):
        plan[f"{attention}.{name}"] = WholeParameters()
    plan |= {f"{attention}.o_proj": RowwiseParallel(), f"{mlp}.down_proj": RowwiseParallel()}
    return plan | {"model.embed_tokens": VocabularyEmbedding(), "lm_head": HeadParallel()}


def _alone(rank, block, tied):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = tiny_model("qwen3", num_hidden_layers=2, vocab_size=125, tie_word_embeddings=tied)
    parallelize_module(model, mesh["model"], _plan(block))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    batch = rows(mesh["data"].get_local_rank(), 2, 8, 125, supervised=1.0)
    for _ in range(2):
        model(**batch, use_cache=False).loss.backward()
    return {n: whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("block, tied", [(True, False), (False, True)])
def test_styles_alone_beside_fsdp2(block, tied):
    """Two backwards add up; FSDP2 averages over its 2 ranks, as it does when nobody asks for more."""
    model = tiny_model("qwen3", num_hidden_layers=2, vocab_size=125, tie_word_embeddings=tied)
    for rank in range(2):
        model(**rows(rank, 2, 8, 125, supervised=1.0), use_cache=False).loss.backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    for got in run_ranks(4, _alone, block, tied):
        assert_same_gradients(got, want, tol=1e-5)


class _Mlp(nn.Module):
    def __init__(self, inner=6, bias=True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up = nn.Linear(4, 2 * inner, bias=bias)
        self.down = nn.Linear(inner, 4, bias=bias)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def _packed(rank, frozen):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    mlp = _Mlp()
    if frozen:
        mlp.gate_up.requires_grad_(False)
    parallelize_module(mlp, mesh, {"gate_up": ColwiseParallel(sections=2), "down": RowwiseParallel()})
    x = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
    y = mlp(x)
    y += 1.0  # a fresh tensor, no view of a DTensor's insides
    y.square().sum().backward()
    packed = sections_of(mlp)
    grads = {n: None if p.grad is None else whole(p.grad, packed.get(n)) for n, p in mlp.named_parameters()}
    return y.detach(), x.grad, grads, whole(mlp.gate_up.weight, packed["gate_up.weight"])


@pytest.mark.parametrize("frozen", [False, True])
def test_t6_t7_t14_packed_weights_and_biases_added_once(frozen):
    """T14: gate and up stored one after the other. T7: the bias is in the output once. T19: frozen weights."""
    mlp = _Mlp()
    if frozen:
        mlp.gate_up.requires_grad_(False)
    x = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
    y = mlp(x) + 1.0
    y.square().sum().backward()
    for got, dx, grads, weight in run_ranks(2, _packed, frozen):
        torch.testing.assert_close(got, y.detach())
        torch.testing.assert_close(dx, x.grad)
        assert_same_gradients(grads, {n: p.grad for n, p in mlp.named_parameters()}, tol=1e-5)
        assert torch.equal(weight, mlp.gate_up.weight)


class _Bare(nn.Module):
    """Two products whose parameters its own forward reads: gate above up, and a bias of the output."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("gate_up", (12, 4)), ("down", (4, 6)), ("bias", (4,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x):
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down, self.bias)


def _bare(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    model = nn.Sequential(_Bare(), nn.Identity())
    for style in (BlockInput(), CutParameters({"gate_up": (0, 2), "down": 1, "bias": None}), SumOutput()):
        parallelize_module(model, mesh, {"0": style})
    model(torch.linspace(-1, 1, 24).view(2, 3, 4)).square().sum().backward()
    packed = sections_of(model)
    return {n: whole(p.grad, packed.get(n)) for n, p in model.named_parameters()}, model[0].gate_up.to_local().shape


def test_t14_bare_parameters_in_sections_and_one_added_once():
    model = nn.Sequential(_Bare(), nn.Identity())
    model(torch.linspace(-1, 1, 24).view(2, 3, 4)).square().sum().backward()
    for grads, shape in run_ranks(2, _bare):
        assert_same_gradients(grads, {n: p.grad for n, p in model.named_parameters()}, tol=1e-5)
        assert shape == (6, 4)


def _bias_only(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("model",))
    linear = nn.Linear(4, 1)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.fill_(100.0)
    parallelize_module(linear, mesh, RowwiseParallel())
    return linear(torch.zeros(1, 1, 1)).item()


def test_t7_a_bias_of_100_on_4_ranks_is_100():
    assert run_ranks(4, _bias_only) == [100.0] * 4


def _rank_dependent(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    norm = nn.LayerNorm(2, bias=False)
    parallelize_module(norm, mesh, SequenceParallel())
    (norm(torch.tensor([[1.0, -1.0]]) * (rank + 1)) * (rank + 1)).sum(0)[0].backward()
    return norm.weight.grad


def test_t3_whole_weights_on_different_tokens_sum_their_gradients():
    """Inputs that depend on the rank: 1 + 2 = 3."""
    for grad in run_ranks(2, _rank_dependent):
        torch.testing.assert_close(grad, torch.tensor([3.0, 0.0]), rtol=1e-4, atol=1e-4)


def _tables(rank, vocab, n):
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("model",))
    table = nn.Embedding(vocab, 3, padding_idx=1)
    table.weight.data = torch.arange(3.0 * vocab).view(vocab, 3)
    parallelize_module(table, mesh, VocabularyEmbedding())
    out = table(torch.tensor([[0, vocab - 1, 1, 1]]))
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    rows_here = table.weight.to_local(grad_placements=table.weight.placements).shape[0]
    return out.detach(), whole(table.weight.grad), rows_here


@pytest.mark.parametrize("vocab, n, held", [(7, 2, [4, 3]), (5, 4, [2, 2, 1, 0]), (8, 2, [4, 4])])
def test_a_vocabulary_need_not_divide(vocab, n, held):
    table = nn.Embedding(vocab, 3, padding_idx=1)
    table.weight.data = torch.arange(3.0 * vocab).view(vocab, 3)
    out = table(torch.tensor([[0, vocab - 1, 1, 1]]))
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    results = run_ranks(n, _tables, vocab, n)
    assert [r[2] for r in results] == held
    for got, grad, _ in results:
        assert torch.equal(got, out.detach()) and torch.equal(grad, table.weight.grad)


def test_sections_of_unequal_length():
    sections = Sections(dim=0, sizes=(4, 2, 2), parts=2)
    assert sections.order().tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


def test_t8_no_local_tensor_without_a_placement_for_its_gradient():
    """Every to_local and from_local names `grad_placements`, or works on a detached tensor. (`ops` calls them where
    autograd is off, to wrap gradients and count bytes.)"""
    bare = []
    package = Path(dtensor_5d.__file__).parent
    for file in (f for f in package.rglob("*.py") if f.parent.name != "ops"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to_local", "from_local"):
                named = any(keyword.arg == "grad_placements" for keyword in node.keywords)
                if not named and getattr(getattr(node.func, "value", None), "id", "") != "detached":
                    bare.append(f"{file.name}:{node.lineno}")
    assert bare == []


def test_the_head_alone_gathers():
    logits = run_ranks(2, _head)
    model = tiny_model("llama", num_hidden_layers=1)
    want = model(torch.arange(3, 11)[None], use_cache=False).logits
    for got in logits:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _head(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    model = tiny_model("llama", num_hidden_layers=1)
    parallelize_module(model, mesh, {"lm_head": HeadParallel()})
    assert isinstance(model.lm_head.weight, DTensor)
    logits = model(torch.arange(3, 11)[None], use_cache=False).logits
    assert logits.shape[-1] == VOCAB
    return logits.detach()
