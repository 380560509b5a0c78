"""Every back end gives the output, log-sum-exp and gradients of plain attention, for every kind of tile."""

from __future__ import annotations

import math

import pytest
import torch

from dtensor_5d.context import block as block_module
from dtensor_5d.context.block import block_for
from dtensor_5d.context.mask import Band
from dtensor_5d.errors import PlanError

BANDS = {  # name: (queries, keys, band)
    "full": (9, 14, Band()),
    "causal": (11, 11, Band(None, 0)),
    "window": (150, 150, Band(-39, 0)),
    "window, cut off on the left": (20, 30, Band(-4, 12)),
    "window, cut off on the right": (20, 12, Band(-8, 6)),
    "window, only its lower edge": (40, 60, Band(1, 500)),
    "one token": (1, 1, Band()),
}


def data(queries, keys, dtype=torch.float64, heads=4, kv_heads=2, size=8, value_size=8, batch=2):
    gen = torch.Generator().manual_seed(3)
    shapes = [(heads, queries, size), (kv_heads, keys, size)]
    shapes += [(kv_heads, keys, value_size), (heads, queries, value_size)]
    return [torch.randn(batch, *shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def plain(q, k, v, grad, band, scale, softcap=None):
    """Output, log-sum-exp, dq, dk, dv by autograd."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads = q.size(1) // k.size(1)
    keys, values = (x.repeat_interleave(heads, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    j_minus_i = torch.arange(k.size(2)) - torch.arange(q.size(2))[:, None]
    low, high = -math.inf if band.low is None else band.low, math.inf if band.high is None else band.high
    scores = scores.masked_fill((j_minus_i < low) | (j_minus_i > high), -math.inf)
    out = torch.softmax(scores, -1) @ values
    return [out.detach(), torch.logsumexp(scores, -1).detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(got, want, tol):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        assert a.shape == b.shape, name
        error = (a.double() - b.double()).abs().max().item()
        assert error <= tol * max(1.0, b.double().abs().max().item()), f"{name}: {error:.2e}"


def run(block, q, k, v, grad, band):
    out, lse = block.forward(q, k, v, band)
    return [out, lse, *block.backward(grad, q, k, v, out.to(q.dtype), lse, band)]


@pytest.mark.parametrize("back_end", ["cpu_flash", "plain"])
@pytest.mark.parametrize("sizes", [(8, 8), (24, 8), (4, 6)], ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_tiles(name, sizes, back_end):
    queries, keys, band = BANDS[name]
    q, k, v, grad = data(queries, keys, size=sizes[0], value_size=sizes[1])
    block = block_for(q, v, 0.4, back_end=back_end)
    compare(run(block, q, k, v, grad, band), plain(q, k, v, grad, band, 0.4), 1e-13)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("back_end", ["cpu_flash", "plain"])
def test_grouped_heads(back_end, heads):
    q, k, v, grad = data(7, 9, heads=heads[0], kv_heads=heads[1])
    compare(run(block_for(q, v, 0.4, back_end=back_end), q, k, v, grad, Band()),
            plain(q, k, v, grad, Band(), 0.4), 1e-13)  # fmt: skip


@pytest.mark.parametrize("name", BANDS)
def test_soft_cap(name):
    queries, keys, band = BANDS[name]
    q, k, v, grad = data(queries, keys)
    block = block_for(q, v, 1.0, softcap=1.5)
    assert block.back_end == "plain"
    compare(run(block, q, k, v, grad, band), plain(q, k, v, grad, band, 1.0, 1.5), 1e-13)


def test_plain_works_in_strips(monkeypatch):
    q, k, v, grad = data(150, 150)
    monkeypatch.setattr(block_module, "_SCORES", 4 * 2 * 150 * 16)
    for band in (Band(), Band(None, 0), Band(-39, 0), Band(-20, -20)):
        if band.low == band.high == -20:  # rows without a key are not ours to give
            q, grad = q[:, :, 20:], grad[:, :, 20:]
            band = Band(0, 0)
        compare(run(block_for(q, v, 0.4, back_end="plain"), q, k, v, grad, band),
                plain(q, k, v, grad, band, 0.4), 1e-13)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("back_end", ["cpu_flash", "plain"])
def test_low_precision(back_end, dtype):
    q, k, v, grad = data(40, 40, dtype)
    block = block_for(q, v, 0.4, back_end=back_end)
    got = run(block, q, k, v, grad, Band(-9, 0))
    assert got[1].dtype == torch.float32
    want = plain(*(x.double() for x in (q, k, v, grad)), Band(-9, 0), 0.4)
    compare(got, want, 16 * torch.finfo(dtype).eps)  # sums of 40 terms


@pytest.mark.parametrize("back_end", ["cpu_flash", "plain"])
def test_strided_inputs(back_end):
    # As models give them, [B, S, H, D] transposed, and with the numbers of a head far apart, which flash reads wrongly.
    for a, b in ((1, 2), (2, 3), (0, 3)):
        q, k, v, grad = (x.transpose(a, b).contiguous().transpose(a, b) for x in data(11, 11))
        compare(run(block_for(q, v, 0.4, back_end=back_end), q, k, v, grad, Band(None, 0)),
                plain(q, k, v, grad, Band(None, 0), 0.4), 1e-13)  # fmt: skip
    grad = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(q.shape)  # what out.sum().backward() gives
    compare(run(block_for(q, v, 0.4, back_end=back_end), q, k, v, grad, Band(None, 0)),
            plain(q, k, v, grad, Band(None, 0), 0.4), 1e-13)  # fmt: skip


def test_the_plain_one_takes_the_gradient_check():
    q, k, v, grad = data(5, 6, batch=1, heads=2, kv_heads=1, size=3, value_size=2)
    block = block_for(q, v, 0.7, softcap=2.0)
    out, lse = block.forward(q, k, v, Band())
    eps = 1e-6
    for index, x in enumerate((q, k, v)):
        found = block.backward(grad, q, k, v, out, lse, Band())[index]
        for place in range(0, x.numel(), 3):
            moved = []
            for sign in (1, -1):
                args = [q, k, v]
                args[index] = x.clone()
                args[index].view(-1)[place] += sign * eps
                moved.append((block.forward(*args, Band())[0] * grad).sum())
            assert abs((moved[0] - moved[1]) / (2 * eps) - found.flatten()[place]) < 1e-7


@pytest.mark.parametrize(("back_end", "softcap"), [("cuda_flash", None), ("cpu_flash", 5.0), ("nonsense", None)])
def test_back_ends_that_cannot(back_end, softcap):
    q, _, v, _ = data(4, 4)
    with pytest.raises(PlanError, match=r"can take this: .*plain"):
        block_for(q, v, 1.0, softcap, back_end)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("sizes", [(64, 64), (192, 128), (20, 20)], ids=str)
def test_cuda_flash(name, sizes):
    queries, keys, band = BANDS[name]
    q, k, v, grad = (x.cuda() for x in data(queries, keys, torch.bfloat16, size=sizes[0], value_size=sizes[1]))
    block = block_for(q, v, 0.1)
    assert block.back_end == "cuda_flash"
    got = [x.cpu() for x in run(block, q, k, v, grad, band)]
    compare(got, plain(*(x.cpu().double() for x in (q, k, v, grad)), band, 0.1), 16 * torch.finfo(torch.bfloat16).eps)
