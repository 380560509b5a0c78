"""`dtensor-5d`: what a layout costs, before anything is launched. No torch.

Exit codes: 0 the answer is there; 1 the answer is no (a layout does not fit); 2 the question was wrong; 3 a fault of
this program.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dtensor_5d.cli.console import Console, add_output_arguments

__all__ = ["main"]

_COMMANDS = {
    "schedule": "draw, compare and export pipeline schedules",
    "memory": "what every rank of a layout holds, by cause",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of the process) and return the exit code.

    Example: `main(["schedule", "1f1b", "zbv", "--ranks", "4", "--microbatches", "8"])`
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = _parser().parse_args(words)
    except _UsageError as error:
        sys.stderr.write(error.usage)
        # As argparse reads it: any beginning of --json that no other flag shares.
        Console("", 0, any(len(word) > 2 and "--json".startswith(word) for word in words)).error(error)
        return 2
    console = Console.of(arguments)
    try:
        return int(arguments.run(arguments, console))
    except BrokenPipeError:
        # `dtensor-5d ... | head`: the reader has seen enough. Keep Python from complaining once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:  # PlanError is a ValueError
        console.error(error)
        return 2
    except Exception as error:
        if arguments.traceback:
            raise
        console.error(error, fault=True)
        return 3


class _UsageError(ValueError):
    """A command line that argparse cannot read."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    """Leaves it to `main` to print an error: it may have to be JSON."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(message, self.format_usage())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dtensor-5d",
        description="What a layout over five axes costs, before anything is launched.",
        epilog="exit codes: 0 answered, 1 does not fit, 2 wrong input, 3 a fault of this program",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about in _COMMANDS.items():
        module = importlib.import_module(f"dtensor_5d.cli.{name}")
        command = commands.add_parser(
            name,
            help=about,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        add_output_arguments(command)
        command.set_defaults(run=module.run)
    return parser
