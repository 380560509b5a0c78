"""Each phase at its own fullest moment: random layouts against a slow walk, and values worked out by hand."""

from __future__ import annotations

import random

import pytest

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan
from dtensor_5d.planner import memory
from dtensor_5d.planner.activity import Activity, Tokens, activity_of_stage
from dtensor_5d.planner.moments import fullest_moments
from dtensor_5d.planner.stages import stages_by_rank
from dtensor_5d.schedule import build

PRESETS = ("llama-3.1-8b", "mixtral-8x7b", "gpt-oss-120b", "gemma-3-27b", "smollm2-135m")
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto", "zbv", "v-half", "v-min", "dualpipe", "dualpipev",
)  # fmt: skip
S = 2048


def draw(seed: int) -> tuple[ModelShape, Plan]:
    """A random layout with a pipeline."""
    rnd = random.Random(seed)
    pp = rnd.choice([2, 4, 4])
    options = dict(
        schedule=SCHEDULES[seed % len(SCHEDULES)], microbatches=rnd.choice([8, 16]), zero=rnd.choice([1, 2, 3]),
        precision=rnd.choice([None, "bf16", "fp32"]), recompute=rnd.choice(["none", "block", "selective", "every=2"]),
    )  # fmt: skip
    degrees = Degrees(pp=pp, dp_shard=rnd.choice([1, 2, 8]), tp=rnd.choice([1, 2]), cp=rnd.choice([1, 2]))
    return ModelShape.preset(rnd.choice(PRESETS)), Plan(degrees, Options(**options))


def slow(schedule, rank: int, activity) -> dict[str, int]:
    """Bytes of the fullest moment of each phase, from lists of which micro-batches wait where."""
    forwarded: list[int] = []
    input_done: list[int] = []
    most = {"loss": 0, "backward": 0}

    def see(phase: str, extra: int) -> None:
        alive = sum(activity[s].kept for s in forwarded) + sum(activity[s].stash for s in input_done)
        most[phase] = max(most[phase], alive + extra)

    for action in schedule.table[rank]:
        parts = sorted(action.parts or (action,), key=lambda p: "FIWB".index(p.kind))
        beside = 0
        for part in parts:
            stage = part.stage % schedule.depth
            own = activity[stage]
            if part.kind == "F":
                forwarded.append(stage)
                see("loss", own.logits)
                beside = own.logits if len(parts) > 1 else 0
            elif part.kind == "W":
                see("backward", 0)
                input_done.remove(stage)
            else:
                see("loss", max(own.logits, beside))
                see("backward", own.recompute + own.working + beside - own.probabilities)
                forwarded.remove(stage)
                if part.kind == "I":
                    input_done.append(stage)
                see("backward", own.recompute + own.working + beside)
    assert not forwarded
    assert not input_done
    return most


def test_every_phase_at_its_fullest_and_no_cause_below_zero():
    weighed = []
    for seed in range(5 * len(SCHEDULES)):
        shape, plan = draw(seed)
        try:
            report = memory(shape, plan, micro_batch=1, seq_len=S)
        except PlanError:  # more stages than layers, or a schedule's own rule
            continue
        weighed.append(plan.options.schedule)
        precision = plan.options.precision
        width = 2 if precision == "bf16" or (shape.bytes_per_number == 2 and not precision) else 4
        by_rank, schedule = stages_by_rank(shape, plan)
        tokens = Tokens(S // plan.degrees.cp, S, width, "flash")
        activity = {s.number: activity_of_stage(shape, plan, s, tokens) for stages in by_rank for s in stages}
        for rank in report:
            for phase, causes in rank.phases.items():
                assert min(causes.values()) >= 0, (seed, phase, causes)
            got, want = fullest_moments(schedule, rank.rank, activity), slow(schedule, rank.rank, activity)
            assert {phase: sum(causes.values()) for phase, causes in got.items()} == want, seed
            for phase, causes in got.items():
                shown = rank.phases[f"step 1: {phase}"]
                # `working` has the largest unit's gradients besides.
                assert shown["working"] >= causes["working"]
                assert all(shown[c] == causes[c] for c in causes if c != "working"), seed
    assert set(weighed) == set(SCHEDULES)
    assert len(weighed) >= 40


def test_a_split_backward_with_recomputation_by_hand():
    """A stash that is larger than what is kept: the fullest moment is the one with most stash."""
    schedule = build("zb-h1", ranks=2, microbatches=4)
    first = Activity(kept=1, stash=10, recompute=5, logits=0, working=2, buffers=0, probabilities=0)
    last = Activity(kept=4, stash=10, recompute=5, logits=6, working=2, buffers=0, probabilities=3)
    for rank, own in enumerate((first, last)):
        waiting = most_waiting = 0
        for action in schedule.table[rank]:
            waiting += {"I": 1, "W": -1}.get(action.kind, 0)
            most_waiting = max(most_waiting, waiting)
        causes = fullest_moments(schedule, rank, {0: first, 1: last})["backward"]
        assert causes["stash"] == 10 * most_waiting
        assert causes["activations"] in (0, own.kept, own.kept - own.probabilities, 2 * own.kept)
        assert (causes["recompute"], causes["working"], causes["logits"]) == (5, 2, 0)


def test_one_micro_batch_by_hand():
    own = Activity(kept=100, stash=70, recompute=7, logits=40, working=5, buffers=0, probabilities=30)
    schedule = build("zb-h1", ranks=1, microbatches=1)
    loss = dict(activations=100, stash=0, logits=40, recompute=0, working=0)
    # I starts with 100 - 30 kept, and ends with a stash of 70: the same 70 + 7 + 5
    for got in (fullest_moments(None, 0, {0: own}), fullest_moments(schedule, 0, {0: own})):
        assert got["loss"] == loss
        assert got["backward"] == dict(activations=70, stash=0, logits=0, recompute=7, working=5)


def test_the_layout_that_had_negative_bytes():
    options = Options(schedule="zb-h1", microbatches=4, recompute="block", precision="bf16")
    plan = Plan(Degrees(pp=2, dp_shard=64, ep=4), options)
    report = memory(ModelShape.preset("mixtral-8x7b"), plan, micro_batch=1, seq_len=4096)
    assert min(bytes_ for r in report for causes in r.phases.values() for bytes_ in causes.values()) == 0
    for rank in report:
        assert rank.phases["step 2: backward"]["stash"] > 0
        # a stage input of 2 bytes x 4096 x 4096 tokens for each of its 16 layers and one more
        assert rank.phases["step 2: loss"]["activations"] >= 17 * 2 * 4096 * 4096 - 1


TIED = ModelShape.preset("smollm2-135m")


@pytest.mark.parametrize(
    ("schedule", "tables"),
    [("1f1b", 2), ("interleaved", 2), ("zb-h1", 2), ("zbv", 1), ("v-half", 1), ("v-min", 1), ("dualpipev", 1),
     ("dualpipe", 4)],
)  # fmt: skip
def test_a_tied_table_is_held_once_by_a_rank_that_has_both_ends(schedule, tables):
    plan = Plan(Degrees(pp=2), Options(schedule=schedule, microbatches=8))
    report = memory(TIED, plan, micro_batch=1, seq_len=512)
    copies = 2 if schedule == "dualpipe" else 1
    held = sum(stage.parameters for rank in report for stage in rank.stages)
    assert held == copies * (TIED.parameters - TIED.embedding_parameters) + tables * TIED.embedding_parameters
    state = sum(rank.dense[n] for rank in report for n in ("parameters", "master"))
    assert state == held * TIED.bytes_per_number
