"""init_weights: Hugging Face's own rules, the same numbers on any layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from dtensor_5d import PlanError
from dtensor_5d.checkpoint.pretrained import init_weights
from dtensor_5d.checkpoint.template import named_tensors
from tests.checkpoint.layouts import differing, lay_out, on_meta, sharded, whole
from tests.families.tiny import VOCAB, tiny_config
from tests.harness import run_ranks

# Each with something of its own: scaled projections, zero-centred norms and embedding scale, sinks and biases,
# a correction buffer, experts, ties.
FAMILIES = ["gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "smollm3", "gpt_neox"]
OVERRIDES = {"smollm3": {"tie_word_embeddings": True}, "qwen3_moe": {"num_experts": 6}}


def config_of(family):
    return tiny_config(family, **OVERRIDES.get(family, {}))


def initialised(family, seed=0, dtype=torch.float32):
    model = on_meta(config_of(family), dtype)
    init_weights(model, seed)
    return model


def layouts(rank, cases):
    problems = []
    for family, layout in cases:
        model = lay_out(on_meta(config_of(family)), layout)
        init_weights(model, 0)
        problems += [f"{family} {layout}: {n}" for n in differing(whole(model), named_tensors(initialised(family)))]
    return problems


def test_the_same_numbers_on_any_layout():
    """C11: 1 rank, dp_shard 2 and 4, dp_replicate 2 x dp_shard 2; experts with an empty shard; ties."""
    four = [("gpt2", "dp4"), ("gpt_oss", "hsdp"), ("qwen3_moe", "dp4"), ("smollm3", "hsdp"), ("deepseek_v3", "dp4")]
    assert run_ranks(4, layouts, four) == [[]] * 4
    assert run_ranks(2, layouts, [("gemma2", "dp2"), ("qwen3_moe", "dp2")]) == [[]] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_is_distributed_as_transformers_initialises_it(family):
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    ours, theirs = named_tensors(initialised(family)), named_tensors(model)
    assert set(ours) == set(theirs)
    constant = {name for name, tensor in theirs.items() if (tensor == tensor.flatten()[0]).all()}
    for name, tensor in theirs.items():
        if name in constant or name in dict(model.named_buffers()):
            assert torch.equal(ours[name], tensor), name
            continue
        spread, centre = tensor.std(), tensor.mean()
        # The standard error of a standard deviation of n numbers is std / sqrt(2 n), that of a mean std / sqrt(n).
        n = tensor.numel()
        assert abs(ours[name].std() - spread) < 6 * spread / math.sqrt(n), name
        assert abs(ours[name].mean() - centre) < 6 * 1.5 * spread / math.sqrt(n), name


def test_the_rules_that_matter():
    """I3: the config's range, gpt2's scaled projections, gemma's norms around 1, an untrained loss of ln V."""
    gpt2 = initialised("gpt2")
    assert gpt2.config.initializer_range == 0.02
    assert gpt2.transformer.h[1].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    scaled = 0.02 / math.sqrt(2 * gpt2.config.n_layer)
    assert gpt2.transformer.h[1].mlp.c_proj.weight.std().item() == pytest.approx(scaled, rel=0.05)
    tied = initialised("smollm3")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tied.model.embed_tokens.padding_idx == 0
    assert tied.lm_head.weight[0].abs().max() == 0, "the embedding's rule goes before the head's"
    assert initialised("gemma2").model.layers[0].input_layernorm.weight.abs().max() == 0
    assert tied.model.layers[0].input_layernorm.weight.min() == 1
    ids = torch.randint(3, VOCAB, (4, 64), generator=torch.Generator().manual_seed(0))
    for family in FAMILIES:
        loss = initialised(family).eval()(input_ids=ids, labels=ids, use_cache=False).loss.item()
        assert loss == pytest.approx(math.log(VOCAB), rel=0.05), family


def test_numbers_depend_on_seed_and_module_and_nothing_else():
    state = torch.get_rng_state()
    a, b, again = (named_tensors(initialised("qwen3_moe", seed)) for seed in (0, 1, 0))
    assert torch.equal(torch.get_rng_state(), state), "the generator must be left as it was"
    assert differing(a, again) == []
    drawn = {n for n, t in a.items() if t.numel() > 1 and t.is_floating_point() and t.std() > 0 and "rotary" not in n}
    assert set(differing(a, b)) == drawn
    first, second = (a[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(a["model.layers.0.self_attn.k_proj.weight"], a["model.layers.0.self_attn.v_proj.weight"])


def test_a_stage_of_a_pipeline_draws_what_the_whole_model_does():
    want = named_tensors(initialised("smollm3"))
    model = on_meta(config_of("smollm3"))
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.model.embed_tokens = torch.nn.Identity()
    model.model.layers[0] = torch.nn.Identity()
    init_weights(model, 0)
    got = named_tensors(model)
    assert 0 < len(got) < len(want)
    assert differing(got, {n: want[n] for n in got}) == []


def test_a_narrow_model_rounds_the_wide_ones_numbers():
    wide, narrow = initialised("gpt_oss"), initialised("gpt_oss", dtype=torch.bfloat16)
    for name, parameter in narrow.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, wide.get_parameter(name).bfloat16()), name
    for name, buffer in narrow.named_buffers():
        assert torch.equal(buffer, wide.get_buffer(name)), name


def test_weights_in_memory_are_overwritten_in_place():
    model = AutoModelForCausalLM.from_config(config_of("gemma2"), dtype=torch.float32)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    init_weights(model, 0)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert differing(named_tensors(model), named_tensors(initialised("gemma2"))) == []


def test_a_family_without_rules_is_named():
    with pytest.raises(PlanError, match=r"layers\.0\.mlp\.act_fn\.alpha_p is left without values.*load_pretrained"):
        initialised("apertus")


def trains(rank):
    model = sharded(on_meta(config_of("gpt2")), init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    init_weights(model, 0)
    plain = initialised("gpt2")
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    ids = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for m, o in ((model, optimizer), (plain, reference)):
            m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            o.step()
            o.zero_grad()
    assert isinstance(model.transformer.wte.weight, DTensor)
    got = whole(model)
    return max((got[n] - w).abs().max().item() / w.abs().max().item() for n, w in plain.named_parameters())


def test_an_optimizer_made_on_meta_trains_the_initialised_weights():
    assert max(run_ranks(4, trains)) < 1e-5
