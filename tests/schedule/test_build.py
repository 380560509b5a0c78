"""What `build` and `Costs` refuse, and that they say what to do instead."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest

from dtensor_5d import PlanError
from dtensor_5d.options import SCHEDULES
from dtensor_5d.schedule import Costs, build, check, lower, simulate
from dtensor_5d.schedule.build import MemoryLimitError

from .made import made

UNIT = Costs(1, 1, 1)

REFUSED = [
    (dict(name="zbw", ranks=2, microbatches=4), "did you mean 'zbv'"),
    (dict(name="ZB-H1", ranks=2, microbatches=4), "did you mean 'zb-h1'"),
    (dict(name="1f1b", ranks=0, microbatches=4), "ranks=0: must be an integer >= 1"),
    (dict(name="1f1b", ranks=2, microbatches=0), "microbatches=0: must be an integer >= 1"),
    (dict(name="1f1b", ranks=2.0, microbatches=True), "2 things to change"),
    (dict(name="1f1b", ranks=2, microbatches=4, chunks=2), "it has 1 a rank; use chunks=1, or schedule='interleaved'"),
    (dict(name="zbv", ranks=2, microbatches=4, chunks=3), "it has 2 a rank; use chunks=2"),
    (dict(name="interleaved", ranks=2, microbatches=4, chunks=0), "chunks=0"),
    (dict(name="dualpipe", ranks=3, microbatches=8), "ranks must be even: they work in pairs; use ranks=4 or 2"),
    (dict(name="dualpipe", ranks=4, microbatches=6), "needs at least 2 for each rank: 8; use 8 or more"),
    (dict(name="dualpipe", ranks=4, microbatches=11), "must be even: one half enters at each end; use 10 or 12"),
    (dict(name="dualpipev", ranks=4, microbatches=7), "needs at least 2 for each rank: 8; use 8 or more"),
    (dict(name="1f1b", ranks=4, microbatches=8, memory_limit=3), "needs at least 4 .*limit to 4, or use 'zb-auto'$"),
    (dict(name="zb-h2", ranks=4, microbatches=8, memory_limit=4), "needs at least 7 .*'zb-h1' or 'zb-auto'$"),
    (dict(name="v-half", ranks=4, microbatches=8, memory_limit=5), "raise the limit to 6, or use 'v-min' or 'zbv'$"),
    (dict(name="v-half", ranks=4, microbatches=8, memory_limit=1), "raise the limit to 6$"),
    (dict(name="zbv", ranks=4, microbatches=8, memory_limit=1), "it needs at least 2 .*raise the limit to 2$"),
    (dict(name="zb-auto", ranks=4, microbatches=8, memory_limit=0.5), "it needs at least 1 .*raise the limit to 1$"),
    (dict(name="zb-auto", ranks=2, microbatches=2, memory_limit=1, costs=Costs(1, 1, 1, input_release=-0.12341)),
     "raise the limit to 1.1235$"),
    (dict(name="zb-auto", ranks=4, microbatches=8, memory_limit="2p"), "must be a number above 0"),
    (dict(name="zb-auto", ranks=4, microbatches=8, memory_limit=0), "must be a number above 0"),
    (dict(name="zb-auto", ranks=4, microbatches=8, memory_limit=math.nan), "must be a number above 0"),
    (dict(name="1f1b", ranks=4, microbatches=8, costs=3), r"costs=3: must be Costs\("),
    (dict(name=[], ranks=4, microbatches=8), r"schedule=\[\]: must be one of"),
    (dict(name="zb-auto", ranks=4, microbatches=8, costs=Costs([1, 1, 1], 1, 1)), "forward lists 3 stages: the"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "reason"), REFUSED, ids=lambda x: str(x)[:60])
def test_refusals(request_, reason):
    with pytest.raises(PlanError, match=reason):
        build(**request_)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0, 1, 1), "forward=0: a time must be greater than 0"),
        ((1, -2, 1), "backward_input=-2: a time must be greater than 0"),
        ((1, 1, [1, 0, 1]), "backward_weight=0: a time must be greater than 0"),
        ((1, 1, 1, -0.5), "comm=-0.5: a latency is at least 0"),
        ((math.nan, 1, 1), "forward=nan: must be a finite number"),
        ((1, math.inf, 1), "backward_input=inf: must be a finite number"),
        (("1", 1, 1), "forward='1': must be a finite number"),
        ((True, 1, 1), "forward=True: must be a finite number"),
        ((10**400, 1, 1), "forward=an integer of 1329 bits: must be a finite number, at most 1e.100"),
        ((10**5000, 1, 1), "must be a finite number"),
        ((1e308, 1, 1), "must be a finite number, at most 1e.100"),
        ((1e-308, 1, 1), "must be at least 1e-100"),
        (([[1]], 1, 1), "must be a finite number"),
        ((b"1", 1, 1), "must be a finite number"),
        ((0, 0, 1), "2 things to change"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else None,
)
def test_bad_costs(arguments, reason):
    with pytest.raises(PlanError, match=reason):
        Costs(*arguments)


def test_bad_extra_costs():
    with pytest.raises(PlanError, match="overlapped=0: a time"):
        Costs(1, 1, 1, overlapped=0)
    with pytest.raises(PlanError, match="I cannot let go more than the 1 unit"):
        Costs(1, 1, 1, input_release=1.5)
    with pytest.raises(PlanError, match="comm lists 2 stages: the schedule has 4; give one number, or 4"):
        simulate(build("1f1b", ranks=4, microbatches=4), Costs(1, 1, 1, [0, 1]))


def test_lists_equal_numbers():
    schedule = build("zb-h1", ranks=3, microbatches=5)
    one = simulate(schedule, Costs(3, 2, 1, 0.5))
    many = simulate(schedule, Costs([3] * 3, (2,) * 3, [1.0] * 3, [0.5] * 3, input_release=[0.5] * 3))
    assert one.rows == many.rows and one.peak_activations == many.peak_activations
    assert hash(Costs([3], 2, 1)) == hash(Costs((3,), 2, 1))


def test_numbers_of_numpy_are_numbers():
    costs = Costs(np.float32(3), np.array([2, 2, 2]), np.int64(1), np.array(0.5), input_release=Fraction(1, 2))
    assert costs == Costs(3, (2, 2, 2), 1, 0.5)
    schedule = build("zb-auto", ranks=3, microbatches=4, costs=costs, memory_limit=np.float32(3))
    assert simulate(schedule, costs).peak_activations[0] == 3


@pytest.mark.parametrize("use", [simulate, lambda s, c: lower(s, costs=c)])
def test_costs_that_are_none_are_refused_everywhere(use):
    with pytest.raises(PlanError, match=r"costs=3: must be Costs\("):
        use(made("1f1b"), 3)


@pytest.mark.parametrize("limit", [math.inf, 10**5000], ids=["inf", "integer"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_limit(name, limit):
    schedule = build(name, ranks=2, microbatches=4, memory_limit=limit)
    check(schedule)
    if name not in ("zb-auto", "zbv"):
        assert schedule == made(name, 2, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_limit_that_a_refusal_names_is_kept_and_so_it_is_by_the_schedules_it_names(name):
    size = {"ranks": 2, "microbatches": 4}
    with pytest.raises(MemoryLimitError) as error:
        build(name, **size, memory_limit=0.5)
    needed = error.value.needed
    assert max(simulate(build(name, **size, memory_limit=needed), UNIT).peak_activations) == needed
    with pytest.raises(MemoryLimitError) as error:
        build(name, **size, memory_limit=needed - 0.01)
    for other in error.value.others:
        build(other, **size, memory_limit=needed - 0.01)
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.needed, again.others) == (str(error.value), needed, error.value.others)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_builds(name):
    schedule = made(name)
    check(schedule)
    assert schedule.name == name
    held = [schedule.stages_of(rank) for rank in range(4)]
    assert all(len(stages) == schedule.chunks for stages in held)
    if name in ("zbv", "v-half", "v-min", "dualpipe", "dualpipev"):
        assert held == [(r, 7 - r) for r in range(4)]


def test_stage_neighbours_of_two_copies():
    schedule = build("dualpipe", ranks=4, microbatches=8)
    assert [schedule.before(s) for s in range(8)] == [None, 0, 1, 2, None, 4, 5, 6]
    assert [schedule.after(s) for s in range(8)] == [1, 2, 3, None, 5, 6, 7, None]
    assert schedule.microbatches_of(0) == range(4) and schedule.microbatches_of(7) == range(4, 8)


def test_a_smaller_limit_on_zbv_is_kept():
    rates = []
    for limit in (4, 6, 8):
        schedule = build("zbv", ranks=4, microbatches=12, memory_limit=limit)
        timeline = simulate(schedule, Costs(1, 1, 1))
        assert max(timeline.peak_activations) <= limit
        rates.append(timeline.bubble_rate)
    assert rates[0] > rates[1] > rates[2] == 0


def test_import_is_quick_and_without_torch():
    program = (
        "import time, sys; start = time.process_time(); import dtensor_5d.schedule; "
        "print((time.process_time() - start) * 1e3, 'torch' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(5)]
    times, torches = zip(*(run.stdout.split() for run in runs))
    assert set(torches) == {"False"}
    assert min(map(float, times)) < 50


def test_building_checking_and_simulating_is_quick():
    """16 ranks, 128 micro-batches of 1F1B in under 50 ms (issue 3): CPU time, best of 5."""
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        schedule = build("1f1b", ranks=16, microbatches=128)
        check(schedule)
        simulate(schedule, Costs(1, 1, 1))
        best = min(best, time.process_time() - start)
    assert best < 0.05
