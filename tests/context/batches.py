"""Batches for models over the context axis: longer than windows, padded, packed, without tokens."""

from __future__ import annotations

import torch

from tests.parity import rows


def long(step, rank, vocab):
    """Another length each step, also odd ones; token counts differ between ranks."""
    return [rows(100 * step + rank, 2 + rank % 2, (24, 37, 19)[step], vocab, supervised=(0.9, 0.3)[rank % 2])]


def padded(step, rank, vocab):
    """Left padding in one row, right padding in another, none in the third."""
    batch = rows(100 * step + rank, 3, 29, vocab, supervised=1.0)
    mask = torch.ones(3, 29, dtype=torch.long)
    mask[0, :7] = 0
    mask[1, 20:] = 0
    batch["labels"][mask == 0] = -100
    batch["labels"][0, 7] = -100  # padding would predict it: eager attention then looks at everything
    return [batch | {"attention_mask": mask}]


def packed(step, rank, vocab):
    """Documents of any length, other ones in each row; told by positions that start again."""
    batch = rows(100 * step + rank, 2, 31, vocab)
    lengths = ((9, 1, 21), (16, 15))
    positions = torch.tensor([[p for n in row for p in range(n)] for row in lengths])
    batch["labels"][positions == 0] = -100
    return [batch | {"position_ids": positions}]


def one_without_tokens(step, rank, vocab):
    """Rank 1 has no supervised token in step 0; a batch without any; one with a few at the end."""
    last = rows(100 * step + rank + 70, 1, 20, vocab, supervised=1.0)
    last["labels"][:, :15] = -100
    return [
        rows(100 * step + rank, 3, 22, vocab, supervised=0.0 if rank == 1 and step == 0 else 0.7),
        rows(100 * step + rank + 50, 1, 10 + step, vocab, supervised=0.0),
        last,
    ]


def ragged(step, rank, vocab):
    """Two batches of other lengths, one of a single token; rank 0 has one batch less."""
    both = [rows(100 * step + rank, 2, 18, vocab), rows(100 * step + rank + 50, 1, (1, 33, 2)[step], vocab)]
    return both[: 1 if rank == 0 else 2]
