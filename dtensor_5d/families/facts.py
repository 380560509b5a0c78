"""What the structure of a model does not tell about its family: facts as data, one entry per `model_type`.

Measured on tiny models of 69 families with transformers' own attention, on the CPU, in training mode, with
`use_cache=False`; `tests/adapters/test_facts.py` measures them again and compares, so the data cannot rot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

__all__ = ["FACTS", "FamilyFacts", "facts_for"]


@dataclass(frozen=True)
class FamilyFacts:
    """Facts of one family.

    packs_by_position: `position_ids` that start at 0 again, without an attention mask, separate the documents of a
        packed row: every logit of a document is what it is when the document stands alone.
    takes_position_ids: given `position_ids` are used (a forward can swallow them unread).
    attention: the implementations that run: "eager", "sdpa", and "custom" for a function registered with
        `AttentionInterface` that gets no mask. What needs an accelerator or a compiler (flash, flex) is not measured.
    aux_loss: with `output_router_logits=True` the model returns an auxiliary loss that balances its experts.
    randomness: what makes training forwards random with the config's default chances: "module" for `nn.Dropout`,
        "functional" for dropout or router jitter inside a forward, which no module shows.
    shared_after: the child of the block around the experts that runs after them, once and on the block's own input, so
        that it can as well run while their tokens travel; "" for none (others run before, or on another tensor).
    verified: measured; False for a family that nobody looked at, whose other facts are then the cautious ones.
    """

    packs_by_position: bool
    takes_position_ids: bool
    attention: tuple[str, ...]
    aux_loss: bool
    randomness: tuple[str, ...]
    shared_after: str = ""
    verified: bool = True


def facts_for(model_type: str) -> FamilyFacts:
    """The facts of a family by its `config.model_type` (of the text config, where a model has several).

    Example:
        >>> facts_for("gpt_oss").packs_by_position, facts_for("never heard of").verified
        (False, False)
    """
    return FACTS.get(model_type, _UNKNOWN)


_UNKNOWN = FamilyFacts(
    packs_by_position=False,
    takes_position_ids=False,
    attention=("eager",),
    aux_loss=True,
    randomness=("module", "functional"),
    verified=False,
)

_PLAIN = FamilyFacts(
    packs_by_position=True,
    takes_position_ids=True,
    attention=("eager", "sdpa", "custom"),
    aux_loss=False,
    randomness=(),
)
_BALANCED = replace(_PLAIN, aux_loss=True)

_SHARED_AFTER = replace(_PLAIN, shared_after="shared_experts")

# Conv, mamba and linear-attention layers carry their state across the border of two documents.
_STATEFUL = replace(_PLAIN, packs_by_position=False)

_PLAIN_FAMILIES = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma3_text", "gemma3n_text",
    "gemma4_text", "glm", "glm4", "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "internlm3", "llama", "llama4_text", "ministral", "mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
    "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
_SHARED_AFTER_FAMILIES = ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "solar_open")
_BALANCED_FAMILIES = (
    "ernie4_5_moe", "flex_olmo", "granitemoe", "granitemoeshared", "minimax_m2", "mixtral", "olmoe", "qwen2_moe",
    "qwen3_moe",
)  # fmt: skip

FACTS: Mapping[str, FamilyFacts] = MappingProxyType(
    {
        **dict.fromkeys(_PLAIN_FAMILIES, _PLAIN),
        **dict.fromkeys(_SHARED_AFTER_FAMILIES, _SHARED_AFTER),
        **dict.fromkeys(_BALANCED_FAMILIES, _BALANCED),
        **dict.fromkeys(("lfm2", "lfm2_moe", "qwen3_5_text"), _STATEFUL),
        **dict.fromkeys(("jamba", "minimax", "qwen3_next"), replace(_STATEFUL, aux_loss=True)),
        # Their forward gives the mask no positions.
        "afmoe": replace(_PLAIN, packs_by_position=False),
        "gpt_oss": replace(_BALANCED, packs_by_position=False, attention=("eager", "custom")),
        "opt": replace(_PLAIN, packs_by_position=False, randomness=("functional",)),
        # Alibi from the mask; `position_ids` are swallowed, and so is a registered attention: it runs without a mask.
        "bloom": replace(_PLAIN, packs_by_position=False, takes_position_ids=False, attention=("eager",)),
        # Soft-capped logits, which sdpa has not.
        "gemma2": replace(_PLAIN, attention=("eager", "custom")),
        "vaultgemma": replace(_PLAIN, attention=("eager", "custom")),
        # A class of its own per implementation.
        "falcon": replace(_PLAIN, attention=("eager", "sdpa")),
        # The indexer reads the mask.
        "deepseek_v32": replace(_SHARED_AFTER, attention=("eager", "sdpa")),
        "gpt2": replace(_PLAIN, randomness=("module",)),
        "gpt_bigcode": replace(_PLAIN, randomness=("module", "functional")),
        "phimoe": replace(_BALANCED, randomness=("functional",)),
        "seed_oss": replace(_PLAIN, randomness=("functional",)),
    }
)
