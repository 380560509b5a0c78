"""Reading the config of a Hugging Face model: one name for each number, whatever the family calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from dtensor_5d.errors import PlanError, Violation

__all__ = ["Fields", "read_config"]

# Our name -> the names that families use for it.
_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "residual_dropout": ("resid_pdrop", "hidden_dropout", "dropout"),
    "layer_types": ("layer_types", "attn_type_list"),
    "dtype": ("dtype", "torch_dtype"),
}
_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Fields:
    """The fields of one config, with the defaults of its family behind them."""

    raw: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """The value under any of the names for it; a missing one or None gives the family's default, or `default`."""
        for known in _ALIASES.get(name, (name,)):
            value = self.raw.get(known)
            if value is not None:
                return value
        fallback = self.defaults.get(name)
        return default if fallback is None else fallback

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number >= 1. Errors: `PlanError` for a missing field, or for one that is no such number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            names = " or ".join(_ALIASES.get(name, (name,)))
            found = "no value" if value is None else repr(value)
            raise PlanError(
                Violation(f"{found} for {names}", "the config must give a whole number >= 1", f"add {names} to it")
            )
        return value

    @property
    def has_layers(self) -> bool:
        """Whether the config says layer by layer what differs (`per_layer_config` of transformers 5)."""
        return "per_layer_config" in self.raw

    def at_layer(self, index: int) -> Fields:
        """The fields as the layer at this place sees them: those of `per_layer_config` come first."""
        given = self.raw.get("per_layer_config") or {}
        # Keys are text in JSON, with zeros in front: "05".
        own = next((fields for place, fields in given.items() if int(place) == index), None)
        return Fields({**self.raw, **own}, self.defaults) if own else self

    def flag(self, rule: bool | str) -> bool:
        """A fixed truth, or the truth of a field."""
        return rule if isinstance(rule, bool) else bool(self.get(rule, False))

    def per_layer(self, name: str, layer: int) -> int:
        """A count that may be one number or a list with one for each layer."""
        value = self.get(name)
        if isinstance(value, (list, tuple)):
            if layer >= len(value):
                raise PlanError(
                    Violation(
                        f"{len(value)} values of {name}",
                        f"there must be one for each of the {self.count('num_hidden_layers')} layers",
                        f"give {self.count('num_hidden_layers')} values, or one number",
                    )
                )
            return int(value[layer])
        return self.count(name)

    @property
    def head_size(self) -> int:
        """Size of a query head."""
        if self.get("head_dim"):
            return self.count("head_dim")
        return self.count("hidden_size") // self.count("num_attention_heads")

    def violations(self) -> list[Violation]:
        """What is missing or contradicts itself."""
        bad: list[Violation] = []
        for name in _COUNTS:
            try:
                self.count(name)
            except PlanError as error:
                bad += error.violations
        if bad:
            return bad
        hidden, heads, layers = (self.count(n) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        if not self.get("head_dim") and hidden % heads and not self.get("kv_lora_rank"):
            near = _nearest_divisor(hidden, heads)
            bad.append(
                Violation(
                    f"hidden_size={hidden} with num_attention_heads={heads} and no head_dim",
                    f"{heads} must divide {hidden}",
                    f"give head_dim, or use {near} heads",
                )
            )
        kv = self.get("num_key_value_heads")
        if kv is not None and (not isinstance(kv, int) or isinstance(kv, bool) or kv < 1 or heads % kv):
            near = _nearest_divisor(heads, kv) if isinstance(kv, int) and not isinstance(kv, bool) and kv > 0 else heads
            bad.append(
                Violation(
                    f"num_key_value_heads={kv!r} with num_attention_heads={heads}",
                    f"the key-value heads must divide the {heads} query heads",
                    f"use {near} key-value heads",
                )
            )
        for name in ("layer_types", "mlp_layer_types"):
            kinds = self.get(name)
            if isinstance(kinds, (list, tuple)) and len(kinds) != layers:
                bad.append(
                    Violation(
                        f"{len(kinds)} {name} for num_hidden_layers={layers}",
                        f"there must be {layers}, one for each layer",
                        f"give {layers} {name} or num_hidden_layers={len(kinds)}",
                    )
                )
        experts, chosen = self.get("experts"), self.get("experts_per_token")
        if isinstance(experts, int) and isinstance(chosen, int) and not 1 <= chosen <= max(experts, 1):
            bad.append(
                Violation(
                    f"{chosen} experts per token of {experts} experts",
                    f"must be between 1 and {experts}",
                    f"use {min(max(chosen, 1), max(experts, 1))} experts per token",
                )
            )
        return bad


def read_config(source: Mapping[str, Any] | str | PathLike[str]) -> dict[str, Any]:
    """The language model's part of a config: a dict, a `config.json` or a folder with one; also inside `text_config`.

    Errors: `PlanError` for a path without a config and for text that is none.
    """
    # Only who reads a file pays for these imports.
    import json
    from pathlib import Path

    if isinstance(source, Mapping):
        raw: Any = dict(source)
    else:
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise PlanError(
                Violation(f"config {str(source)!r}", "must be a config.json or a folder with one", "check the path")
            )
        try:
            raw = json.loads(file.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            asked, needs = f"config {str(file)!r}", f"must be JSON ({error})"
            raise PlanError(Violation(asked, needs, "give a config.json")) from None
    if not isinstance(raw, dict):
        raise PlanError(
            Violation(f"a config that is a {type(raw).__name__}", "must be an object of fields", "give a config.json")
        )
    for inner in ("text_config", "language_config", "llm_config"):
        if isinstance(raw.get(inner), Mapping):
            outer = raw
            raw = dict(outer[inner])
            raw.setdefault("model_type", f"{outer.get('model_type', '')}_text")
            for shared in ("tie_word_embeddings", "dtype", "torch_dtype"):
                if shared in outer:
                    raw.setdefault(shared, outer[shared])
            break
    return raw


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, min(number, 4096) + 1) if number % d == 0] + [number]
    return min(divisors, key=lambda d: (abs(math.log(d / wanted)), d))
