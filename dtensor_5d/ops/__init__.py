"""What several axes compute with: products whose weight gradient can wait, and collectives with their transposes."""

from dtensor_5d.ops.collectives import (
    added_once,
    all_gather_reduce_scatter,
    all_gather_split,
    all_reduce_identity,
    all_to_all,
    identity_all_reduce,
    reduce_scatter_all_gather,
    split_all_gather,
)
from dtensor_5d.ops.deferral import Deferral, make_deferrable, restore
from dtensor_5d.ops.products import batched_matmul, embedding, grouped_matmul, linear, matmul
from dtensor_5d.ops.store import WeightGradients, accumulate

__all__ = [
    "Deferral", "WeightGradients", "accumulate", "added_once", "all_gather_reduce_scatter", "all_gather_split",
    "all_reduce_identity", "all_to_all", "batched_matmul", "embedding", "grouped_matmul", "identity_all_reduce",
    "linear", "make_deferrable", "matmul", "reduce_scatter_all_gather", "restore", "split_all_gather",
]  # fmt: skip
