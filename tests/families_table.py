"""Writes the README's table of families and axes: every cell is a run of `check_parity`.

    python -m tests.families_table            # a few minutes on two cores; changes README.md

`tests/tensor/test_table.py` keeps the table's rows and the data in `families/tensor.py` together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtensor_5d import Degrees
from dtensor_5d.families.tensor import PROVED
from tests.harness import RanksFailed, pool
from tests.parity import Case, check_parity

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- families: python -m tests.families_table -->", "<!-- /families -->"

# Column -> degrees, options and changes to the model's config.
COLUMNS: Mapping[str, tuple[Degrees, dict[str, Any], dict[str, Any]]] = {
    "dp_shard": (Degrees(dp_shard=2), {}, {}),
    "tp": (Degrees(tp=2), {"sequence_parallel": False}, {}),
    "tp, sequence": (Degrees(tp=2), {"sequence_parallel": True}, {}),
    "dp_shard x tp": (Degrees(dp_shard=2, tp=2), {}, {}),
    "dp_replicate x tp": (Degrees(dp_replicate=2, tp=2), {}, {}),
    "tp > kv heads": (Degrees(tp=4), {}, {"num_key_value_heads": 2}),
}
# Every head has keys and values of its own in these; in phi3 they are fused with q.
_NO_SHARED_KV = {
    "deepseek_v2": "latent", "deepseek_v3": "latent", "glm4_moe_lite": "latent", "gpt2": "-", "gpt_neox": "-",
    "opt": "-", "phi3": "refused",
}  # fmt: skip
# Dropout that is on by default has other numbers in one process.
_CHANGES = {"seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0}}


def cell(family: str, column: str) -> str:
    """`yes` if loss, every gradient, norm and weights of 3 steps are those of one process."""
    if column == "tp > kv heads" and family in _NO_SHARED_KV:
        return _NO_SHARED_KV[family]
    degrees, options, changes = COLUMNS[column]
    try:
        check_parity(Case(family, degrees, options, {"num_hidden_layers": 2, **_CHANGES.get(family, {}), **changes}))
    except RanksFailed as error:
        print(f"{family}, {column}: {error}", file=sys.stderr)
        return "no"
    return "yes"


def table() -> str:
    """The table in Markdown, measured."""
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in PROVED:
        lines.append(f"| {family} | " + " | ".join(cell(family, column) for column in COLUMNS) + " |")
    return "\n".join(lines)


def main() -> None:
    try:
        made = table()
    finally:
        pool().close()
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
