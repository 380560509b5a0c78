"""The data axis: units, gathers and reductions of every cell of the table, overlap, bytes of a shard."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.dp.fsdp import units_of
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import Case, check_parity, rows
from tests.traces import Trace

LAYERS = 4
UNITS = LAYERS + 2  # embedding, layers, head with the final norm


def _run(family="llama", degrees=None, model=None, **options):
    made = tiny_model(family, **(model or {}))
    degrees = degrees or Degrees(dp_shard=2)
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _count(rank, degrees, zero, grad_reduce, micro):
    run = _run(degrees=degrees, zero=zero, grad_reduce=grad_reduce, microbatches=micro)
    batch = rows(rank, micro, 8, VOCAB)
    counts = []
    for _ in range(2):  # the second window must cost what the first did
        with Trace() as trace:
            run.step(batch)
        counts.append((trace.count("gather"), trace.count("reduce_scatter"), trace.count("all_reduce") - 1))
    held = sum(p.to_local(grad_placements=p.placements).numel() for p in run.parameters())
    return counts, held


@pytest.mark.parametrize("grad_reduce", ["window", "microbatch"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathers_and_reductions_of_every_cell(zero, grad_reduce):
    micro = 3
    # zero 3: layers twice per micro-batch; the embedding needs no weight in backward, the head stays for it
    gathers = UNITS if zero < 3 else micro * (2 * LAYERS + 2)
    reductions = UNITS * (1 if grad_reduce == "window" else micro)
    for counts, _ in run_ranks(2, _count, Degrees(dp_shard=2), zero, grad_reduce, micro):
        assert counts == [(gathers, reductions, 0)] * 2


def test_replicas_are_reduced_once_per_window():
    """dp_replicate: reduce-scatter per micro-batch, all-reduce across replicas once."""
    for counts, _ in run_ranks(4, _count, Degrees(dp_replicate=2, dp_shard=2), 2, "microbatch", 3):
        assert counts == [(UNITS, 3 * UNITS, UNITS)] * 2


def _order(rank):
    run = _run(zero=3)
    trace = Trace()
    for number, layer in enumerate(run.model.model.layers):

        def entered(module, args, kwargs, number=number):
            trace.mark(f"forward {number}")
            hidden = args[0] if args else kwargs["hidden_states"]
            hidden.register_hook(lambda grad: trace.mark(f"backward {number} done"))

        layer.register_forward_pre_hook(entered, with_kwargs=True)
    with trace:
        run.step(rows(rank, 2, 8, VOCAB))
    return [e.kind for e in trace.events]


def test_reduction_of_a_layer_starts_before_the_backward_of_the_one_below_ends():
    for events in run_ranks(2, _order):
        reductions = [i for i, kind in enumerate(events) if kind == "reduce_scatter"]
        # reductions come in the order head, last layer, ..., first layer, embedding
        for layer in range(LAYERS - 1, 0, -1):
            assert reductions[LAYERS - layer] < events.index(f"backward {layer - 1} done")


def test_the_next_layer_is_gathered_before_the_forward_of_this_one():
    for events in run_ranks(2, _order):
        for layer in range(LAYERS - 1):
            before = events[: events.index(f"forward {layer}")].count("gather")
            assert before >= layer + 3, "embedding, this layer and the next one"  # implied by prefetch


def _bytes(rank, shard):
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole = sum(p.numel() for p in model.parameters())
    degrees = Degrees(dp_shard=shard)
    run = parallelize(model, plan_for(model, degrees, zero=3), build_mesh(degrees, "cpu"))
    assert all(isinstance(p, DTensor) and p.is_meta for p in run.parameters())
    held = sum(p._local_tensor.numel() * p._local_tensor.element_size() for p in run.parameters())
    return whole, held


def _on_fake_world(rank, world, fn, *args):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5 % world, world_size=world)
    return fn(rank, *args)


@pytest.mark.parametrize("shard", [8, 64])
def test_parameter_bytes_of_a_70b_llama_equal_the_closed_form(shard):
    ((whole, held),) = run_ranks(1, _on_fake_world, shard, _bytes, shard)
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert whole == 80 * layer + 2 * 128256 * 8192 + 8192
    assert held * shard == whole * 2  # bf16, and every dim 0 divides


def test_units_are_found_by_rule_inner_first():
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    rules = {
        "model.layers.*": "unit",
        "model.layers.*.mlp.experts": "unit",
        "model.norm": "unit:head",
        "lm_head": "unit:head",
    }
    names = [unit for unit, _ in units_of(model, rules)]
    assert names == [
        ["model.layers.0.mlp.experts"], ["model.layers.1.mlp.experts"], ["model.layers.0"], ["model.layers.1"],
        ["model.norm", "lm_head"],
    ]  # fmt: skip
    assert units_of(model, {"model.layers.*": "unit", "model.layers.1": "root"}) == [(["model.layers.0"], "unit")]


def _rules_errors(rank):
    model = tiny_model("llama", num_hidden_layers=2, tie_word_embeddings=True)
    degrees = Degrees(dp_shard=2)
    said = []
    for rules in (
        {"model.layers.*": "units"},
        {"model.blocks.*": "unit"},
        {"model.layers.*": "unit/3"},
        {"model.embed_tokens": "unit"},
    ):
        try:
            plan = plan_for(model, degrees, rules={"dp": rules})
            parallelize(model, plan, build_mesh(degrees, "cpu"))
            said.append("nothing")
        except PlanError as error:
            said.append(str(error))
    return said


def test_wrong_rules_of_the_data_axis_are_refused():
    for said in run_ranks(2, _rules_errors):
        for text, part in zip(
            said, ("must be unit, unit:NAME", "must match at least 1 module", "divide the 2 ranks", "tied")
        ):
            assert part in text


@pytest.mark.parametrize("style", ["unit/2", "unit/4"])
def test_resharding_to_a_subgroup_is_exact(style):
    check_parity(
        Case("llama", Degrees(dp_shard=4), {"rules": {"dp": {"model.layers.*": style}}}, {"num_hidden_layers": 2})
    )


def _bf16(rank):
    run = _run("deepseek_v3", precision="bf16", model=dict(num_hidden_layers=2))
    seen = {}

    def look(module, args):
        seen["router"] = module.weight.dtype

    def look_head(module, args):
        seen["head"] = module.weight.dtype

    run.model.model.layers[1].mlp.gate.register_forward_pre_hook(look)
    run.model.lm_head.register_forward_pre_hook(look_head)
    with Trace() as trace:
        loss = run.step(rows(rank, 2, 8, VOCAB))
    stored = {p.dtype for p in run.parameters()} | {p.grad.dtype for p in run.parameters()}
    return loss.item(), seen, stored, trace.count("reduce_scatter"), run.full_gradients()


def test_bf16_computes_in_bf16_and_stores_reduces_and_routes_in_fp32():
    results = run_ranks(2, _bf16)
    (exact,) = run_ranks(1, _exact_loss, 2)
    for loss, seen, stored, _, grads in results:
        assert seen == {"router": torch.float32, "head": torch.bfloat16}
        assert stored == {torch.float32}
        assert abs(loss - exact[0]) < 0.02 * exact[0]
        for name in ("lm_head.weight", "model.layers.0.mlp.down_proj.weight"):
            cosine = torch.cosine_similarity(grads[name].flatten(), exact[1][name].flatten(), dim=0)
            assert cosine > 0.99
    assert results[0][0] == results[1][0]


def _exact_loss(rank, data):
    model = tiny_model("deepseek_v3", num_hidden_layers=2)
    window = [rows(r, 2, 8, VOCAB) for r in range(data)]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    total = 0.0
    for b in window:
        loss = model(**b, use_cache=False, num_items_in_batch=tokens).loss
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters()}


def _routers(rank, family):
    run = _run(family, precision="bf16", model=dict(num_hidden_layers=2))
    loss = run.step(rows(rank, 2, 8, VOCAB)).item()
    plain = tiny_model(family, num_hidden_layers=2)
    window = [rows(r, 2, 8, VOCAB) for r in range(2)]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    want = sum(plain(**b, use_cache=False, num_items_in_batch=tokens).loss.item() for b in window)
    return loss, want, run.grad_norm().item()


@pytest.mark.parametrize("family", ["ernie4_5_moe", "afmoe"])
def test_routers_with_parameters_inside_and_beside_them_train_in_bf16(family):
    """ernie: a correction inside the router; afmoe: a frozen one beside experts of another dtype, kept whole."""
    for loss, want, norm in run_ranks(2, _routers, family):
        assert abs(loss - want) < 0.02 * want and norm > 0


def _unused(rank, grad_reduce):
    """deepseek_v32 has indexers that no gradient reaches."""
    run = _run("deepseek_v32", precision="bf16", grad_reduce=grad_reduce, microbatches=2)
    return run.step(rows(0, 4, 8, VOCAB)).item(), run.full_gradients()


def test_parameters_without_gradients_in_bf16_with_one_reduction_for_a_window():
    (loss, want), *_ = run_ranks(2, _unused, "microbatch")
    for found, got in run_ranks(2, _unused, "window"):
        assert abs(found - loss) < 1e-5 * loss
        assert_same_gradients(got, want, tol=1e-5)


def _fails_and_goes_on(rank, degrees, where, options):
    """Gradients of a clean step, and of one after a window that failed on every rank."""
    model = tiny_model("llama", num_hidden_layers=4)
    run = parallelize(model, plan_for(model, degrees, **options), build_mesh(degrees, "cpu"))
    batch = rows(run.data_rank, 4, 8, VOCAB)
    run.step(batch)
    want = run.full_gradients()
    calls = []

    def fail(*_):
        calls.append(0)
        if len(calls) == 2:
            raise RuntimeError("out of memory, say")

    layer = next(layer for layer in reversed(run.model.model.layers) if hasattr(layer, "mlp"))
    hook = layer.mlp.register_forward_hook(fail) if where == "forward" else None
    if hook is None:
        hook = layer.mlp.register_full_backward_hook(fail)
    for p in run.parameters():
        p.grad = None
    with pytest.raises(RuntimeError):
        run.step([batch, batch])
    hook.remove()
    for p in run.parameters():
        p.grad = None
    run.step(batch)
    assert_same_gradients(run.full_gradients(), want, tol=1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        (Degrees(dp_shard=2), {"zero": 1}),
        (Degrees(dp_shard=2), {"zero": 3, "grad_reduce": "window"}),
        (Degrees(dp_shard=2), {"zero": 3}),
        (Degrees(dp_shard=2, tp=2), {"zero": 2, "grad_reduce": "window"}),
    ],
)
def test_nothing_is_left_of_a_window_that_failed(degrees, options, where):
    run_ranks(degrees.world_size, _fails_and_goes_on, degrees, where, options)
