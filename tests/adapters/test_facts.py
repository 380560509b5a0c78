"""The facts of families as data are what their tiny models do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dtensor_5d.families.facts import FACTS, facts_for
from tests.adapters.measure import measure
from tests.families.tiny import FAMILIES, tiny_config

# One for each way in which a fact can differ from the plain case.
HANDFUL = ("llama", "gpt2", "opt", "bloom", "falcon", "lfm2", "mixtral", "gpt_oss", "phimoe", "deepseek_v32")


@pytest.mark.parametrize("name", HANDFUL)
def test_facts_are_what_is_measured(name):
    assert measure(name) == facts_for(tiny_config(name).model_type)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HANDFUL])
def test_facts_of_every_other_family_are_what_is_measured(name):
    assert measure(name) == facts_for(tiny_config(name).model_type)


def test_the_data_speak_of_the_families_that_are_measured_and_of_no_other():
    assert set(FACTS) == {tiny_config(name).model_type for name in FAMILIES}
    assert all(facts.verified for facts in FACTS.values())


def test_an_unknown_family_gets_the_cautious_facts():
    facts = facts_for("never_heard_of")
    assert not facts.verified and not facts.packs_by_position and not facts.takes_position_ids
    assert "custom" not in facts.attention
    # What may be there counts as there.
    assert facts.aux_loss and facts.randomness == ("module", "functional")


def test_facts_need_no_torch():
    code = "import sys, dtensor_5d.families.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
