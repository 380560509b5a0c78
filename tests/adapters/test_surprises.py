"""Models that are not plain: found, or refused with the way out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtensor_5d.adapters.decoder import find_decoder
from dtensor_5d.adapters.rules import read_rules
from dtensor_5d.errors import PlanError
from tests.families.tiny import tiny_model

TEXT = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=96, max_position_embeddings=256, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# As many layers as the text model has, and wider ones: neither length nor size tells which is which.
TOWER = dict(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=28, patch_size=14,
)  # fmt: skip
MROPE = dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4))
QWEN_TOWER = dict(depth=4, hidden_size=256, out_hidden_size=64, num_heads=4, intermediate_size=64)


def multimodal(name):
    t = transformers
    if name == "llava":
        text, tower = dict(TEXT, model_type="llama"), dict(TOWER, model_type="clip_vision_model")
        config = t.LlavaConfig(text_config=text, vision_config=tower, image_token_index=5)
        kind = t.LlavaForConditionalGeneration
    elif name == "gemma3":
        config = t.Gemma3Config(text_config=TEXT, vision_config=TOWER, mm_tokens_per_image=4)
        kind = t.Gemma3ForConditionalGeneration
    elif name == "qwen3_vl":
        config = t.Qwen3VLConfig(text_config=dict(TEXT, **MROPE), vision_config=QWEN_TOWER)
        kind = t.Qwen3VLForConditionalGeneration
    else:
        text = dict(TEXT, **MROPE, num_experts=8, moe_intermediate_size=48)
        config = t.Qwen3VLMoeConfig(text_config=text, vision_config=QWEN_TOWER)
        kind = t.Qwen3VLMoeForConditionalGeneration
    with torch.device("meta"):
        return kind(config)


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3_vl", "qwen3_vl_moe"])
def test_the_decoder_of_a_multimodal_model_is_that_of_its_text_model(name):
    decoder = find_decoder(multimodal(name))
    assert (decoder.layers, decoder.base) == ("model.language_model.layers", "model.language_model")
    assert decoder.before == (decoder.embedding,) == ("model.language_model.embed_tokens",)
    assert decoder.after == ("model.language_model.norm", "lm_head")
    assert any(".0." in other for other in decoder.other)  # layers of the tower
    assert all(other.startswith(("model.vi", "model.multi_modal_projector")) for other in decoder.other)
    assert len(decoder.experts) == len(decoder.routers) == (4 if name == "qwen3_vl_moe" else 0)


def test_rules_of_a_multimodal_model_have_whole_names():
    rules = read_rules(multimodal("qwen3_vl_moe"))
    assert rules["ep"]["model.language_model.layers.*.mlp.experts"] == "dispatch"
    assert rules["tp"]["lm_head"] == "head"


def test_a_model_that_is_its_own_base_model_is_found():
    model = tiny_model("llama4_text")
    assert model.base_model is model  # base_model_prefix="language_model" names nothing here
    assert find_decoder(model).layers == "model.layers"


def test_a_model_without_head_is_its_own_base():
    with torch.device("meta"):
        model = transformers.LlamaModel(transformers.LlamaConfig(**TEXT))
    decoder = find_decoder(model)
    assert (decoder.base, decoder.layers, decoder.head, decoder.after) == ("", "layers", None, ("norm",))


class Lora(nn.Module):
    """What peft puts in a Linear's place: the base layer stays a child, two thin products beside it."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer
        columns, rows = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, rows, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_in_place_are_parts_like_any_other():
    model = tiny_model("qwen3_moe")
    plain = find_decoder(model)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    model.lm_head = Lora(model.lm_head)
    decoder = find_decoder(model)
    assert (decoder.layers, decoder.n_layers, decoder.base) == (plain.layers, 4, "model")
    assert (decoder.experts, decoder.routers) == (plain.experts, plain.routers)
    assert decoder.head == "lm_head"
    parts = ("lm_head.base_layer", "lm_head.lora_A.default", "lm_head.lora_B.default")
    assert decoder.after == ("model.norm", *parts)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 10 and all("lora_" in n for n in trained)


class Outer(nn.Module):
    """A wrapper like peft's: everything that it does not have comes from the model inside."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def test_a_wrapper_with_the_model_as_a_child_is_looked_through():
    decoder = find_decoder(Outer(tiny_model("llama")))
    assert decoder.layers == "base_model.model.layers"
    assert (decoder.embedding, decoder.head) == ("base_model.model.embed_tokens", "base_model.lm_head")


def refused(model, *words):
    with pytest.raises(PlanError) as error:
        find_decoder(model)
    for word in words:
        assert word in str(error.value)


def test_compiled_models_and_layers_are_refused_by_name():
    refused(torch.compile(tiny_model("llama")), "torch.compile", "compile=True")
    model = tiny_model("llama")
    model.model.layers[2] = torch.compile(model.model.layers[2])
    refused(model, "torch.compile", "model.layers.2._orig_mod", "compile=True")
    # Compiled in place, names are as they were.
    model = tiny_model("llama")
    model.model.layers[0].compile()
    assert find_decoder(model) == find_decoder(tiny_model("llama"))


def test_a_model_in_a_data_parallel_wrapper_is_refused():
    refused(nn.DataParallel(tiny_model("llama")), "DataParallel", "give its .module")


def test_a_model_that_is_sharded_already_is_refused():
    model = tiny_model("llama")
    layer = model.model.layers[1]
    layer.__class__ = type("FSDPLlamaDecoderLayer", (FSDPModule, type(layer)), {})  # what fully_shard does first
    refused(model, "fully_shard", "model.layers.1", "the data axis shards it")


def test_an_encoder_decoder_is_refused():
    t5 = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=128)
    with torch.device("meta"):
        refused(transformers.T5ForConditionalGeneration(t5), "encoder-decoder", "decoder-only")


def test_a_model_without_layers_or_embedding_is_refused_and_told_what_was_looked_for():
    refused(nn.Linear(2, 2), "Linear", "input embedding", "get_input_embeddings")
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList()
    refused(model, "no decoder layers", "none", "num_hidden_layers = 4")
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(list(model.model.layers)[:3])
    model.model.more = nn.ModuleList(list(model.model.layers)[:2])
    refused(model, "model.layers (3)", "model.more (2)", "num_hidden_layers = 4")


def test_a_model_whose_forward_was_replaced_is_refused_with_the_cause():
    model = tiny_model("llama")
    inner = model.model.norm
    model.model.norm.forward = lambda x: inner.weight.mul(x.sum().item()) @ torch.ones(3)
    refused(model, "LlamaForCausalLM", "did not run", "RuntimeError", "plain Hugging Face model")


def test_a_model_that_does_not_run_its_layers_is_refused():
    model = tiny_model("llama")
    model.model.config.num_hidden_layers = 0
    refused(model, "without its layers model.layers")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden_states):
        return self.inner(hidden_states)


class Toy(nn.Module):
    """Runs its layers as told, with a shared module between them and a module that text never reaches."""

    def __init__(self, visits):
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=3)
        self.visits = visits
        self.embed, self.between, self.unused, self.out = (
            nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, use_cache):
        hidden = self.embed(input_ids) * self.scale
        for number in self.visits:
            hidden = self.between(self.blocks[number](hidden_states=hidden))
        return self.out(hidden)


@pytest.mark.parametrize("visits, in_order", [((0, 1, 2), True), ((0, 1, 2, 0, 1, 2), False), ((0, 1), False)])
def test_what_runs_between_or_never_or_twice_is_told(visits, in_order):
    decoder = find_decoder(Toy(visits))
    assert decoder.in_order == in_order
    assert decoder.before == ("", "embed")  # the model itself owns a parameter
    assert decoder.between == ("between",) and decoder.after == ("between", "out")
    assert decoder.other == ("unused",)
    assert decoder.head is None
