"""`check` proves every schedule that we build, and finds what is wrong with a bad one."""

from __future__ import annotations

import itertools

import pytest

from dtensor_5d import PlanError
from dtensor_5d.options import Options
from dtensor_5d.schedule import Action, Costs, Schedule, build, check, lower, simulate

HANDWRITTEN = ["gpipe", "1f1b", "zb-h1", "zb-h2"]


def legal(microbatches):
    """(name, ranks, chunks, micro-batches) of everything that is legal for p 2..8 and v 1..3."""
    for p, m in itertools.product(range(2, 9), microbatches):
        yield from ((name, p, None, m) for name in HANDWRITTEN)
        yield from (("interleaved", p, v, m) for v in (1, 2, 3))
        if m >= 2 * p:
            yield "dualpipev", p, None, m
            if m % 2 == 0 and p % 2 == 0:
                yield "dualpipe", p, None, m


def prove(name, p, v, m):
    schedule = build(name, ranks=p, chunks=v, microbatches=m)
    check(schedule)
    check(lower(schedule))


def test_every_handwritten_schedule_is_free_of_deadlock():
    for case in legal((1, 2, 3, 5, 8, 13, 16, 18)):
        prove(*case)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_handwritten_schedule_is_free_of_deadlock_for_all_m():
    for case in legal(range(1, 33)):
        prove(*case)


SEARCHED = ["zb-auto", "zbv", "v-half", "v-min"]


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_schedules_are_free_of_deadlock(name):
    for p, m in ((3, 2), (5, 3), (2, 24)):
        prove(name, p, None, m)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SEARCHED)
def test_searched_schedules_are_free_of_deadlock_for_all_p(name):
    for p, m in itertools.product(range(2, 9), (1, 2, 3, 4, 6, 9, 14, 20, 32)):
        prove(name, p, None, m)


@pytest.mark.parametrize("name", [*HANDWRITTEN, *SEARCHED, "interleaved", "dualpipev"])
def test_one_rank(name):
    prove(name, 1, None, 3)


def csv(*rows):
    return "\n".join(rows)


GOOD = csv("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")

BAD = {
    "skips a backward": (csv("0F0,0F1,0B0", "1F0,1B0,1F1,1B1"), r"rank 0, cell 3 .*missing: 0B1", ">end<"),
    "skips a forward": (csv("0F0,0B0,0B1", "1F0,1B0,1F1,1B1"), r"cell 2 \(0B1\).*after F; done so far", ">0B1<"),
    "does one twice": (csv("0F0,0F1,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"), r"cell 2 \(0F1\).*comes once", ">0F1<"),
    "B and I of one": (csv("0F0,0F1,0B0,0I0,0B1", "1F0,1B0,1F1,1B1"), r"cell 3 \(0I0\).*done so far: all", ">0I0<"),
    "I without W": (csv("0F0,0F1,0B0,0I1", "1F0,1B0,1F1,1B1"), r"missing: 0W1", ">end<"),
    "W before I": (csv("0F0,0F1,0W0,0I0,0B1", "1F0,1B0,1F1,1B1"), r"cell 2 \(0W0\).*after F and I", ">0W0<"),
    "backward first": (csv("0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"), r"nothing may wait in a circle", ">0B0<|>1F1<"),
    "circle": (
        csv("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"), r"0B0 on rank 0 waits for 1B0.*1F1 on rank 1", ">0B0<|>1F1<"),
    "stage on two ranks": (csv("0F0,0B0,1F0", "1B0"), r"stage 1 on ranks 0 and 1", ">1B0<"),
    "no stage 1": (csv("0F0,0B0", "2F0,2B0"), r"stage 2 is there and stage 1 on no rank.*numbers 0 to 1", ""),
    "a word": (csv("0F0,0Q0", "1F0,1B0"), r"rank 0, cell 1: action '0Q0'", ""),
    "many words": (",".join(["0Q0"] * 5000), r"4992 more cells: are no actions either", ""),
    "nothing": ("\n", r"empty schedule", ""),
    "sends before computing": (
        csv("0SEND_F0,0F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"), r"cell 0 .*not computed yet", ">0SEND_F0<"),
    "reads before receiving": (
        csv("0F0,0SEND_F0,0RECV_B0,0B0", "1F0,1RECV_F0,1B0,1SEND_B0"), r"cell 0 .*arrives by 1RECV_F0", ">1F0<"),
    "no send": (csv("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0"), r"1SEND_B0 is missing", ">end<"),
    "no receiver": (
        csv("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0"), r"no other rank to send", ">1SEND_F0<"),
    "crossed sends": (
        csv("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"),
        r"reached together, but rank", ">0SEND_F1<|>1SEND_B0<"),
    "reads what is not gathered": (
        csv("0UNSHARD,0F0,0RESHARD,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"),
        r"parameters of stage 0 are not gathered", ">0B0<"),
    "gathers twice": (
        csv("0UNSHARD,0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD", "1RECV_F0,1F0,1B0,1SEND_B0"),
        r"is so already", ""),
    "stays gathered": (
        csv("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"), r"stay gathered", ">end<"),
    "reduces too early": (
        csv("0F0,0SEND_F0,0RECV_B0,0I0,0REDUCE_GRAD,0W0", "1RECV_F0,1F0,1B0,1SEND_B0"),
        r"when it is whole", ">0REDUCE_GRAD<"),
    "reduces a micro-batch too early": (
        csv("0F0,0F1,0B0,0REDUCE_GRAD1,0B1,0REDUCE_GRAD0"), r"when it is whole", ">0REDUCE_GRAD1<"),
    "reduces twice": (csv("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD"), r"cell 3 .*reduced once", ">0REDUCE_GRAD<"),
    "reduces a micro-batch twice": (
        csv("0F0,0B0,0REDUCE_GRAD0,0REDUCE_GRAD0"), r"cell 3 .*reduced once", ">0REDUCE_GRAD0<"),
    "reduces both ways": (csv("0F0,0B0,0REDUCE_GRAD0,0REDUCE_GRAD"), r"not both", ">0REDUCE_GRAD<"),
    "reduces both ways round": (csv("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD0"), r"not both", ">0REDUCE_GRAD0<"),
    "forgets to reduce a micro-batch": (
        csv("0F0,0B0,0REDUCE_GRAD0,0F1,0B1"), r"reduced if any is; missing: 0REDUCE_GRAD1", ">end<"),
    "reduces on one rank": (
        csv("0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD", "1RECV_F0,1F0,1B0,1SEND_B0"),
        r"rank 1, cell 4 .*missing: 1REDUCE_GRAD;", ">end<"),
    "gathers on one rank": (
        csv("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD", "1RECV_F0,1F0,1B0,1SEND_B0"),
        r"rank 1, cell 1 .*parameters of stage 1 are not gathered", ">1F0<"),
    "gathers for a micro-batch": (csv("0UNSHARD0,0F0,0B0,0RESHARD0"), r"belong to no micro-batch", ">0UNSHARD0<"),
    "a pair that needs itself": (
        csv("(0F0;0B0)OVERLAP_F_B"), r"this backward needs this forward", r">(0F0;0B0)OVERLAP_F_B<"),
    "a large number": (csv("0F0,0B0,0F999999999"), r"micro-batch 999999999 is there and micro-batch 1 nowhere", ""),
    "a large stage": (csv("999999F0,999999B0"), r"stage 999999 is there and stage 0 on no rank", ""),
    "a larger number": (csv("0F" + "9" * 100_000), r"action '0F99.*99' *: an action is", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_csv_is_refused_with_the_cell(fault):
    text, reason, marks = BAD[fault]
    with pytest.raises(PlanError, match=reason) as error:
        Schedule.from_csv(text)
    assert len(str(error.value)) < 2000
    assert not marks or any(mark in str(error.value) for mark in marks.split("|")), str(error.value)


def test_good_csv():
    schedule = Schedule.from_csv(GOOD)
    assert (schedule.ranks, schedule.chunks, schedule.microbatches, schedule.rank_of) == (2, 1, 2, (0, 1))
    assert simulate(schedule, Costs(1, 1, 1)).makespan == 9


def test_a_byte_order_mark_and_other_line_ends():
    assert Schedule.from_csv("\ufeff" + GOOD.replace("\n", "\r\n")) == Schedule.from_csv(GOOD)


def test_blank_lines_are_no_ranks_and_an_idle_rank_is_no_blank_line():
    assert Schedule.from_csv("\n \n" + GOOD.replace("\n", "\n\n")) == Schedule.from_csv(GOOD)
    idle = Schedule.from_csv(GOOD.rstrip() + "\n,\n")
    assert idle.ranks == 3 and Schedule.from_csv(idle.to_csv()) == idle


def test_a_path_in_capitals(tmp_path):
    path = tmp_path / "RUN.CSV"
    path.write_text(GOOD)
    assert Schedule.from_csv(str(path)) == Schedule.from_csv(GOOD)
    assert Options(schedule=str(path)) == Options(schedule=GOOD)


def test_a_file_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(GOOD, encoding="utf-8-sig")
    assert Schedule.from_csv(path) == Schedule.from_csv(GOOD)


@pytest.mark.parametrize("source", [None, GOOD.encode(), 3, ["0F0"]])
def test_what_is_no_text_is_refused(source):
    with pytest.raises(PlanError, match="must be text, or a path to a file"):
        Schedule.from_csv(source)


def test_copies_of_the_model_are_read_off_the_table():
    for name, copies in (("dualpipe", 2), ("dualpipev", 1), ("1f1b", 1)):
        schedule = build(name, ranks=4, microbatches=8)
        for table in (schedule, lower(schedule)):
            assert Schedule.from_csv(table.to_csv(), name=name) == table
            assert table.copies == copies


@pytest.mark.parametrize("copies", [0, 3, -1, 2.0, True, "2"])
def test_copies_that_cannot_be(copies):
    text = build("dualpipe", ranks=4, microbatches=8).to_csv()
    with pytest.raises(PlanError, match=r"copies=.*divides the 8 stages and the 8 micro-batches; use 1, 2, 4, 8"):
        Schedule.from_csv(text, copies=copies)


def test_checking_what_is_no_schedule():
    with pytest.raises(PlanError, match="must be a Schedule"):
        check(GOOD)


@pytest.mark.parametrize("reduce", ["window", "microbatch"])
def test_every_lost_or_doubled_reduction_and_gather_is_found(reduce):
    """Take one parameter action out of a lowered schedule, or put it in twice, anywhere: never accepted."""
    schedule = lower(build("zbv", ranks=2, microbatches=2), "visit", reduce)
    check(schedule)
    for rank, row in enumerate(schedule.table):
        for cell, action in enumerate(row):
            if action.kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
                for new in ((), (action, action)):
                    table = [list(r) for r in schedule.table]
                    table[rank][cell : cell + 1] = new
                    with pytest.raises(PlanError):
                        check(schedule.with_table(table))


def test_missing_file():
    with pytest.raises(PlanError, match="cannot be read"):
        Schedule.from_csv("/nowhere/schedule.csv")


@pytest.mark.parametrize("kind", ["SEND_F", "RECV_F", "SEND_B", "RECV_B"])
def test_every_lost_message_is_found(kind):
    """Take one send or receive out of a lowered schedule, anywhere: never accepted, never a hang."""
    schedule = lower(build("zb-h1", ranks=3, microbatches=3))
    for rank, row in enumerate(schedule.table):
        for cell, action in enumerate(row):
            if action.kind == kind:
                table = [list(r) for r in schedule.table]
                del table[rank][cell]
                with pytest.raises(PlanError):
                    check(schedule.with_table(table))


def test_the_deadlock_of_one_microbatch_on_two_ranks():
    """Field fault P7: torch deadlocked in warm-up with one micro-batch; ours are legal and proven."""
    for name in (*HANDWRITTEN, *SEARCHED, "interleaved"):
        prove(name, 2, None, 1)


def test_the_window_of_a_long_table_names_its_cell():
    schedule = build("1f1b", ranks=4, microbatches=64)
    table = [list(row) for row in schedule.table]
    table[2][70], table[2][71] = table[2][71], table[2][70]
    table[2][70] = Action(2, "F", 0)
    with pytest.raises(PlanError) as error:
        check(schedule.with_table(table))
    text = str(error.value)
    assert "rank 2, cell 70 (2F0)" in text and ">2F0<" in text and max(map(len, text.splitlines())) < 300


def test_simulating_what_cannot_run_explains_itself():
    schedule = build("1f1b", ranks=2, microbatches=2)
    wrong = schedule.with_table([schedule.table[0][::-1], schedule.table[1]])
    for use in (check, lower, lambda s: simulate(s, Costs(1, 1, 1))):
        with pytest.raises(PlanError, match="after F"):
            use(wrong)
