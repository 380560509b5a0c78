"""What multi-rank tests are written with: `run_ranks`, `fails_on_ranks`, `assert_same_gradients`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.pool import Outcome, Pool


@functools.lru_cache(maxsize=1)
def pool() -> Pool:
    """The pool of this test run (closed by conftest)."""
    return Pool()


class RanksFailed(AssertionError):
    """Some rank failed, hung or died; the message tells each one's story."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`fn(rank, *args)` on n ranks with a gloo process group; the results by rank.

    fn must be at the top level of an importable module; args and results travel by pickle.
    Errors: `RanksFailed` with every rank's traceback; after `timeout` seconds a hang is a failure.
    """
    outcomes = pool().run(n, fn, args, timeout)
    if all(o.ok for o in outcomes):
        return [o.value for o in outcomes]
    raise RanksFailed("\n".join(_story(o) for o in outcomes))


def fails_on_ranks(
    n: int, fn: Callable[..., Any], *args: Any, error: type[BaseException], match: str, timeout: float = 30.0
) -> list[BaseException]:
    """Asserts that *every* rank raises `error` with a message that `match` finds, and that none hangs."""
    outcomes = pool().run(n, fn, args, timeout)
    good = [isinstance(o.error, error) and re.search(match, str(o.error)) is not None for o in outcomes]
    if not all(good):
        raise RanksFailed(
            f"every rank should raise {error.__name__} matching {match!r}\n" + "\n".join(_story(o) for o in outcomes)
        )
    return [o.error for o in outcomes if o.error is not None]


def assert_same_gradients(
    got: Mapping[str, torch.Tensor | None], want: Mapping[str, torch.Tensor | None], *, tol: float
) -> None:
    """Asserts that two dicts of full tensors by parameter name are equal: the same names, and for each
    max |got - want| <= tol x max |want| + 8 eps x (the largest of all gradients).

    The second term is rounding: a gradient that is zero in exact arithmetic (a key bias) is noise of that size.
    A missing gradient (None) equals a zero one, as an optimizer without momentum sees it.
    """
    assert set(got) == set(want), f"names differ: {sorted(set(got) ^ set(want))}"
    largest = max((w.abs().max().item() for w in want.values() if w is not None and w.numel()), default=0.0)
    wrong = []
    for name, w in want.items():
        g = got[name]
        if w is None and g is None:
            continue
        if g is None or w is None:
            some = g if g is not None else w
            assert some is not None
            g, w = (torch.zeros_like(some) if t is None else t for t in (g, w))
        if g.shape != w.shape:
            wrong.append(f"{name}: shape {tuple(g.shape)} instead of {tuple(w.shape)}")
            continue
        if not w.numel():
            continue
        error = (g.double() - w.double()).abs().max().item()
        scale = w.double().abs().max().item()
        if not error <= tol * scale + 8 * torch.finfo(w.dtype).eps * largest:
            ratio = (g.double().flatten() @ w.double().flatten() / w.double().square().sum().clamp_min(1e-300)).item()
            wrong.append(f"{name}: error {error:.3e} of {scale:.3e} (got / want = {ratio:.6g})")
    assert not wrong, f"{len(wrong)} of {len(want)} tensors differ:\n" + "\n".join(wrong[:20])


def _story(o: Outcome) -> str:
    if o.ok:
        return f"--- rank {o.rank}: fine"
    return f"--- rank {o.rank}: {o.lost or o.trace}"
