"""load_pretrained: whatever the layout, the model holds what Hugging Face's own loader gives it, and trains on."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from dtensor_5d.checkpoint import sources
from dtensor_5d.checkpoint.pretrained import load_pretrained
from dtensor_5d.checkpoint.slices import local_part
from dtensor_5d.checkpoint.template import named_tensors
from tests.checkpoint.layouts import decoder_layers, differing, lay_out, on_meta, sharded, whole
from tests.families.tiny import tiny_config, tiny_model
from tests.harness import run_ranks

SIX_EXPERTS = {"num_experts": 6}

# Pairwise: families with something to get wrong x layouts. With 6 experts on dp4 one rank owns none.
CASES = [
    ("llama", "dp4", {}),
    ("llama", "tp+dp", {}),
    ("smollm3", "hsdp", {"tie_word_embeddings": True}),
    ("gpt2", "dp4", {}),
    ("gemma2", "dp4", {}),
    ("phi3", "dp4", {}),
    ("qwen3_moe", "dp4", SIX_EXPERTS),
    ("qwen3_moe", "ep+dp", {}),
    ("mixtral", "gate_up dim 1", {}),
    ("mixtral", "gate_up strided", {}),
    ("deepseek_v3", "hsdp", {}),
    ("gpt_oss", "dp4", {}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family, dtype=torch.float32, **overrides):
        key = (family, dtype, str(sorted(overrides.items())))
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp(family))
            tiny_model(family, dtype=dtype, **overrides).save_pretrained(made[key])
        return made[key]

    return folder


def counted_reads():
    """A list that grows by the elements of every block that is read from a file."""
    log = []
    read = sources.FileTensor.read

    def counting(self, runs):
        part = read(self, runs)
        log.append(part.numel())
        return part

    return log, counting


def loads(rank, cases):
    problems = []
    for family, layout, overrides, folder in cases:
        want = named_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        model = lay_out(on_meta(tiny_config(family, **overrides)), layout)
        before = [id(p) for p in model.parameters()]
        log, counting = counted_reads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources.FileTensor, "read", counting)
            load_pretrained(model, folder, device="cpu")
        stored = sum(local_part(t).numel() for t in {id(t): t for t in model.parameters()}.values())
        persistent = sum(b.numel() for n, b in model.named_buffers() if n in model.state_dict())
        bad = differing(whole(model), want)
        if bad:
            problems.append(f"{family} {layout}: {len(bad)} differ: {bad[:3]}")
        if [id(p) for p in model.parameters()] != before:
            problems.append(f"{family} {layout}: parameters are other objects")
        if sum(log) != stored + persistent:
            problems.append(f"{family} {layout}: {sum(log)} elements read, {stored} + {persistent} stored")
    return problems


def test_every_layout_holds_what_transformers_loads(folders):
    """I1, F12, E13, K9, T21: buffers rebuilt, empty shards, fused experts cut anywhere, only own slices read."""
    cases = [(f, layout, o, folders(f, **o)) for f, layout, o in CASES]
    assert run_ranks(4, loads, cases, timeout=110) == [[]] * 4


def trains(rank, folder):
    """Two SGD steps on a sharded model that was loaded from meta, then once more after loading over it."""
    config = tiny_config("smollm3", tie_word_embeddings=True)
    model = sharded(on_meta(config), init_device_mesh("cpu", (4,)))
    ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    load_pretrained(model, folder, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]

    def steps():
        for _ in range(2):
            for m, optimizer in zip((model, plain), optimizers):
                m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        got, want = whole(model), named_tensors(plain)
        return max((got[n] - w).abs().max().item() / w.abs().max().item() for n, w in want.items() if w.abs().max() > 0)

    first = steps()
    with torch.no_grad():  # gathered parameters, as an evaluation may leave them behind
        model(input_ids=ids, use_cache=False)
    load_pretrained(model, folder, device="cpu")
    reloaded = named_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    bad = differing(whole(model), reloaded)
    plain.load_state_dict(reloaded, strict=False)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return first, bad, steps(), tied


def test_training_goes_on_from_loaded_weights_with_the_same_optimizer(folders):
    for first, bad, second, tied in run_ranks(4, trains, folders("smollm3", tie_word_embeddings=True)):
        assert first < 1e-5 and second < 1e-5
        assert bad == []
        assert tied


def precisions(rank, bf16_folder):
    """bf16 files into fp32 master weights; into bf16 parameters with routers that the family keeps in fp32."""
    config = tiny_config("deepseek_v3")
    master = sharded(
        on_meta(config), init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    load_pretrained(master, bf16_folder, device="cpu")
    exact = AutoModelForCausalLM.from_pretrained(bf16_folder, dtype=torch.float32)
    bad = differing(whole(master), named_tensors(exact))

    mixed = on_meta(config, torch.bfloat16)
    for name, module in mixed.named_modules():
        if name.endswith("mlp.gate"):
            module.to(torch.float32)
    for layer in decoder_layers(mixed):
        if hasattr(layer.mlp, "gate"):
            fully_shard(layer.mlp.gate, mesh=init_device_mesh("cpu", (2,)))
    sharded(mixed, init_device_mesh("cpu", (2,)))
    load_pretrained(mixed, bf16_folder, device="cpu")
    gates = {p.dtype for n, p in mixed.named_parameters() if n.endswith("mlp.gate.weight")}
    rest = {p.dtype for n, p in mixed.named_parameters() if not n.endswith("mlp.gate.weight")}
    got = {n: t.float() for n, t in whole(mixed).items() if n in dict(mixed.named_parameters())}
    want = {n: t for n, t in exact.named_parameters()}
    return bad, gates, rest, differing(got, want)


def test_parameters_keep_their_dtype(folders):
    folder = folders("deepseek_v3", dtype=torch.bfloat16)
    for bad, gates, rest, mixed in run_ranks(2, precisions, folder):
        assert bad == []
        assert gates == {torch.float32} and rest == {torch.bfloat16}
        assert mixed == []


def test_a_part_of_the_layers_takes_its_own(folders):
    """I2: a stage without embedding, with the tied head as its own parameter, has its buffers."""
    folder = folders("gemma2", tie_word_embeddings=True)
    model = on_meta(tiny_config("gemma2", tie_word_embeddings=True))
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.model.embed_tokens = torch.nn.Identity()
    for i in (0, 1):
        model.model.layers[i] = torch.nn.Identity()
    load_pretrained(model, folder, device="cpu")
    want = named_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    got = named_tensors(model)
    assert len(got) < len(want)
    assert differing(got, {n: want[n] for n in got}) == []
    assert torch.equal(got["lm_head.weight"], want["model.embed_tokens.weight"])


def test_attributes_of_parameters_survive_the_way_from_meta(folders):
    model = on_meta(tiny_config("llama"))
    model.model.norm.weight.mark = "kept"
    model.lm_head.weight.requires_grad_(False)
    load_pretrained(model, folders("llama"), device="cpu")
    assert model.model.norm.weight.mark == "kept"
    assert not model.lm_head.weight.requires_grad and model.model.norm.weight.requires_grad


def outside(rank, folder):
    """A parameter on a mesh of ranks 0 and 1; rank 2 holds it whole."""
    model = on_meta(tiny_config("llama"))
    mesh = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        shard = DTensor.from_local(torch.empty(32, device="meta"), mesh, [Shard(0)], run_check=False)
        model.model.norm.weight = torch.nn.Parameter(shard)
    load_pretrained(model, folder, device="cpu")
    return local_part(model.model.norm.weight)


def test_a_mesh_of_some_ranks(folders):
    a, b, c = run_ranks(3, outside, folders("llama"))
    assert torch.equal(torch.cat([a, b]), c)
