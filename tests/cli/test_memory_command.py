"""`dtensor-5d memory`: presets, folders, plans as flags and as files, data."""

from __future__ import annotations

import json

import pytest

from dtensor_5d import Degrees, Options, Plan
from dtensor_5d.cli import main
from dtensor_5d.planner import ModelShape, memory
from dtensor_5d.schedule import build

SMALL = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32",
}  # fmt: skip


def run(capsys, *argv):
    code = main(["memory", *argv])
    return code, capsys.readouterr().out


def data(capsys, *argv):
    return json.loads(run(capsys, *argv, "--json")[1])


def test_the_page_names_the_model_the_layout_the_causes_and_the_verdict(capsys):
    flags = ("--dp-shard", "8", "--precision", "bf16", "--recompute", "selective", "--seq-len", "8192", "--phases")
    code, out = run(capsys, "llama-3.1-8b", *flags)
    assert code == 0
    assert "llama-3.1-8b: 8.03 B parameters" in out
    assert "Degrees(dp_shard=8) = 8 ranks, precision=bf16, recompute=selective" in out
    assert "rank 0, phase by phase" in out and "step 2: backward" in out
    assert out.splitlines()[-1].startswith("fits below the 80 % line")
    assert all(len(line) <= 120 for line in out.splitlines()[:-1])


def test_numbers_are_those_of_the_planner(capsys):
    plan = Plan(Degrees(pp=2, dp_shard=4), Options(precision="bf16", schedule="1f1b", microbatches=4, zero=2))
    report = memory(ModelShape.preset("smollm2-135m"), plan, micro_batch=2, seq_len=1024)
    flags = "--pp 2 --dp-shard 4 --precision bf16 --schedule 1f1b --microbatches 4 --zero 2 --micro-batch 2"
    got = data(capsys, "smollm2-135m", *flags.split(), "--seq-len", "1024")
    assert got["ranks"] == json.loads(json.dumps(report.to_dict()))["ranks"]
    assert got["parameters"] == 134_515_008


def test_a_schedule_from_a_file(capsys, tmp_path):
    path = tmp_path / "own.csv"
    build("1f1b", ranks=2, microbatches=4).to_csv(path)
    flags = ["smollm2-135m", "--pp", "2", "--microbatches", "4", "--schedule"]
    assert data(capsys, *flags, str(path))["ranks"] == data(capsys, *flags, "1f1b")["ranks"]
    code, out = run(capsys, *flags, str(path))
    assert code == 0 and "schedule=a table of 2 ranks, microbatches=4" in out


def test_a_world_leaves_the_rest_to_dp_shard(capsys):
    a = data(capsys, "smollm2-135m", "--world", "12", "--tp", "3")
    b = data(capsys, "smollm2-135m", "--dp-shard", "4", "--tp", "3")
    assert a == b


@pytest.mark.parametrize("folder", [True, False])
def test_a_folder_and_a_config_file_are_models(capsys, tmp_path, folder):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    got = data(capsys, str(tmp_path if folder else tmp_path / "config.json"))
    assert got["parameters"] == ModelShape.from_config(SMALL).parameters


def test_a_plan_as_a_file_equals_its_flags(capsys, tmp_path):
    plan = Plan(Degrees(pp=2, dp_shard=2), Options(microbatches=4, layers_per_stage=[16, 14]))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    by_file = data(capsys, "smollm2-135m", "--plan", str(path))
    flags = ("--pp", "2", "--dp-shard", "2", "--microbatches", "4", "--layers-per-stage", "16,14")
    assert by_file == data(capsys, "smollm2-135m", *flags)
    assert main(["memory", "smollm2-135m", "--plan", str(path), "--tp", "2"]) == 2
    assert "--plan beside tp" in capsys.readouterr().err


def test_other_options_and_the_global_batch(capsys):
    a = data(capsys, "smollm2-135m", "--option", "regather=window", "--option", "compile=true", "--pp", "2",
             "--dp-shard", "2", "--global-batch", "16", "--micro-batch", "2")  # fmt: skip
    assert "regather=window" in a["plan"] and "compile=True" in a["plan"] and "microbatches=4" in a["plan"]


def test_what_does_not_fit_is_code_1(capsys):
    code, out = run(capsys, "llama-3.1-70b", "--precision", "bf16", "--device-memory", "80GB")
    assert code == 1
    assert out.splitlines()[-1].startswith("DOES NOT FIT") and "of 74.5 GiB" in out.splitlines()[-1]


def test_an_unknown_family_is_weighed_with_a_note(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "novel"}))
    assert main(["memory", str(tmp_path)]) == 0
    assert "'novel' is not a family known here" in capsys.readouterr().err
