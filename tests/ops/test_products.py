from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor_5d.ops import WeightGradients, batched_matmul, embedding, grouped_matmul, linear, matmul
from dtensor_5d.ops.grouped import grouped_product, grouped_product_by_loop, kernel_takes

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def _results(product, *tensors, store=None, cast=None):
    """Output and gradients of fresh leaves under one fixed output gradient; deferred if a store is given."""
    leaves = [
        t.detach().clone().requires_grad_(t.requires_grad) if torch.is_tensor(t) and t.is_floating_point() else t
        for t in tensors
    ]
    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        y = product(*leaves)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    if store is None:
        y.backward(g)
    else:
        with store.deferring("k"):
            y.backward(g)
        store.run("k")
    return [y, *(t.grad for t in leaves if torch.is_tensor(t))]


def _equal(got, want):
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), (a - b).abs().max()


def _leaf(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("shape", [(7, 48), (2, 33, 48), (2, 3, 5, 48), (48,), (0, 48), (2, 0, 48)])
def test_linear_is_bit_equal_to_torch_at_once_and_deferred(shape):
    torch.manual_seed(0)
    store = WeightGradients()
    for dtype, bias in itertools.product(DTYPES, (False, True)):
        x, w = _leaf(*shape, dtype=dtype), _leaf(65, 48, dtype=dtype)
        b = _leaf(65, dtype=dtype) if bias else None
        want = _results(F.linear, x, w, b)
        _equal(_results(lambda *t: linear(*t, store), x, w, b), want)
        _equal(_results(lambda *t: linear(*t, store), x, w, b, store=store), want)
        if dtype != torch.float64:
            want = _results(F.linear, x, w, b, cast=torch.bfloat16)
            assert want[0].dtype == torch.bfloat16
            _equal(_results(lambda *t: linear(*t, store), x, w, b, cast=torch.bfloat16), want)
            _equal(_results(lambda *t: linear(*t, store), x, w, b, cast=torch.bfloat16, store=store), want)


@pytest.mark.parametrize("frozen", ["x", "w", "b"])
def test_linear_with_a_frozen_operand(frozen):
    x, w, b = (_leaf(*s, grad=n != frozen) for n, s in (("x", (5, 8)), ("w", (6, 8)), ("b", (6,))))
    store = WeightGradients()
    want = _results(F.linear, x, w, b)
    _equal(_results(lambda *t: linear(*t, store), x, w, b), want)
    _equal(_results(lambda *t: linear(*t, store), x, w, b, store=store), want)


def test_linear_with_non_contiguous_operands():
    x, w = torch.randn(48, 6, 2).transpose(0, 2).requires_grad_(), torch.randn(48, 32).t().requires_grad_()
    store, product = WeightGradients(), lambda a, b: linear(a, b, None, store)
    want = _results(F.linear, x, w)
    _equal(_results(product, x, w), want)
    _equal(_results(product, x, w, store=store), want)


def test_matmul_and_batched_matmul():
    store = WeightGradients()
    for dtype in DTYPES:
        for plain, ours, x, w in (
            (torch.matmul, matmul, _leaf(3, 7, 16, dtype=dtype), _leaf(16, 24, dtype=dtype)),
            (torch.bmm, batched_matmul, _leaf(3, 7, 16, dtype=dtype), _leaf(3, 16, 24, dtype=dtype)),
        ):
            want = _results(plain, x, w)
            _equal(_results(lambda a, b, f=ours: f(a, b, store), x, w), want)
            _equal(_results(lambda a, b, f=ours: f(a, b, store), x, w, store=store), want)


@pytest.mark.parametrize("ids", [[[1, 5, 5], [0, 2, 2]], [], [[]], 3])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_embedding(ids, options):
    ids = torch.tensor(ids, dtype=torch.long)
    for dtype in DTYPES:
        w, store = _leaf(8, 6, dtype=dtype), WeightGradients()
        want = _results(lambda i, v: F.embedding(i, v, **options), ids, w)
        ours = lambda i, v, s=store: embedding(i, v, s, **options)  # noqa: E731  # one line beside the other
        _equal(_results(ours, ids, w), want)
        _equal(_results(ours, ids, w, store=store), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_column", [False, True])
def test_grouped_is_bit_equal_to_torch(dtype, by_column):
    x, w = _leaf(33, 48, dtype=dtype), _leaf(*((4, 64, 48) if by_column else (4, 48, 64)), dtype=dtype)
    ends = torch.tensor([5, 5, 20, 33], dtype=torch.int32)
    view = (lambda v: v.transpose(1, 2)) if by_column else (lambda v: v)
    store = WeightGradients()
    want = _results(lambda a, v: F.grouped_mm(a, view(v), offs=ends), x, w)
    ours = lambda a, v: grouped_matmul(a, view(v), ends, store)  # noqa: E731
    _equal(_results(ours, x, w), want)
    got = _results(ours, x, w, store=store)
    _equal(got, want)
    assert got[2].stride() == w.stride()


def _by_hand(x, w, ends):
    bounds = [0, *ends.tolist()]
    y = torch.zeros(x.size(0), w.size(2), dtype=x.dtype)
    return y.index_add(0, torch.arange(bounds[-1]), torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(
        itertools.pairwise(bounds))]))  # fmt: skip


@pytest.mark.parametrize("ends", [[3, 3, 7], [0, 0, 0], [0, 9, 9], [2, 4, 9]])
@pytest.mark.parametrize("outputs", [16, 5])
def test_grouped_in_fp64_odd_widths_and_past_the_last_end(ends, outputs):
    ends, store = torch.tensor(ends, dtype=torch.int32), WeightGradients()
    for rows, dtype in ((9, torch.float64), (9, torch.float32), (int(ends[-1]), torch.float32)):
        x, w = _leaf(rows, 16, dtype=dtype), _leaf(3, 16, outputs, dtype=dtype)
        want = _results(lambda a, v: _by_hand(a, v, ends), x, w)
        for s in (None, store):
            for g, r in zip(_results(lambda a, v: grouped_matmul(a, v, ends, store), x, w, store=s), want):
                torch.testing.assert_close(g, r, rtol=1e-5, atol=1e-5)


def test_the_kernel_and_the_loop_agree_and_both_are_used():
    x, w, ends = torch.randn(9, 16), torch.randn(3, 16, 8), torch.tensor([2, 2, 7], dtype=torch.int32)
    assert kernel_takes(x, w) and not kernel_takes(x.double(), w.double()) and not kernel_takes(x[:, :5], x[:0])
    torch.testing.assert_close(grouped_product(x, w, ends), grouped_product_by_loop(x, w, ends))


def test_gradcheck_and_second_derivatives():
    store = WeightGradients()
    x, w, b = (_leaf(*s, dtype=torch.float64) for s in ((2, 3, 4), (5, 4), (5,)))
    ends = torch.tensor([1, 4], dtype=torch.int32)
    xe, we = _leaf(4, 3, dtype=torch.float64), _leaf(2, 3, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: linear(*t, store), (x, w, b))
    assert torch.autograd.gradgradcheck(lambda *t: linear(*t, store), (x, w, b))
    assert torch.autograd.gradcheck(lambda a, v: matmul(a, v.t(), store), (x, w))
    assert torch.autograd.gradcheck(lambda a, v: grouped_matmul(a, v, ends, store), (xe, we))
    assert torch.autograd.gradcheck(lambda v: embedding(torch.tensor([1, 1, 3]), v, store), (w,))


def test_autograd_delivers_as_usual_without_deferring():
    store = WeightGradients()
    x, w = _leaf(3, 4), nn.Parameter(torch.randn(5, 4))
    seen = []
    w.register_hook(lambda g: seen.append("hook"))
    w.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    y = linear(x, w, None, store)
    (linear(y @ torch.randn(5, 4), w, None, store) + y).sum().backward()  # the weight used twice
    assert seen == ["hook", "post"]
    (dw,) = torch.autograd.grad(linear(x, w, None, store).sum(), [w])
    torch.testing.assert_close(dw, torch.ones(3, 5).t() @ x)
    with torch.inference_mode():
        assert linear(x, w, None, store).grad_fn is None
    with torch.no_grad():
        assert linear(x, w, None, store).grad_fn is None
    # frozen weight: torch's own node, not ours
    assert "Linear" not in linear(x, w.detach(), None, store).grad_fn.name()


def test_a_weight_used_twice_sums_up_when_deferred():
    store = WeightGradients()
    x, w = torch.randn(3, 4, dtype=torch.float64), nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    F.linear(F.linear(x, w), w).square().sum().backward()
    want, w.grad = w.grad, None
    y = linear(linear(x, w, None, store), w, None, store).square().sum()
    with store.deferring(0):
        y.backward()
    assert w.grad is None and store.run(0) == 2
    torch.testing.assert_close(w.grad, want, rtol=1e-13, atol=1e-13)
