"""What is wrong with a plan: every violation at once, before any process group is asked for anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import Violation
from dtensor_5d.options import Options
from dtensor_5d.plan.patterns import matches

__all__ = ["built_violations", "rule_violations"]

# Options that this version knows by name but does not run yet. An issue that builds one removes its line.
_OPTIONS_TO_COME: dict[str, str] = {"float8": "float8", "compile": "compilation"}


def built_violations(degrees: Degrees, options: Options) -> list[Violation]:
    """What does not go together, and options that are legal but not built in this version, each refused by name."""
    bad: list[Violation] = []
    changed = options.changed()
    if degrees.tp == 1 and options.sequence_parallel:
        bad.append(Violation("sequence_parallel=True with tp=1", "tokens are cut over the ranks of tp, at least 2",
                             "give tp a degree, or leave sequence_parallel at its default"))  # fmt: skip
    if degrees.tp == 1 and options.rules.get("tp"):
        bad.append(Violation("rules for tp with tp=1", "there is nothing to cut over 1 rank", "remove rules['tp']"))
    bad += _expert_violations(degrees, options, changed)
    bad += _context_violations(degrees, options, changed)
    bad += _pipeline_violations(degrees, options)
    bad += [
        Violation(f"{name}={changed[name]!r}", f"{what} is not in this version", f"leave {name} at its default")
        for name, what in _OPTIONS_TO_COME.items()
        if name in changed
    ]
    if options.precision == "fp16":
        needs = "fp16 needs loss scaling, which is not in this version"
        bad.append(Violation("precision='fp16'", needs, "use precision='bf16'"))
    return bad


def _expert_violations(degrees: Degrees, options: Options, changed: dict[str, Any]) -> list[Violation]:
    bad = []
    if degrees.ep == 1 and degrees.etp == 1:
        bad += [
            Violation(f"{name}={changed[name]!r} with ep=1", "tokens are brought to experts on at least 2 ranks of ep",
                      f"give ep a degree, or leave {name} at its default")
            for name in ("dispatch", "capacity")
            if name in changed
        ]  # fmt: skip
        if options.rules.get("ep"):
            bad.append(Violation("rules for ep with ep=1", "there is nothing to cut over 1 rank", "remove rules['ep']"))
    if options.capacity is not None and options.dispatch == "two_step":
        asked = f"capacity={options.capacity} with dispatch='two_step'"
        bad.append(Violation(asked, "capacity needs dispatch all_to_all or all_gather", "use one of these, or None"))
    return bad


def _context_violations(degrees: Degrees, options: Options, changed: dict[str, Any]) -> list[Violation]:
    bad: list[Violation] = []
    if degrees.cp == 1:
        bad += [
            Violation(f"{name}={changed[name]!r} with cp=1", "the sequence is cut over the ranks of cp, at least 2",
                      f"give cp a degree, or leave {name} at its default")
            for name in ("context", "balance", "ulysses")
            if name in changed
        ]  # fmt: skip
        if options.rules.get("cp"):
            bad.append(Violation("rules for cp with cp=1", "there is nothing to cut over 1 rank", "remove rules['cp']"))
    elif options.ulysses is not None and options.context != "ring+ulysses":
        bad.append(Violation(f"ulysses={options.ulysses} with context={options.context!r}",
                             "it is the size of a team of context='ring+ulysses'", "leave it out"))  # fmt: skip
    return bad


def _pipeline_violations(degrees: Degrees, options: Options) -> list[Violation]:
    bad = []
    changed = options.changed()
    if degrees.pp == 1:
        if "\n" in options.schedule:
            changed["schedule"] = "a table"
        bad += [
            Violation(f"{name}={changed[name]!r} with pp=1", "there are no stages on 1 rank",
                      f"give pp a degree, or leave {name} at its default")
            for name in ("regather", "schedule", "chunks", "layers_per_stage")
            if name in changed
        ]  # fmt: skip
    elif options.schedule == "dualpipe":
        bad.append(Violation("schedule='dualpipe'", "it holds 2 copies of the model on each rank: simulated only",
                             "use schedule='dualpipev'"))  # fmt: skip
    if options.rules.get("pp"):
        bad.append(Violation("rules for pp", "stages are contiguous ranges of layers", "use layers_per_stage"))
    return bad


def rule_violations(axis: str, rules: dict[str, Any], module_names: Iterable[str]) -> list[Violation]:
    """Rules that match no module of the model."""
    names = list(module_names)
    bad = []
    for pattern in rules:
        if any(matches(pattern, name) for name in names):
            continue
        last = pattern.split(".")[-1]
        near = next((name for name in names if name.split(".")[-1] == last), None)
        top = [name for name in names if name and "." not in name]
        change = f"did you mean {near!r}?" if near else f"the top-level modules are {top}"
        bad.append(Violation(f"rule {pattern!r} of axis {axis}", "it must match at least 1 module", change))
    return bad
