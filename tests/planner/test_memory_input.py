"""Bad input of the memory calculator, and what its report says of estimates."""

from __future__ import annotations

import pytest

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan
from dtensor_5d.planner import Device, ModelShape, memory
from dtensor_5d.planner.cut import split_layers
from tests.families.tiny import tiny_config
from tests.planner.test_memory import weigh

BAD = [
    (dict(micro_batch=0), ["micro_batch=0", ">= 1"]),
    (dict(seq_len=True), ["seq_len=True"]),
    (dict(degrees=dict(tp=3)), ["tp=3 with 32 query heads", "[1, 2, 4, 8, 16, 32]"]),
    (dict(degrees=dict(dp_shard=-1)), ["dp_shard=-1", "resolve"]),
    (dict(degrees=dict(dp_shard=4, ep=2)), ["without experts", "ep=1"]),
    (dict(name="mixtral-8x7b", degrees=dict(dp_shard=16, ep=16)), ["ep=16 with 8 experts", "[1, 2, 4, 8]"]),
    (dict(layers_per_stage=(3, 4)), ["layers_per_stage=[3, 4] (sum 7)", "32 layers", "[32]"]),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=range(len(BAD)))
def test_bad_input_gets_an_answer(arguments, said):
    arguments = {"name": "llama-3.1-8b"} | arguments
    with pytest.raises(PlanError) as caught:
        weigh(**arguments)
    for text in said:
        assert text in str(caught.value)


@pytest.mark.parametrize(("fields", "said"), [
    (dict(optimizer_numbers=-1), "optimizer_numbers=-1"), (dict(optimizer_numbers=1.5), "optimizer_numbers=1.5"),
    (dict(device=5), "device of type int"), (dict(attention="sdpa"), "attention='sdpa'"),
])  # fmt: skip
def test_bad_arguments_get_an_answer(fields, said):
    with pytest.raises(PlanError, match=said):
        memory(ModelShape.preset("smollm2-135m"), Plan(Degrees(), Options()), micro_batch=1, seq_len=64, **fields)


def test_all_violations_come_at_once():
    with pytest.raises(PlanError) as caught:
        weigh("llama-3.1-8b", dict(tp=3, dp_shard=2, ep=2), micro_batch=0)
    assert len(caught.value.violations) == 3


def test_layers_are_split_evenly_and_the_ends_get_less():
    assert split_layers(10, 4) == (2, 3, 3, 2)
    assert split_layers(126, 16) == (7, *[8] * 14, 7)
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            counts = split_layers(layers, stages)
            assert (len(counts), sum(counts)) == (stages, layers)
            assert max(counts) - min(counts) <= 1
    with pytest.raises(PlanError, match="use pp x chunks <= 3"):
        split_layers(3, 4)


@pytest.mark.parametrize(("fields", "said"), [
    (dict(memory=0), ["memory=0", "> 0"]), (dict(context=-1), ["context=-1", ">= 0"]),
    (dict(line="most", margin=float("nan")), ["line='most'", "margin=nan"]),
    (dict(memory=float("inf")), ["memory=inf"]),
])  # fmt: skip
def test_a_device_of_wrong_numbers_is_refused(fields, said):
    with pytest.raises(PlanError) as caught:
        Device(**fields)
    assert all(text in str(caught.value) for text in said)


def test_the_report_says_what_is_an_estimate():
    plan = Plan(Degrees(), Options())
    report = memory(ModelShape.from_config(tiny_config("jamba")), plan, micro_batch=1, seq_len=64)
    assert report.to_dict()["notes"] == list(report.notes)
    assert report.notes
    assert all(note in str(report) for note in report.notes)
