"""Style objects in a plan: each stands for the style of that name, and is made anew for the model it is applied to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtensor_5d.errors import Violation
from dtensor_5d.tensor.style import (
    BlockInput,
    ColwiseParallel,
    HeadParallel,
    NormParallel,
    RowwiseParallel,
    SequenceParallel,
    SumOutput,
    VocabularyEmbedding,
    WholeParameters,
)

__all__ = ["by_name"]

_NAMES: Mapping[type, Callable[[Any], str | None]] = {
    ColwiseParallel: lambda style: _column(style),
    RowwiseParallel: lambda _: "row",
    NormParallel: lambda style: "norm_column" if style.grouped is None else "norm_column_kv",
    VocabularyEmbedding: lambda _: "embedding",
    HeadParallel: lambda _: "head",
    BlockInput: lambda _: "block",
    SumOutput: lambda _: "sum_output",
    WholeParameters: lambda _: "replicate_sum",
    SequenceParallel: lambda _: "sequence",
}


def by_name(rules: Mapping[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """The rules of the tensor axis with names for our style objects, and what has none.

    An object that is used alone has its own sums and its own exchange; in a plan the block around it exchanges for
    all that is in it. So a plan takes from the object what it says of the module.

    Example:
        >>> by_name({"model.layers.*.mlp.up_proj": ColwiseParallel()})
        ({'model.layers.*.mlp.up_proj': 'column'}, [])
    """
    named: dict[str, Any] = {}
    bad: list[Violation] = []
    for pattern, style in rules.items():
        name = style if isinstance(style, str) else _NAMES.get(type(style), lambda _: None)(style)
        if name is None:
            asked = f"rules['tp'][{pattern!r}] = {type(style).__module__}.{type(style).__name__}"
            ours = ", ".join(kind.__name__ for kind in _NAMES)
            needs = f"must be a style name, or one of {ours} of dtensor_5d.tensor"
            bad.append(Violation(asked, needs, "use a style name (see the README), which works inside blocks"))
        else:
            named[pattern] = name
    return named, bad


def _column(style: ColwiseParallel) -> str | None:
    if style.grouped is not None:
        return "column_kv"
    if style.sections is None:
        return "column"
    if isinstance(style.sections, int):
        return f"packed_column/{style.sections}"
    return "qkv" if len(style.sections) == 3 else None
