"""Patterns of module names: the ones of `parallelize_module`, one wildcard piece for each piece of the name."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["matches", "specificity"]


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted module name fits a pattern; `*` stands for (a part of) one piece, never for several.

    Example:
        >>> matches("model.layers.*.mlp", "model.layers.11.mlp"), matches("model.*", "model.layers.0")
        (True, False)
    """
    want, have = pattern.split("."), name.split(".")
    return len(want) == len(have) and all(fnmatchcase(h, w) for w, h in zip(want, have))


def specificity(pattern: str) -> int:
    """How many pieces have no wildcard: where several patterns fit one name, the most specific one counts."""
    return sum("*" not in piece and "?" not in piece and "[" not in piece for piece in pattern.split("."))
