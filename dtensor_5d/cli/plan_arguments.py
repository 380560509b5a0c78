"""The flags that describe a model and a plan, and what they stand for: shared by the commands that take one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dtensor_5d.degrees import Degrees
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.options import Options
from dtensor_5d.plan import Plan
from dtensor_5d.planner import ModelShape

__all__ = ["add_model_argument", "add_plan_arguments", "plan_of", "shape_of"]

_AXES = tuple(name for name, _ in Degrees().items())
# Options with a flag of their own; every other one is reached by --option NAME=VALUE.
_OPTIONS = {
    "zero": "1, 2 or 3 (default 3)",
    "grad_reduce": "window or microbatch",
    "regather": "visit or window: zero 3 in a pipeline",
    "schedule": "of the pipeline (default 1f1b), or a path that ends in .csv",
    "chunks": "of a rank of the pipeline",
    "microbatches": "between two optimizer steps (default 1)",
    "layers_per_stage": "a list such as 7,8,8,7",
    "precision": "bf16, fp16 or fp32 (default: the dtype of the model, all through)",
    "recompute": "none, block, selective or every=k",
}


_PIPELINE = ("schedule", "chunks", "regather")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL: a folder, a config.json or a preset."""
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a config.json, or a preset")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Degrees and options of a plan."""
    add = parser.add_argument_group("degrees (one of the first five may be -1: what is left of the world)").add_argument
    for axis in _AXES:
        add(f"--{axis.replace('_', '-')}", type=int, metavar="N", help="default 1")
    add("--world", type=_ranks, metavar="N", help="number of ranks; dp-shard takes what is left if it is not given")
    add = parser.add_argument_group("options of the plan").add_argument
    add("--plan", type=Path, metavar="FILE", help="a plan as JSON, instead of degrees and options")
    for name, about in _OPTIONS.items():
        add(f"--{name.replace('_', '-')}", metavar="VALUE", help=about)
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="any other, for example context=ring")


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: it must be an integer, at least 1")
    return int(text)


def shape_of(arguments: argparse.Namespace) -> ModelShape:
    """The shape of MODEL. Errors: `PlanError` for what is neither a path nor a preset."""
    name = arguments.model
    if Path(name).exists() or name.endswith(".json") or "/" in name:
        return ModelShape.from_config(Path(name))
    return ModelShape.preset(name)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan of the command line, its degrees resolved where the world is known.

    Errors: `PlanError` for what a plan refuses, for flags that contradict each other or would change nothing, and for
    a degree of -1 without a world.
    """
    given = {axis: getattr(arguments, axis) for axis in _AXES if getattr(arguments, axis) is not None}
    options = {name: _value(getattr(arguments, name)) for name in _OPTIONS if getattr(arguments, name) is not None}
    bad: list[Violation] = []
    for pair in arguments.option:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            bad.append(Violation(f"--option {pair}", "must be NAME=VALUE", "for example --option context=ring"))
        elif name in options:
            bad.append(Violation(f"--option {pair}", f"{name} is given twice", "give it once"))
        options[name] = _value(value)
    if bad:
        raise PlanError(bad)
    if arguments.plan is not None:
        if given or options:
            flags = ", ".join([*given, *options])
            raise PlanError(
                Violation(f"--plan beside {flags}", "a plan says all of these", "leave out --plan or the others")
            )
        plan = Plan.from_json(arguments.plan.read_text())
    else:
        if arguments.world is not None and "dp_shard" not in given and -1 not in given.values():
            given["dp_shard"] = -1
        plan = Plan(Degrees(**given), Options.of(**options))
    if arguments.world is not None:
        plan = Plan(plan.degrees.resolve(arguments.world), plan.options, plan.rules, plan.model)
    elif not plan.degrees.is_resolved:
        flags = ", ".join(f"--{axis.replace('_', '-')} -1" for axis in plan.degrees.open_axes)
        raise PlanError(Violation(flags, "needs the number of ranks, of which it takes what is left", "add --world N"))
    idle = [f"--{name}" for name in _PIPELINE if name in options]
    if idle and plan.degrees.pp == 1:
        raise PlanError(
            Violation(f"{', '.join(idle)} with 1 pipeline rank", "changes nothing without a pipeline", "add --pp N")
        )
    return plan


def _value(text: str) -> Any:
    """The value that a flag spells: JSON where it is some (2, 1.5, true, null, [1, 2]), a list with commas, a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pieces = text.split(",")
        if len(pieces) > 1 and all(piece.strip().isdecimal() for piece in pieces):
            return [int(piece) for piece in pieces]
        return text
