"""Names of the whole model: Hugging Face's, in its order, a tied parameter under its first one."""

from __future__ import annotations

import pytest
from torch import nn

from dtensor_5d.names import Names
from tests.families.tiny import tiny_model


@pytest.mark.parametrize("tied", [True, False])
def test_names_of_a_whole_model(tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    names = Names.of(model)
    assert list(names.order) == [name for name, _ in model.named_parameters()]
    assert names.ties == ((("model.embed_tokens.weight", "lm_head.weight"),) if tied else ())
    assert set(names.first.values()) == set(names.order)


def test_a_copy_of_a_tied_parameter_counts_where_the_first_one_is():
    model = tiny_model("llama", tie_word_embeddings=True)
    names = Names.of(model)
    assert len(list(names.counted(model.named_parameters()))) == len(names.order)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.embed_tokens = nn.Identity()
    counted = {id(p) for p in names.counted(model.named_parameters())}
    assert id(model.lm_head.weight) not in counted and id(model.model.norm.weight) in counted
