"""`dtensor-5d schedule`: charts, comparison, files, data."""

from __future__ import annotations

import json

import pytest

from dtensor_5d.cli import main
from dtensor_5d.options import SCHEDULES
from dtensor_5d.schedule import Costs, Schedule, build, simulate


def run(capsys, *argv):
    code = main(argv)
    return code, capsys.readouterr().out


def test_one_schedule_is_a_chart_and_a_table_of_ranks(capsys):
    code, out = run(capsys, "schedule", "1f1b", "-p", "2", "-m", "2", "--width", "44", "--table")
    assert code == 0
    lines = out.splitlines()
    caption = " ".join(line.strip() for line in lines[:3])
    assert caption.startswith("1f1b: 2 ranks, 2 micro-batches, 1 chunk a rank | makespan 9 | bubble 33.3 %")
    assert lines[3] == "rank 0  F0ffF1ff........B0bbbbbb....B1bbbbbb"
    assert lines[8].split() == ["rank", "0", "0", "6", "3", "33.3", "%"]
    assert lines[12].split() == ["rank", "0", "2", "0"]
    assert lines[15] == "rank 0  0F0 0F1 0B0 0B1"
    assert lines[-1] == " F  forward    B  backward    .  idle"


def test_several_are_compared_on_one_time_axis(capsys):
    code, out = run(capsys, "schedule", "gpipe", "zb-h2", "-p", "4", "-m", "8")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[0] == "schedule" and lines[1].split()[0] == "gpipe" and lines[2].split()[0] == "zb-h2"
    axes = [line.split() for line in lines if line.startswith("        0 ")]
    assert axes == [["0", "16.5", "33"]] * 2


def test_all_shows_what_is_possible_and_says_why_the_others_are_not(capsys):
    code, out = run(capsys, "schedule", "all", "-p", "3", "-m", "6", "--no-gantt", "--json")
    assert code == 0
    data = json.loads(out)
    names = [s["name"] for s in data["schedules"]]
    assert sorted([*names, *data["refused"]]) == sorted(SCHEDULES)
    assert "dualpipe" in data["refused"], "3 ranks are odd"
    assert {"1f1b", "zbv", "zb-auto"} <= set(names)


def test_times_are_of_a_whole_rank_and_chunks_get_their_share(capsys):
    """So that the work of a rank, 8 x (2 + 3 + 1), is the same in each."""
    names = ("1f1b", "interleaved", "zbv", "dualpipe")
    flags = ("--forward", "2", "--backward-input", "3", "--backward-weight", "1")
    _, out = run(capsys, "schedule", *names, "-p", "4", "-m", "8", *flags, "--json")
    data = {s["name"]: s for s in json.loads(out)["schedules"]}
    assert all(busy == pytest.approx(48) for s in data.values() for busy in s["busy"])
    direct = simulate(build("interleaved", ranks=4, microbatches=8), Costs(1, 1.5, 0.5))
    assert data["interleaved"]["makespan"] == pytest.approx(direct.makespan)
    assert data["interleaved"]["bubble_rate"] == pytest.approx(direct.bubble_rate)
    assert data["interleaved"]["peak_activations"] == pytest.approx([peak / 2 for peak in direct.peak_activations])


def test_lists_give_each_stage_its_own_time_as_it_stands(capsys):
    _, out = run(capsys, "schedule", "zbv", "-p", "2", "-m", "4", "--forward", "1,2,3,4", "--json")
    data = json.loads(out)["schedules"][0]
    first = {a["action"]: a["end"] - a["start"] for row in data["actions"] for a in row}
    assert [first[f"{stage}F0"] for stage in range(4)] == [1, 2, 3, 4]


def test_data_is_the_timeline(capsys):
    _, out = run(capsys, "schedule", "1f1b", "-p", "2", "-m", "2", "--json")
    (made,) = json.loads(out)["schedules"]
    assert made["rank_of_stage"] == [0, 1] and made["makespan"] == 9
    assert made["actions"][1][1] == {"action": "1B0", "start": 2.0, "end": 4.0}


def test_files_are_written_and_a_csv_comes_back(capsys, tmp_path):
    paths = {name: tmp_path / f"run.{name}" for name in ("csv", "svg", "trace")}
    flags = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert main(["schedule", "interleaved", "-p", "2", "-m", "4", "-v", "3", *flags]) == 0
    assert capsys.readouterr().err == "".join(f"wrote {path}\n" for path in paths.values())
    assert paths["svg"].read_text().startswith("<svg") and "traceEvents" in json.loads(paths["trace"].read_text())
    again = Schedule.from_csv(paths["csv"])
    assert again.table == build("interleaved", ranks=2, microbatches=4, chunks=3).table
    _, out = run(capsys, "schedule", str(paths["csv"]), "--json")
    (made,) = json.loads(out)["schedules"]
    assert (made["name"], made["ranks"], made["chunks"], made["microbatches"]) == ("run", 2, 3, 4)


def test_the_lowered_table_has_what_a_runtime_executes(capsys, tmp_path):
    path = tmp_path / "low.csv"
    code, out = run(
        capsys, "schedule", "1f1b", "-p", "2", "-m", "1", "--lower", "window", "--csv", str(path), "--table"
    )
    assert code == 0
    for text in (out, path.read_text()):
        assert all(action in text for action in ("0UNSHARD", "0SEND_F0", "1RECV_F0", "0REDUCE_GRAD"))


def test_a_csv_that_cannot_run_shows_the_bad_cell(capsys, tmp_path):
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert main(["schedule", str(path)]) == 2
    err = capsys.readouterr().err
    assert ">1B0<" in err and "Traceback" not in err


def refusal(capsys, *argv):
    assert main(["schedule", *argv]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        ("v-half -p 4 -m 8 --memory-limit 2", "3"),
        ("zbv -p 4 -m 8 --memory-limit 0.5", "1"),
        ("zbv -p 5 -m 1 --memory-limit 0.9", "1"),
        ("zb-auto -p 3 -m 4 --memory-limit 0.25", "1"),
        ("1f1b -p 4 -m 8 --memory-limit 1", "4"),
        ("interleaved -v 3 -p 4 -m 8 --memory-limit 3.5", "5"),
        ("dualpipe -p 4 -m 8 --memory-limit 4.5", "5"),
        ("dualpipev -p 4 -m 8 --memory-limit 4", "4.5"),
    ],
)
def test_memory_is_counted_in_one_unit_and_the_value_named_is_enough(capsys, argv, needed):
    words = argv.split()
    err = refusal(capsys, *words)
    assert f"--memory-limit {words[-1]} with {words[0]}: it needs at least {needed} micro-batches on all layers" in err
    assert f"raise --memory-limit to {needed}" in err
    code, out = run(capsys, "schedule", *words[:-1], needed, "--json")
    assert code == 0 and max(json.loads(out)["schedules"][0]["peak_activations"]) <= float(needed)


def test_no_limit_at_all(capsys):
    for name in ("zb-auto", "zbv", "interleaved"):
        assert main(["schedule", name, "-p", "2", "-m", "4", "--memory-limit", "inf", "--json"]) == 0


def test_dualpipe_comes_back_from_its_csv(capsys, tmp_path):
    path = tmp_path / "d.csv"
    flags = ("--overlapped", "2.4", "--json")
    _, first = run(capsys, "schedule", "dualpipe", "-p", "4", "-m", "8", "--csv", str(path), *flags)
    code, again = run(capsys, "schedule", str(path), *flags)
    first, again = json.loads(first)["schedules"][0], json.loads(again)["schedules"][0]
    assert code == 0 and again == {**first, "name": "d"}


def test_flags_that_a_file_contradicts_are_refused_and_others_welcome(capsys, tmp_path):
    path = str(tmp_path / "run.csv")
    build("interleaved", ranks=2, microbatches=4, chunks=3).to_csv(path)
    assert main(["schedule", path, "-p", "2", "-m", "4", "-v", "3", "--memory-limit", "3"]) == 0
    err = refusal(capsys, path, "-p", "4", "-m", "5", "-v", "2")
    assert "--ranks 4" in err and "the file has 2;" in err and "--microbatches 5" in err and "--chunks 2" in err
    assert "--memory-limit 1 with" in (err := refusal(capsys, path, "--memory-limit", "1")) and "run.csv" in err
    assert main(["schedule", path, "interleaved", "-p", "2", "-m", "4", "-v", "2"]) == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("zbv 1f1b -v 3", "--chunks 3: only interleaved has"),
        ("1f1b --overlapped 2", "--overlapped: only dualpipe"),
        ("1f1b --lower visit", "--lower visit: changes what --table prints"),
        ("1f1b --svg -", "--svg -: must be a file"),
    ],
)
def test_what_would_change_nothing_is_refused(capsys, flags, reason):
    assert reason in refusal(capsys, *flags.split(), "-p", "2", "-m", "4")


def test_each_file_is_for_one_thing(capsys, tmp_path):
    path, other = tmp_path / "x.csv", tmp_path / "y"
    flags = ("-p", "2", "-m", "4")
    err = refusal(capsys, "1f1b", *flags, "--svg", str(path), "--trace", str(tmp_path / "." / "x.csv"))
    assert "for --svg and --trace: each needs a file of its own" in err and not path.exists()
    build("1f1b", ranks=2, microbatches=4).to_csv(path)
    before = path.read_text()
    assert "x.csv and --svg" in refusal(capsys, str(path), "--svg", str(path)) and path.read_text() == before
    assert main(["schedule", "1f1b", *flags, "--svg", str(other), "--csv", str(path)]) == 0


@pytest.mark.parametrize("width", [40, 60, 90])
def test_nothing_is_wider_than_asked(capsys, width):
    names = ("interleaved", "dualpipe", "dualpipev", "zbv")
    for argv in (("all", "-p", "3", "-m", "8"), (*names, "-p", "4", "-m", "8"), ("dualpipe", "-p", "4", "-m", "8")):
        _, out = run(capsys, "schedule", *argv, "--table", "--lower", "visit", "--width", str(width))
        assert max(map(len, out.splitlines())) <= width
    flags = ("--pp", "4", "--microbatches", "8", "--precision", "bf16", "--phases", "--width", str(width))
    _, out = run(capsys, "memory", "deepseek-v3", *flags)
    assert max(map(len, out.splitlines())) <= width
