"""The text form, both ways, here and in torch."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from dtensor_5d import PlanError
from dtensor_5d.schedule import Action, Costs, Schedule, build, check, lower, simulate

from .made import made

ONE_COPY = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto", "zbv", "v-half", "v-min", "dualpipev"]


def torch_table(schedule):
    return {r: [torch_schedules._Action.from_str(str(a)) for a in row] for r, row in enumerate(schedule.table)}


@pytest.mark.parametrize(
    "text",
    ["2F0", "0I3", "1W12", "7B1", "0SEND_F1", "1RECV_F1", "1SEND_B0", "0RECV_B0", "3UNSHARD", "3RESHARD",
     "0REDUCE_GRAD", "0REDUCE_GRAD5", "(2F0;1B3)OVERLAP_F_B"],
)  # fmt: skip
def test_text_both_ways(text):
    action = Action.parse(text)
    assert str(action) == text
    assert str(torch_schedules._Action.from_str(text)) == text
    assert hash(action) == hash(Action.parse(f" {text} "))


@pytest.mark.parametrize(
    "text", ["", "F0", "2X0", "2F", "2f0", "-1F0", "2F0x", "(1F0)OVERLAP_F_B", "(1B0;1F0)OVERLAP_F_B"]
)
def test_text_that_is_no_action(text):
    with pytest.raises(PlanError, match="STAGE KIND MICROBATCH"):
        Action.parse(text)


@pytest.mark.parametrize("name", ONE_COPY)
def test_torch_accepts_our_schedules(name):
    schedule = made(name)
    home = torch_schedules._validate_schedule(torch_table(schedule), 4, schedule.stages, 8)
    assert home == dict(enumerate(schedule.rank_of))


@pytest.mark.parametrize("name", [*ONE_COPY, "dualpipe"])
def test_csv_both_ways(name, tmp_path):
    schedule = made(name)
    for table in (schedule, lower(schedule), lower(schedule, "window", "microbatch", split_backward=False)):
        path = tmp_path / "schedule.csv"
        text = table.to_csv(path)
        for source in (text, path, str(path)):
            back = Schedule.from_csv(source, name=name, copies=schedule.copies)
            assert back == table


@pytest.mark.parametrize("name", ONE_COPY)
def test_torch_simulates_our_lowered_schedules(name):
    """torch's own simulation of sends and receives runs to the end."""
    schedule = lower(made(name), None, None)  # it knows no parameter actions
    table = torch_table(schedule)
    done = torch_schedules._simulate_comms_compute(table, schedule.rank_of.__getitem__, schedule.stages)
    assert sum(a is not None for row in done.values() for a in row) == sum(map(len, schedule.table))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 9), (4, 8), (8, 20)])
def test_dualpipev_is_torchs(ranks, microbatches):
    theirs = object.__new__(torch_schedules.ScheduleDualPipeV)
    theirs.pp_group_size, theirs._n_microbatches = ranks, microbatches
    ours = build("dualpipev", ranks=ranks, microbatches=microbatches)
    for rank, row in enumerate(ours.table):
        expected = [str(a) for a in theirs._calculate_single_rank_operations(rank) if a is not None]
        assert [str(a) for a in row] == expected


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 6), (3, 3, 2)])
def test_interleaved_is_torchs(ranks, chunks, microbatches):
    theirs = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs._n_microbatches, theirs.n_local_stages = ranks, microbatches, chunks
    theirs.microbatches_per_round = microbatches // max(1, microbatches // ranks)
    ours = build("interleaved", ranks=ranks, chunks=chunks, microbatches=microbatches)
    for rank, row in enumerate(ours.table):
        expected = [str(a) for a in theirs._calculate_single_rank_operations(rank) if a is not None]
        assert [str(a) for a in row] == expected


@pytest.mark.parametrize(
    ("ranks", "microbatches", "costs"),
    [(4, 8, (3, 3, 2, 0.1)), (8, 24, (4959, 5217, 3519, 213)), (8, 16, (5, 6, 4, 0.5)), (3, 4, (1, 2, 1)),
     (24, 72, (6763, 6969, 5251, 755))],
)  # fmt: skip
def test_reads_torchs_csv(ranks, microbatches, costs):
    """torch's hand-written ZBV, bubbles and all, is a schedule to us; ours is at least as good."""
    theirs = object.__new__(torch_schedules.ScheduleZBVZeroBubble)
    theirs.pp_group_size, theirs._n_microbatches, theirs.num_stages = ranks, microbatches, 2 * ranks
    rows = [theirs._calculate_single_rank_operations(rank) for rank in range(ranks)]
    text = "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows)
    schedule = Schedule.from_csv(text)
    check(schedule)
    assert schedule.rank_of == (*range(ranks), *reversed(range(ranks)))
    costs = Costs(*costs)
    ours = simulate(build("zbv", ranks=ranks, microbatches=microbatches, costs=costs), costs)
    assert max(ours.spans) <= max(simulate(schedule, costs).spans)
