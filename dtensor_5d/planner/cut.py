"""Which layers form a stage of a pipeline: by what they cost, or by count where nobody knows what a layer costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.blocks import LayerShape, Param
from dtensor_5d.families.flops import product_flops
from dtensor_5d.families.shape import ModelShape

__all__ = ["CUT_LENGTH", "cut_layers", "split_layers"]

CUT_LENGTH = 4096
"""Tokens of a row for which stages are balanced. Fixed, so that a planner and a job of any length cut alike."""


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be; the ends, which have embedding and head, get the shorter shares.

    Example:
        >>> split_layers(10, 4)
        (2, 3, 3, 2)

    Errors: `PlanError` for more stages than layers.
    """
    if stages > layers:
        raise PlanError(
            Violation(
                f"{stages} pipeline stages for {layers} layers",
                f"every stage needs at least 1 of the {layers} layers",
                f"use pp x chunks <= {layers}",
            )
        )
    base, extra = divmod(layers, stages)
    # From the middle outwards, the later of two equally central stages last.
    order = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), s))
    longer = set(order[:extra])
    return tuple(base + (s in longer) for s in range(stages))


def cut_layers(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Layers per stage, so that the dearest stage is as cheap as can be; of such cuts the one nearest `split_layers`.

    The cost is the forward's floating-point operations per token at `CUT_LENGTH` tokens: every layer its own (dense or
    experts, any mixer), the head's product with the last one; looking up an embedding costs nothing. A family that is
    not known here is cut by count.

    Example: the head of a small model is worth 5 of its layers.
        >>> cut_layers(ModelShape.preset("smollm2-135m"), 2)
        (17, 13)

    Errors: `PlanError` for more stages than layers.
    """
    even = split_layers(len(shape.layers), stages)
    if not shape.known:
        return even
    costs = _costs(shape)
    return _nearest(costs, even, _cheapest_bound(costs, stages))


def _costs(shape: ModelShape) -> list[int]:
    """By layer; the first and the last with what runs outside. Whole numbers, so that equal costs are equal."""

    def flops(layers: Iterable[LayerShape], outside: Iterable[Param], tied: bool) -> int:
        return round(
            sum(product_flops(layers, outside, shape.hidden, shape.vocab, tied, CUT_LENGTH, "causal").values())
        )

    costs = [flops((layer,), (), False) for layer in shape.layers]
    costs[0] += flops((), shape.first, False)
    costs[-1] += flops((), shape.last, shape.tied)
    return costs


def _cheapest_bound(costs: Sequence[int], stages: int) -> int:
    """The smallest cost that no stage of some cut exceeds: bisection, each time filling stages up from the left."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        needed, filled = 1, 0
        for cost in costs:
            if filled + cost > middle:
                needed, filled = needed + 1, 0
            filled += cost
        # A cut into fewer stages can be cut further: there are layers enough.
        low, high = (low, middle) if needed <= stages else (middle + 1, high)
    return low


def _nearest(costs: Sequence[int], even: Sequence[int], bound: int) -> tuple[int, ...]:
    """Of the cuts whose stages cost at most `bound` the one whose counts differ least (by squares) from `even`; of
    equals the one with fewer layers in later stages."""
    layers = len(costs)
    until = [0]
    for cost in costs:
        until.append(until[-1] + cost)
    # By number of layers in the stages so far: the least difference, and the layers of the last of these stages.
    best: list[float] = [0.0] + [inf] * layers
    chosen: list[list[int]] = []
    for wanted in even:
        made, counts = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(1, layers + 1):
            start = end - 1
            while start >= 0 and until[end] - until[start] <= bound:
                difference = best[start] + (end - start - wanted) ** 2
                if difference < made[end]:
                    made[end], counts[end] = difference, end - start
                start -= 1
        best = made
        chosen.append(counts)
    assert best[layers] < inf, (costs, bound)
    cut: list[int] = []
    end = layers
    for counts in reversed(chosen):
        cut.append(counts[end])
        end -= counts[end]
    return tuple(reversed(cut))
