"""The harness must fail when it should: a check that cannot fail proves nothing."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksFailed, assert_same_gradients, fails_on_ranks, run_ranks


def _sum(rank, x):
    t = torch.tensor([float(rank + x)])
    dist.all_reduce(t)
    return t.item(), dist.get_world_size(), os.getpid()


def _one_raises(rank):
    if rank == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _one_dies(rank):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang(rank):
    if rank == 0:
        time.sleep(60)


def _all_raise(rank, text):
    raise ValueError(f"{text} {rank}")


def test_ranks_work_and_are_reused():
    first = run_ranks(2, _sum, 10)
    assert [r[:2] for r in first] == [(21.0, 2)] * 2
    again = run_ranks(3, _sum, 0)
    assert [r[0] for r in again] == [3.0] * 3
    assert again[0][2] == first[0][2], "the pool started a new process instead of reusing one"


@pytest.mark.parametrize("fn, text", [(_one_raises, "rank one says no"), (_one_dies, "code 7")])
def test_a_failing_rank_fails_the_trial_with_its_story(fn, text):
    with pytest.raises(RanksFailed, match=text):
        run_ranks(2, fn)
    assert run_ranks(2, _sum, 1)[0][0] == 3.0  # and the pool lives on


def test_a_hang_is_a_failure():
    with pytest.raises(RanksFailed, match="hung for 1"):
        run_ranks(2, _hang, timeout=1)


def test_fails_on_ranks_needs_every_rank_and_the_right_words():
    assert len(fails_on_ranks(2, _all_raise, "too many", error=ValueError, match="too many [01]")) == 2
    with pytest.raises(RanksFailed):
        fails_on_ranks(2, _all_raise, "too many", error=ValueError, match="too few")
    with pytest.raises(RanksFailed):
        fails_on_ranks(2, _one_raises, error=ValueError, match="no")


def _grads(**change):
    return {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([1e-3]), "frozen": None} | change


def test_gradients_that_agree_pass():
    assert_same_gradients(_grads(), _grads(), tol=1e-5)
    assert_same_gradients(_grads(frozen=torch.zeros(3)), _grads(), tol=1e-5)
    assert_same_gradients(_grads(b=torch.tensor([1e-3 + 1e-9])), _grads(), tol=1e-5)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"a": torch.tensor([1.0, -2.0001])}, "a: error"),
        ({"b": torch.tensor([2e-3])}, "got / want = 2"),
        ({"b": torch.tensor([1.01e-3])}, "b: error"),
        ({"b": torch.tensor([float("nan")])}, "b: error nan"),
        ({"b": None}, "b: error"),
        ({"a": torch.tensor([1.0])}, "shape"),
        ({"frozen": torch.ones(1)}, "frozen"),
        ({"extra": torch.ones(1)}, "names differ"),
    ],
)
def test_gradients_that_differ_fail(change, text):
    with pytest.raises(AssertionError, match=text):
        assert_same_gradients(_grads(**change), _grads(), tol=1e-5)
