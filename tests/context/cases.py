"""Attention on ranks against attention in one process: one case is a dict of plain values."""

from __future__ import annotations

import random
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dtensor_5d.context import Mask, Scope, attend
from dtensor_5d.context.reference import attention, visible
from dtensor_5d.order import PADDING, documents_from_ids, length_multiple, make_order
from tests.harness import assert_same_gradients

DEFAULTS = {
    "kind": "zigzag", "strategy": "ring", "mask": {}, "rows": "whole", "heads": (4, 2), "sizes": (8, 8), "batch": 1,
    "tokens": 37, "softcap": None, "sinks": False, "back_end": None, "dtype": "float64", "scale": 0.3, "tol": 1e-12,
    "ulysses": None, "seed": 0,
}  # fmt: skip


def document_ids(rows, tokens, batch, multiple):
    """Ids per row, filled up with padding to the multiple; rows of a batch differ unless they are whole."""
    rng = random.Random(tokens)
    found = []
    for row in range(batch):
        if rows == "whole":
            ids = [0] * tokens
        elif rows in ("left", "right"):
            gap = min(tokens - 1, 5 + row)
            ids = [0] * (tokens - gap)
            ids = [PADDING] * gap + ids if rows == "left" else ids + [PADDING] * gap
        else:  # packed: documents of any length, one of a single token
            lengths = [1]
            while sum(lengths) < tokens:
                lengths.append(rng.randint(1, max(1, tokens // 3)))
            ids = [d for d, n in enumerate(lengths) for _ in range(n)][:tokens]
        found.append(ids + [PADDING] * (-len(ids) % multiple))
    return found


def inputs(case, length):
    """q, k, v, gradient of the output, sinks: whole sequences in their original order."""
    gen = torch.Generator().manual_seed(case["seed"])
    heads, kv_heads = case["heads"]
    size, value_size = case["sizes"]
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    drawn = [torch.randn(case["batch"], h, length, d, generator=gen, dtype=torch.float64) for h, d in shapes]
    drawn.append(torch.randn(heads, generator=gen, dtype=torch.float64))
    return [x.to(getattr(torch, case["dtype"])) for x in drawn]


def expected(case, ids, mask, dtype=torch.float64):
    """Output and gradients in one process: dict of whole tensors."""
    q, k, v, grad, sinks = (x.to(dtype) for x in inputs(case, len(ids[0])))
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    seen = torch.stack([visible(row, mask) for row in ids])
    out = attention(q, k, v, seen, case["scale"], case["softcap"], sinks if case["sinks"] else None)
    names = ["dq", "dk", "dv"] + ["dsinks"] * case["sinks"]
    found = torch.autograd.grad(out, leaves[: len(names)], grad)
    return {"out": out.detach(), **dict(zip(names, found))}


def orders_of(case, ids, ranks):
    """One order per row; one for all where they are the same."""
    orders = [make_order(case["kind"], len(row), ranks, documents_from_ids(row)) for row in ids]
    return tuple(orders[:1] if len(set(orders)) == 1 else orders)


def cut(x, orders, rank):
    """The tokens (dim 2) of a rank, each row in its order."""
    rows = [orders[min(b, len(orders) - 1)] for b in range(x.size(0))]
    return torch.stack([x[b][:, list(order.positions(rank))] for b, order in enumerate(rows)])


def found_on_ranks(group, case, ids, orders, mask):
    """This rank's output and gradients, as the cuts that they are."""
    q, k, v, grad, sinks = inputs(case, len(ids[0]))
    rank = group.rank()
    leaves = [cut(x, orders, rank).requires_grad_() for x in (q, k, v)] + [sinks.requires_grad_()]
    scope = Scope(group, orders, mask, case["strategy"], case["ulysses"], case["back_end"])
    options = {"scope": scope, "scale": case["scale"], "softcap": case["softcap"]}
    options["sinks"] = leaves[3] if case["sinks"] else None
    out = attend(*leaves[:3], **options)
    names = ["dq", "dk", "dv"] + ["dsinks"] * case["sinks"]
    got = torch.autograd.grad(out, leaves[: len(names)], cut(grad, orders, rank))
    return {"out": out.detach(), **dict(zip(names, got))}


WRONG = {
    "scale": {"scale": 0.31}, "softcap": {"softcap": 50.0}, "sinks": {"sinks": True}, "mask": {"mask": {"window": 30}},
}  # fmt: skip


def check(rank, n, cases, wrong=None):
    """Every case on n ranks: output, dq, dk, dv and the gradient of sinks. `wrong` makes the ranks compute another."""
    for changes in cases:
        case = {**DEFAULTS, **changes}
        mask = Mask(**case["mask"])
        ids = document_ids(case["rows"], case["tokens"], case["batch"], length_multiple(case["kind"], n))
        orders = orders_of(case, ids, n)
        want = expected(case, ids, mask)
        if wrong is not None:
            case = {**case, **WRONG[wrong]}
            mask = Mask(**case["mask"])
        got = found_on_ranks(dist.group.WORLD, case, ids, orders, mask)
        if wrong is not None:
            got.pop("dsinks", None)
        if "dsinks" in got:
            dist.all_reduce(got["dsinks"])
        want = {name: x if name == "dsinks" else cut(x, orders, rank) for name, x in want.items()}
        try:
            assert_same_gradients(got, want, tol=case["tol"])
        except AssertionError as error:
            raise AssertionError(f"{changes} on {n} ranks: {error}") from None
    return len(cases)


@contextmanager
def recorded():
    """Bytes and partner of every message this rank sends by p2p, and what collectives it calls."""
    sent, called = [], []
    kept = {name: getattr(dist, name) for name in ("batch_isend_irecv", "all_gather_single", "all_to_all_single")}

    def batch(ops):
        sent.extend((op.tensor.numel() * op.tensor.element_size(), op.group_peer) for op in ops if op.op is dist.isend)
        return kept["batch_isend_irecv"](ops)

    def other(name):
        def call(*args, **options):
            called.append(name)
            return kept[name](*args, **options)

        return call

    dist.batch_isend_irecv = batch
    for name in list(kept)[1:]:
        setattr(dist, name, other(name))
    try:
        yield sent, called
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
