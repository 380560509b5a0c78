"""How many attention heads a model has, and how many of them a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Heads", "heads_of"]


@dataclass(frozen=True)
class Heads:
    """query, kv: heads of the whole model; size: of one head (of fused q, k and v)."""

    query: int
    kv: int
    size: int

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rows of q, k and v in a fused projection."""
        return self.query * self.size, self.kv * self.size, self.kv * self.size

    def copies(self, tp: int) -> int:
        """How many ranks hold the same kv head."""
        return max(tp // self.kv, 1)

    def attributes(self, tp: int) -> dict[str, tuple[int, int]]:
        """Attribute of an attention module -> (its value for the whole, the rank's)."""
        query, kv = self.query // tp, max(self.kv // tp, 1)
        return {
            "num_heads": (self.query, query),
            "num_attention_heads": (self.query, query),
            "num_key_value_heads": (self.kv, kv),
            "num_key_value_groups": (self.query // self.kv, query // kv),
            "split_size": (self.query * self.size, query * self.size),
        }


def heads_of(model: nn.Module) -> Heads:
    """From the model's (text) config."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True)
    query = int(text.num_attention_heads)
    kv = int(getattr(text, "num_key_value_heads", None) or query)
    return Heads(query, kv, int(getattr(text, "head_dim", None) or text.hidden_size // query))
