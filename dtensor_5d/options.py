"""The options of a plan: a closed, frozen set with one table of legal values. Unknown names and values raise."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from dtensor_5d.errors import PlanError, Violation

__all__ = ["SCHEDULES", "Options"]

SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto", "zbv", "v-half", "v-min", "dualpipe", "dualpipev",
)  # fmt: skip

RULE_AXES = ("dp", "tp", "cp", "pp", "ep")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the axes work. Every field is explained in the README's table of options.

    `None` means: chosen by the plan (see `Options.settled`). A schedule that is no name (a path to a CSV, a `Schedule`)
    is kept as CSV text.
    Errors: `PlanError` listing every value that is not legal.
    """

    zero: int = 3
    grad_reduce: str | None = None
    regather: str = "visit"
    schedule: str = "1f1b"
    chunks: int | None = None
    microbatches: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    context: str = "ring"
    balance: str = "zigzag"
    ulysses: int | None = None
    dispatch: str = "all_to_all"
    capacity: float | None = None
    precision: str | None = None
    float8: str | None = None
    recompute: str = "none"
    compile: bool = False
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.layers_per_stage, list):
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        unread: Sequence[Violation] = ()
        try:
            object.__setattr__(self, "schedule", _schedule_text(self.schedule))
        except PlanError as error:
            unread = error.violations
            object.__setattr__(self, "schedule", Options.schedule)
        bad = [*unread, *(v for v in (_value_violation(f.name, getattr(self, f.name)) for f in fields(self)) if v)]
        if bad:
            raise PlanError(bad)

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options by name. Errors: `PlanError` for an unknown name, with the nearest known one."""
        known = {f.name for f in fields(cls)}
        bad = []
        for name in options:
            if name in known:
                continue
            near = difflib.get_close_matches(name, known, n=1)
            change = _NAMED_REFUSALS.get(name) or (f"did you mean {near[0]!r}?" if near else "remove it")
            bad.append(Violation(f"option {name!r}", f"options are {', '.join(sorted(known))}", change))
        good = {n: v for n, v in options.items() if n in known}
        try:
            made = cls(**good)
        except PlanError as error:
            raise PlanError([*bad, *error.violations]) from None
        if bad:
            raise PlanError(bad)
        return made

    def settled(self, pp: int) -> Options:
        """These options with the defaults that depend on the degrees filled in."""
        if self.grad_reduce is not None:
            return self
        reduce = "microbatch" if self.zero >= 2 and pp == 1 else "window"
        return Options(**{**self.to_dict(), "grad_reduce": reduce})

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def changed(self) -> dict[str, Any]:
        """Only the fields that differ from their defaults."""
        plain = Options()
        return {n: v for n, v in self.to_dict().items() if v != getattr(plain, n)}

    def shown(self) -> dict[str, str]:
        """`changed` for a reader; a schedule given as a table, which would fill lines, in a few words."""
        texts = {n: str(v) for n, v in self.changed().items()}
        return {n: f"a table of {t.count(chr(10))} ranks" if "\n" in t else t for n, t in texts.items()}


# What people look for under another name, or what is left out on purpose.
_NAMED_REFUSALS = {
    "offload": "CPU offload is not in this version; use zero=3 and more dp_shard ranks to fit",
    "cpu_offload": "CPU offload is not in this version; use zero=3 and more dp_shard ranks to fit",
    "gradient_accumulation_steps": "give microbatches=n, or pass a list of batches to run.step",
    "gradient_checkpointing": "use recompute",
    "mixed_precision": "use precision",
    "dtype": "use precision",
    "bf16": "use precision='bf16'",
    "fp16": "use precision",
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": (1, 2, 3),
    "grad_reduce": (None, "window", "microbatch"),
    "regather": ("visit", "window"),
    "schedule": SCHEDULES,
    "sequence_parallel": (None, True, False),
    "context": ("ring", "allgather", "ulysses", "ring+ulysses"),
    "balance": ("zigzag", "striped", "document", "none"),
    "dispatch": ("all_to_all", "all_gather", "two_step"),
    "precision": (None, "bf16", "fp16", "fp32"),
    "compile": (False, True),
}


def _value_violation(name: str, value: Any) -> Violation | None:
    if name == "schedule" and isinstance(value, str) and "\n" in value:
        return None  # a table, proved when it was read
    if name in _CHOICES:
        choices = _CHOICES[name]
        # `1 == True`: an int option must not take a bool, nor the other way round.
        if any(value == c and type(value) is type(c) for c in choices):
            return None
        change = "choose one of these" + (", or give a path that ends in .csv" if name == "schedule" else "")
        return Violation(f"{name}={value!r}", f"must be one of {', '.join(map(repr, choices))}", change)
    if name in ("microbatches", "chunks", "ulysses"):
        optional = name != "microbatches"
        if (value is None and optional) or _is_count(value):
            return None
        return Violation(f"{name}={value!r}", "must be an integer >= 1" + (" or None" * optional), "give a count")
    if name == "layers_per_stage":
        if value is None or (isinstance(value, tuple) and value and all(_is_count(v) for v in value)):
            return None
        return Violation(f"{name}={value!r}", "must be a list of integers >= 1 or None", "give layers for each stage")
    if name == "capacity":
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf):
            return None
        needs = "must be a finite factor > 0 or None (nothing dropped)"
        return Violation(f"{name}={value!r}", needs, "give a number or None")
    if name == "float8":
        if value is None or isinstance(value, str):
            return None
        return Violation(f"{name}={value!r}", "must be the name of a torchao recipe or None", "give a name")
    if name == "recompute":
        every = isinstance(value, str) and value.startswith("every=") and value[6:].isdigit() and int(value[6:]) > 0
        if value in ("none", "block", "selective") or every:
            return None
        return Violation(f"{name}={value!r}", "must be none, block, selective or every=k (k >= 1)", "choose one")
    assert name == "rules", name
    ok = isinstance(value, dict) and all(a in RULE_AXES and isinstance(r, dict) for a, r in value.items())
    if ok:
        return None
    return Violation(
        f"rules={value!r}",
        f"must be a dict from an axis ({', '.join(RULE_AXES)}) to a dict from a module pattern to a style",
        "for example rules={'tp': {'model.layers.*.mlp.up_proj': 'column'}}",
    )


def _schedule_text(schedule: Any) -> Any:
    """See `schedule.chosen.as_option`, which is loaded only where there is something to read."""
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return schedule
    from dtensor_5d.schedule.chosen import as_option

    return as_option(schedule)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
