"""Byte-level tokens: the id of a byte is the byte, one more id ends a document; as an ordinary tokenizer folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["END", "VOCABULARY", "TokenizedText", "tokenize", "write_byte_tokenizer"]

END = 256
"""The id that ends a document (begin-of-sequence, end-of-sequence and padding in one)."""

VOCABULARY = 257
END_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizedText:
    """Documents as one row of tokens, each ended by the end token.

    tokens [N] int32; ends [documents] int64: document d is tokens[ends[d - 1] : ends[d]].
    """

    tokens: Tensor
    ends: Tensor


def tokenize(
    documents: Sequence[str], encode: Callable[[str], Sequence[int]] | None = None, end: int = END
) -> TokenizedText:
    """Documents in tokens. Without `encode`: their UTF-8 bytes, which is what the tokenizer of
    `write_byte_tokenizer` gives. With it, for example a Hugging Face tokenizer:

        >>> tokenize(documents, lambda text: tokenizer(text).input_ids, tokenizer.eos_token_id)
    """
    parts = []
    for text in documents:
        if encode is None:
            ids = torch.frombuffer(bytearray(text.encode() + b"."), dtype=torch.uint8).int()  # the dot: room for `end`
            ids[-1] = end
        else:
            ids = torch.tensor([*encode(text), end], dtype=torch.int32)
        parts.append(ids)
    tokens = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32)
    return TokenizedText(tokens, torch.tensor([len(ids) for ids in parts], dtype=torch.int64).cumsum(0))


def write_byte_tokenizer(folder: str | Path) -> None:
    """Writes the files of a byte-level tokenizer that `transformers.AutoTokenizer.from_pretrained(folder)` loads.

    257 ids: 0 to 255 are the bytes, 256 is `<|endoftext|>`. Every text survives encode and decode.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _letters_of_bytes()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TEXT, special=True, normalized=False)])
    assert tokenizer.token_to_id(END_TEXT) == END
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_TEXT, eos_token=END_TEXT, pad_token=END_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip


def _letters_of_bytes() -> list[str]:
    """The printable letter that stands for each byte in byte-level vocabularies (GPT-2, Radford et al. 2019)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
