"""What every command has: help, exit codes, errors as one message, colour only where there is a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from dtensor_5d.cli import main
from dtensor_5d.cli.console import Console

PROGRAM = [sys.executable, "-c", "import sys; from dtensor_5d.cli import main; sys.exit(main())"]
CHART = ["schedule", "1f1b", "-p", "2", "-m", "2"]


def answer(capsys, *argv):
    """(exit code, standard output, standard error) of a command line."""
    try:
        code = main(argv)
    except SystemExit as end:  # argparse
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("argv", [["--help"], ["schedule", "--help"], ["memory", "--help"]])
def test_help_says_what_it_does_with_an_example(capsys, argv):
    code, out, _ = answer(capsys, *argv)
    assert code == 0
    assert "exit code" in out if "schedule" not in argv else "examples:" in out
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize(
    "argv",
    [
        [], ["paint"], ["schedule"], ["memory"],
        ["schedule", "zbb", "-p", "4", "-m", "8"],
        ["schedule", "1f1b"],
        ["schedule", "1f1b", "-p", "4", "-m", "0"],
        ["schedule", "1f1b", "-p", "four", "-m", "8"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--forward", "0"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--forward", "1,x"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--forward", "1,1,1"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--comm", "nan"],
        ["schedule", "dualpipe", "-p", "3", "-m", "8"],
        ["schedule", "1f1b", "gpipe", "-p", "4", "-m", "8", "--csv", "both.csv"],
        ["schedule", "nowhere.csv"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--svg", "/nowhere/a.svg"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--width", "3"],
        ["memory", "llama9"],
        ["memory", "nowhere/config.json"],
        ["memory", "llama-3.1-8b", "--tp", "3"],
        ["memory", "llama-3.1-8b", "--zero", "4"],
        ["memory", "llama-3.1-8b", "--option", "foo=1"],
        ["memory", "llama-3.1-8b", "--option", "foo"],
        ["memory", "llama-3.1-8b", "--dp-shard", "-1"],
        ["memory", "llama-3.1-8b", "--world", "6", "--tp", "4"],
        ["memory", "llama-3.1-8b", "--world", "0"],
        ["memory", "llama-3.1-8b", "--cp", "8192"],
        ["memory", "llama-3.1-8b", "--option", "zero=1", "--zero", "2"],
        ["memory", "llama-3.1-8b", "--option", "zero=1", "--option", "zero=2"],
        ["memory", "llama-3.1-8b", "--chunks", "3"],
        ["memory", "llama-3.1-8b", "--schedule", "zbv"],
        ["memory", "llama-3.1-8b", "--option", "regather=window"],
        ["schedule", "zbv", "-p", "4", "-m", "8", "--memory-limit", "0"],
        ["schedule", "zbv", "-p", "4", "-m", "8", "--memory-limit", "nan"],
        ["schedule", "zbv", "-p", "4", "-m", "8", "--memory-limit", "much"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--forward", "1e400"],
        ["schedule", "1f1b", "-p", "4", "-m", "8", "--forward", "1e308"],
        ["memory", "llama-3.1-8b", "--pp", "64", "--microbatches", "64"],
        ["memory", "llama-3.1-8b", "--device-memory", "much"],
        ["memory", "llama-3.1-8b", "--global-batch", "7", "--dp-shard", "4"],
        ["memory", "llama-3.1-8b", "--global-batch", "8", "--microbatches", "2"],
        ["memory", "llama-3.1-8b", "--plan", "nowhere.json"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_question_is_code_2_and_one_message(capsys, argv):
    code, out, err = answer(capsys, *argv)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert len(re.findall("error:", err)) == 1 and len(err.split("error:")[1]) > 20


def test_errors_are_data_as_well_when_data_was_asked_for(capsys):
    code, out, err = answer(capsys, "memory", "llama-3.1-8b", "--tp", "3", "--micro-batch", "0", "--json")
    assert code == 2 and err.startswith("dtensor-5d: error:")
    assert [v["asked"] for v in json.loads(out)["violations"]] == ["micro_batch=0", "tp=3 with 32 query heads"]


@pytest.mark.parametrize("flag", ["--json", "--js"])
def test_so_are_errors_of_the_command_line_itself(capsys, flag):
    code, out, err = answer(capsys, "schedule", "1f1b", "-p", "four", flag)
    assert code == 2 and "usage:" in err and json.loads(out) == {
        "error": "argument -p/--ranks: invalid int value: 'four'", "violations": [],
    }  # fmt: skip


def test_minus_one_without_a_world_names_the_flag(capsys):
    _, _, err = answer(capsys, "memory", "llama-3.1-8b", "--dp-shard", "-1")
    assert "--dp-shard -1: needs the number of ranks" in err and "add --world N" in err


def test_the_flag_that_an_error_names_is_in_the_help(capsys):
    for command in ("schedule", "memory"):
        assert "--traceback" in answer(capsys, command, "--help")[1]


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "dtensor_5d.cli", *CHART]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("1f1b: 2 ranks")


def test_a_fault_of_the_program_is_code_3_and_no_traceback_unless_asked(capsys, monkeypatch):
    def broken(console, lines):
        raise RuntimeError("the chart broke")

    monkeypatch.setattr(Console, "print", broken)
    code, _, err = answer(capsys, *CHART)
    assert code == 3
    assert err == "dtensor-5d: error: RuntimeError: the chart broke (a fault of dtensor-5d: see it with --traceback)\n"
    with pytest.raises(RuntimeError, match="the chart broke"):
        main([*CHART, "--traceback"])


def in_terminal(*argv, **environment):
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "COLUMNS", "FORCE_COLOR")}
    process = subprocess.Popen([*PROGRAM, *argv], stdout=theirs, env={**plain, **environment})
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    assert process.wait(30) == 0
    return written.decode()


def test_colour_in_a_terminal_and_letters_elsewhere(capsys):
    seen = in_terminal(*CHART, TERM="xterm-256color")
    assert "\x1b[" in seen and "F0f" not in seen
    assert "F0f" in in_terminal(*CHART, TERM="xterm-256color", NO_COLOR="1")
    _, out, _ = answer(capsys, *CHART)
    assert "\x1b" not in out and "F0ff" in out
    _, out, _ = answer(capsys, *CHART, "--color", "always")
    assert "\x1b[" in out


def test_16_colours_keep_the_kinds_apart(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = answer(capsys, "schedule", "zb-h1", "-p", "2", "-m", "4", "--color", "always")
    legend = out.splitlines()[-1]
    assert len(set(re.findall(r"\x1b\[([0-9;]+)m [FIW] ", legend))) == 3


def test_without_rich_there_is_plain_text(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    _, out, _ = answer(capsys, *CHART, "--color", "always")
    assert "\x1b" not in out and "F0ff" in out


def test_a_reader_that_leaves_early_is_no_error():
    command = " ".join(map(repr, PROGRAM)) + " schedule gpipe -p 16 -m 512 --table --width 4000 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.returncode == 0


def test_the_program_needs_no_torch_and_no_rich_without_a_terminal():
    code = f"import sys; from dtensor_5d.cli import main; main({CHART!r}); main(['memory', 'smollm2-135m'])"
    check = "; sys.exit(' '.join(m for m in ('torch', 'rich', 'transformers') if m in sys.modules) or None)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
