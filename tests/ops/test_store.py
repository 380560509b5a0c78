from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from dtensor_5d.ops import WeightGradients, accumulate, linear
from dtensor_5d.ops.store import Place, home


def _deferred(store, key, x, w):
    with store.deferring(key):
        linear(x, w, None, store).sum().backward()


def test_several_micro_batches_in_flight_add_in_place():
    store, w = WeightGradients(), nn.Parameter(torch.randn(5, 4))
    xs = [torch.randn(3, 4) for _ in range(3)]
    outs = [linear(x, w, None, store) for x in xs]
    for i, y in enumerate(outs):
        with store.deferring(i):
            y.square().sum().backward()
    assert store.waiting == (0, 1, 2) and w.grad is None
    store.run(0)
    address = w.grad.data_ptr()
    store.run(1), store.run(2)
    assert w.grad.data_ptr() == address and store.waiting == () and store.held_bytes() == 0
    got, w.grad = w.grad, None
    for x in xs:
        F.linear(x, w).square().sum().backward()
    assert torch.equal(got, w.grad)


def test_the_stash_holds_input_and_output_gradient_once_and_never_the_weight():
    store, w, v = WeightGradients(), nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(6, 4))
    x = torch.randn(3, 4)
    y, z = linear(x, w, None, store), linear(x, v, None, store)
    with store.deferring(0):
        torch.autograd.backward([y, z], [torch.ones(3, 5), torch.ones(3, 6)])
    assert store.held_bytes() == 4 * (3 * 4 + 3 * 5 + 3 * 6)
    seen = weakref.ref(x)
    del x, y, z
    w.untyped_storage().resize_(0)  # as FSDP2 reshards
    store.run(0)
    assert w.grad.shape == (5, 4) and seen() is None


def test_what_cannot_wait_is_delivered_at_once():
    store, x = WeightGradients(), torch.randn(3, 4)
    hooked, posted, scaled = (nn.Parameter(torch.randn(5, 4)) for _ in range(3))
    hooked.register_hook(lambda g: None)
    posted.register_post_accumulate_grad_hook(lambda p: None)
    for w, seen in ((hooked, hooked), (posted, posted), (scaled, scaled * 2)):
        _deferred(store, 0, x, seen)
        assert w.grad is not None and store.run(0) == 0
    layer = nn.Linear(4, 5)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    _deferred(store, 0, x, layer.weight)
    assert layer.parametrizations.weight.original.grad is not None and store.run(0) == 0


def test_a_hook_that_comes_after_the_forward_is_honoured():
    store, w, seen = WeightGradients(), nn.Parameter(torch.randn(5, 4)), []
    y = linear(torch.randn(3, 4), w, None, store)
    w.register_hook(lambda g: seen.append(g.shape))
    with store.deferring(0):
        y.sum().backward()
    assert seen == [w.shape] and store.run(0) == 0


@pytest.mark.parametrize(
    "view",
    [lambda p: p[2], lambda p: p.unbind()[1], lambda p: p.flatten(0, 1), lambda p: p.chunk(2, 1)[1][0],
     lambda p: p.transpose(1, 2)[0], lambda p: p.view(12, 5)],
)  # fmt: skip
def test_views_land_in_their_place(view):
    store, p = WeightGradients(), nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))
    x = torch.randn(2, view(p).shape[1], dtype=torch.float64)
    F.linear(x, view(p)).square().sum().backward()
    want, p.grad = p.grad, None
    y = linear(x, view(p), None, store)
    with store.deferring(0):
        y.square().sum().backward()
    assert p.grad is None and store.run(0) == 1
    assert torch.equal(p.grad, want) and p.grad.stride() == p.stride()


def test_home():
    p = nn.Parameter(torch.zeros(4, 3, 2))
    assert home(p) == (p, None)
    parameter, place = home(p[1].t())
    assert parameter is p and place == Place((2, 3), (1, 2), 6)
    for w in (p * 2, p.to(torch.bfloat16), p.as_strided((4, 3), (1, 1)), p[0][:1].expand(3, 2), p.reshape(-1).clone()):
        assert home(w) is None

    class Doubled(torch.autograd.Function):  # a view with a backward of its own, as a collective has
        @staticmethod
        def forward(ctx, w):
            return w.view_as(w)

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    assert Doubled.apply(p)._base is p and home(Doubled.apply(p)) is None


def test_accumulate_keeps_the_parameters_layout_and_dtype():
    p = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    accumulate(p, torch.ones(2, 3).t())
    assert p.grad.dtype == torch.bfloat16 and p.grad.stride() == p.stride()


def test_a_custom_landing():
    seen = []
    store = WeightGradients(land=lambda p, g, place: seen.append((p, g.shape, place)))
    w = nn.Parameter(torch.randn(5, 4))
    _deferred(store, 0, torch.randn(3, 4), w)
    store.run(0)
    assert len(seen) == 1 and seen[0][0] is w and seen[0][1:] == (w.shape, None) and w.grad is None


def test_create_graph_is_not_deferred():
    store, w, x = WeightGradients(), nn.Parameter(torch.randn(5, 4)), torch.randn(3, 4)
    with store.deferring(0):
        (dw,) = torch.autograd.grad(linear(x, w, None, store).square().sum(), [w], create_graph=True)
    assert dw.requires_grad and store.run(0) == 0


def test_misuse_is_told():
    store, w, x = WeightGradients(), nn.Parameter(torch.randn(5, 4)), torch.randn(3, 4)
    with pytest.raises(KeyError, match="no weight gradients wait under 7"):
        store.run(7)
    with store.deferring(0), pytest.raises(RuntimeError, match="one backward at a time"), store.deferring(1):
        pass
    with store.deferring(0), pytest.raises(RuntimeError, match="still queueing"):
        store.run(0)
    store.run(0)
    _deferred(store, 0, x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place.*\(5, 4\)"):
        store.run(0)


def test_a_failed_backward_leaves_nothing_behind():
    store, w, x = WeightGradients(), nn.Parameter(torch.randn(5, 4)), torch.randn(3, 4, requires_grad=True)
    _deferred(store, 0, torch.randn(3, 4), w)

    def fail(g):
        raise ArithmeticError("in backward")

    x.register_hook(fail)
    for key in (0, 1):
        y = linear(x, w, None, store).sum()
        with pytest.raises(ArithmeticError), store.deferring(key):
            y.backward()
    assert store.waiting == (0,) and store.run(0) == 1 and not store.is_deferring
    _deferred(store, 0, torch.randn(3, 4), w)
    store.clear()
    assert store.waiting == ()
