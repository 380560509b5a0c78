"""Errors, degrees, options, plan: plain numbers and clear refusals; and what importing the package costs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_5d.degrees import DENSE_AXES, Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan, built_violations, matches, rule_violations

counts = st.integers(1, 6)


def _refused(build):
    with pytest.raises(PlanError) as caught:
        build()
    return str(caught.value)


# --- import


def test_importing_the_package_loads_neither_torch_nor_torchao():
    code = (
        "import sys, dtensor_5d; from dtensor_5d import Degrees, Plan, Options, PlanError; "
        "assert not {'torch', 'torchao', 'transformers', 'numpy'} & set(sys.modules), 'loaded'; print('clean')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "clean\n"


def test_public_names_are_listed_and_unknown_ones_are_errors():
    import dtensor_5d

    assert set(dtensor_5d.__all__) <= set(dir(dtensor_5d))
    assert all(getattr(dtensor_5d, name) is not None for name in dtensor_5d.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dtensor_5d.nothing


# --- errors


def test_one_message_lists_all_violations_and_survives_pickle():
    error = PlanError([Violation("a", "b", "c"), Violation("d", "e", "f")])
    assert "1. a: b; c" in str(error) and "2. d: e; f" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and list(again.violations) == list(error.violations)
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(PlanError("plain")))) == "plain"


# --- degrees


@settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries({axis: counts for axis in DENSE_AXES}), st.sampled_from(DENSE_AXES))
def test_resolve_fills_the_open_axis(known, axis):
    world = Degrees(**known).world_size
    assert Degrees(**{**known, axis: -1}).resolve(world) == Degrees(**known)
    assert Degrees(**known).resolve(world) == Degrees(**known)


@settings(deadline=None, max_examples=100)
@given(counts, counts, counts, counts, counts)
def test_expert_axes_fold_over_the_inner_three_or_are_refused(shard, cp, tp, ep, etp):
    if shard * cp * tp % (ep * etp) == 0:
        d = Degrees(dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp)
        assert d.efsdp * d.ep * d.etp == d.dp_shard * d.cp * d.tp
    else:
        said = _refused(lambda: Degrees(dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp))
        assert f"= {ep * etp}" in said and f"= {shard * cp * tp}" in said


def test_wrong_degrees_name_both_numbers():
    said = _refused(lambda: Degrees(pp=-2, tp=0, cp=1.5, dp_shard=True, ep=-1))
    for part in ("pp=-2", "tp=0", "cp=1.5", "dp_shard=True", "ep=-1", "5 things"):
        assert part in said
    assert "at most 1" in _refused(lambda: Degrees(dp_shard=-1, dp_replicate=-1))
    said = _refused(lambda: Degrees(dp_shard=3).resolve(8))
    assert "multiply to 3" in said and "world size 8" in said
    said = _refused(lambda: Degrees(dp_shard=-1, tp=3).resolve(8))
    assert "multiply to 3" in said and "divide 8" in said
    assert "resolve(world_size)" in _refused(lambda: Degrees(dp_shard=-1).world_size)


# --- options


def test_unknown_options_and_values_are_all_refused_at_once():
    said = _refused(
        lambda: Options.of(zeroo=3, zero=4, grad_reduce="often", offload=True, microbatches=0, recompute="every=0")
    )
    for part in (
        "did you mean 'zero'?",
        "zero=4",
        "grad_reduce='often'",
        "CPU offload is not in this version",
        "microbatches=0",
        "every=0",
    ):
        assert part in said
    for wrong in (
        dict(zero=True),
        dict(compile=1),
        dict(capacity=-1.0),
        dict(rules={"xp": {}}),
        dict(layers_per_stage=[0, 2]),
    ):
        _refused(lambda wrong=wrong: Options.of(**wrong))


@pytest.mark.parametrize(
    "zero, pp, reduce",
    [(3, 1, "microbatch"), (2, 1, "microbatch"), (1, 1, "window"), (3, 2, "window"), (1, 2, "window")],
)
def test_the_default_of_grad_reduce(zero, pp, reduce):
    assert Options(zero=zero).settled(pp).grad_reduce == reduce


def test_what_is_not_built_yet_is_refused_by_name():
    degrees = Degrees(pp=2, tp=2, cp=2, dp_shard=2, ep=2)
    options = Options(
        schedule="dualpipe", context="ulysses", dispatch="two_step", capacity=1.0, compile=True, precision="fp16"
    )
    text = "\n".join(map(str, built_violations(degrees, options)))
    for part in (
        "schedule='dualpipe'",
        "dualpipev",
        "capacity needs dispatch",
        "compile=",
        "fp16",
    ):
        assert part in text
    assert text.count("not in this version") == 2
    assert built_violations(Degrees(dp_shard=8), Options(zero=1, microbatches=4, precision="bf16")) == []
    assert built_violations(Degrees(pp=2), Options(schedule="zbv", microbatches=4, layers_per_stage=[1] * 4)) == []
    text = "\n".join(map(str, built_violations(Degrees(), Options(schedule="zbv", regather="window", chunks=2))))
    assert text.count("there are no stages on 1 rank") == 3


# --- plan


def test_batch_arithmetic_of_the_design():
    # 4M tokens of 4k = 1024 sequences, micro-batch 2
    assert Plan(Degrees(dp_shard=128)).batch(1024, 2) == 4
    assert Plan(Degrees(dp_replicate=4, dp_shard=128)).batch(1024, 2) == 1
    said = _refused(lambda: Plan(Degrees(dp_shard=512)).batch(1500, 2))
    assert "1500" in said and "1024 or 2048" in said
    assert (
        "1 sequences" in (said := _refused(lambda: Plan(Degrees(dp_shard=2)).batch(1, 1)))
        and "use a global batch of 2" in said
    )
    _refused(lambda: Plan(Degrees(dp_shard=2)).batch(0, 1))
    _refused(lambda: Plan(Degrees(dp_shard=-1)).batch(8, 1))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4096))
def test_batch_is_exact_or_names_the_nearest_legal_sizes(data, micro, total):
    plan = Plan(Degrees(dp_shard=data))
    if total % (data * micro) == 0:
        assert plan.batch(total, micro) * data * micro == total
    else:
        said = _refused(lambda: plan.batch(total, micro))
        above = (total // (data * micro) + 1) * data * micro
        assert str(above) in said and plan.batch(above, micro)


def test_a_plan_prints_as_a_table_and_travels_as_json():
    plan = Plan(Degrees(dp_shard=8), Options(zero=2, microbatches=4), {"dp": {"model.layers.*": "unit"}}, "llama")
    assert Plan.from_json(plan.to_json()) == plan
    lines = str(plan).splitlines()
    assert "llama" in lines[0] and "zero=2" in lines[0]
    assert lines[1].split() == ["axis", "pattern", "style"] and lines[3].split() == ["dp", "model.layers.*", "unit"]
    assert "names" in _refused(lambda: Plan(Degrees(), rules={"dp": {"a": object()}}).to_json())
    assert "no JSON" in _refused(lambda: Plan.from_json("{"))
    assert "format" in _refused(lambda: Plan.from_json("{}"))
    assert "qp" in _refused(lambda: Plan.from_json(json.dumps({"format": 1, "degrees": {"qp": 2}})))


def test_patterns_and_rules_that_match_nothing():
    assert matches("model.layers.*", "model.layers.7") and not matches("model.layers.*", "model.layers.7.mlp")
    assert matches("*.h.[0-3]", "transformer.h.2") and not matches("*.h.[0-3]", "transformer.h.4")
    (bad,) = rule_violations("dp", {"layers.*.mlp": "unit", "model.*.mlp": "unit"}, ["model", "model.a", "model.a.mlp"])
    assert "layers.*.mlp" in bad.asked and "model.a.mlp" in bad.change
