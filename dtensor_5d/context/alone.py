"""`cut_batch`: the batch of `ContextParallel` used alone, without a plan and a run."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_5d.agree import Agreement
from dtensor_5d.batch import BatchRules, Explicit, MicroBatch, cut_window, fingerprint
from dtensor_5d.context.rows import RowCutter
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.order import length_multiple

__all__ = ["cut_batch"]


def cut_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh, *, balance: str = "zigzag", context: str = "ring",
    ulysses: int | None = None, multiple: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """This rank's tokens of a batch, as arguments of a model whose attention modules have the style.

    Every rank of `mesh` (one-dimensional) calls it with the same batch of whole rows.

    Example: `loss = model(**cut_batch({"input_ids": ids, "labels": ids}, mesh["cp"])).loss`, whose sum over the ranks
    is the mean over all supervised tokens of the batch; gradients are sums over the ranks, too.

    batch: dict of [B, S] tensors as for `run.step`; labels are shifted before they are cut. balance, context, ulysses:
    as the options of a plan. multiple: rows are padded to a multiple of it besides (tp x cp under sequence
    parallelism). Result: input_ids, position_ids, labels and shift_labels `[B, L]`, num_items_in_batch, use_cache, and
    `context_rows`, which the model hands down to its attention (gpt_bigcode does not: use a plan).
    Errors: `PlanError` on every rank of the mesh, where a batch is wrong or differs between ranks.
    """
    group = mesh.get_group()
    device = _device(mesh)
    window: list[MicroBatch] = []
    error: Exception | None = None
    try:
        whole = lcm(length_multiple(balance, group.size()), multiple)
        # What cannot be known without the model is refused: see `_Layer` for what only the attention can find out.
        explicit = Explicit(any_jump=False, blank_padding=False)
        rules = BatchRules(vocab=1 << 62, multiple=whole, adaptive=True, explicit=explicit)
        window = cut_window(batch, 1, rules, device, need_labels=False)
        if window[0].is_empty:
            needs = "must hold at least 1 token"
            raise PlanError(Violation("a batch without tokens", needs, "leave it out on all ranks"))
        cutter = RowCutter(group, whole, balance, context, ulysses)
        local = cutter.local(window[0])
    except Exception as problem:
        error = problem
    every = Agreement(group, group.size(), device).check(error, fingerprint(window))
    other = [rank for rank, row in enumerate(every) if row != every[0]]
    if other:
        raise PlanError(
            Violation(f"other rows on ranks {other[:8]} of the context axis than on rank 0",
                      f"its {group.size()} ranks share each row: they must read the same batch",
                      "read the batch by the rank on the data axis")
        )  # fmt: skip
    found = {**local.inputs, "use_cache": False, "context_rows": local.local}
    if local.labels is not None:
        found |= {"labels": local.labels, "shift_labels": local.labels, "num_items_in_batch": max(window[0].tokens, 1)}
    return found


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
