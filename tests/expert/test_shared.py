"""Shared experts run while tokens travel: the order of events, every gradient, and calls that were not expected."""

from __future__ import annotations

import copy
from itertools import groupby
from types import MethodType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_5d import Degrees, PlanError, build_mesh
from dtensor_5d.expert import shared
from dtensor_5d.expert.style import ExpertParallel
from dtensor_5d.families.tensor import PROVED
from tests.families.tiny import tiny_model
from tests.harness import fails_on_ranks, run_ranks
from tests.pairwise import pairwise
from tests.parity import Case, _trial, one_without_tokens, padded, uneven
from tests.tensor.adapted import Adapt, prepared_parity

EP2 = Degrees(dp_shard=2, ep=2)


def _block(family="deepseek_v3", dtype=torch.float64):
    model = tiny_model(family, dtype=dtype, experts="eager", num_hidden_layers=2)
    return next(m for m in model.modules() if "experts" in dict(m.named_children()))


def _cut(block, **options):
    return parallelize_module(block, build_mesh(EP2, "cpu")["ep"], ExpertParallel(overlap="shared_experts", **options))


def _tokens(rank, count=12, dtype=torch.float64):
    return torch.randn(1, count, 64, generator=torch.Generator().manual_seed(rank), dtype=dtype)


class _Work:
    def __init__(self, work, events):
        self.work, self.events = work, events

    def wait(self):
        self.events.append("wait")
        self.work.wait()


def _events(rank, family, transport, overlap):
    """What happened in forward and in backward; several messages at a time count once."""
    events = []
    real_all, real_batch = dist.all_to_all_single, dist.batch_isend_irecv

    def all_to_all(*args, **kwargs):
        events.append("post")
        return _Work(real_all(*args, **kwargs), events)

    def batch(ops):
        events.append("post")
        return [_Work(work, events) for work in real_batch(ops)]

    block = _block(family)
    beside = block.shared_expert if family == "llama4_text" else block.shared_experts
    style = ExpertParallel(transport=transport, overlap="shared_experts" if overlap else None)
    named = block if overlap or family == "llama4_text" else block.experts
    if family == "llama4_text":
        style = ExpertParallel(transport=transport)
    parallelize_module(named, build_mesh(EP2, "cpu")["ep"], style)
    beside.down_proj.register_forward_hook(lambda *_: events.append("shared"))
    for product in (beside.gate_proj, beside.up_proj):
        product.register_full_backward_hook(lambda *_: events.append("shared"))
    found = []
    with mock.patch.object(dist, "all_to_all_single", all_to_all), mock.patch.object(dist, "batch_isend_irecv", batch):
        out = block((_tokens(rank) * 1).requires_grad_())
        found.append([event for event, _ in groupby(events)])
        events.clear()
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        found.append([event for event, _ in groupby(events)])
    return found


@pytest.mark.parametrize("transport", ["all_to_all", "direct"])
@pytest.mark.parametrize("family", ["deepseek_v3", "llama4_text"])
def test_shared_experts_run_between_posting_and_waiting_both_ways(family, transport):
    for forward, backward in run_ranks(2, _events, family, transport, True):
        assert forward == ["post", "shared", "wait", "post", "wait"]
        assert backward == ["post", "wait", "post", "shared", "wait"]


def test_without_the_block_they_run_where_the_model_calls_them():
    for forward, backward in run_ranks(2, _events, "deepseek_v3", "direct", False):
        assert forward == ["post", "wait", "post", "wait", "shared"]
        assert backward == ["shared", "post", "wait", "post", "wait"]


def _as_it_is(self, x):
    return self.routed(x) + self.shared_experts(x)


def _another_tensor(self, x):
    return self.routed(x) + self.shared_experts(x * 1.0)


def _twice(self, x):
    return self.routed(x) + self.shared_experts(x) + 2.0 * self.shared_experts(x)


def _before(self, x):
    return self.shared_experts(x) + self.routed(x)


def _changed_since(self, x):
    y = self.routed(x)
    with torch.no_grad():
        x.mul_(2.0)
    return y + self.shared_experts(x)


def _not_at_all(self, x):
    return self.routed(x)


def _routed(self, x):
    index, weights = torch.arange(x.size(1)).view(-1, 1) % 8, torch.full((x.size(1), 1), 0.5, dtype=x.dtype)
    return self.experts(x.view(-1, x.size(-1)), index, weights).view_as(x)


# forward -> how often the shared experts run, hooks and all
CALLS = {_as_it_is: 1, _another_tensor: 2, _twice: 2, _before: 2, _changed_since: 2, _not_at_all: 1}


def _with(block, forward):
    block.routed, block.forward = MethodType(_routed, block), MethodType(forward, block)
    return block


def _run(block, rank, backward=True):
    """Output and gradients of what is not cut."""
    x = _tokens(rank).requires_grad_(backward)
    block.shared_experts.zero_grad()
    out = block(x * 1.0)
    if not backward:
        return [out]
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in block.shared_experts.parameters())]


def _calls(rank):
    for forward, times in CALLS.items():
        plain = _with(_block(), forward)
        ours = _cut(_with(copy.deepcopy(plain), forward), transport="direct")
        runs = []
        ours.shared_experts.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        for turn in range(2):
            grads = forward is not _changed_since  # autograd refuses what is changed behind its back
            with torch.set_grad_enabled(grads):
                for got, want in zip(_run(ours, rank, grads), _run(plain, rank, grads), strict=True):
                    assert (got is None) == (want is None), forward
                    if got is not None:
                        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=f"{forward} {turn}")
            assert len(runs) == times * (turn + 1), (forward, runs)
            assert "_call_impl" not in vars(ours.shared_experts), forward
        with torch.inference_mode():
            torch.testing.assert_close(ours(_tokens(rank)), plain(_tokens(rank)))


def test_any_call_of_the_block_is_exact_and_hooks_run_once():
    run_ranks(2, _calls)


class _Stop(Exception):
    pass


def _stopped(rank):
    """Errors before the messages have arrived, and after; the next forward is as if nothing had been."""
    plain = _block()
    ours = _cut(copy.deepcopy(plain))
    for where in (ours.shared_experts.down_proj, ours.shared_experts, ours.experts):

        def stop(*_):
            raise _Stop

        hook = where.register_forward_hook(stop)
        with pytest.raises(_Stop):
            ours(_tokens(rank + 10))
        hook.remove()
        assert "_call_impl" not in vars(ours.shared_experts)
        x = _tokens(rank)
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-10, atol=1e-12)


def test_an_error_in_between_leaves_nothing():
    run_ranks(2, _stopped)


def _refused(rank, what):
    block = _block("qwen3_moe") if what == "shared" else _block()
    _cut(block.experts if what == "experts" else block)


@pytest.mark.parametrize("what", ["experts", "shared"])
def test_overlap_needs_the_block_around_both(what):
    name = "'experts'" if what == "experts" else "'shared_experts'"
    fails_on_ranks(2, _refused, what, error=PlanError, match=f"must have a child {name}")


class _Counted(shared._Made):
    """[made, taken]."""

    counts = (0, 0)

    def __init__(self, *args):
        super().__init__(*args)
        made, taken = _Counted.counts
        _Counted.counts = (made + 1, taken)

    def __call__(self, *args, **kwargs):
        out = super().__call__(*args, **kwargs)
        made, taken = _Counted.counts
        _Counted.counts = (made, taken + (out is self.out))
        return out


def _counted(rank, case, adapt):
    _Counted.counts = (0, 0)
    with mock.patch.object(shared, "_Made", _Counted):
        if adapt:
            prepared_parity(rank, case, Adapt("down_proj", "o_proj"))
        else:
            _trial(rank, case)
    return _Counted.counts


def _check(case, adapt=False):
    for made, taken in run_ranks(case.degrees.world_size, _counted, case, adapt, timeout=90):
        if case.family == "qwen2_moe" or case.options.get("dispatch") == "all_gather":
            assert made == 0
        elif case.options.get("recompute", "none") == "none":
            assert made == taken > 0, (made, taken)
        else:  # a recomputation ends as soon as it has what is missing
            assert made >= taken > 0, (made, taken)


@pytest.mark.parametrize(
    ("family", "degrees", "options", "adapt"),
    [
        ("deepseek_v3", EP2, {"recompute": "block", "zero": 2}, False),
        ("glm4_moe", Degrees(tp=2, ep=2), {"sequence_parallel": False, "recompute": "selective"}, False),
        ("deepseek_v3", Degrees(tp=2, ep=2), {}, True),
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_process(family, degrees, options, adapt):
    _check(Case(family, degrees, options, {"num_hidden_layers": 2}), adapt)


AXES = {
    "family": ["deepseek_v3", "glm4_moe", "llama4_text", "qwen2_moe"],
    "degrees": [
        EP2, Degrees(tp=2, ep=2), Degrees(dp_shard=2, tp=2, ep=4), Degrees(cp=2, ep=2),
        Degrees(dp_shard=4, ep=2, etp=2), Degrees(pp=2, dp_shard=2, ep=2), Degrees(pp=2, tp=2, ep=2),
    ],
    "recompute": ["none", "block", "selective"],
    "sequence_parallel": [None, False],
    "dispatch": ["all_to_all", "all_gather"],
    "adapt": [False, True],
    "batches": [uneven, one_without_tokens, padded],
}  # fmt: skip


def _name(row):
    return "-".join(getattr(value, "__name__", str(value)) for value in row.values())


# llama4_text has no rules for tp.
ROWS = [row for row in pairwise(AXES) if row["degrees"].tp == 1 or row["family"] in PROVED]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_every_pair_of_options(row):
    degrees = row["degrees"]
    options = {"recompute": row["recompute"], "dispatch": row["dispatch"]}
    if degrees.tp > 1:
        options["sequence_parallel"] = row["sequence_parallel"]
    if degrees.pp > 1:
        options |= {"schedule": "zbv", "microbatches": 2}
    layers = {"num_hidden_layers": 4 if degrees.pp > 1 else 2}
    _check(Case(row["family"], degrees, options, layers, batches=row["batches"]), row["adapt"])
