"""`ExpertParallel` alone, through torch's `parallelize_module`, on whole Hugging Face models: gradient parity."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_5d import Degrees, build_mesh
from dtensor_5d.errors import PlanError
from dtensor_5d.expert.keep import keeping_routing
from dtensor_5d.expert.style import ExpertParallel
from dtensor_5d.ops import WeightGradients
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, fails_on_ranks, run_ranks

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "llama4_text",
    "phimoe", "granitemoe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "dots1", "flex_olmo", "afmoe",
)  # fmt: skip
CORE = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")


def _model(family, dtype):
    model = tiny_model(family, dtype=dtype, experts="eager", num_hidden_layers=2)
    # The router of phimoe draws lots in training, other ones on every rank: it is compared in eval mode.
    return model.eval() if family == "phimoe" else model


def _names(model):
    return [n for n, m in model.named_modules() if n.endswith("experts") and "down_proj" in m._parameters]


def _rules(family, model, **options):
    style, names = ExpertParallel(**options), _names(model)
    assert names
    if family == "llama4_text":  # its experts take no indices: the block around them is named
        names = [n.rpartition(".")[0] for n in names]
    return dict.fromkeys(names, style)


def _tokens(ranks, rows=2, length=9):
    g = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB, (ranks * rows, length), generator=g)


def _loss(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").to(logits)


def _full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def _all_gradients(model):
    """Full gradients: experts gathered, those of replicated parameters summed over ranks (what FSDP would do)."""
    found = {}
    for name, p in model.named_parameters():
        g = p.grad
        if isinstance(p, DTensor):
            assert isinstance(g, DTensor) and g.placements == (Shard(0),), f"{name}: {type(g)}"
            g = g.full_tensor()
        else:
            g = torch.zeros_like(p) if g is None else g.clone()
            torch.distributed.all_reduce(g)
        found[name] = g
    return found


def _whole(family, dtype, ids):
    model = _model(family, dtype)
    _loss(model, ids).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def _parity(rank, ranks, families, dtype, tol, options):
    mesh = build_mesh(Degrees(dp_shard=ranks, ep=ranks), "cpu")
    ids = _tokens(ranks)
    for family in families:
        want = _whole(family, dtype, ids)
        model = _model(family, dtype)
        parallelize_module(model, mesh["ep"], _rules(family, model, **options))
        _loss(model, ids.chunk(ranks)[rank]).backward()
        try:
            assert_same_gradients(_all_gradients(model), want, tol=tol)
        except AssertionError as error:
            raise AssertionError(f"{family} {options}: {error}") from error


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_gradient_equals_one_process(ranks):
    run_ranks(ranks, _parity, ranks, CORE, torch.float32, 1e-5, {})


def test_every_gradient_equals_one_process_in_fp64():
    run_ranks(2, _parity, 2, ("qwen3_moe", "gpt_oss"), torch.float64, 1e-10, {})


@pytest.mark.parametrize(
    "options", [{"dispatch": "all_gather"}, {"dispatch": "two_step", "ranks_per_node": 2}, {"transport": "direct"}]
)
def test_other_ways_and_transports(options):
    run_ranks(4, _parity, 4, ("qwen3_moe",), torch.float32, 1e-5, options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_families(ranks):
    run_ranks(ranks, _parity, ranks, FAMILIES, torch.float32, 1e-5, {}, timeout=300)


def _steps(rank, ranks):
    """AdamW with weight decay: experts that got no token move as in one process."""
    mesh = build_mesh(Degrees(dp_shard=ranks, ep=ranks), "cpu")
    ids = _tokens(ranks, rows=1, length=4)  # few tokens for 8 experts
    whole, model = _model("qwen3_moe", torch.float64), _model("qwen3_moe", torch.float64)
    parallelize_module(model, mesh["ep"], _rules("qwen3_moe", model))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, foreach=False) for m in (whole, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(whole, ids).backward()
        _loss(model, ids.chunk(ranks)[rank]).backward()
        for p in model.parameters():
            if not isinstance(p, DTensor):
                torch.distributed.all_reduce(p.grad)
        for optimizer in optimizers:
            optimizer.step()
    got = {n: _full(p).detach() for n, p in model.named_parameters()}
    assert_same_gradients(got, {n: p.detach() for n, p in whole.named_parameters()}, tol=1e-9)


def test_three_steps_of_adamw_equal_one_process():
    run_ranks(2, _steps, 2)


def _empty_rank(rank, ranks):
    mesh = build_mesh(Degrees(dp_shard=ranks, ep=ranks), "cpu")
    whole, model = _model("qwen3_moe", torch.float64), _model("qwen3_moe", torch.float64)
    name = _names(whole)[0]
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 64, generator=g, dtype=torch.float64)
    index, weights = torch.randint(0, 8, (5, 2), generator=g), torch.rand(5, 2, generator=g, dtype=torch.float64)
    experts = whole.get_submodule(name)
    experts(hidden, index, weights).square().sum().backward()
    parallelize_module(model, mesh["ep"], {name: ExpertParallel()})
    own = slice(0, 5) if rank == 0 else slice(0, 0)
    ours = model.get_submodule(name)
    ours(hidden[own], index[own], weights[own]).square().sum().backward()
    got = {n: _full(p.grad) for n, p in ours.named_parameters()}
    assert_same_gradients(got, {n: p.grad for n, p in experts.named_parameters()}, tol=1e-10)


def test_ranks_without_tokens():
    run_ranks(4, _empty_rank, 4)


def _same_tokens(rank, dp, tp):
    """ep folded over dp x tp: the ranks of tp hold the same tokens, each sends its part of them once (C6)."""
    ranks = dp * tp
    mesh = build_mesh(Degrees(dp_shard=dp, tp=tp, ep=ranks), "cpu")
    ids = _tokens(dp, rows=1, length=7)
    want = _whole("deepseek_v3", torch.float64, ids)
    model = _model("deepseek_v3", torch.float64)
    parallelize_module(model, mesh["ep"], _rules("deepseek_v3", model, same_tokens=mesh["tp"]))
    _loss(model, ids.chunk(dp)[rank // tp]).backward()
    got = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            got[name] = p.grad.full_tensor()
            continue
        g = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        copies = [torch.empty_like(g) for _ in range(tp)]
        torch.distributed.all_gather(copies, g, group=mesh["tp"].get_group())
        assert all(torch.equal(c, g) for c in copies), f"{name} drifts apart over tp"  # T2, C2
        torch.distributed.all_reduce(g, group=mesh["fsdp"].get_group())
        got[name] = g
    assert_same_gradients(got, want, tol=1e-10)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_tokens_that_tensor_ranks_share_travel_once(dp, tp):
    run_ranks(dp * tp, _same_tokens, dp, tp)


class _Noisy(nn.Module):
    """A router that answers a little differently each time it runs."""

    def __init__(self, router):
        super().__init__()
        self.router, self.runs, self.seen = router, 0, []

    def forward(self, hidden):
        self.runs += 1
        shift = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(self.runs)) * 0.5
        return self.router(hidden + shift)


def _recomputed(rank):
    mesh = build_mesh(Degrees(dp_shard=2, ep=2), "cpu")
    found = []
    for again in (False, True):
        block = _model("qwen3_moe", torch.float32).model.layers[1].mlp
        parallelize_module(block, mesh["ep"], {"experts": ExpertParallel()})
        block.gate = _Noisy(block.gate)
        x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        if again:
            y = checkpoint(block, x, use_reentrant=False, context_fn=keeping_routing)
        else:
            y = block(x)
        y.square().sum().backward()
        assert block.gate.runs == 1 + again
        found.append([y, *(_full(p.grad) for p in block.experts.parameters())])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want)


def test_recomputation_never_routes_anew():
    run_ranks(2, _recomputed)


def _waiting(rank):
    mesh, store = build_mesh(Degrees(dp_shard=2, ep=2), "cpu"), WeightGradients()
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(rank))
    found = []
    for waits in (False, True):
        block = _model("qwen3_moe", torch.float32).model.layers[1].mlp
        parallelize_module(block, mesh["ep"], {"experts": ExpertParallel(store=store)})
        with store.deferring(0) if waits else contextlib.nullcontext():
            block(x).square().sum().backward()
        if waits:
            assert all(p.grad is None for p in block.experts.parameters())
            assert store.run(0) == 2
        assert all(p.grad.placements == (Shard(0),) for p in block.experts.parameters())
        found.append([_full(p.grad) for p in block.experts.parameters()])
    assert all(map(torch.equal, *found))


def test_weight_gradients_of_cut_experts_can_wait():
    run_ranks(2, _waiting)


def _refused(rank, ranks, what):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    if what == "dense":
        model = tiny_model("llama", num_hidden_layers=1)
        parallelize_module(model, mesh, {"model.layers.*.mlp": ExpertParallel()})
    elif what == "divide":
        model = tiny_model("qwen3_moe", num_hidden_layers=1, num_experts=7)
        parallelize_module(model, mesh, _rules("qwen3_moe", model))
    elif what == "nodes":
        model = _model("qwen3_moe", torch.float32)
        parallelize_module(model, mesh, _rules("qwen3_moe", model, dispatch="two_step", ranks_per_node=3))
    elif what == "llama4":
        model = _model("llama4_text", torch.float32)
        parallelize_module(model, mesh, dict.fromkeys(_names(model), ExpertParallel()))
    else:
        model = _model("qwen3_moe", torch.float32)
        parallelize_module(model, mesh, _rules("qwen3_moe", model))
        parallelize_module(model, mesh, _rules("qwen3_moe", model))


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("dense", "must hold fused experts"),
        ("divide", r"with 7 experts: ep must divide the 7 experts; use an ep of \[1, 7\]"),
        ("nodes", "ranks_per_node=3 for ep=2: must divide the 2 ranks"),
        ("llama4", "takes no router indices; name the block"),
        ("twice", "is cut over ranks already"),
    ],
)
def test_what_cannot_be_is_refused_before_any_collective(what, match):
    fails_on_ranks(2, _refused, 2, what, error=PlanError, match=match)


@pytest.mark.parametrize(
    "options",
    [{"dispatch": "magic"}, {"transport": "bird"}, {"capacity": 0.0}, {"dispatch": "two_step"},
     {"dispatch": "two_step", "ranks_per_node": 2, "capacity": 1.0}, {"dispatch": None}, {"transport": None},
     {"capacity": "2"}, {"capacity": True}, {"dispatch": "two_step", "ranks_per_node": -1}, {"ranks_per_node": True},
     {"ranks_per_node": 1.5}, {"same_tokens": 3}, {"overlap": "experts"}, {"overlap": ["shared_experts"]}],
)  # fmt: skip
def test_unknown_options_are_refused(options):
    with pytest.raises(PlanError, match="must"):
        ExpertParallel(**options)


def test_all_violations_at_once():
    with pytest.raises(PlanError) as caught:
        ExpertParallel(dispatch="magic", transport="bird", capacity=-1)
    assert len(caught.value.violations) == 3


def _a_rank_without_tokens(rank):
    model = _model("llama4_text", torch.float32)
    at = next(n for n, layer in enumerate(model.model.layers) if hasattr(layer.feed_forward, "experts"))
    block = model.model.layers[at].feed_forward
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parallelize_module(model, mesh["ep"], {f"model.layers.{at}.feed_forward": ExpertParallel()})
    x = torch.randn(1, 3 * (1 - rank), model.config.hidden_size, requires_grad=True)
    out, _ = block(x)
    out.sum().backward()
    return out.numel() // out.size(-1), x.grad.size(1), x.grad.abs().sum().item() > 0


def test_a_rank_without_tokens_whose_scores_scale_the_input():
    assert run_ranks(2, _a_rank_without_tokens) == [(3, 3, True), (0, 0, False)]
