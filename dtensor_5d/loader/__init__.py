"""Text for training: documents, byte-level tokens, packed rows with a global position.

    >>> train, held_out = split_documents(read_documents(), 0.02)
    >>> loader = PackedLoader(tokenize(train), sequence_length=256, batch_size=8, data_rank=run.data_rank,
    ...                       data_size=run.data_size)
"""

from dtensor_5d.loader.packed import PackedLoader
from dtensor_5d.loader.text import read_documents, split_documents
from dtensor_5d.loader.tokens import END, VOCABULARY, TokenizedText, tokenize, write_byte_tokenizer

__all__ = [
    "END", "VOCABULARY", "PackedLoader", "TokenizedText", "read_documents", "split_documents", "tokenize",
    "write_byte_tokenizer",
]  # fmt: skip
