"""What the expert tests share: routings of every awkward kind, a tiny expert, and the layer computed both ways."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch

from dtensor_5d.expert.dispatch import plain_experts
from dtensor_5d.ops import grouped_matmul

EXPERTS, MODEL = 8, 6


def routing(kind: str, ranks: int, seed: int = 0):
    """Per rank: index [T, K]."""
    g = torch.Generator().manual_seed(seed)
    choose = lambda tokens, k: torch.stack([torch.randperm(EXPERTS, generator=g)[:k] for _ in range(tokens)])  # noqa: E731
    none = torch.empty(0, 2, dtype=torch.long)
    if kind == "one expert":  # all tokens to it
        return [torch.full((5, 1), 3) for _ in range(ranks)]
    if kind == "nothing for the last rank":
        return [choose(6, 2) % (EXPERTS // ranks) for _ in range(ranks)]
    if kind == "one token":
        return [choose(1, 2), *[none] * (ranks - 1)]
    if kind == "no token":
        return [none] * ranks
    if kind.startswith("top"):
        return [choose(7 + rank, int(kind[3:])) for rank in range(ranks)]
    if kind == "0, 1, 7, 44":
        flat = torch.tensor([1] + [2] * 7 + [6] * 44)[torch.randperm(52, generator=g)]
        return list(flat.view(-1, 1).chunk(ranks))
    raise AssertionError(kind)


KINDS = (
    "one expert", "nothing for the last rank", "one token", "no token", "top1", "top2", "top3", "top8", "0, 1, 7, 44",
)  # fmt: skip


class Layer:
    """Hidden states and weights of every rank, and experts y = tanh(x A[e]) B[e]; the same on every rank."""

    def __init__(self, index, dtype=torch.float64, seed=1):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
        self.index = index
        self.hidden = [draw(len(i), MODEL) for i in index]
        self.weights = [draw(*i.shape).sigmoid() for i in index]
        self.up, self.down = draw(EXPERTS, MODEL, 4), draw(EXPERTS, 4, MODEL)
        self.grads = [draw(len(i), MODEL) for i in index]

    def reference(self, keeps=None):
        """Of all tokens in one process: (out, dhidden, dweights) of all, (dup, ddown). keeps: pairs that count."""
        hidden, weights = torch.cat(self.hidden).requires_grad_(), torch.cat(self.weights).requires_grad_()
        up, down = self.up.clone().requires_grad_(), self.down.clone().requires_grad_()
        used = weights if keeps is None else weights * keeps
        out = plain_experts(
            hidden, torch.cat(self.index), used, EXPERTS, lambda rows, e: (rows @ up[e]).tanh() @ down[e]
        )
        out.backward(torch.cat(self.grads))
        return [t.detach() for t in (out, hidden.grad, weights.grad)], (up.grad, down.grad)

    def ours(self, rank, ranks, bring):
        """The same of this rank's tokens and experts, by a dispatch."""
        hidden = self.hidden[rank].clone().requires_grad_()
        weights = self.weights[rank].clone().requires_grad_()
        own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        up, down = self.up[own].clone().requires_grad_(), self.down[own].clone().requires_grad_()
        compute = lambda rows, ends: grouped_matmul(grouped_matmul(rows, up, ends).tanh(), down, ends)  # noqa: E731
        out = bring(hidden, self.index[rank], weights, compute)
        out.backward(self.grads[rank])
        return [out.detach(), hidden.grad, weights.grad], (up.grad, down.grad)

    def check(self, rank, ranks, bring, tol, keeps=None):
        whole, whole_experts = self.reference(keeps)
        tokens, experts = self.ours(rank, ranks, bring)
        sizes = [len(i) for i in self.index]
        for name, got, want in zip(("out", "hidden", "weights"), tokens, whole):
            close(got, want.split(sizes)[rank], tol, name)
        for name, got, want in zip(("up", "down"), experts, whole_experts):
            assert got is not None, f"no gradient of {name}"
            close(got, want.chunk(ranks)[rank], tol, name)


def close(got, want, tol, name):
    assert got.shape == want.shape, (name, got.shape, want.shape)
    error = (got - want).abs().max().item() if got.numel() else 0.0
    assert error <= tol, f"{name}: {error}"  # also fails for NaN


@contextmanager
def poisoned():
    """Memory that nothing was written to holds NaN."""

    def filled(make):
        def fresh(*args, **kwargs):
            t = make(*args, **kwargs)
            return t.fill_(float("nan")) if t.is_floating_point() else t

        return fresh

    real = torch.Tensor.new_empty, torch.empty, torch.empty_like
    with (
        mock.patch.object(torch.Tensor, "new_empty", filled(real[0])),
        mock.patch.object(torch, "empty", filled(real[1])),
        mock.patch.object(torch, "empty_like", filled(real[2])),
    ):
        yield
