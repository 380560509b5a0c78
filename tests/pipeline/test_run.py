"""What a `Run` over a pipeline does besides giving the right gradients: counts, memory, timing, names, refusals."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from dtensor_5d.pipeline import PipelineParallel
from dtensor_5d.schedule import Costs, build, simulate
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import rows
from tests.traces import Trace


def _run(family="llama", degrees=None, model=None, **options):
    made = tiny_model(family, **(model or {}))
    degrees = degrees or Degrees(pp=2)
    options = {"microbatches": 4, **options}
    return parallelize(made, plan_for(made, degrees, **options), build_mesh(degrees, "cpu"))


def _alone(window, **model):
    made = tiny_model("llama", **model)
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    loss = sum(made(**b, use_cache=False, num_items_in_batch=tokens).loss for b in window)
    loss.backward()
    return made, loss.item()


# --- what is gathered, reduced, recomputed, kept


def _counts(rank, schedule, zero, regather, grad_reduce):
    run = _run(degrees=Degrees(pp=2, dp_shard=2), schedule=schedule, zero=zero, regather=regather,
               grad_reduce=grad_reduce)  # fmt: skip
    batch = rows(run.data_rank, 4, 8, VOCAB)
    run.step(batch)
    with Trace() as trace:
        run.step(batch)
    units = sum(1 for u in run._parts.data._parts)
    return trace.count("gather"), trace.count("reduce_scatter"), units


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    "zero, regather, grad_reduce", [(3, "visit", "window"), (3, "window", "window"), (2, "visit", "microbatch")]
)
def test_gathers_and_reductions_of_a_unit(schedule, zero, regather, grad_reduce):
    """Field faults P28, F8: one gather a window, or one for each F and I; one reduction a window, or one for each W."""
    for gathers, reductions, units in run_ranks(4, _counts, schedule, zero, regather, grad_reduce):
        assert reductions == units * (1 if grad_reduce == "window" else 4)
        if zero == 3 and regather == "visit":
            # For each of 4 micro-batches: both layers twice; the embedding once, which needs no weight in backward,
            # and the head once, since the I of the last stage follows its F.
            assert gathers == 4 * (2 * 2 + units - 2)
        else:
            assert gathers == units


def _recomputes(rank, schedule):
    run = _run(schedule=schedule, recompute="block")
    calls = []
    for number, layer in enumerate(run.model.model.layers):
        if any(True for _ in layer.parameters()):
            layer.mlp.register_forward_pre_hook(lambda *_, n=number: calls.append(n))
    run.step(rows(0, 4, 8, VOCAB))
    return {n: calls.count(n) for n in sorted(set(calls))}


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_a_layer_is_recomputed_once_for_each_micro_batch(schedule):
    """Twice 4 micro-batches: forward, and the second forward in I; none in W."""
    found = {}
    for counts in run_ranks(2, _recomputes, schedule):
        found |= counts
    assert found == dict.fromkeys(range(4), 8)


def _memory(rank, schedule, micro, length):
    run = _run(schedule=schedule, microbatches=micro, model={"num_hidden_layers": 4})
    engine = run._parts.engine
    plain, most = engine._runtime, {"graphs": 0, "stash": 0, "bytes": 0}

    def watched(*args):
        runtime = plain(*args)
        for stage in runtime.stages.values():
            for name in ("forward", "backward_input", "backward_weight"):
                setattr(stage, name, _watch(getattr(stage, name), runtime, engine, most))
        return runtime

    engine._runtime = watched
    run.step(rows(0, micro, length, VOCAB))
    return most


def _watch(action, runtime, engine, most):
    def watched(*args):
        out = action(*args)
        most["graphs"] = max(most["graphs"], sum(len(s.stage._graphs) for s in runtime.stages.values()))
        most["stash"] = max(most["stash"], len(engine.store.waiting))
        most["bytes"] = max(most["bytes"], engine.store.held_bytes())
        return out

    return watched


@pytest.mark.parametrize("schedule, micro", [("1f1b", 6), ("zb-h1", 6), ("zbv", 6), ("gpipe", 4)])
def test_what_is_alive_is_what_the_simulator_says(schedule, micro):
    timeline = simulate(build(schedule, ranks=2, microbatches=micro), Costs(1, 1, 1, input_release=1.0))
    split = simulate(build(schedule, ranks=2, microbatches=micro), Costs(1, 1, 1))
    for rank, most in enumerate(run_ranks(2, _memory, schedule, micro, 8)):
        assert most["graphs"] == timeline.peak_activations[rank]
        assert most["stash"] == max(split.peak_stash[rank], 1)  # a B is an I whose W follows at once


def test_waiting_gradients_do_not_grow_with_the_number_of_micro_batches():
    few, many = (run_ranks(2, _memory, "zbv", micro, 8) for micro in (6, 12))
    more_ids = 6 * 8 * 8  # rank 0: micro-batches are views of one batch of ids, which the embedding's product holds
    assert [m["bytes"] for m in many] == [few[0]["bytes"] + more_ids, few[1]["bytes"]]


def _waiting(rank, degrees):
    run = _run(degrees=degrees, schedule="zb-h1", microbatches=2)
    store, counts = run._parts.engine.store, []
    plain = store.run
    store.run = lambda key: counts.append(plain(key)) or counts[-1]
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    return run.mesh.coordinate()["pp"], counts


@pytest.mark.parametrize("degrees", [Degrees(pp=2), Degrees(pp=2, tp=2), Degrees(pp=2, dp_shard=2)], ids=str)
def test_every_product_waits_for_w(degrees):
    """7 in a llama layer, also on shards of the tensor axis; and the embedding, or the head."""
    for _, counts in run_ranks(degrees.world_size, _waiting, degrees):
        assert counts == [2 * 7 + 1] * 2


# --- time


def _slow_rank(rank, slow, schedule):
    run = _run(schedule=schedule)
    if slow == rank:
        for layer in run.model.model.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    losses = [run.step(rows(step, 4, 8 + step, VOCAB)).item() for step in range(2)]
    return losses, {n: p.grad for n, p in run.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_slow_rank_changes_nothing_but_time(schedule):
    """Field faults P10, P23."""
    want = run_ranks(2, _slow_rank, None, schedule)
    for slow in (0, 1):
        for (losses, grads), (plain_losses, plain) in zip(run_ranks(2, _slow_rank, slow, schedule), want):
            assert losses == plain_losses
            assert all(torch.equal(g, plain[n]) for n, g in grads.items())


def _timeline(rank, schedule):
    run = _run(schedule=schedule)
    assert run.timeline() is None
    run.step(rows(0, 4, 8, VOCAB))
    timeline = run.timeline()
    simulated = simulate(timeline.schedule, timeline.costs)
    assert [[t.action for t in row] for row in timeline.rows] == [[t.action for t in row] for row in simulated.rows]
    return timeline.makespan, simulated.makespan, str(timeline.schedule)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-auto"])
def test_a_measured_timeline_stands_beside_the_simulated_one(schedule):
    (measured, simulated, one), (_, _, other) = run_ranks(2, _timeline, schedule)
    assert measured > 0 and simulated > 0 and one == other


# --- looking, names


def _look(rank, family):
    run = _run(family, schedule="zbv", microbatches=2, degrees=Degrees(pp=2, dp_shard=2))
    run.model.model.layers.train()
    batches = [rows(7 + run.data_rank, 3, 9, VOCAB), rows(17 + run.data_rank, 1, 6, VOCAB)]
    loss, tokens = run.evaluate(batches if run.data_rank == 0 else batches[:1])
    logits = run.logits({"input_ids": batches[0]["input_ids"]})
    model = tiny_model(family).eval()
    with torch.no_grad():
        want = model(batches[0]["input_ids"], use_cache=False).logits
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
    assert run.model.training
    return loss, tokens, batches


def test_evaluation_and_logits_by_the_same_path():
    """Field faults L21, P22."""
    results = run_ranks(4, _look, "gemma2")
    assert len({(loss, tokens) for loss, tokens, _ in results}) == 1
    first, second = results[0][2], results[1][2][:1]
    model = tiny_model("gemma2").eval()
    total = count = 0
    for batch in first + second:
        n = int((batch["labels"][:, 1:] != -100).sum())
        total += model(**batch, use_cache=False).loss.item() * n
        count += n
    assert results[0][1] == count and abs(results[0][0] - total / count) < 1e-5


def _tied(rank, schedule):
    run = _run(schedule=schedule, model={"tie_word_embeddings": True})
    optim = torch.optim.AdamW(run.parameters(), lr=0.01)
    for step in range(3):
        run.step(rows(step, 4, 8, VOCAB))
        run.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
    held = dict(run.model.named_parameters(remove_duplicate=False))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {n: held[n].detach().clone() for n in names if n in held}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_both_copies_of_a_tied_weight_stay_equal_bit_for_bit(schedule):
    """Field fault P20."""
    copies = [t for held in run_ranks(2, _tied, schedule) for t in held.values()]
    assert len(copies) == 2 and torch.equal(*copies)


def _accumulated(rank):
    run = _run(schedule="zb-h1", model={"tie_word_embeddings": True}, degrees=Degrees(pp=2, dp_shard=2), zero=2)
    for step in range(3):
        run.step(rows(10 * step + run.data_rank, 2, 8 + step, VOCAB))
    return run.full_gradients()


def test_windows_add_up():
    """Field faults P3, P15: gradients of 3 windows of other lengths, each with its own mean."""
    want: dict[str, torch.Tensor] = {}
    for step in range(3):
        made, _ = _alone([rows(10 * step + r, 2, 8 + step, VOCAB) for r in range(2)], tie_word_embeddings=True)
        for n, p in made.named_parameters():
            want[n] = p.grad + want[n] if n in want else p.grad
    for got in run_ranks(4, _accumulated):
        assert_same_gradients(got, want, tol=1e-5)


def _from_meta(rank, folder, schedule):
    config = tiny_config("llama", tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    degrees = Degrees(pp=2, dp_shard=2)
    run = parallelize(model, plan_for(config, degrees, schedule=schedule, microbatches=2), build_mesh(degrees, "cpu"))
    run.init_weights(seed=3)
    drawn = run.full_parameters()
    run.step(rows(run.data_rank, 2, 8, VOCAB))
    run.save_pretrained(folder)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(config)
    loaded = parallelize(other, plan_for(config, degrees, microbatches=2), build_mesh(degrees, "cpu"))
    loaded.load_pretrained(folder)
    assert all(torch.equal(p, dict(again.named_parameters())[n]) for n, p in loaded.full_parameters().items())
    assert run.logits({"input_ids": torch.ones(1, 4, dtype=torch.long)}).isfinite().all()
    return {n: p.clone() for n, p in drawn.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_from_meta_to_a_folder_and_back(schedule, tmp_path):
    """Field faults I2, P21: the same seed gives the same weights as on one rank; one key for a tied weight."""
    drawn = run_ranks(4, _from_meta, tmp_path / "out", schedule)
    (alone,) = run_ranks(1, _drawn_alone)
    for got in drawn:
        assert list(got) == list(alone) and all(torch.equal(got[n], alone[n]) for n in alone)


def _drawn_alone(rank):
    config = tiny_config("llama", tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    run = parallelize(model, plan_for(config, Degrees()), build_mesh(Degrees(), "cpu"))
    run.init_weights(seed=3)
    return run.full_parameters()


# --- alone


def _style(rank, schedule):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = tiny_model("llama", tie_word_embeddings=True)
    names = {n for n, _ in model.named_parameters()}
    model = parallelize_module(model, mesh["pp"], PipelineParallel(schedule=schedule, microbatches=3))
    assert {n for n, _ in model.named_parameters()} <= names | {"lm_head.weight"}
    loss = model.step(rows(0, 4, 8, VOCAB))
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_style_alone(schedule):
    made, loss = _alone([rows(0, 4, 8, VOCAB)], tie_word_embeddings=True)
    want = {n: p.grad for n, p in made.named_parameters()}
    found = {}
    for got, grads in run_ranks(2, _style, schedule):
        assert abs(got - loss) < 1e-5 * abs(loss)
        found |= {("model.embed_tokens.weight" if n == "lm_head.weight" else n): g for n, g in grads.items()}
    assert_same_gradients(found, want, tol=1e-5)
