"""Rows of S tokens cut from a text, shuffled per epoch, shared out over data ranks, with a global position."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.loader.tokens import TokenizedText

__all__ = ["PackedLoader"]

IGNORE = -100


class PackedLoader:
    """Batches of packed rows for one data rank.

    Row i of the text is its tokens i x S to (i + 1) x S, so every token is in exactly one row; the last row is filled
    up with its own last token, not supervised. A global batch is `batch_size` rows; the data rank r of n takes those
    from r x rows // n to (r + 1) x rows // n, so shares differ by at most one row. Ranks that differ only in pp, tp
    and cp pass the same `data_rank` and read the same. The last batch of an epoch is short; a rank may get no row of
    it: tensors of shape [0, S].

    A batch: `input_ids` and `labels` [B, S] int64. labels are the inputs, -100 where not supervised (Hugging Face's
    convention: shifted inside the model). With `documents=True` also `document_ids` (-1 is padding) and `position_ids`
    that restart with each document, and the first token of a document is not supervised: nothing before it says what
    it is.

    Example:
        >>> loader = PackedLoader(text, sequence_length=256, batch_size=8, data_rank=run.data_rank,
        ...                       data_size=run.data_size, seed=0)
        >>> for batch in loader.steps(1000):                # over as many epochs as it takes
        ...     run.step(batch)
        >>> state = loader.state_dict()                     # plain numbers; loads for any data_size

    `for batch in loader` gives the rest of the current epoch.

    Errors: PlanError for a text of fewer than 2 tokens, sizes below 1, fewer rows than `batch_size`, a batch smaller
    than `data_size`.
    """

    def __init__(
        self, text: TokenizedText, *, sequence_length: int, batch_size: int, data_rank: int = 0, data_size: int = 1,
        seed: int = 0, shuffle: bool = True, documents: bool = False,
    ) -> None:  # fmt: skip
        _check(text, sequence_length, batch_size, data_rank, data_size)
        self._text = text
        self._length, self._batch = sequence_length, batch_size
        self._rank, self._size = data_rank, data_size
        self._seed, self._shuffle, self._documents = seed, shuffle, documents
        self._rows = -(-len(text.tokens) // sequence_length)
        self._checksum = zlib.crc32(text.tokens.numpy().tobytes())
        self._epoch, self._row = 0, 0
        self._drawn: tuple[int, Tensor] | None = None  # the order of one epoch

    @property
    def rows(self) -> int:
        """Rows of one epoch, over all data ranks."""
        return self._rows

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._epoch

    def __len__(self) -> int:
        """Batches of one epoch, the short one included."""
        return -(-self._rows // self._batch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """What is left of the current epoch."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield self._next()

    def steps(self, count: int) -> Iterator[dict[str, Tensor]]:
        """The next `count` batches."""
        for _ in range(count):
            yield self._next()

    def state_dict(self) -> dict[str, int]:
        """The global position: the same on all ranks, and for any `data_rank`, `data_size` and `batch_size`."""
        return {"epoch": self._epoch, "row": self._row, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken: the same rows in the same order.

        Errors: PlanError if it was taken over another text, sequence length, seed or shuffling.
        """
        mine = self._identity()
        bad = [
            Violation(f"{key}={value} in this loader", f"the saved position has {key}={state.get(key)}", _SAME[key])
            for key, value in mine.items()
            if state.get(key) != value
        ]
        if bad:
            raise PlanError(bad)
        epoch, row = state.get("epoch"), state.get("row")
        if not isinstance(epoch, int) or not isinstance(row, int) or epoch < 0 or not 0 <= row < self._rows:
            asked = f"epoch={epoch}, row={row}"
            needs = f"epoch must be at least 0 and row from 0 to {self._rows - 1}"
            raise PlanError(Violation(asked, needs, "give what state_dict() returned"))
        self._epoch, self._row = epoch, row

    def _identity(self) -> dict[str, int]:
        return {"rows": self._rows, "sequence_length": self._length, "seed": self._seed,
                "shuffle": int(self._shuffle), "checksum": self._checksum}  # fmt: skip

    def _next(self) -> dict[str, Tensor]:
        batch = self._order(self._epoch)[self._row : self._row + self._batch]
        first, last = (len(batch) * r // self._size for r in (self._rank, self._rank + 1))
        rows = [self._cut(row) for row in batch[first:last].tolist()]
        # The position moves before the batch is given away: a state taken after it says that it was used.
        self._row += len(batch)
        if self._row == self._rows:
            self._epoch, self._row = self._epoch + 1, 0
        keys = ("input_ids", "labels", *(("document_ids", "position_ids") if self._documents else ()))
        empty = torch.zeros(0, self._length, dtype=torch.int64)
        return {key: torch.stack([row[key] for row in rows]) if rows else empty for key in keys}

    def _order(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(self._rows)
        if self._drawn is None or self._drawn[0] != epoch:
            # One stream for each (seed, epoch); the factor keeps neighbouring seeds apart.
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._drawn = epoch, torch.randperm(self._rows, generator=generator)
        return self._drawn[1]

    def _cut(self, row: int) -> dict[str, Tensor]:
        start = row * self._length
        tokens = self._text.tokens[start : start + self._length].long()
        real = len(tokens)
        ids = torch.cat([tokens, tokens[-1:].expand(self._length - real)])
        labels = ids.clone()
        labels[real:] = IGNORE
        cut = {"input_ids": ids, "labels": labels}
        if self._documents:
            places = torch.arange(start, start + self._length)
            document = torch.searchsorted(self._text.ends, places, right=True)
            begins = torch.cat([torch.zeros(1, dtype=torch.int64), self._text.ends])
            begin = begins[document]
            labels[places == begin] = IGNORE
            # Positions count from where the document begins in this row, as a model sees it.
            cut["position_ids"] = places - begin.clamp_min(start)
            cut["document_ids"] = document - document[0]
            cut["document_ids"][real:] = -1
            cut["position_ids"][real:] = 0
        return cut


_SAME = {
    "rows": "load it with the text that it was saved with",
    "sequence_length": "use the sequence length that it was saved with",
    "seed": "use the seed that it was saved with",
    "shuffle": "shuffle as when it was saved (1: yes, 0: no)",
    "checksum": "load it with the text that it was saved with",
}


def _check(text: TokenizedText, sequence_length: int, batch_size: int, data_rank: int, data_size: int) -> None:
    bad = [
        Violation(f"{name}={value}", "must be a whole number of at least 1", f"give {name} >= 1")
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size), ("data_size", data_size))
        if not isinstance(value, int) or value < 1
    ]
    if not bad and not 0 <= data_rank < data_size:
        bad.append(Violation(f"data_rank={data_rank}", f"must be from 0 to {data_size - 1} (data_size={data_size})",
                             "use run.data_rank and run.data_size"))  # fmt: skip
    if not bad and batch_size < data_size:
        bad.append(Violation(f"batch_size={batch_size}", f"must be at least data_size={data_size}: a row for each rank",
                             f"use batch_size {data_size}, or fewer data ranks"))  # fmt: skip
    tokens = len(text.tokens)
    if tokens < 2:
        bad.append(Violation(f"a text of {tokens} tokens", "needs at least 2 (one to predict)", "give more text"))
    elif not bad and (rows := -(-tokens // sequence_length)) < batch_size:
        asked = f"a text of {tokens} tokens: {rows} rows of sequence_length {sequence_length}"
        needs = f"must fill one batch of batch_size={batch_size} rows"
        bad.append(Violation(asked, needs, "give more text, or smaller batches"))
    if bad:
        raise PlanError(bad)
