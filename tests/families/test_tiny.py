"""The tiny models that other tests lean on: deterministic, finite, and following their overrides."""

from __future__ import annotations

import pytest
import torch

from tests.families.tiny import CORE, DENSE, FAMILIES, MOE, VOCAB, tiny_config, tiny_model


def test_there_are_69_families_and_the_core_is_among_them():
    assert len(FAMILIES) == len(set(FAMILIES)) == 69
    assert set(CORE) <= set(FAMILIES) == set(DENSE) | set(MOE)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_equal_arguments_give_equal_weights_and_leave_the_random_state_alone(name):
    state = torch.get_rng_state()
    first, again, other = tiny_model(name), tiny_model(name), tiny_model(name, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    pairs = zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True)
    for (parameter_name, one), two, three in pairs:
        assert torch.equal(one, two), parameter_name
        assert not torch.equal(one, three), parameter_name


def test_every_dtype_rounds_the_same_numbers():
    wide, narrow = tiny_model("gpt2", dtype=torch.float64), tiny_model("gpt2", dtype=torch.bfloat16)
    for one, two in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert two.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), two.float(), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_overrides_reach_the_config_and_the_layers(name):
    model = tiny_model(name, num_hidden_layers=2, tie_word_embeddings=True)
    assert len(model.model.layers) == 2
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_finite_logits(name):
    tokens = torch.randint(3, VOCAB, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = tiny_model(name).eval()(tokens, use_cache=False).logits
    assert logits.shape == (2, 32, tiny_config(name).vocab_size)
    assert bool(torch.isfinite(logits).all())
