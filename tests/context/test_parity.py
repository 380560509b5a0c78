"""Output, dq, dk, dv (and the sinks' gradient) of every strategy equal plain attention in one process, in fp64."""

from __future__ import annotations

import pytest
import torch

from tests.context.cases import check
from tests.harness import run_ranks
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


@pytest.mark.parametrize("n", [1, 2, 4])
def test_parity(n):
    cases = cases_for(n)
    assert len(cases) > 15
    assert run_ranks(n, check, n, cases) == [len(cases)] * n


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 8])
def test_parity_on_more_ranks(n):
    cases = cases_for(n)
    assert run_ranks(n, check, n, cases, timeout=240) == [len(cases)] * n
