"""Reading the config of a Hugging Face model: one name for each number, whatever the family calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from dtensor_5d.errors import PlanError, Violation

__all__ = ["DTYPES", "KINDS", "Fields", "layer_kind", "read_config"]

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
KINDS: Mapping[str, str] = {
    "full_attention": "full", "attention": "full", "indexed_attention": "full", "sliding_attention": "sliding",
    "chunked_attention": "chunked", "linear_attention": "linear", "conv": "linear", "mamba": "linear",
}  # fmt: skip
DTYPES: Mapping[str, int] = {
    "float64": 8, "double": 8, "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip


def layer_kind(name: object) -> str | None:
    """full, sliding, chunked or linear for an entry of layer_types (MiniMax counts: 1 full, 0 linear); else None."""
    if isinstance(name, str):
        return KINDS.get(name)
    return {1: "full", 0: "linear"}.get(name) if isinstance(name, int) else None


@dataclass(frozen=True)
class Fields:
    """The fields of one config, with the defaults of its family behind them."""

    raw: Mapping[str, Any]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of the family, before the common ones

    def names(self, name: str) -> tuple[str, ...]:
        """The names that the config may use for this field."""
        return self.aliases.get(name) or _ALIASES.get(name, (name,))

    def get(self, name: str, default: Any = None) -> Any:
        """The value under any of the names for it; a missing one or None gives the family's default, or `default`."""
        for known in self.names(name):
            value = self.raw.get(known)
            if value is not None:
                return value
        fallback = self.defaults.get(name)
        return default if fallback is None else fallback

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number >= 1. Errors: `PlanError` for a missing field, or for one that is no such number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            names = " or ".join(self.names(name))
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
        return replace(self, raw={**self.raw, **own}) if own else self

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

    @property
    def bytes_per_number(self) -> int:
        """Of the dtype that the config names; fp32 where it names none."""
        return DTYPES.get(str(self.get("dtype", "float32")).removeprefix("torch."), 4)


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
