"""The memory of pipeline ranks: what each schedule keeps alive, and how ranks differ."""

from __future__ import annotations

import pytest

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan
from dtensor_5d.planner import memory
from dtensor_5d.planner.moments import in_flight
from dtensor_5d.schedule import Costs, build, simulate

GIB = 2**30


def weigh(name, pp, microbatches, *, seq_len=4096, degrees=None, **options):
    shape = name if isinstance(name, ModelShape) else ModelShape.preset(name)
    plan = Plan(Degrees(pp=pp, **(degrees or {})), Options(microbatches=microbatches, **options))
    return memory(shape, plan, micro_batch=1, seq_len=seq_len)


EVERY = [
    ("gpipe", 4, 8), ("1f1b", 4, 8), ("interleaved", 4, 8), ("zb-h1", 4, 8), ("zb-h2", 4, 8), ("zb-auto", 3, 6),
    ("zbv", 4, 8), ("v-half", 4, 8), ("v-min", 4, 8), ("dualpipe", 4, 8), ("dualpipev", 4, 8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "microbatches"), EVERY, ids=[e[0] for e in EVERY])
@pytest.mark.parametrize("stash", [1, 2, 3])
def test_alive_at_once_as_the_simulator_says(name, ranks, microbatches, stash):
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    unit = 4  # a stored activation, of which I lets all but the stash go
    timeline = simulate(schedule, Costs(1, 1, 1, input_release=1 - stash / unit))
    for rank in range(ranks):
        alive = in_flight(schedule, rank, [unit] * schedule.depth, [stash] * schedule.depth)
        assert (alive.activations + alive.stash) / unit == pytest.approx(timeline.peak_activations[rank])


def test_1f1b_keeps_fewer_micro_batches_on_later_ranks():
    shape = ModelShape.preset("llama-3.1-8b")
    report = weigh(shape, 4, 3, precision="bf16", layers_per_stage=(8, 8, 8, 8))
    per_layer = 4096 * sum(t.bytes for t in shape.activations(0, 4096))
    for rank, alive in zip(report, (3, 3, 2, 1), strict=True):
        (stage,) = rank.stages
        assert stage.activations_per_microbatch >= 8 * per_layer
        assert rank.phases["step 1: loss"]["activations"] == alive * stage.activations_per_microbatch
        assert rank.phases["step 1: loss"]["stash"] == 0
    assert [len(r.stages[0].layers) for r in report] == [8, 8, 8, 8]


def test_a_split_backward_keeps_a_stash():
    report = weigh("llama-3.1-8b", 4, 8, precision="bf16", schedule="zb-h1")
    assert any(rank.phases["step 1: loss"]["stash"] > 0 for rank in report)


def test_ranks_differ_by_embedding_head_and_micro_batches():
    # field fault Q5
    first, last = weigh("llama-3.1-8b", 2, 4, precision="bf16", layers_per_stage=(16, 16))
    assert first.phases["step 1: loss"]["logits"] == 0 < last.phases["step 1: loss"]["logits"]
    assert first.phases["step 1: loss"]["activations"] > last.phases["step 1: loss"]["activations"]
    # one table each; the last one has the final norm besides
    assert last.dense["master"] - first.dense["master"] == 4 * 4096


def test_static_memory_falls_in_proportion():
    # field fault F17
    names = ("parameters", "gradients", "master", "optimizer")
    whole = weigh("llama-3.1-70b", 1, 4, precision="bf16")
    halves = weigh("llama-3.1-70b", 2, 4, precision="bf16", layers_per_stage=(40, 40))
    assert sum(r.dense[n] for r in halves for n in names) == sum(whole[0].dense[n] for n in names)
    assert max(sum(r.dense[n] for n in names) for r in halves) < 0.51 * sum(whole[0].dense[n] for n in names)


def test_tied_embeddings_live_on_both_ends():
    shape = ModelShape.preset("smollm2-135m")
    report = weigh(shape, 3, 4)
    assert sum(r.dense["parameters"] for r in report) == 2 * (shape.parameters + shape.embedding_parameters)


def test_two_copies_of_the_model_in_dualpipe():
    single, double = (
        weigh("smollm2-135m", 2, 8, schedule=s, layers_per_stage=(15, 15)) for s in ("1f1b", "dualpipe")
    )
    one, two = (sum(r.dense["parameters"] for r in report) for report in (single, double))
    assert two == 2 * one
    assert [s.number for s in double[0].stages] == [0, 1]


def test_v_schedules_put_the_ends_on_the_first_rank():
    report = weigh("smollm2-135m", 3, 6, schedule="zbv", layers_per_stage=(5, 5, 5, 5, 5, 5))
    assert [[s.number for s in r.stages] for r in report] == [[0, 5], [1, 4], [2, 3]]
    assert [s.layers for s in report[0].stages] == [tuple(range(5)), tuple(range(25, 30))]


@pytest.mark.parametrize(("hidden", "heads", "layers", "p", "v", "want"), [
    (12288, 96, 96, 8, 3, (71.8, 13.26, 6.24)),
    (20480, 128, 105, 35, 3, (122.4, 24.8, 11.7)),
    (25600, 160, 128, 64, 1, (140.9, 28.5, 13.4)),
])  # fmt: skip
def test_korthikanti_first_stage_totals(hidden, heads, layers, p, v, want):
    """GB under tensor parallelism 8: plain, with sequence parallelism and selective, and with full recomputation."""
    from dtensor_5d.planner.activity import cut_bytes

    s = 2048
    shape = ModelShape.from_config(
        dict(
            model_type="gpt2", n_embd=hidden, n_head=heads, n_layer=1, vocab_size=51200, n_positions=s,
            activation_function="gelu_pytorch_tanh", resid_pdrop=0.1, attn_pdrop=0.1,
        )
    )  # fmt: skip
    terms = shape.activations(0, s, attention="eager")
    block = shape.activations(0, s, attention="eager", recompute="block")
    plain, parallel = (Plan(Degrees(tp=8), Options(sequence_parallel=sp)) for sp in (False, True))
    per_layer = (
        cut_bytes(terms, plain),
        cut_bytes([t for t in terms if not t.core], parallel),
        sum(t.bytes for t in block),
    )
    name = "interleaved" if v > 1 else "1f1b"
    schedule = build(name, ranks=p, microbatches=2 * p, chunks=v if v > 1 else None)
    chunks = in_flight(schedule, 0, [1] * p * v, [0] * p * v).activations
    for ours, theirs in zip(per_layer, want, strict=True):
        assert chunks * layers / (p * v) * ours * s / 1e9 == pytest.approx(theirs, rel=5e-3)


BAD = [
    (dict(pp=16, microbatches=64, schedule="interleaved", chunks=4), ["64 pipeline stages for 32 layers", "<= 32"]),
    (dict(pp=2, microbatches=4, layers_per_stage=(10, 10)), ["[10, 10] (sum 20)", "2 numbers", "[16, 16]"]),
    (dict(pp=4, microbatches=4, layers_per_stage=(16, 16)), ["4 numbers"]),
    (dict(pp=3, microbatches=12, schedule="dualpipe"), ["dualpipe"]),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=range(len(BAD)))
def test_bad_pipelines_get_an_answer(arguments, said):
    with pytest.raises(PlanError) as caught:
        weigh("llama-3.1-8b", **arguments)
    for text in said:
        assert text in str(caught.value)
