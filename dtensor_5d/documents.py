"""Documents of packed rows: which tokens attend to one another, read from what a batch says (contract C4).

    position_ids    0 1 2 3 | 0 1 2      they start again, so here are two documents
    document_ids    5 5 5 5 | 8 8 8      a run of equal ids is a document
    cu_seqlens      0         4       7  where documents start, and where the last one ends
    attention_mask  0 0 1 1   1 1 1      0 is padding: document id -1

Shapes: B rows, S tokens of a whole row; every tensor is [B, S].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.loss import IGNORE
from dtensor_5d.order import PADDING

__all__ = ["document_numbers", "explicit_violations", "packed_positions", "whole_positions", "with_offsets"]


def with_offsets(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch whose documents are told by `cu_seqlens` (where each starts in the rows laid end to end, and B x S last),
    with `document_ids` instead; any other batch as it is.

    Example: two rows of 4 tokens, `cu_seqlens = [0, 3, 4, 8]` -> document_ids `[[0, 0, 0, 1], [2, 2, 2, 2]]`.
    Errors: `PlanError` for offsets that do not fill the rows, for a document over the end of a row, and for documents
    told twice.
    """
    offsets = batch.get("cu_seqlens")
    if offsets is None:
        return batch
    ids = batch.get("input_ids")
    total = ids.numel() if isinstance(ids, Tensor) else 0
    fine = isinstance(offsets, Tensor) and offsets.dim() == 1 and not offsets.is_floating_point() and len(offsets) > 1
    if not fine or int(offsets[0]) or int(offsets[-1]) != total or bool((offsets[1:] <= offsets[:-1]).any()):
        what = offsets.tolist() if isinstance(offsets, Tensor) else offsets
        needs = f"must be whole numbers that go up from 0 to B x S = {total}"
        change = "give the start of each document, and the end of the last one"
        raise PlanError(Violation(f"cu_seqlens {what}", needs, change))
    if batch.get("document_ids") is not None:
        raise PlanError(Violation("both cu_seqlens and document_ids", "documents are told once", "remove one of them"))
    assert isinstance(ids, Tensor)
    if ids.dim() == 2:
        borders = torch.arange(ids.shape[1], total, ids.shape[1], device=offsets.device)
        over = borders[~torch.isin(borders, offsets)].tolist()
        if over:
            asked = f"cu_seqlens with a document over the end of a row (at {over[:4]})"
            needs = f"each row of {ids.shape[1]} tokens starts a document"
            raise PlanError(Violation(asked, needs, "add these offsets, or lay all documents into one row [1, B x S]"))
    numbers = torch.searchsorted(offsets[1:].contiguous(), torch.arange(total, device=offsets.device), right=True)
    rest = {key: value for key, value in batch.items() if key != "cu_seqlens"}
    return {**rest, "document_ids": numbers.view(ids.shape)}


def packed_positions(given: Mapping[str, Tensor]) -> Tensor | None:
    """Positions that restart at each document, or None when every row is one document (perhaps with padding)."""
    documents, positions = given.get("document_ids"), given.get("position_ids")
    if documents is not None:
        return _restarting(documents) if bool((documents[:, 1:] != documents[:, :-1]).any()) else None
    if positions is not None and bool(_jumps(positions, given.get("attention_mask")).any()):
        return positions
    return None


def document_numbers(given: Mapping[str, Tensor]) -> Tensor:
    """The document of each token: 0, 1, 2, ... in each row, `PADDING` where there is none."""
    documents, positions, mask = (given.get(key) for key in ("document_ids", "position_ids", "attention_mask"))
    if documents is not None:
        starts = documents[:, 1:] != documents[:, :-1]
    elif positions is not None:
        starts = _jumps(positions, mask)
    else:
        starts = torch.zeros_like(given["input_ids"][:, 1:], dtype=torch.bool)
    numbers = F.pad(starts.long().cumsum(1), (1, 0))
    if documents is not None:
        numbers = numbers.masked_fill(documents == PADDING, PADDING)
    return numbers if mask is None else numbers.masked_fill(mask == 0, PADDING)


def whole_positions(given: Mapping[str, Tensor], *, counts_real: bool) -> Tensor:
    """The positions that a model gives tokens by itself. counts_real: padding is not counted (opt)."""
    ids, mask = given["input_ids"], given.get("attention_mask")
    if counts_real and mask is not None:
        return (mask.long().cumsum(1) * mask.long()) - 1
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def explicit_violations(
    given: Mapping[str, Tensor], *, family: str, any_jump: bool, blank_padding: bool, chunk: int | None
) -> list[Violation]:
    """What cannot be said with documents, or would be another thing than what one process computes.

    any_jump: transformers takes every position that does not follow the one before for a new document. blank_padding:
    its attention gives padding before the first token 0, as the ring does. chunk: of chunked attention.
    """
    bad = []
    mask, numbers = given.get("attention_mask"), document_numbers(given)
    if mask is not None and bool((_starts(mask.bool()).sum(1) > 1).any()):
        bad.append(
            Violation("an attention_mask with zeros between ones", "padding must be on the left or right of a row",
                      "move it there, or make what it separates documents of their own with document_ids")
        )  # fmt: skip
    supervised = _supervised(given)
    if supervised is not None:
        padding = numbers == PADDING
        wrong = supervised & padding
        if blank_padding and mask is not None:  # before the first token transformers' padding sees nothing either
            wrong &= (~padding).long().cumsum(1) > 0
        count = int(wrong.sum())
        if count:
            bad.append(
                Violation(f"{count} supervised tokens that padding would predict",
                          "padding attends to nothing where the sequence is cut over ranks",
                          f"set their labels to {IGNORE}")
            )  # fmt: skip
    packed = packed_positions(given)
    positions = given.get("position_ids")
    if packed is not None and not any_jump and positions is not None:
        jumps = _jumps(positions, mask)
        if bool((jumps & (positions[:, 1:] != 0)).any()):
            bad.append(
                Violation(f"position_ids that jump to another number than 0 ({family})",
                          "documents start at position 0, and positions follow one another in them",
                          "number each document from 0")
            )  # fmt: skip
    if packed is not None and chunk is not None and given["input_ids"].shape[1] > chunk:
        bad.append(
            Violation(f"packed documents in rows longer than a chunk of {chunk} tokens",
                      f"{family} counts its chunks from the start of the row",
                      "put one document into a row, or use shorter rows")
        )  # fmt: skip
    return bad


def _supervised(given: Mapping[str, Tensor]) -> Tensor | None:
    """Where a token has a target: the shifted labels."""
    if "shift_labels" in given:
        return given["shift_labels"] != IGNORE
    if "labels" in given:
        return F.pad(given["labels"][:, 1:] != IGNORE, (0, 1), value=False)
    return None


def _starts(real: Tensor) -> Tensor:
    """[B, S]: where a run of real tokens starts."""
    return real & ~F.pad(real[:, :-1], (1, 0), value=False)


def _jumps(positions: Tensor, mask: Tensor | None) -> Tensor:
    """[B, S - 1]: whether a token's position does not follow that of the token before; of real tokens only."""
    jumps = positions[:, 1:] - positions[:, :-1] != 1
    if mask is not None:  # the positions of padding are arbitrary
        jumps &= mask[:, 1:].bool() & mask[:, :-1].bool()
    return jumps


def _restarting(documents: Tensor) -> Tensor:
    """Position of each token inside its document; a document is a run of equal ids."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(dim=1).values
