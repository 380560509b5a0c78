"""The README's table of families and axes says what was measured, and refusals in it are what plans say."""

from __future__ import annotations

import pytest

from dtensor_5d.families.tensor import PROVED
from tests.families.tiny import FAMILIES, tiny_config
from tests.families_table import BEGIN, COLUMNS, END, README, cell, recorded, refusal, table

RESULTS = recorded()
AXES = ("dp_shard", "tp, sequence", "cp", "ep", "pp")
TP = [column for column in COLUMNS if "tp" in column]


def test_the_readme_shows_the_recorded_results():
    assert README.read_text().partition(BEGIN)[2].partition(END)[0].strip() == table(RESULTS)


def test_every_family_is_in_the_table_and_nothing_fails():
    assert list(RESULTS) == sorted(FAMILIES)
    for family, cells in RESULTS.items():
        assert list(cells) == list(COLUMNS), family
        assert all(c in ("yes", "-", "latent") or c.startswith("refused: ") for c in cells.values()), (family, cells)
        assert cells["dp_shard"] == "yes"
        if tiny_config(family).model_type in PROVED:
            assert {cells[column] for column in TP[:-1]} == {"yes"}, family
        else:
            assert all(cells[column].startswith("refused: ") for column in TP), family


# One column of tp: without proved rules a family is refused in all of them.
@pytest.mark.parametrize("column", ["tp", "cp", "ep", "pp"])
def test_what_is_refused_is_refused_by_plan_for(column):
    for family, cells in RESULTS.items():
        if cells[column].startswith("refused: "):
            assert f"refused: {refusal(family, column)}" == cells[column], family


@pytest.mark.slow
@pytest.mark.parametrize("column", AXES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_cells_are_measured(family, column):
    assert cell(family, column) == RESULTS[family][column]
