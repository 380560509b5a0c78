"""Parity: a parallel run against one process of plain transformers, every gradient, under SGD.

The reference is Hugging Face's own forward, its own loss (divided by the tokens of the whole window) and backward,
over all rows of all data ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from tests.families.tiny import tiny_model
from tests.harness import assert_same_gradients, run_ranks

STEPS = 3
LR = 0.1


@dataclass(frozen=True)
class Case:
    """One comparison. batches: fn(step, data_rank, vocab) -> list of batches of that rank."""

    family: str
    degrees: Degrees
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    batches: Callable[[int, int, int], list[dict[str, torch.Tensor]]] | None = None
    on_meta: bool = False

    @property
    def tol(self) -> float:
        return 1e-10 if self.dtype == torch.float64 else 1e-5


def rows(seed: int, count: int, length: int, vocab: int, supervised: float = 0.8) -> dict[str, torch.Tensor]:
    """Random rows of which a part of the labels is supervised."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (count, length), generator=g)
    keep = torch.rand(count, length, generator=g) < supervised
    return {"input_ids": ids, "labels": torch.where(keep, ids, -100)}


def uneven(step: int, rank: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """Another length each step; token counts differ between ranks."""
    return [rows(100 * step + rank, 2 + rank % 2, (12, 17, 9)[step], vocab, supervised=(0.9, 0.3, 0.6, 0.1)[rank % 4])]


def one_without_tokens(step: int, rank: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """Rank 1 has no supervised token in step 0; the others have a batch without any beside one with."""
    return [
        rows(100 * step + rank, 3, 10, vocab, supervised=0.0 if rank == 1 and step == 0 else 0.7),
        rows(100 * step + rank + 50, 1, 10 + step, vocab, supervised=0.0),
    ]


def ragged(step: int, rank: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """Two batches of other lengths; rank 0 has one batch less."""
    both = [rows(100 * step + rank, 2, 8, vocab), rows(100 * step + rank + 50, 1, 13, vocab, supervised=0.5)]
    return both[: 1 if rank == 0 else 2]


def padded(step: int, rank: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """Right padding on even ranks, left padding on odd ones."""
    batch = rows(100 * step + rank, 2, 12, vocab, supervised=1.0)
    mask = torch.ones(2, 12, dtype=torch.long)
    hole = slice(7, 12) if rank % 2 == 0 else slice(0, 5)
    mask[0, hole] = 0
    batch["labels"][0, hole] = -100
    return [batch | {"attention_mask": mask}]


def check_parity(case: Case, timeout: float = 90.0) -> list[dict[str, Any]]:
    """Runs the case on its ranks; loss, every gradient, norm and the weights after 3 SGD steps must agree."""
    return run_ranks(case.degrees.world_size, _trial, case, timeout=timeout)


def _trial(rank: int, case: Case) -> dict[str, Any]:
    model = tiny_model(case.family, dtype=case.dtype, **case.model)
    reference = copy.deepcopy(model).train() if rank == 0 else None
    plan = plan_for(model, case.degrees, **case.options)
    run = parallelize(model, plan, build_mesh(case.degrees, "cpu"))
    got = train(run, case)
    if reference is not None:
        compare(got, train_alone(reference, case), case.tol)
    return {"losses": [s["loss"] for s in got["steps"]]}


def _batches(case: Case, step: int, rank: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    return (case.batches or uneven)(step, rank, vocab)


def train(run, case: Case) -> dict[str, Any]:
    """Three SGD steps of a `Run`: loss, gradients and norm of each, weights at the end."""
    vocab = run.model.config.get_text_config().vocab_size
    optim = torch.optim.SGD(run.parameters(), lr=LR)
    steps = []
    for step in range(STEPS):
        loss = run.step(_batches(case, step, run.data_rank, vocab))
        steps.append({"loss": loss.item(), "grads": run.full_gradients(), "norm": run.grad_norm().item()})
        optim.step()
        optim.zero_grad()
    return {"steps": steps, "weights": run.full_parameters()}


def train_alone(model, case: Case) -> dict[str, Any]:
    """The same with plain transformers in one process."""
    vocab = model.config.get_text_config().vocab_size
    optim = torch.optim.SGD(model.parameters(), lr=LR)
    steps = []
    for step in range(STEPS):
        window = [b for rank in range(case.degrees.data) for b in _batches(case, step, rank, vocab)]
        tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
        total = 0.0
        for batch in window:
            loss = _reference_loss(model, batch, max(tokens, 1), case.dtype)
            loss.backward()
            total += loss.item()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.cat([g.flatten().double() for g in grads.values() if g is not None]).norm().item()
        steps.append({"loss": total, "grads": grads, "norm": norm})
        optim.step()
        optim.zero_grad()
    return {"steps": steps, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def _reference_loss(model, batch, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float64:
        return model(**batch, use_cache=False, num_items_in_batch=tokens).loss
    # transformers computes its loss in fp32 whatever the model's dtype, which would hide what fp64 is to show
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum") / tokens


def compare(got: dict[str, Any], want: dict[str, Any], tol: float) -> None:
    for step, (g, w) in enumerate(zip(got["steps"], want["steps"])):
        for what in ("loss", "norm"):
            error = abs(g[what] - w[what])
            assert error <= tol * abs(w[what]), f"step {step}: {what} {g[what]!r} instead of {w[what]!r}"
        assert w["norm"] > 0, "a comparison of zeros proves nothing"
        assert_same_gradients(g["grads"], w["grads"], tol=tol)
    assert_same_gradients(got["weights"], want["weights"], tol=tol)
