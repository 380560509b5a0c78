"""The README's table of families says what the data says, and nothing that was not measured."""

from __future__ import annotations

from dtensor_5d.families.tensor import PROVED
from tests.families_table import BEGIN, COLUMNS, END, README


def _rows():
    table = README.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    return lines[0], lines[2:]


def test_every_proved_family_is_in_the_table_and_no_other():
    head, rows = _rows()
    assert head == ["family", *COLUMNS]
    assert tuple(row[0] for row in rows) == PROVED


def test_no_cell_says_no():
    _, rows = _rows()
    assert all(cell in ("yes", "-", "latent", "refused") for row in rows for cell in row[1:])
    assert all(row[1:-1] == ["yes"] * (len(COLUMNS) - 1) for row in rows)
