"""Output, dq, dk, dv (and the sinks' gradient) of every strategy equal plain attention in one process, in fp64."""

from __future__ import annotations

import random

import pytest

from tests.context.cases import check
from tests.harness import fails_on_ranks, run_ranks
from tests.pairwise import pairwise

MASKS = [{}, {"causal": False}, {"window": 6}, {"window": 1}, {"chunk": 8}]
AXES = {
    "strategy": ["ring", "allgather", "ulysses", "ring+ulysses"],
    "kind": ["zigzag", "striped", "document", "none"],
    "mask": MASKS,
    "rows": ["whole", "left", "right", "packed"],
    "heads": [(1, 1), (4, 2), (8, 1), (8, 8)],
    "sizes": [(8, 8), (12, 8), (4, 6)],
    "batch": [1, 3],
    "tokens": [37, 48, 5],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "back_end": [None, "plain"],
}


def legal(case, n):
    return not (case["strategy"] == "ulysses" and case["heads"][0] % n)


def cases_for(n):
    return [case for case in pairwise(AXES) if legal(case, n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_parity(n):
    cases = cases_for(n)
    assert len(cases) > 15
    assert run_ranks(n, check, n, cases) == [len(cases)] * n


@pytest.mark.parametrize("n", [2, 4])
def test_grouped_heads_that_do_not_divide(n):
    heads = [(12, 3), (4, 1), (4, 4), (20, 4), (28, 7), (8, 2)]
    cases = [{"strategy": s, "heads": h, "sinks": True} for s in ("ulysses", "ring+ulysses") for h in heads]
    assert run_ranks(n, check, n, cases) == [len(cases)] * n


def test_teams_of_a_given_size():
    cases = [
        {"strategy": "ring+ulysses", "ulysses": u, "heads": (4, 2), "kind": kind, "rows": rows, "batch": 2}
        for u in (1, 2, 4) for kind in ("zigzag", "striped", "document", "none") for rows in ("whole", "packed")
    ]  # fmt: skip
    assert run_ranks(4, check, 4, cases) == [len(cases)] * 4


def test_precisions_other_than_fp64():
    cases = [{"dtype": "float32", "tol": 1e-5, "strategy": s} for s in AXES["strategy"]]
    cases += [{"dtype": "bfloat16", "tol": 2e-2, "strategy": s, "sinks": True} for s in AXES["strategy"]]
    assert run_ranks(2, check, 2, cases) == [len(cases)] * 2


@pytest.mark.parametrize("wrong", ["scale", "softcap", "sinks", "mask"])
def test_the_comparison_can_fail(wrong):
    fails_on_ranks(2, check, 2, [{}], wrong, error=AssertionError, match="tensors differ")


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_many_combinations(n):
    rng = random.Random(n)
    cases = [{name: rng.choice(values) for name, values in AXES.items()} | {"seed": i} for i in range(300)]
    cases = [case for case in cases if legal(case, n)]
    assert run_ranks(n, check, n, cases, timeout=240) == [len(cases)] * n
