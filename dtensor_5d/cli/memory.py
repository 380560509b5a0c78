"""What every rank of a layout holds at its fullest moment, by cause, before anything is launched.

The answer is for the first two steps: the optimizer state appears at the end of step 1. Pipeline ranks are shown one
by one; ranks that differ only on other axes hold the same, or less."""

from __future__ import annotations

import argparse
import re

from dtensor_5d.cli.console import Console
from dtensor_5d.cli.plan_arguments import add_model_argument, add_plan_arguments, plan_of, shape_of
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.plan import Plan
from dtensor_5d.planner import Device, MemoryReport, ModelShape, memory
from dtensor_5d.report.memory import cause_legend, cause_table, phase_bars, rank_bars, verdict
from dtensor_5d.report.text import Line, Span, styled

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """examples:
  dtensor-5d memory llama-3.1-8b --dp-shard 8 --precision bf16 --recompute selective --seq-len 8192
  dtensor-5d memory path/to/folder --world 64 --pp 4 --tp 8 --schedule zbv --microbatches 16
  dtensor-5d memory deepseek-v3 --world 2048 --pp 16 --ep 64 --precision bf16 --device-memory 80 --json

exit code 1: it does not fit the device
"""

_OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
_UNITS = {"": 2**30, "GIB": 2**30, "GB": 10**9, "TIB": 2**40, "MIB": 2**20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_model_argument(parser)
    add_plan_arguments(parser)
    add = parser.add_argument_group("work and device").add_argument
    add("--micro-batch", type=int, default=1, metavar="N", help="sequences of one micro-batch on a rank; default 1")
    add("--seq-len", type=int, default=4096, metavar="N", help="tokens of a whole sequence; default 4096")
    add("--global-batch", type=int, metavar="N", help="sequences between two optimizer steps: sets the micro-batches")
    add("--attention", choices=("flash", "eager"), default="flash", help="eager: scores are written out")
    add("--optimizer", choices=tuple(_OPTIMIZERS), default="adam", help="default adam: 2 numbers a parameter")
    add("--device-memory", type=_size, default=Device().memory, metavar="SIZE", help="in GiB, or as 80GB; default 80")
    add("--phases", action="store_true", help="also show the fullest rank phase by phase")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Answer the command line; the exit code."""
    shape, plan = shape_of(arguments), _with_batch(arguments, plan_of(arguments))
    if plan.degrees.cp > arguments.seq_len > 0:
        asked = f"--cp {plan.degrees.cp} with --seq-len {arguments.seq_len}"
        required = "a sequence is cut into parts of at least 1 token"
        raise PlanError(Violation(asked, required, f"use --cp {arguments.seq_len} or less, or longer sequences"))
    report = memory(
        shape,
        plan,
        micro_batch=arguments.micro_batch,
        seq_len=arguments.seq_len,
        attention=arguments.attention,
        optimizer_numbers=_OPTIMIZERS[arguments.optimizer],
        device=Device(memory=arguments.device_memory),
    )
    if not shape.known:
        console.note(f"note: {shape.model_type!r} is not a family known here; it is read as if it were Llama's")
    if console.json:
        console.data({"model": arguments.model, "parameters": shape.parameters, "plan": str(plan), **report.to_dict()})
    else:
        console.print(_page(arguments, console, shape, plan, report))
    return 0 if report.fits else 1


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80 (GiB), 80GB or 141GB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _with_batch(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """The plan with the micro-batches that make up --global-batch."""
    if arguments.global_batch is None:
        return plan
    if arguments.microbatches is not None:
        raise PlanError(
            Violation("--global-batch and --microbatches", "one follows from the other", "give one of the two")
        )
    count = plan.batch(arguments.global_batch, arguments.micro_batch)
    options = type(plan.options)(**{**plan.options.to_dict(), "microbatches": count})
    return Plan(plan.degrees, options, plan.rules, plan.model)


def _page(
    arguments: argparse.Namespace, console: Console, shape: ModelShape, plan: Plan, report: MemoryReport
) -> list[Line]:
    width, letters = console.width, console.letters
    changed = ", ".join(f"{name}={value}" for name, value in plan.options.shown().items()) or "options at default"
    active = "" if shape.active_parameters == shape.parameters else f" ({shape.active_parameters / 1e9:.2f} B active)"
    lines: list[Line] = [
        (Span(arguments.model, "head"), Span(f": {shape.parameters / 1e9:.2f} B parameters{active}")),
        styled(f"{plan.degrees} = {plan.degrees.world_size} ranks, {changed}"),
        styled(f"micro-batch {arguments.micro_batch} x {arguments.seq_len} tokens, {arguments.optimizer}"),
        (),
        *rank_bars(report, width=width, letters=letters),
        *cause_legend(report, width=width, phases=arguments.phases, letters=letters),
        (),
        *cause_table(report, width=width),
    ]
    if arguments.phases:
        fullest = report.fullest
        lines += [(), styled(f"rank {fullest.rank}, phase by phase", "head")]
        lines += phase_bars(report, fullest, width=width, letters=letters)
    return [*lines, (), verdict(report)]
