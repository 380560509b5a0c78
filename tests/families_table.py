"""Writes the README's table of families and axes: every cell is a run of a parity case, or what `plan_for` refuses.

    python -m tests.families_table                 # all; changes tests/data/families.json and README.md
    python -m tests.families_table cp ep llama     # these columns (all: none named) of these families (all: none named)

`tests/families/test_table.py` keeps README, results and refusals together, and runs the cells again.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtensor_5d import Degrees, PlanError, plan_for
from dtensor_5d.families.tensor import PROVED
from tests.context.batches import long
from tests.families.tiny import FAMILIES, tiny_config
from tests.harness import RanksFailed, pool, run_ranks
from tests.parity import Case, uneven
from tests.tensor.adapted import prepared_parity
from tests.tensor.doubles import StayDouble

README = Path(__file__).parent.parent / "README.md"
RESULTS = Path(__file__).parent / "data" / "families.json"
BEGIN, END = "<!-- families: python -m tests.families_table -->", "<!-- /families -->"


@dataclass(frozen=True)
class Column:
    """How the families are laid out in one column; model: changes to the config."""

    degrees: Degrees
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    batches: Callable[..., Any] = uneven


COLUMNS: Mapping[str, Column] = {
    "dp_shard": Column(Degrees(dp_shard=2)),
    "tp": Column(Degrees(tp=2), {"sequence_parallel": False}),
    "tp, sequence": Column(Degrees(tp=2), {"sequence_parallel": True}),
    "dp_shard x tp": Column(Degrees(dp_shard=2, tp=2)),
    "dp_replicate x tp": Column(Degrees(dp_replicate=2, tp=2)),
    "tp > kv heads": Column(Degrees(tp=4), model={"num_key_value_heads": 2}),
    "cp": Column(Degrees(cp=2), batches=long),
    "ep": Column(Degrees(dp_shard=2, ep=2)),
    "pp": Column(Degrees(pp=2), {"schedule": "zb-h1", "microbatches": 2}),
}
# Every head has keys and values of its own in these.
_NO_SHARED_KV = {
    "deepseek_v2": "latent", "deepseek_v3": "latent", "glm4_moe_lite": "latent", "gpt2": "-", "gpt_neox": "-",
    "opt": "-",
}  # fmt: skip
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    # Dropout that is on by default has other numbers in one process.
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "gemma3n_text": {"num_hidden_layers": 4},  # the last two use keys of the first two
}
# Rounding of fp32 grows beyond 1e-5 in these, on one process as well: compared in fp64 instead, at 1e-10.
_IN_DOUBLES = ("gemma3n_text", "gemma4_text", "qwen3_5_text", "qwen3_next")
# The router of one process ties to the last bit (1e-7) between two experts of a token there: other weights do not.
_SEEDS: Mapping[tuple[str, str], int] = {("dots1", "tp > kv heads"): 1}


def config_changes(family: str, column: str) -> dict[str, Any]:
    """What a cell changes in the config of the tiny model."""
    return {"num_hidden_layers": 2, **_CHANGES.get(family, {}), **COLUMNS[column].model}


def refusal(family: str, column: str) -> str | None:
    """What `plan_for` requires and this family has not got; None where it makes a plan."""
    laid = COLUMNS[column]
    try:
        plan_for(tiny_config(family, **config_changes(family, column)), laid.degrees, **laid.options)
    except PlanError as error:
        # The same reason for every family: its name stands in what was asked, and in the list of those proved.
        return "; ".join(v.required for v in error.violations).replace(", ".join(PROVED), "those of the column")
    return None


def cell(family: str, column: str) -> str:
    """`yes` if loss, every gradient, norm and weights of 3 steps are those of one process; else why not."""
    if column == "tp > kv heads" and family in _NO_SHARED_KV:
        return _NO_SHARED_KV[family]
    why = refusal(family, column)
    if why is not None:
        return f"refused: {why}"
    laid, dtype = COLUMNS[column], torch.float32
    model = {**config_changes(family, column), "seed": _SEEDS.get((family, column), 0)}
    if family in _IN_DOUBLES:
        model, dtype = {**model, "experts": "eager"}, torch.float64
    case = Case(family, laid.degrees, dict(laid.options), model, dtype, laid.batches)
    try:
        run_ranks(laid.degrees.world_size, _trial, case, timeout=90.0)
    except RanksFailed as error:
        print(f"{family}, {column}: {error}", file=sys.stderr)
        return "no"
    return "yes"


def _trial(rank: int, case: Case) -> None:
    with StayDouble() if case.dtype == torch.float64 else contextlib.nullcontext():
        prepared_parity(rank, case, _draws_no_lots)


def _draws_no_lots(model: nn.Module) -> None:
    """The router of phimoe draws lots in training; it is compared as it is in eval."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.eval()
            module.train = _stay  # type: ignore[method-assign]  # what the model calls for each of its modules


def _stay(mode: bool = True) -> None:
    pass


def recorded() -> dict[str, dict[str, str]]:
    """Family -> column -> cell, as measured last."""
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """The table in Markdown, reasons numbered below it."""
    reasons: dict[str, int] = {}
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family, cells in results.items():
        shown = [_shown(cells[column], reasons) for column in COLUMNS]
        lines.append(f"| {family} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())])


def _shown(cell: str, reasons: dict[str, int]) -> str:
    kind, _, reason = cell.partition(": ")
    if kind != "refused":
        return cell
    if "this model is dense" in reason:
        return "dense"
    return f"refused ({reasons.setdefault(reason, len(reasons) + 1)})"


def main(names: list[str]) -> None:
    """Measures the columns and families named (all: none named), and writes results and README."""
    unknown = sorted({*names} - {*COLUMNS, *FAMILIES})
    if unknown:
        sys.exit(f"{unknown} are neither columns ({', '.join(COLUMNS)}) nor families")
    columns = [column for column in COLUMNS if column in names] or list(COLUMNS)
    every = recorded()
    try:
        for family in sorted({*FAMILIES} & {*names} or FAMILIES):
            found = {column: cell(family, column) for column in columns}
            print(family, found, flush=True)
            cells = every.get(family, {}) | found
            every[family] = {column: cells[column] for column in COLUMNS if column in cells}
            results = {family: every[family] for family in sorted(every)}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        pool().close()
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])
