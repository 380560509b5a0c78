"""`Plan`: what `parallelize` will do, as data that prints as a table and travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.options import Options

__all__ = ["Plan"]

_FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """Degrees, options, and rules: axis -> {module pattern: style name}.

    The rules of the data axis say which modules are FSDP units: `unit` makes every match its own unit, `unit:NAME`
    puts all matches of that NAME into one unit, `root` leaves the module in the unit of its parent. For the other
    axes a style name is one of that axis' styles.

    A plan made without a model (for instance by the planner's search) has no rules; `parallelize` derives them then.
    """

    degrees: Degrees
    options: Options = field(default_factory=Options)
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: str = ""

    def to_json(self) -> str:
        """This plan as JSON text. Errors: `PlanError` for a rule whose style is an object and no name."""
        objects = [
            Violation(f"rules[{axis!r}][{pattern!r}] = {style!r}", "only style names can be written as JSON",
                      "use the name of a style")
            for rules in (self.rules, self.options.rules)
            for axis, table in rules.items()
            for pattern, style in table.items()
            if not isinstance(style, str)
        ]  # fmt: skip
        if objects:
            raise PlanError(objects)
        plain = {
            "format": _FORMAT,
            "model": self.model,
            "degrees": dict(self.degrees.items()),
            "options": self.options.changed(),
            "rules": {axis: dict(table) for axis, table in self.rules.items()},
        }
        return json.dumps(plain, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Errors: `PlanError` for text that is no such plan."""
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"this is no JSON ({error}); give the text that Plan.to_json() wrote") from None
        if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
            found = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
            raise PlanError(f"a plan of format {found!r}: this version reads format {_FORMAT}; write it anew")
        extra = set(plain) - {"format", "model", "degrees", "options", "rules"}
        axes = {name for name, _ in Degrees().items()}
        unknown = sorted(extra) + sorted(set(plain.get("degrees", {})) - axes)
        if unknown:
            raise PlanError(f"a plan with the unknown fields {unknown}: remove them, or write the plan anew")
        return cls(
            degrees=Degrees(**plain.get("degrees", {})),
            options=Options.of(**plain.get("options", {})),
            rules=plain.get("rules", {}),
            model=plain.get("model", ""),
        )

    def batch(self, global_batch: int, micro_batch: int) -> int:
        """Micro-batches per window, so that `global_batch` sequences meet between two optimizer steps.

        global batch = micro-batch x micro-batches x data ranks. Errors: `PlanError` with the nearest legal sizes.

        Example: 4M tokens of 4k are 1024 sequences.
            >>> Plan(Degrees(dp_shard=128)).batch(1024, 2), Plan(Degrees(dp_shard=512)).batch(1024, 2)
            (4, 1)
        """
        for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(Violation(f"{name}={value!r}", "must be an integer >= 1", "give a number of sequences"))
        once = micro_batch * self.degrees.data
        if global_batch % once:
            below, above = global_batch // once * once, (global_batch // once + 1) * once
            legal = f"{below} or {above}" if below else f"{above}"
            raise PlanError(
                Violation(
                    f"a global batch of {global_batch} sequences",
                    f"must be a multiple of micro-batch {micro_batch} x {self.degrees.data} data ranks = {once}",
                    f"use a global batch of {legal}, or another micro-batch",
                )
            )
        return global_batch // once

    def __str__(self) -> str:
        rows = [(axis, pattern, _style_text(style)) for axis, t in self.rules.items() for pattern, style in t.items()]
        options = ", ".join(f"{n}={v}" for n, v in self.options.shown().items() if n != "rules") or "defaults"
        head = f"{self.model + ': ' if self.model else ''}{self.degrees}, {options}"
        if not rows:
            return head + "\n(no rules: one rank, or derived from the model by parallelize)"
        table = [("axis", "pattern", "style"), *rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table]
        lines.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join([head, *lines])


def _style_text(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__
