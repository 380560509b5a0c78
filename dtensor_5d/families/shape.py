"""`ModelShape`: what a model weighs and works, from its config alone. No torch.

Letters: M model size, V vocabulary, S sequence, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.activations import Numbers, Saved, kept_tensors
from dtensor_5d.families.blocks import LayerShape, Param, linear, vector
from dtensor_5d.families.contradictions import contradictions
from dtensor_5d.families.estimates import notes_for
from dtensor_5d.families.fields import Fields, read_config
from dtensor_5d.families.flops import product_flops
from dtensor_5d.families.layers import build_layer, layer_kinds, norm_params
from dtensor_5d.families.published import PRESETS
from dtensor_5d.families.recipes import Recipe, recipe_for

__all__ = ["ModelShape"]


@dataclass(frozen=True)
class ModelShape:
    """Parameters by name, and the layers they belong to.

    first: what comes before the layers (embedding, positions). last: final norm and head; a tied head has no
    parameter of its own. known: False where the family is not known here and was read as if it were Llama's.

    Example:
        >>> shape = ModelShape.preset("llama-3.1-8b")
        >>> shape.parameters, shape.layers[0].parameters
        (8030261248, 218112000)
    """

    model_type: str
    hidden: int
    vocab: int
    heads: int
    layers: tuple[LayerShape, ...]
    first: tuple[Param, ...]
    last: tuple[Param, ...]
    tied: bool
    known: bool
    recipe: Recipe = field(repr=False)
    activation: str = "silu"
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    softcap: bool = False
    bytes_per_number: int = 4

    # ------------------------------------------------------------------------------------------------ made from
    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | PathLike[str]) -> ModelShape:
        """The shape of a config: a dict, a `config.json`, or a folder with one (a language model inside included).

        A transformers config object serves as well.

        Errors: `PlanError` listing what is missing or contradicts itself.
        """
        if not isinstance(source, (Mapping, str, PathLike)):
            to_dict = getattr(source, "to_dict", None)
            if not callable(to_dict):
                raise PlanError(
                    Violation(f"a config of type {type(source).__name__}", "must be a dict or a path",
                              "give config.to_dict(), a config.json or a folder")
                )  # fmt: skip
            source = to_dict()
        raw = read_config(source)
        model_type = raw.get("model_type") or ""
        if not isinstance(model_type, str):
            raise PlanError(
                Violation(f"model_type={model_type!r}", "must be a text", "give the model_type of its config.json")
            )
        recipe = recipe_for(model_type)
        known = recipe is not None
        if recipe is None:
            recipe = recipe_for("qwen3_moe" if _looks_like_experts(raw) else "llama")
            assert recipe is not None
        fields = Fields(raw, recipe.defaults, recipe.aliases)
        bad = contradictions(fields, known=known, whole_heads=recipe.whole_heads)
        if bad:
            raise PlanError(bad)
        try:
            return _build(fields, recipe, model_type or "llama", known)
        except PlanError:
            raise
        except (TypeError, ValueError, IndexError, ArithmeticError) as error:
            asked = f"a config of {model_type or 'no model_type'} with a field of the wrong kind ({error})"
            needs = "fields must be numbers, lists and truths as the family's own config has them"
            raise PlanError(Violation(asked, needs, "compare it with a published config.json")) from error

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        """A published model by name. Errors: `PlanError` naming the presets there are."""
        if name not in PRESETS:
            raise PlanError(
                Violation(f"preset {name!r}", f"there are {', '.join(PRESETS)}", "choose one, or give a config.json")
            )
        return cls.from_config(PRESETS[name])

    @property
    def notes(self) -> tuple[str, ...]:
        """What is an estimate in this family, a sentence each; parameters never are where the family is known."""
        return notes_for(self.model_type)

    # ---------------------------------------------------------------------------------------------- parameters
    def named_parameters(self) -> Iterator[Param]:
        """Every parameter once, under its Hugging Face name."""
        yield from self.first
        for layer in self.layers:
            yield from layer.params
        yield from self.last

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(p.numel for p in self.named_parameters())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of the experts only those it is sent to."""
        unused = sum(
            p.numel // layer.experts * (layer.experts - layer.experts_per_token)
            for layer in self.layers
            for p in layer.of("expert")
        )
        return self.parameters - unused

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts."""
        return self._part("expert")

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding (and of learned positions)."""
        return self._part("embedding", "position")

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are its own: 0 weights when it is tied."""
        return self._part("head")

    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each layer."""
        return tuple(layer.parameters for layer in self.layers)

    def _part(self, *parts: str) -> int:
        return sum(p.numel for p in self.named_parameters() if p.part in parts)

    # ---------------------------------------------------------------------------------------------------- work
    def flops_by_product(self, seq_len: int, attention: str = "causal") -> dict[str, float]:
        """Forward floating-point operations per token by matrix product, summed over the layers.

        attention: "causal" counts the pairs of tokens that the masks let through (windows included), "full" all pairs.
        A backward pass costs twice as much.

        Example:
            >>> round(sum(ModelShape.preset("llama-3.1-8b").flops_by_product(8192).values()) * 3 / 1e9, 1)
            51.5
        """
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
            raise PlanError(Violation(f"seq_len={seq_len!r}", "must be an integer >= 1", "give a number of tokens"))
        if attention not in ("causal", "full"):
            raise PlanError(Violation(f"attention={attention!r}", "must be 'causal' or 'full'", "choose one of these"))
        outside = self.first + self.last
        return product_flops(self.layers, outside, self.hidden, self.vocab, self.tied, seq_len, attention)

    def numbers(self, seq_len: int, width: int = 2, attention: str = "flash") -> Numbers:
        """What decides the size of activations: S, bytes of a number in compute, how attention runs."""
        return Numbers(
            self.hidden, seq_len, width, attention, self.activation, self.attention_dropout, self.residual_dropout,
            self.softcap,
        )  # fmt: skip

    def activations(
        self, layer: int, seq_len: int, *, recompute: str = "none", width: int = 2, attention: str = "flash"
    ) -> tuple[Saved, ...]:
        """What a layer keeps from forward to backward, tensor by tensor, in bytes per token.

        Example: 34 M + 5 H S bytes in GPT-2 with fused GELU and eager attention.
            >>> shape = ModelShape.preset("llama-3.1-8b")
            >>> sum(t.bytes for t in shape.activations(0, 4096, recompute="block")) == 2 * shape.hidden
            True
        """
        bad = [
            Violation(f"{name}={value!r}", "must be an integer >= 1", f"give {name} a count")
            for name, value in (("seq_len", seq_len), ("width", width))
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(self.layers):
            last = len(self.layers) - 1
            bad.append(Violation(f"layer={layer!r}", f"there are layers 0 to {last}", f"use a layer from 0 to {last}"))
        if bad:
            raise PlanError(bad)
        return kept_tensors(recompute, self.layers[layer], self.recipe, self.numbers(seq_len, width, attention), layer)

    def flops_per_token(self, seq_len: int, attention: str = "causal", backward: bool = True) -> float:
        """Floating-point operations per token: forward, and backward as twice the forward."""
        return sum(self.flops_by_product(seq_len, attention).values()) * (3 if backward else 1)


def _looks_like_experts(raw: Mapping[str, Any]) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(isinstance(raw.get(n), int) and raw[n] > 1 for n in names)


def _build(fields: Fields, recipe: Recipe, model_type: str, known: bool) -> ModelShape:
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    tied = bool(fields.get("tie_word_embeddings", False))
    kinds = layer_kinds(fields, recipe)
    layers = tuple(build_layer(fields, recipe, i, kind) for i, kind in enumerate(kinds))
    width = int(fields.get("word_embed_proj_dim", hidden))
    root = recipe.root
    first = [Param(f"{root}.{recipe.embed}.weight", (vocab, width), "embedding", 0)]
    if recipe.position:
        # OPT's table begins with two rows for padding.
        rows = fields.count("max_position_embeddings") + (2 if recipe.position == "embed_positions" else 0)
        first.append(Param(f"{root}.{recipe.position}.weight", (rows, hidden), "position"))
    if recipe.embed_norm:
        first += norm_params(fields, recipe, f"{root}.{recipe.embed_norm}")
    first += _per_layer_embeddings(fields, root, hidden)
    last = []
    if recipe.position == "embed_positions" and width != hidden:
        last += linear(f"{root}.project_out", width, hidden, "embedding_mix")
        first += linear(f"{root}.project_in", hidden, width, "embedding_mix")
    has_final = recipe.position != "embed_positions" or fields.get("do_layer_norm_before", True)
    if recipe.final_norm and has_final:
        last += norm_params(fields, recipe, f"{root}.{recipe.final_norm}")
    streams = int(fields.get("altup_num_inputs", 0))
    for i in range(streams - 1):
        first += linear(f"{root}.altup_projections.{i}", hidden, hidden, "embedding_mix")
        last += linear(f"{root}.altup_unembed_projections.{i}", hidden, hidden, "embedding_mix")
    if not tied:
        last.append(Param("lm_head.weight", (vocab, width), "head", 0, outputs=vocab))
    if fields.flag(recipe.head_bias):
        last.append(vector("lm_head.bias", vocab, "head", cut=True))
    return ModelShape(
        model_type=model_type,
        hidden=hidden,
        vocab=vocab,
        heads=fields.count("num_attention_heads"),
        layers=layers,
        first=tuple(first),
        last=tuple(last),
        tied=tied,
        known=known,
        recipe=recipe,
        activation=str(fields.get("activation", "silu")),
        attention_dropout=float(fields.get("attention_dropout", 0.0)),
        residual_dropout=float(fields.get("residual_dropout", 0.0)),
        softcap=fields.get("attn_logit_softcapping") is not None,
        bytes_per_number=fields.bytes_per_number,
    )


def _per_layer_embeddings(fields: Fields, root: str, hidden: int) -> list[Param]:
    """Gemma 3n and 4: a second embedding with a slice for every layer."""
    size = int(fields.get("hidden_size_per_layer_input", 0))
    if not size:
        return []
    rows, wide = fields.count("vocab_size_per_layer_input"), fields.count("num_hidden_layers") * size
    return [
        Param(f"{root}.embed_tokens_per_layer.weight", (rows, wide), "embedding"),
        *linear(f"{root}.per_layer_model_projection", wide, hidden, "embedding_mix"),
        vector(f"{root}.per_layer_projection_norm.weight", size, "norm"),
    ]
