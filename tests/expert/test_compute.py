"""The experts of every family's form on sorted rows, against the family's own forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor_5d.errors import PlanError
from dtensor_5d.expert.compute import _SwiGLU, compute_experts, form_of
from dtensor_5d.ops import WeightGradients
from tests.families.tiny import tiny_model

SIZES = (0, 1, 7, 44, 0, 3, 0, 2)


def _experts(family, dtype):
    model = tiny_model(family, dtype=dtype, experts="eager", num_hidden_layers=2)
    return next(m for n, m in model.named_modules() if n.endswith("experts") and "gate_up_proj" in m._parameters)


def _gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "phimoe"])
def test_groups_of_any_size_equal_the_model(family, dtype):
    tol = 1e-10 if dtype is torch.float64 else 1e-5
    experts, form = _experts(family, dtype), None
    form = form_of(experts)
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(SIZES), 64, generator=g, dtype=torch.float64).to(dtype)
    grad = torch.randn(sum(SIZES), 64, generator=g, dtype=torch.float64).to(dtype)
    index = torch.repeat_interleave(torch.arange(8), torch.tensor(SIZES)).unsqueeze(1)
    a, b = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    want = experts(a, index, torch.ones(len(rows), 1, dtype=dtype))
    want.backward(grad)
    wanted = _gradients(experts)
    experts.zero_grad()
    got = compute_experts(experts, form, b, torch.tensor(SIZES).cumsum(0).to(torch.int32))
    got.backward(grad)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol)
    torch.testing.assert_close(b.grad, a.grad, atol=tol, rtol=tol)
    for name, value in _gradients(experts).items():
        torch.testing.assert_close(value, wanted[name], atol=tol, rtol=tol)


def test_no_rows_at_all_give_zero_gradients():
    for family in ("qwen3_moe", "gpt_oss"):
        experts = _experts(family, torch.float32)
        rows = torch.empty(0, 64, requires_grad=True)
        compute_experts(experts, form_of(experts), rows, torch.zeros(8, dtype=torch.int32)).sum().backward()
        assert all(g is not None and not g.any() for g in _gradients(experts).values())


def test_weight_gradients_can_wait():
    experts = _experts("qwen3_moe", torch.float32)
    form, ends, store = form_of(experts), torch.tensor(SIZES).cumsum(0).to(torch.int32), WeightGradients()
    rows = torch.randn(sum(SIZES), 64).requires_grad_()
    compute_experts(experts, form, rows, ends).square().sum().backward()
    at_once, dx = _gradients(experts), rows.grad
    experts.zero_grad()
    rows.grad = None
    with store.deferring(0):
        compute_experts(experts, form, rows, ends, store).square().sum().backward()
    assert torch.equal(rows.grad, dx) and all(g is None for g in _gradients(experts).values())
    assert store.run(0) == 2
    for name, value in _gradients(experts).items():
        assert torch.equal(value, at_once[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_in_one_operation_has_the_numbers_of_the_plain_one(dtype):
    x = torch.randn(5000, 48, dtype=dtype)
    grad = torch.randn(5000, 24, dtype=dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    gate, up = a.chunk(2, 1)
    want, got = F.silu(gate) * up, _SwiGLU.apply(b)
    want.backward(grad), got.backward(grad)
    assert torch.equal(got, want) and torch.equal(b.grad, a.grad)


def test_forms_are_recognised():
    forms = {family: form_of(_experts(family, torch.float32)) for family in ("qwen3_moe", "gpt_oss", "llama4_text")}
    assert forms["qwen3_moe"].swiglu and not forms["gpt_oss"].swiglu
    assert [f.transposed for f in forms.values()] == [False, True, True]
    assert forms["gpt_oss"].parameters == ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


def test_other_modules_are_refused_by_name():
    with pytest.raises(PlanError, match=r"mlp \(Linear\): must hold fused experts.*use ep=1"):
        form_of(nn.Linear(4, 4), "mlp")
    experts = _experts("qwen3_moe", torch.float32)
    experts.shared_scale = nn.Parameter(torch.ones(3))
    with pytest.raises(PlanError, match=r"with \['shared_scale'\]: all parts must belong to one expert each"):
        form_of(experts)
    experts = _experts("qwen3_moe", torch.float32)
    experts.has_post_expert_norm = True
    with pytest.raises(PlanError, match="post_expert_norm"):
        form_of(experts)
