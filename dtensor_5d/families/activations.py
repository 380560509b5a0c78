"""What a layer keeps for its backward pass, tensor by tensor, in bytes per token.

The terms are those of transformers' modules under plain autograd: every input of a matrix product once, what norms
and activations keep, and the queries, keys, values and output of the attention. For GPT-2 with fused GELU, dropout
and eager attention they add up to the 34 M + 5 H S of Korthikanti et al. (published-numbers 1.1, F5).

Letters: M model size, H heads, K key-value heads, D head size, I inner size, E experts, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.blocks import LayerShape, Param
from dtensor_5d.families.recipes import Recipe

__all__ = ["Numbers", "Saved", "is_recomputed", "kept_tensors", "saved_tensors", "stashed_tensors"]

# Tensors of the inner size that an activation function keeps besides its output (which is the next product's input).
_KEPT_BY = {"relu": 0, "relu2": 1, "gelu_new": 4, "gelu_fast": 5, "quick_gelu": 3, "xielu": 4}
_CLAMPED_EXPERTS = 4  # GPT-OSS writes out its clamped gate, clamped up, sigmoid and shifted up


@dataclass(frozen=True)
class Saved:
    """One tensor kept for backward, in bytes per token.

    cut: what divides it: "tensor" (by tp), "sequence" (by tp where sequence parallel is on), "expert" (the tokens of
    a rank's experts) or "" (whole on every tensor rank).
    core: only there because the attention's scores are written out (eager); what Korthikanti's selective drops.
    feeds: it is the input of a matrix product, so its weight gradient waits for it.
    """

    name: str
    bytes: float
    cut: str
    core: bool = False
    feeds: bool = False


@dataclass(frozen=True)
class Numbers:
    """What decides the size of the tensors besides the layer.

    width: bytes of a number in compute. attention: "flash" (scores are never written out) or "eager".
    """

    hidden: int
    seq_len: int
    width: int = 2
    attention: str = "flash"
    activation: str = "silu"
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    softcap: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ("flash", "eager"):
            raise PlanError(
                Violation(f"attention={self.attention!r}", "must be 'flash' or 'eager'", "choose one of these")
            )


def saved_tensors(layer: LayerShape, recipe: Recipe, numbers: Numbers) -> tuple[Saved, ...]:
    """All tensors that a layer keeps when nothing is recomputed."""
    made: list[Saved] = []
    hidden, width = numbers.hidden, numbers.width
    _norms(made, layer, recipe, numbers)
    made.append(Saved("attention input", width * hidden, "sequence", feeds=True))
    if layer.mixer.kind == "linear":
        _linear_mixing(made, layer, width)
    else:
        _attention(made, layer, recipe, numbers)
    if not (_side_by_side(recipe) and len(recipe.norms) == 1):
        made.append(Saved("mlp input", width * hidden, "sequence", feeds=True))
    if layer.experts:
        _experts(made, layer, recipe, numbers)
        if layer.beside:
            made.append(Saved("experts input", width * hidden, "sequence"))
            _mlp(made, "mlp", layer.beside, layer.gated, numbers.activation, width, "tensor")
    else:
        _mlp(made, "mlp", layer.inner, layer.gated, numbers.activation, width, "tensor")
    if numbers.residual_dropout > 0:
        made.append(Saved("attention dropout mask", hidden, "sequence"))
        made.append(Saved("mlp dropout mask", hidden, "sequence"))
    return tuple(made)


def kept_tensors(policy: str, layer: LayerShape, recipe: Recipe, numbers: Numbers, place: int = 0) -> tuple[Saved, ...]:
    """What stays from forward to backward under a recompute policy, for the layer at this place of its stage.

    "none" keeps all; "block" only the layer's input; "selective" the input and the outputs of matrix products and of
    the attention, so that only cheap operations run again; "every=k" recomputes every k-th layer.
    """
    if not is_recomputed(policy, place):
        return saved_tensors(layer, recipe, numbers)
    block_input = Saved("layer input", numbers.width * numbers.hidden, "sequence")
    if policy != "selective":
        return (block_input,)
    made = [block_input, *(_output(p, layer, numbers) for p in layer.params if p.multiplies and p.part != "router")]
    mixer = layer.mixer
    if mixer.kind != "linear":
        made.append(Saved("attention output", numbers.width * mixer.heads * mixer.v_size, "tensor"))
        made.append(Saved("attention statistics", 4 * mixer.heads, "tensor"))
    return tuple(made)


def stashed_tensors(layer: LayerShape, recipe: Recipe, numbers: Numbers) -> tuple[Saved, ...]:
    """What waits between the two halves of a split backward: inputs and output gradients of the matrix products.

    For GPT-2 32 M bytes per token in bf16, the M_W of the Zero Bubble paper (published-numbers 2.2).
    """
    inputs = [t for t in saved_tensors(layer, recipe, numbers) if t.feeds]
    return (*inputs, *(_output(p, layer, numbers) for p in layer.params if p.multiplies))


def is_recomputed(policy: str, place: int) -> bool:
    """Whether the layer at this place of a stage runs its forward again in backward."""
    if policy.startswith("every="):
        return place % int(policy[6:]) == 0
    return policy in ("block", "selective")


def _side_by_side(recipe: Recipe) -> bool:
    return recipe.parallel is not False


def _output(param: Param, layer: LayerShape, numbers: Numbers) -> Saved:
    """The output of the product with this parameter (its gradient has the same size)."""
    pieces = param.name.removesuffix(".weight").split(".")
    layer_place = next(i for i, piece in enumerate(pieces) if piece.isdigit())
    name, size = ".".join(pieces[layer_place + 1 :]), numbers.width * param.outputs
    if param.is_expert:
        return Saved(name, size * layer.experts_per_token, "expert")
    if param.outputs == numbers.hidden:
        return Saved(name, size, "sequence")
    return Saved(name, size, "tensor" if param.tp is not None else "")


def _norm(made: list[Saved], name: str, kind: str, size: int, groups: int, width: int, cut: str) -> None:
    """What one normalisation keeps: RMS norms of transformers compute in fp32 and keep the copy they made."""
    if kind == "layer":
        made.append(Saved(f"{name} input", width * size, cut))
    elif kind == "layer_plain":  # Cohere writes its layer norm out, in fp32
        made += [Saved(f"{name} {step} in fp32", 4 * size, cut) for step in ("input", "centred", "normalised")]
    else:
        made.append(Saved(f"{name} input in fp32", 4 * size, cut))
        if kind != "none":
            made.append(Saved(f"{name} normalised", (4 if kind == "gemma" else width) * size, cut))
            made.append(Saved(f"{name} statistics", 4 * groups, cut))


def _norms(made: list[Saved], layer: LayerShape, recipe: Recipe, numbers: Numbers) -> None:
    named = [p.name.rsplit(".", 2)[-2] for p in layer.of("norm") if p.name.endswith(".weight")]
    names = [n for n in named if n in (*recipe.norms, "ln_attn", "ln_mlp")] or list(recipe.norms)
    if _side_by_side(recipe) and recipe.norm == "layer":
        names = names[:1]  # both normalise the same tensor, which a layer norm keeps once
    for name in names:
        _norm(made, name, recipe.norm, numbers.hidden, 1, numbers.width, "sequence")


def _attention(made: list[Saved], layer: LayerShape, recipe: Recipe, numbers: Numbers) -> None:
    mixer, width = layer.mixer, numbers.width
    q, k, v = mixer.heads * mixer.qk_size, mixer.kv_heads * mixer.qk_size, mixer.kv_heads * mixer.v_size
    out = mixer.heads * mixer.v_size
    if recipe.mla:
        _latents(made, layer, recipe, width)
    if any(p.name.endswith(f".{recipe.qk_names[0]}.weight") for p in layer.of("norm")):
        groups = 2 if recipe.qk_norm == "full" else mixer.heads + mixer.kv_heads
        _norm(made, "query and key norm", recipe.norm, q + k, groups, width, "tensor")
    made.append(Saved("queries", width * q, "tensor"))
    if numbers.attention == "eager":
        k, v = q, out  # keys and values are repeated for every head
        _scores(made, mixer.heads * numbers.seq_len, recipe.softmax == "fp32", numbers)
    else:
        made.append(Saved("attention statistics", 4 * mixer.heads, "tensor"))
    made.append(Saved("keys", width * k, "tensor"))
    made.append(Saved("values", width * v, "tensor"))
    made.append(Saved("attention output", width * out, "tensor", feeds=True))
    if recipe.attention_gate:
        made.append(Saved("attention gate", 3 * width * out, "tensor"))


def _scores(made: list[Saved], scores: int, upcast: bool, numbers: Numbers) -> None:
    width, dropout = numbers.width, numbers.attention_dropout > 0
    if numbers.softcap:
        made.append(Saved("capped scores", width * scores, "tensor", core=True))
    made.append(Saved("probabilities", (4 if upcast else width) * scores, "tensor", core=True))
    if dropout:
        made.append(Saved("probabilities dropout mask", scores, "tensor", core=True))
    if dropout or (upcast and width < 4):
        made.append(Saved("probabilities in compute dtype", width * scores, "tensor", core=True))


def _latents(made: list[Saved], layer: LayerShape, recipe: Recipe, width: int) -> None:
    for param in layer.of("norm"):
        if param.name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight")):
            name = "key-value latent" if ".kv_a" in param.name else "query latent"
            _norm(made, name, recipe.norm, param.numel, 1, width, "")
            made.append(Saved(f"{name} for its product", width * param.numel, "", feeds=True))


def _linear_mixing(made: list[Saved], layer: LayerShape, width: int) -> None:
    """Outputs of the products, and what the recurrence keeps of them in fp32: an estimate, not a count."""
    *inner, last = [p for p in layer.of("attention") if p.multiplies and len(p.shape) == 2]
    made += [Saved(f"{p.name.split('.')[-2]} output", width * p.outputs, "") for p in inner]
    made.append(Saved("recurrence output", width * last.numel // last.outputs, "", feeds=True))
    mixer = layer.mixer
    # The delta rule as transformers writes it out keeps eight steps of queries, keys and values, and five matrices.
    copies = 8 if mixer.chunk else 2
    sizes = copies * (mixer.qk_size + mixer.v_size) + 5 * mixer.chunk
    made.append(Saved("recurrence in fp32", 4 * mixer.heads * sizes, ""))


def _mlp(made: list[Saved], name: str, inner: int, gated: bool, activation: str, width: int, cut: str) -> None:
    if gated:
        made += [Saved(f"{name} {tensor}", width * inner, cut) for tensor in ("gate", "up", "activated gate")]
    else:
        kept = _KEPT_BY.get(activation, 1)
        made += [Saved(f"{name} activation {i + 1}", width * inner, cut) for i in range(kept)]
    made.append(Saved(f"{name} product input", width * inner, cut, feeds=True))


def _experts(made: list[Saved], layer: LayerShape, recipe: Recipe, numbers: Numbers) -> None:
    chosen, hidden, width = layer.experts_per_token, numbers.hidden, numbers.width
    assert recipe.moe
    # Probabilities in fp32; index, weight and place of every choice.
    made.append(Saved("router", 4 * layer.experts + 40 * chosen, "sequence"))
    if recipe.moe.fp32_router and width < 4:
        made.append(Saved("router input in fp32", 4 * hidden, "sequence"))
    made.append(Saved("dispatched tokens", width * chosen * hidden, "expert", feeds=True))
    _mlp(made, "experts", chosen * layer.inner, True, "silu", width, "expert")
    if recipe.moe.expert_bias:
        made.append(Saved("experts clamped", _CLAMPED_EXPERTS * width * chosen * layer.inner, "expert"))
    made.append(Saved("expert outputs", width * chosen * hidden, "expert"))
    for param in layer.of("shared"):
        if param.outputs == hidden:
            _mlp(made, "shared expert", param.numel // hidden, True, "silu", width, "tensor")
    if recipe.moe.shared_gate:
        made.append(Saved("shared expert output", width * hidden, "sequence"))
