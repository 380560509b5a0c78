"""The tensor axis: weights cut inside a layer, tokens cut between blocks, a cut vocabulary.

The styles work alone, with torch's `parallelize_module`; `apply.py` puts them where the rules of a plan say.
"""

from dtensor_5d.tensor.style import (
    BlockInput,
    ColwiseParallel,
    CutParameters,
    HeadParallel,
    NormParallel,
    RowwiseParallel,
    SequenceParallel,
    SumOutput,
    VocabularyEmbedding,
    WholeParameters,
    WholeTokens,
)

__all__ = [
    "BlockInput", "ColwiseParallel", "CutParameters", "HeadParallel", "NormParallel", "RowwiseParallel",
    "SequenceParallel", "SumOutput", "VocabularyEmbedding", "WholeParameters", "WholeTokens",
]  # fmt: skip
