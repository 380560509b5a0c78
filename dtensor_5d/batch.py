"""From what a user gives to micro-batches: checked, labels shifted, cut along B (contracts C3, C4, C9).

Shapes: B batch (rows of this data rank), S sequence. A batch is the whole sequence; nothing here is cut along S yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dtensor_5d.documents import document_numbers, explicit_violations, packed_positions, whole_positions, with_offsets
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.loss import IGNORE
from dtensor_5d.order import PADDING

__all__ = ["BatchRules", "Explicit", "MicroBatch", "cut_window", "fingerprint"]

_KEYS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "document_ids")


@dataclass(frozen=True)
class BatchRules:
    """What the model can take, so that a batch that it would misread is refused instead (contract C4).

    vocab: ids must be in [0, vocab). positions: the size of a learned position table, None for computed positions.
    packs: whether restarting positions separate documents in this family. multiple: sequences are padded to a
    multiple of it. adaptive: the largest position of a forward decides on the rotary frequencies of all.
    explicit: what attention honours, if rows are to be cut along S (None: transformers makes the masks).
    """

    vocab: int
    positions: int | None = None
    packs: bool = True
    family: str = "this family"
    multiple: int = 1
    adaptive: bool = False
    explicit: Explicit | None = None


@dataclass(frozen=True)
class Explicit:
    """How a family reads masks and positions that it will not see itself. Fields: as in `explicit_violations`.

    counts_real: positions that are not given do not count padding.
    """

    any_jump: bool = True
    blank_padding: bool = True
    counts_real: bool = False
    chunk: int | None = None


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes. `labels` are shifted; `tokens` counts the supervised ones. No rows: `is_empty`.

    `length`: tokens of a row before padding to the multiple. `documents`: [B, S] with `PADDING`, where rows are to be
    cut along S; there positions are given and no mask is. `local`: what the context axis needs of rows that it cut.
    `real` [B, S] bool: which tokens are no padding, where inputs do not say so (documents, rows that were cut).
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None
    tokens: int
    rows: int
    length: int = 0
    documents: torch.Tensor | None = None
    local: Any = None
    real: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.rows == 0 or self.inputs["input_ids"].shape[1] == 0

    @staticmethod
    def missing(device: torch.device) -> MicroBatch:
        """What a rank runs that has fewer micro-batches than others."""
        return MicroBatch({"input_ids": torch.zeros(0, 1, dtype=torch.long, device=device)}, None, 0, 0)

    def runnable(self, multiple: int = 1) -> dict[str, torch.Tensor]:
        """Inputs with at least one row and one token: an empty micro-batch still enters every collective."""
        if not self.is_empty:
            return self.inputs
        return {"input_ids": torch.zeros(1, multiple, dtype=torch.long, device=self.inputs["input_ids"].device)}

    def counted(self, multiple: int = 1) -> torch.Tensor:
        """[B, S] bool, of `runnable`: which tokens are there, neither padding of the user's nor of ours."""
        ids = self.runnable(multiple)["input_ids"]
        if self.is_empty:
            return torch.zeros_like(ids, dtype=torch.bool)
        if self.real is not None:
            return self.real
        here = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) < self.length
        mask = self.inputs.get("attention_mask")
        return here if mask is None else here & mask.bool()


def cut_window(
    batches: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    microbatches: int,
    rules: BatchRules,
    device: torch.device,
    *,
    need_labels: bool = True,
) -> list[MicroBatch]:
    """All micro-batches of a window: each batch checked, its labels shifted over the whole sequence, cut along B.

    Parts differ by at most one row and may be empty. Errors: `PlanError` with all that is wrong with the batches.
    """
    if isinstance(batches, Mapping):
        batches = [batches]
    if not isinstance(batches, Sequence) or isinstance(batches, (str, bytes)):
        raise PlanError(
            Violation(f"a batch of type {type(batches).__name__}", "must be a dict of [B, S] tensors or a list of them",
                      "give for example {'input_ids': ids, 'labels': ids}")
        )  # fmt: skip
    batches = [with_offsets(batch) if isinstance(batch, Mapping) else batch for batch in batches]
    bad: list[Violation] = []
    for i, batch in enumerate(batches):
        where = f"batch {i}: " if len(batches) > 1 else ""
        bad += [Violation(where + v.asked, v.required, v.change) for v in _violations(batch, rules, need_labels)]
    if bad:
        raise PlanError(bad)
    window = []
    for batch in batches:
        prepared = _prepared(batch, rules, device)
        length = prepared["input_ids"].shape[1]
        window += _cut(_padded(prepared, rules), microbatches, length)
    return window


def fingerprint(window: Sequence[MicroBatch]) -> int:
    """A 62-bit number from all that a window holds: ranks that must read the same batch compare it (contract C8)."""
    total = len(window)
    for micro in window:
        named = sorted(micro.inputs.items())
        named += [(key, value) for key in ("labels", "documents", "real") if (value := getattr(micro, key)) is not None]
        for key, value in named:
            place = torch.arange(1, value.numel() + 1, device=value.device)
            # Whole numbers, which wrap around alike everywhere. Mixed before they are summed: of a plain sum some
            # changes cancel (+1, -2, +1 in a row). The place counts, so order does.
            mixed = _mixed(_mixed(value.flatten().long()) + place * 0x9E3779B97F4A7C1)
            total = (total * 1_000_003 + int(mixed.sum()) + len(key) + 31 * value.shape[0]) % (1 << 62)
    return total


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit numbers in which each bit depends on many (multiply and xor-shift, as in splitmix64)."""
    numbers = (numbers ^ (numbers >> 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ (numbers >> 27)) * -0x6B2FB644ECCEEE15
    return numbers ^ (numbers >> 31)


def _violations(batch: Any, rules: BatchRules, need_labels: bool) -> list[Violation]:
    if not isinstance(batch, Mapping):
        asked = f"a batch of type {type(batch).__name__}"
        return [Violation(asked, "must be a dict of [B, S] tensors", "give for example {'input_ids': ids}")]
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        return [Violation(f"input_ids: {shape}", "must be a tensor of shape [B, S]", "stack the rows into one tensor")]
    bad = [
        Violation(f"{key!r} in a batch", f"a batch holds {', '.join(_KEYS)}", f"remove {key!r}")
        for key in batch
        if key not in _KEYS
    ]
    given = {key: batch[key] for key in _KEYS if batch.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, torch.Tensor):
            bad.append(Violation(f"{key} of type {type(value).__name__}", "must be a tensor", "use torch.tensor"))
        elif value.is_meta:
            bad.append(Violation(f"{key} on meta", "must hold values", "build the batch outside torch.device('meta')"))
        elif value.shape != ids.shape:
            needs = f"must have the shape of input_ids, {tuple(ids.shape)}"
            if value.dim() == 4:
                needs += " (4-D masks say nothing about documents)"
            bad.append(Violation(f"{key} of shape {tuple(value.shape)}", needs, "give one value for each token"))
        elif value.is_floating_point() or value.is_complex():
            bad.append(Violation(f"{key} of dtype {value.dtype}", "must hold whole numbers", f"use {key}.long()"))
    if "labels" in given and "shift_labels" in given:
        bad.append(Violation("both labels and shift_labels", "must be one of them", "labels are shifted inside"))
    if need_labels and not ("labels" in given or "shift_labels" in given):
        asked = f"a batch with {sorted(batch)}"
        bad.append(Violation(asked, "needs labels to train", "add labels=input_ids.clone(), -100 where not supervised"))
    if bad or ids.numel() == 0:
        return bad
    return _value_violations(given, rules)


def _value_violations(given: Mapping[str, torch.Tensor], rules: BatchRules) -> list[Violation]:
    bad = []
    ids = given["input_ids"]
    low, high = _range(ids)
    if low < 0 or high >= rules.vocab:
        worst = low if low < 0 else high
        change = "use the tokenizer of this model, or resize its embeddings"
        bad.append(Violation(f"input_ids with the id {worst}", f"ids must be in [0, {rules.vocab})", change))
    for key in ("labels", "shift_labels"):
        if key in given:
            low, high = _range(torch.where(given[key] == IGNORE, 0, given[key]))
            if low < 0 or high >= rules.vocab:
                needs = f"labels must be in [0, {rules.vocab}) or {IGNORE}"
                worst = low if low < 0 else high
                bad.append(Violation(f"{key} with the id {worst}", needs, f"set what is not supervised to {IGNORE}"))
    mask = given.get("attention_mask")
    if mask is not None:
        low, high = _range(mask.long())
        if low < 0 or high > 1:
            asked = f"attention_mask with the value {low if low < 0 else high}"
            bad.append(Violation(asked, "must be 0 (padding) or 1", "mark documents with document_ids"))
    positions = given.get("position_ids")
    length = ids.shape[1]
    if positions is not None:
        low, high = _range(positions)
        if low < 0:
            bad.append(Violation(f"position_ids with {low}", "positions must be >= 0", "number tokens from 0"))
        length = high + 1
    if rules.positions is not None and length > rules.positions:
        bad.append(Violation(f"position {length - 1}", f"the model has learned positions 0 to {rules.positions - 1}",
                             f"use sequences of at most {rules.positions} tokens"))  # fmt: skip
    documents = packed_positions(given) if not bad else None
    if documents is not None:
        differs = positions != documents if positions is not None else torch.zeros((), dtype=torch.bool)
        if "document_ids" in given:  # the positions of padding are arbitrary
            differs = differs & (given["document_ids"] != PADDING)
        if bool(differs.any()):
            asked = "position_ids that differ from document_ids"
            bad.append(Violation(asked, "positions must restart at each document", "give only one of the two"))
        padded = mask is not None and not bool(mask.all())
        if padded:
            bad.append(Violation("packed documents beside an attention_mask with zeros",
                                 "a row is either packed or padded",
                                 "drop the mask and give padding labels -100 and a document of its own"))  # fmt: skip
        if not rules.packs:
            asked = "packed documents (restarting position_ids or document_ids)"
            needs = f"{rules.family} does not separate documents by position, so they would see each other"
            bad.append(Violation(asked, needs, "put one document into a row"))
    how = rules.explicit
    if how is not None and not bad:
        bad += explicit_violations(
            given, family=rules.family, any_jump=how.any_jump, blank_padding=how.blank_padding, chunk=how.chunk
        )
    return bad


def _range(values: torch.Tensor) -> tuple[int, int]:
    low, high = values.aminmax()
    return int(low), int(high)


def _prepared(batch: Mapping[str, Any], rules: BatchRules, device: torch.device) -> dict[str, torch.Tensor]:
    """input_ids, and where they are there attention_mask, position_ids, shifted labels, document numbers."""
    given = {key: batch[key].to(device) for key in _KEYS if batch.get(key) is not None}
    ids = given["input_ids"].long()
    inputs = {"input_ids": ids}
    mask = given.get("attention_mask")
    positions = packed_positions(given) if ids.numel() else None
    if positions is None:
        positions = given.get("position_ids")
    if rules.explicit is not None and ids.numel():
        inputs["documents"] = document_numbers(given)
        if positions is None:
            positions = whole_positions(given, counts_real=rules.explicit.counts_real)
    # A mask of ones says nothing, but transformers stops looking for packed documents when it is there.
    elif mask is not None and ids.numel() and not bool(mask.all()):
        inputs["attention_mask"] = mask.long()
    if positions is not None:
        inputs["position_ids"] = positions.long()
    if "document_ids" in given:
        inputs["real"] = (document_numbers(given) if ids.numel() else ids) != PADDING
    if "shift_labels" in given:
        inputs["labels"] = given["shift_labels"].long()
    elif "labels" in given:
        inputs["labels"] = F.pad(given["labels"].long()[:, 1:], (0, 1), value=IGNORE)
    return inputs


_PADDING = {"attention_mask": 0, "labels": IGNORE, "documents": PADDING, "real": False}


def _padded(prepared: dict[str, torch.Tensor], rules: BatchRules) -> dict[str, torch.Tensor]:
    """Padding on the right up to the multiple: not supervised, and seen by no token before it in a causal model."""
    ids, positions = prepared["input_ids"], prepared.get("position_ids")
    more = -ids.shape[1] % rules.multiple
    if not more or not ids.numel():
        return prepared
    out = {key: F.pad(prepared[key], (0, more), value=value) for key, value in _PADDING.items() if key in prepared}
    # An id of the row itself: the embedding of one that the batch does not hold stays untouched, NaN too.
    out["input_ids"] = torch.cat([ids, ids[:, -1:].expand(-1, more)], dim=1)
    highest = int(positions.max()) if positions is not None else ids.shape[1] - 1
    # Further positions where there are such: repeated ones would look like packed documents.
    fits = not rules.adaptive and (rules.positions is None or highest + more < rules.positions)
    if positions is None and not fits:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if positions is not None:
        step = torch.arange(1, more + 1, device=ids.device) if fits else torch.zeros(more, device=ids.device).long()
        out["position_ids"] = torch.cat([positions, positions[:, -1:] + step], dim=1)
    return out


def _cut(prepared: dict[str, torch.Tensor], parts: int, length: int) -> list[MicroBatch]:
    pieces = {key: value.tensor_split(parts) for key, value in prepared.items()}
    cut = []
    for i in range(parts):
        mine = {key: piece[i] for key, piece in pieces.items()}
        own, documents, real = (mine.pop(key, None) for key in ("labels", "documents", "real"))
        tokens = int((own != IGNORE).sum()) if own is not None else 0
        cut.append(MicroBatch(mine, own, tokens, mine["input_ids"].shape[0], length, documents, real=real))
    return cut
