"""Bytes that a micro-batch costs a stage: what it keeps, what stays for the weight gradients, what comes and goes.

T: tokens of a micro-batch on one rank (micro-batch x sequence / cp).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtensor_5d.families.activations import Saved, is_recomputed, kept_tensors, saved_tensors, stashed_tensors
from dtensor_5d.families.shape import ModelShape
from dtensor_5d.plan import Plan
from dtensor_5d.planner.stages import Stage

__all__ = ["Activity", "Tokens", "activity_of_stage", "cut_bytes"]


@dataclass(frozen=True)
class Tokens:
    """A micro-batch on one rank. count: T. seq_len: S of the whole sequence. width: bytes of a number in compute."""

    count: int
    seq_len: int
    width: int
    attention: str


@dataclass(frozen=True)
class Activity:
    """Bytes of one micro-batch on one stage.

    kept: from forward to backward. stash: from I to W. recompute: the extra of the layer that runs its forward again.
    logits: what only exists around the loss. working: gradients of activations that backward has in hand.
    buffers: of tensor, context, pipeline and expert communication. probabilities: the part of `kept` that belongs to
    the loss, and is gone when the backward of the layers begins.
    """

    kept: int
    stash: int
    recompute: int
    logits: int
    working: int
    buffers: int
    probabilities: int


def cut_bytes(tensors: Iterable[Saved], plan: Plan, kv_heads: int = 0) -> float:
    """Bytes per token on one rank of the tensor axis.

    Key-value heads that are fewer than the ranks are repeated, and an expert-tensor group works on the same tokens.
    """
    tp, etp = plan.degrees.tp, plan.degrees.etp
    parallel = plan.options.sequence_parallel
    sequence = tp if (tp > 1 if parallel is None else parallel) else 1
    total = 0.0
    for tensor in tensors:
        by = {"tensor": tp, "sequence": sequence, "expert": tp}.get(tensor.cut, 1)
        if tensor.name in ("keys", "values") and kv_heads:
            by = min(by, kv_heads)
        size = tensor.bytes / by
        if tensor.cut == "expert" and not tensor.name.startswith("experts"):
            size *= etp
        total += size
    return total


def activity_of_stage(shape: ModelShape, plan: Plan, stage: Stage, tokens: Tokens) -> Activity:
    """All of a stage's terms."""
    numbers = shape.numbers(tokens.seq_len, tokens.width, tokens.attention)
    policy, recipe, width = plan.options.recompute, shape.recipe, tokens.width
    kept = stash = extra = working = 0.0
    alike: dict[tuple[object, ...], tuple[float, ...]] = {}  # a model has many layers and few kinds of them
    for place, layer in enumerate(stage.layers):
        again = is_recomputed(policy, place)
        key = (layer.signature, again)
        if key not in alike:
            kv = layer.mixer.kv_heads
            full = cut_bytes(saved_tensors(layer, recipe, numbers), plan, kv)
            own = cut_bytes(kept_tensors(policy, layer, recipe, numbers, place), plan, kv) if again else full
            waiting = cut_bytes(stashed_tensors(layer, recipe, numbers), plan, kv)
            chosen = max(1, layer.experts_per_token)
            # Backward holds the gradients around one product: in and out of the MLP, and of the residual stream.
            inner = 3.0 * width * layer.inner * chosen
            gradients = [
                Saved("inner gradients", inner, "expert" if layer.experts else "tensor"),
                Saved("hidden gradients", 3.0 * width * shape.hidden, "sequence"),
            ]
            alike[key] = (own, waiting, full - own, cut_bytes(gradients, plan))
        own, waiting, more, in_hand = alike[key]
        kept, stash, extra, working = kept + own, stash + waiting, max(extra, more), max(working, in_hand)
    logits = probabilities = 0.0
    if stage.is_first:
        kept += 8  # token ids
    else:
        kept += cut_bytes([Saved("stage input", width * shape.hidden, "sequence")], plan)
    if stage.is_last:
        probabilities = 4 * _vocab(shape, plan)  # the one fp32 buffer of `loss.py`
        kept += cut_bytes(_head_tensors(shape, width), plan) + probabilities
        logits = 2 * width * _vocab(shape, plan)  # and their gradient
    t = tokens.count
    return Activity(
        int(kept * t), int(stash * t), int(extra * t), int(logits * t), int(working * t),
        int(_buffer_bytes(shape, plan, stage, width) * t), int(probabilities * t),
    )  # fmt: skip


def _vocab(shape: ModelShape, plan: Plan) -> int:
    return -(-shape.vocab // plan.degrees.tp)


def _head_tensors(shape: ModelShape, width: int) -> list[Saved]:
    """Of the final norm and the head's product."""
    fp32, narrow = 4.0 * shape.hidden, float(width * shape.hidden)
    made = [Saved("head input", narrow, "sequence", feeds=True)]
    if shape.recipe.norm == "layer":
        return [*made, Saved("final norm input", narrow, "sequence")]
    made.append(Saved("final norm input in fp32", fp32, "sequence"))
    if shape.recipe.norm != "none":
        made.append(Saved("final norm normalised", fp32 if shape.recipe.norm == "gemma" else narrow, "sequence"))
    return made


def _buffer_bytes(shape: ModelShape, plan: Plan, stage: Stage, width: int) -> float:
    """Per token: messages that are under way while a rank computes."""
    degrees, total = plan.degrees, 0.0
    hidden = cut_bytes([Saved("message", width * shape.hidden, "sequence")], plan)
    if degrees.pp > 1:
        total += 4 * hidden  # an activation and a gradient, coming and going
    if degrees.tp > 1:
        total += width * shape.hidden  # the whole sequence, gathered or to be reduced
    attending = [layer.mixer for layer in stage.layers if layer.mixer.kind != "linear"]
    if degrees.cp > 1 and attending:
        mixer = max(attending, key=lambda m: m.kv_heads * (m.qk_size + m.v_size))
        kv = mixer.kv_heads * (mixer.qk_size + mixer.v_size) / min(degrees.tp, mixer.kv_heads)
        blocks = degrees.cp if plan.options.context in ("allgather", "ulysses") else 2
        total += kv * (blocks * width + 2 * 4)  # keys and values that arrive; their gradients in fp32, in and out
    chosen = max((layer.experts_per_token for layer in stage.layers), default=0)
    if degrees.ep > 1 and chosen:
        total += 2 * chosen * width * shape.hidden * degrees.etp / degrees.tp  # sent and received
    return total
