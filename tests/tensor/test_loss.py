"""The two losses against torch's cross entropy on whole logits: values, every gradient, exchanges and memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from dtensor_5d.ops import all_gather_reduce_scatter, identity_all_reduce
from dtensor_5d.tensor.loss import Vocabulary, chunked_head_loss_sum, vocab_parallel_loss_sum
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks
from tests.logits_memory import LogitsMemory
from tests.traces import Trace

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
B, S, M = 2, 9, 8

# --- one rank's columns


def _cuts(vocab, n):
    """Even, as torch cuts an uneven one, and with ranks that hold nothing."""
    even = -(-vocab // n)
    usual = [(min(r * even, vocab), min((r + 1) * even, vocab)) for r in range(n)]
    all_on_last = [(0, 0)] * (n - 1) + [(0, vocab)]
    return [usual, all_on_last]


def _problem(vocab, dtype, seed=0):
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, S, M, generator=gen, dtype=torch.float64)
    weight = torch.randn(vocab, M, generator=gen, dtype=torch.float64)
    labels = torch.randint(0, vocab, (B, S), generator=gen)
    labels[0, 2:5] = labels[1, -1] = -100
    return hidden.to(dtype), weight.to(dtype), labels


def _reference(hidden, weight, labels, post=lambda logits: logits, scale=0.3):
    """In fp64, from the same rounded numbers."""
    hidden, weight = (t.double().clone().requires_grad_() for t in (hidden, weight))
    logits = post(F.linear(hidden, weight))
    logits.retain_grad()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    (loss * scale).backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "logits": logits.grad}


def _soft_cap(logits):
    return 4.0 * torch.tanh(logits / 4.0)


def _vocab_parallel(rank, n):
    group = dist.group.WORLD
    for vocab in (8, 7, 3 if n < 4 else 2):
        for dtype in TOLERANCE:
            hidden, weight, labels = _problem(vocab, dtype)
            want = _reference(hidden, weight, labels)
            for start, end in (cut[rank] for cut in _cuts(vocab, n)):
                h, w = hidden.clone().requires_grad_(), weight[start:end].clone().requires_grad_()
                logits = F.linear(identity_all_reduce(h, group), w)
                logits.retain_grad()
                with Trace() as trace:
                    loss = vocab_parallel_loss_sum(logits, labels, group, start, end)
                assert [(e.kind, e.numel) for e in trace.events] in ([("gather", 3 * B * S)], [])[n == 1 :]
                assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                every = [torch.zeros_like(loss) for _ in range(n)]
                dist.all_gather(every, loss.detach())
                assert all(torch.equal(every[0], e) for e in every), "ranks disagree on the loss"
                (loss * 0.3).backward()
                got = {"loss": loss.detach(), "hidden": h.grad, "weight": w.grad, "logits": logits.grad}
                mine = want | {"weight": want["weight"][start:end], "logits": want["logits"][..., start:end]}
                assert_same_gradients(got, mine, tol=TOLERANCE[dtype])
                assert not logits.grad[labels == -100].any()
                twin = [torch.zeros_like(h.grad) for _ in range(n)]
                dist.all_gather(twin, h.grad)
                assert all(torch.equal(twin[0], t) for t in twin), "field fault L27"
    return True


@pytest.mark.parametrize("n", [1, 2, 4])
def test_columns_on_several_ranks_give_the_loss_of_whole_logits(n):
    """Field faults L26, L27 and T11 (vocabulary 7 and 8)."""
    assert run_ranks(n, _vocab_parallel, n) == [True] * n


def _hostile(rank):
    group, inf, nan = dist.group.WORLD, float("inf"), float("nan")
    start, end = [(0, 2), (2, 4)][rank]
    # A row of NaN that is not supervised; large numbers; a rank whose columns are all -inf; a column of -inf.
    whole = torch.tensor([[nan] * 4, [1e4, 0.0, -1e4, 3e4], [-inf, -inf, 1.0, 2.0], [0.5, -inf, 1.0, 2.0]]).double()
    labels = torch.tensor([[-100, 3, 2, 0]])
    want = whole.unsqueeze(0).clone().requires_grad_()
    F.cross_entropy(want[0, 1:], labels[0, 1:], reduction="sum").backward()
    logits = whole[:, start:end].unsqueeze(0).clone().requires_grad_()
    loss = vocab_parallel_loss_sum(logits, labels, group, start, end)
    loss.backward()
    nothing = logits.detach().clone().requires_grad_()
    zero = vocab_parallel_loss_sum(nothing, torch.full_like(labels, -100), group, start, end)
    zero.backward()
    nobody = vocab_parallel_loss_sum(logits.detach(), torch.tensor([[-100, 4, 2, 0]]), group, start, end)
    expected = F.cross_entropy(whole[1:], labels[0, 1:], reduction="sum")
    error = (logits.grad - want.grad[..., start:end])[:, 1:].abs().max().item()
    return (loss - expected).item(), error, logits.grad[0, 0].tolist(), zero.item(), nothing.grad.any().item(), nobody


def test_what_is_not_supervised_adds_exactly_nothing_and_infinities_weigh_nothing():
    for loss, error, masked, zero, some, nobody in run_ranks(2, _hostile):
        assert abs(loss) < 1e-9 and error < 1e-12
        assert masked == [0.0, 0.0] and zero == 0.0 and not some
        assert nobody == float("inf"), "a label outside the vocabulary must not pass for a loss"


def _gathered(rank):
    # Field fault L23: gathered logits count every id twice and lose the label.
    logits = torch.tensor([[[0.0, 1.0, 2.0, 3.0]]])
    vocab_parallel_loss_sum(logits, torch.tensor([[3]]), dist.group.WORLD, 2 * rank, 2 * rank + 2)


def _distributed(rank):
    mesh = DeviceMesh("cpu", [0, 1])
    logits = distribute_tensor(torch.zeros(1, 1, 4), mesh, [Shard(-1)])
    vocab_parallel_loss_sum(logits, torch.tensor([[3]]), dist.group.WORLD, 2 * rank, 2 * rank + 2)


def test_gathered_logits_and_dtensors_are_refused():
    fails_on_ranks(2, _gathered, error=ValueError, match="4 columns for the ids .* must be 2 columns")
    fails_on_ranks(2, _distributed, error=ValueError, match="DTensor: give the local shard")


# --- chunks


class _Head(nn.Module):
    """A projection with bias, an adapter, a learnt scale and a soft-cap: all that heads do."""

    def __init__(self, vocab, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(M, vocab, dtype=dtype)
        self.a, self.b = (nn.Linear(*size, bias=False, dtype=dtype) for size in ((M, 2), (2, vocab)))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x):
        return _soft_cap((self.base(x) + self.b(self.a(x))) * self.scale)


def _by_name(module, hidden, loss):
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return grads | {"hidden": None if hidden.grad is None else hidden.grad.clone(), "loss": loss.detach()}


def _whole(module, hidden, labels, scale=0.3):
    module.zero_grad()
    logits = module(hidden)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * scale).backward()
    return _by_name(module, hidden, loss)


@settings(deadline=None, max_examples=25)
@given(
    chunk=st.integers(1, B * S + 3),
    vocab=st.integers(2, 12),
    frozen=st.sampled_from(["", "base", "a", "base a b scale", "hidden", "hidden base"]),
    supervised=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_chunks_give_the_loss_and_gradients_of_whole_logits(chunk, vocab, frozen, supervised):
    head = _Head(vocab, torch.float64)
    hidden, _, labels = _problem(vocab, torch.float64, seed=chunk)
    labels = torch.where(torch.rand(B, S, generator=torch.Generator().manual_seed(vocab)) < supervised, labels, -100)
    for name in frozen.split():
        if name != "hidden":
            getattr(head, name).requires_grad_(False)
    hidden.requires_grad_("hidden" not in frozen)
    if not hidden.requires_grad and not any(p.requires_grad for p in head.parameters()):
        return
    want = _whole(head, hidden.detach().requires_grad_(hidden.requires_grad), labels)
    head.zero_grad()
    loss = chunked_head_loss_sum(hidden, head, labels, chunk)
    (loss * 0.3).backward()
    assert_same_gradients(_by_name(head, hidden, loss), want, tol=1e-12)


def test_a_tied_weight_gets_both_of_its_gradients():
    hidden, weight, labels = _problem(7, torch.float64)
    ids = labels.clamp_min(0)

    def gradient(loss_of):
        w = weight.clone().requires_grad_()
        loss_of(F.embedding(ids, w).tanh() + hidden, w).backward()
        return {"w": w.grad}

    want = gradient(lambda x, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten(), reduction="sum"))
    got = gradient(lambda x, w: chunked_head_loss_sum(x, lambda part: F.linear(part, w), labels, 4))
    assert_same_gradients(got, want, tol=1e-12)


def test_one_weight_used_in_two_ways_and_one_gradient_for_two_parameters():
    hidden, weight, labels = _problem(7, torch.float64)

    def gradients(loss_of):
        h = hidden.clone().requires_grad_()
        w, a, b = (t.clone().requires_grad_() for t in (weight, weight[:, 0], weight[:, 1]))
        loss_of(h, lambda x: F.linear(x, w) + x @ w.t() + a + b).backward()
        return {"h": h.grad, "w": w.grad, "a": a.grad, "b": b.grad}

    want = gradients(lambda h, head: F.cross_entropy(head(h).flatten(0, 1), labels.flatten(), reduction="sum"))
    assert_same_gradients(gradients(lambda h, head: chunked_head_loss_sum(h, head, labels, 5)), want, tol=1e-12)


def test_gradients_add_up_over_calls_and_only_one_backward_is_allowed():
    head, (hidden, _, labels) = _Head(7, torch.float64), _problem(7, torch.float64)
    want = {name: 2 * g for name, g in _whole(head, hidden.clone().requires_grad_(), labels).items()}
    head.zero_grad()
    hidden.requires_grad_()
    losses = [chunked_head_loss_sum(hidden, head, labels, 4) for _ in range(2)]
    (losses[0] * 0.3).backward()
    (losses[1] * 0.3).backward(retain_graph=True)
    assert_same_gradients(_by_name(head, hidden, losses[0] * 2), want, tol=1e-12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_without_gradients_only_the_loss_is_computed():
    head, (hidden, _, labels) = _Head(7, torch.float64), _problem(7, torch.float64)
    with torch.no_grad():
        loss = chunked_head_loss_sum(hidden, head, labels, 4)
    want = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    assert not loss.requires_grad and (loss - want).abs().item() < 1e-12


def test_logits_of_nan_do_no_harm_where_nothing_is_supervised():
    hidden, weight, labels = _problem(7, torch.float64)
    labels[:] = -100
    labels[1, 4:6] = 2

    def head(x):
        logits = F.linear(x, w)
        return torch.where(torch.isin(logits.detach(), known), logits, float("nan"))

    w = weight.clone().requires_grad_()
    known = F.linear(hidden, weight)[1, 4:6]
    h = hidden.clone().requires_grad_()
    chunked_head_loss_sum(h, head, labels, 3).backward()
    want = _reference(hidden, weight, labels, scale=1.0)
    assert_same_gradients({"h": h.grad, "w": w.grad}, {"h": want["hidden"], "w": want["weight"]}, tol=1e-12)


def test_sixteen_bit_weights_lose_nothing_to_the_number_of_chunks():
    gen = torch.Generator().manual_seed(0)
    hidden = (torch.randn(1, 512, M, generator=gen) + 1).bfloat16()
    weight, labels = torch.randn(7, M, generator=gen).bfloat16(), torch.randint(0, 7, (1, 512), generator=gen)
    want = _reference(hidden, weight, labels, scale=1.0)["weight"]
    errors = {}
    for chunk in (2, 512):
        w = weight.clone().requires_grad_()
        chunked_head_loss_sum(hidden, lambda x, w=w: F.linear(x, w), labels, chunk).backward()
        assert w.grad.dtype == torch.bfloat16
        errors[chunk] = ((w.grad - want).norm() / want.norm()).item()
    assert errors[2] < 2 * errors[512] + 2e-3, errors


def test_under_autocast():
    head, (hidden, _, labels) = _Head(7, torch.float32), _problem(7, torch.float32)
    want = _whole(copy.deepcopy(head).double(), hidden.double().requires_grad_(), labels)
    hidden.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_head_loss_sum(hidden, head, labels, 4)
    (loss * 0.3).backward()
    assert_same_gradients(_by_name(head, hidden, loss), want, tol=5e-2)


def test_a_head_that_reads_activations_is_refused():
    hidden, weight, labels = _problem(7, torch.float64)
    doubled = weight.requires_grad_() * 2
    with pytest.raises(ValueError, match="made by an earlier MulBackward0"):
        chunked_head_loss_sum(hidden.requires_grad_(), lambda x: F.linear(x, doubled), labels, 4)
    with pytest.raises(ValueError, match="chunk of 0 tokens"):
        chunked_head_loss_sum(hidden, lambda x: F.linear(x, weight), labels, 0)


@pytest.mark.parametrize("soft_cap", [False, True])
def test_never_more_than_the_logits_of_one_chunk(soft_cap):
    vocab, tokens, width = 997, 256, 16
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, width, generator=gen, requires_grad=True)
    weight = torch.randn(vocab, width, generator=gen, requires_grad=True)
    labels = torch.randint(0, vocab, (2, tokens // 2), generator=gen)

    def head(x):
        return _soft_cap(F.linear(x, weight)) if soft_cap else F.linear(x, weight)

    peaks = {}
    for chunk in (16, 32, 256):
        with LogitsMemory(vocab) as memory:
            chunked_head_loss_sum(hidden, head, labels, chunk).backward()
        peaks[chunk] = memory.peak
    # In units of one chunk's logits: logits and softmax, and with the soft-cap what its three operations make.
    kept = {chunk: peak / (chunk * vocab * 4) for chunk, peak in peaks.items()}
    assert kept[16] == kept[32] == (3 if soft_cap else 2), kept
    assert kept[256] >= 2, "the measure must see whole logits too"


# --- both together, over ranks and under FSDP2


def _chunks_and_columns(rank, n, dtype):
    group = dist.group.WORLD
    hidden, weight, labels = _problem(7, dtype)
    want = _reference(hidden, weight, labels, _soft_cap)
    for chunk in (4, 100):
        for start, end in (cut[rank] for cut in _cuts(7, n)):
            for cut_along_sequence in (False, True):
                h, w = hidden.clone().requires_grad_(), weight[start:end].clone().requires_grad_()
                if cut_along_sequence:
                    sizes = [S - n + 1] + [1] * (n - 1)
                    mine = h.split(sizes, 1)[rank].detach().requires_grad_()
                    x = all_gather_reduce_scatter(mine, group, 1, sizes)
                else:
                    mine, x = h, identity_all_reduce(h, group)
                vocab = Vocabulary(group, start, end)
                with Trace() as trace:
                    loss = chunked_head_loss_sum(
                        x, lambda part, w=w: _soft_cap(F.linear(part, w)), labels, chunk, vocab=vocab
                    )
                    (loss * 0.3).backward()
                parts = -(-B * S // chunk) if n > 1 else 0
                kinds = [e.kind for e in trace.events]
                backward = ["reduce_scatter" if cut_along_sequence else "all_reduce"] * (n > 1)
                assert kinds == ["gather"] * parts + backward, kinds
                whole = want["hidden"]
                got = {"loss": loss.detach(), "hidden": mine.grad, "weight": w.grad}
                assert_same_gradients(
                    got,
                    {
                        "loss": want["loss"],
                        "hidden": whole.split(sizes, 1)[rank] if cut_along_sequence else whole,
                        "weight": want["weight"][start:end],
                    },
                    tol=TOLERANCE[dtype],
                )
    return True


@pytest.mark.parametrize("n, dtype", [(1, torch.float64), (2, torch.float64), (4, torch.float64), (2, torch.bfloat16)])
def test_chunks_of_columns(n, dtype):
    """The hidden gradient is summed over ranks once, not once per chunk (field fault L26)."""
    assert run_ranks(n, _chunks_and_columns, n, dtype) == [True] * n
