"""Covering every pair of values instead of every combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every pair of values of every two axes occurs at least once (greedy, deterministic).

    Example:
        >>> len(pairwise({"a": [1, 2], "b": [1, 2], "c": [1, 2]}))
        4
    """
    names = list(axes)
    open_pairs = {
        (a, i, b, j) for a, b in combinations(names, 2) for i, j in product(range(len(axes[a])), range(len(axes[b])))
    }
    rows = []
    while open_pairs:
        row: dict[str, int] = {}
        a, i, b, j = min(open_pairs, key=lambda p: (names.index(p[0]), names.index(p[2]), p[1], p[3]))
        row[a], row[b] = i, j
        for name in names:
            if name not in row:
                row[name] = max(range(len(axes[name])), key=lambda v: (_gain(row, name, v, names, open_pairs), -v))
        open_pairs -= {(x, row[x], y, row[y]) for x, y in combinations(names, 2)}
        rows.append({name: axes[name][row[name]] for name in names})
    return rows


def _gain(row, name, value, names, open_pairs):
    place = names.index(name)
    return sum(
        ((n, v, name, value) if names.index(n) < place else (name, value, n, v)) in open_pairs for n, v in row.items()
    )
