"""What is an estimate and not a count, as data: families whose activations or work differ from the real model's.

Measured on tiny models in fp32 on the CPU: activations against the tensors that autograd keeps for 4 layers (64 tokens,
"eager" and "sdpa"), work against torch's counter of operations (32 tokens). A family that is not here is within 2 % in
activations and 0.3 % in operations, with two limits: `gemma2`, `vaultgemma`, `bloom`, `smollm3` were measured in work
only or with one implementation; and where torch's sdpa gets a mask (windows) or values of another size than keys (MLA),
the CPU keeps scores or repeated keys that a flash kernel does not: "flash" stands for the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["notes_for"]

_ACTIVATIONS: Mapping[str, str] = MappingProxyType({
    "llama4_text": "62 % too low where its own forward runs, which sends every token to every expert",
    "seed_oss": "up to 64 % too low with the dropout that is its config's default",
    "jamba": "up to 24 % too low",
    "gemma4_text": "up to 22 % too low",
    "gemma3n_text": "not compared with the real model",
    "falcon": "up to 19 % too low",
    "nanochat": "up to 15 % too low",
    "minimax": "up to 12 % too low",
    "stablelm": "up to 8 % too low",
    "lfm2": "up to 7 % too low",
    "qwen3_5_text": "up to 7 % too low",
    "qwen3_next": "up to 5 % too low",
    "lfm2_moe": "up to 5 % too low",
    "gpt_oss": "up to 7 % too high in fp32",
    "afmoe": "up to 3 % too high",
})  # fmt: skip
_WORK: Mapping[str, str] = MappingProxyType({
    "llama4_text": "58 % too low where its own forward runs, which sends every token to every expert",
    "qwen3_5_text": "16 % too low for 32 tokens",
    "qwen3_next": "13 % too low for 32 tokens",
    "minimax": "2 % too low",
    "gemma3n_text": "1 % too low",
    "jamba": "1 % too high",
})  # fmt: skip


def notes_for(model_type: str) -> tuple[str, ...]:
    """One sentence for each thing that is estimated in this family.

    Example:
        >>> notes_for("llama"), len(notes_for("jamba"))
        ((), 2)
    """
    topics = (("activations", _ACTIVATIONS), ("operations", _WORK))
    return tuple(
        f"{topic} of {model_type} are an estimate: {families[model_type]}"
        for topic, families in topics
        if model_type in families
    )
