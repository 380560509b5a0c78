"""save_pretrained: an ordinary Hugging Face folder, bit for bit, complete or not there."""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM

from dtensor_5d import PlanError
from dtensor_5d.checkpoint import export, gather
from dtensor_5d.checkpoint.layout import lay_out as lay_out_files
from dtensor_5d.checkpoint.pretrained import init_weights, load_pretrained, save_pretrained
from dtensor_5d.checkpoint.template import named_tensors
from tests.checkpoint.layouts import decoder_layers, differing, lay_out, on_meta, sharded, whole
from tests.families.tiny import tiny_config, tiny_model
from tests.harness import fails_on_ranks, run_ranks

CASES = [
    ("llama", "tp+dp", {}),
    ("smollm3", "hsdp", {"tie_word_embeddings": True}),
    ("gpt2", "dp4", {}),
    ("phi3", "dp4", {}),
    ("qwen3_moe", "dp4", {"num_experts": 6}),
    ("qwen3_moe", "ep+dp", {}),
    ("mixtral", "gate_up strided", {}),
    ("mixtral", "gate_up dim 1", {}),
    ("deepseek_v3", "hsdp", {}),
    ("gpt_oss", "dp4", {}),
]


def keys_of(folder):
    return {key for file in Path(folder).glob("*.safetensors") for key in load_file(file)}


def round_trips(rank, cases):
    for family, layout, overrides, source, out in cases:
        model = lay_out(on_meta(tiny_config(family, **overrides)), layout)
        load_pretrained(model, source, device="cpu")
        save_pretrained(model, out, config=model.config, source=source, max_shard_bytes=150_000)


def test_every_layout_saves_what_transformers_loads(tmp_path):
    """K8, K11: hub keys, no missing ones, bit-equal, from empty shards, experts on their own mesh, strided cuts."""
    cases = []
    for i, (family, layout, overrides) in enumerate(CASES):
        tiny_model(family, **overrides).save_pretrained(tmp_path / f"in{i}")
        cases.append((family, layout, overrides, str(tmp_path / f"in{i}"), str(tmp_path / f"out{i}")))
    run_ranks(4, round_trips, cases, timeout=110)
    for *case, source, out in cases:
        want = AutoModelForCausalLM.from_pretrained(source)
        got, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), (case, info)
        assert differing(named_tensors(got), named_tensors(want)) == [], case
        assert type(got) is type(want)
        assert keys_of(out) == keys_of(source), case
        assert len(list(Path(out).glob("*.safetensors"))) > 1
        index = json.loads((Path(out) / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == keys_of(out)
        assert not list(Path(out).glob(".*"))


def gathers(rank, in_flight):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_IN_FLIGHT", in_flight)
        return gathered()


def gathered():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    full = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for placements in [
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(1, split_factor=3), Shard(1)),
        (Shard(1), Shard(0)),
        (Replicate(), Shard(0)),
    ]:
        tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        whole_here = gather.gather_to(2, tensor)
        results.append(None if whole_here is None else torch.equal(whole_here, full))
    return results


def test_one_rank_gathers_what_is_cut_unevenly_twice():
    for in_flight in (2**28, 1):
        assert run_ranks(4, gathers, in_flight) == [[None] * 5, [None] * 5, [True] * 5, [None] * 5]


@contextmanager
def live_bytes():
    """A list that receives the most bytes of torch's CPU memory that were held at one time inside."""
    peak: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield peak
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak.append(max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))))


def holds(rank, out):
    config = tiny_config("llama", num_hidden_layers=8, intermediate_size=256)
    model = sharded(on_meta(config), init_device_mesh("cpu", (4,)))
    init_weights(model, 0)
    written = []
    write = export.write_tensor

    def noting(file, entry, tensor):
        written.append(entry.nbytes)
        write(file, entry, tensor)

    with pytest.MonkeyPatch.context() as patch, live_bytes() as peak:
        patch.setattr(export, "write_tensor", noting)
        save_pretrained(model, out, config=config)
    total = sum(p.numel() * 4 for p in model.parameters())
    layer = sum(p.numel() * 4 for p in decoder_layers(model)[0].parameters())
    return peak[0], sum(written), layer, total


def test_no_rank_holds_the_model_and_all_write(tmp_path):
    """K13: bytes held beyond the own shards are those of one unit, on the rank that writes it."""
    results = run_ranks(4, holds, str(tmp_path / "out"))
    peaks, written, layers, totals = zip(*results)
    layer, total = layers[0], totals[0]
    assert layer < total / 6
    assert max(peaks) <= 1.3 * layer, (peaks, layer)
    assert max(peaks) > 0.9 * layer, "the meter saw nothing"
    assert sum(written) == total
    assert min(written) > 0.15 * total, written


def stages(rank, source, out):
    """Each rank holds half of the layers, the last one a copy of the tied embedding as its head."""
    model = on_meta(tiny_config("gemma2", tie_word_embeddings=True))
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    for i in (2, 3) if rank == 0 else (0, 1):
        model.model.layers[i] = torch.nn.Identity()
    if rank == 0:
        model.lm_head, model.model.norm = torch.nn.Identity(), torch.nn.Identity()
    else:
        model.model.embed_tokens = torch.nn.Identity()
    load_pretrained(model, source, device="cpu")
    save_pretrained(model, out, config=model.config, source=source)


def test_stages_of_a_pipeline_write_one_folder(tmp_path):
    tiny_model("gemma2", tie_word_embeddings=True).save_pretrained(tmp_path / "in")
    run_ranks(2, stages, str(tmp_path / "in"), str(tmp_path / "out"))
    got, want = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "in"))
    assert differing(named_tensors(got), named_tensors(want)) == []
    assert keys_of(tmp_path / "out") == keys_of(tmp_path / "in")


def test_a_narrower_dtype_keeps_routers_in_fp32(tmp_path):
    model = tiny_model("deepseek_v3")
    save_pretrained(model, tmp_path / "out", config=model.config, dtype="bf16")
    saved = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        saved.update({key: tensor.dtype for key, tensor in load_file(file).items()})
    wide = {key for key, dtype in saved.items() if dtype == torch.float32}
    assert wide == {k for k in saved if k.endswith(("mlp.gate.weight", "e_score_correction_bias"))} and wide
    assert {d for k, d in saved.items() if k not in wide} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    want = tiny_model("deepseek_v3")
    for name, tensor in again.named_parameters():
        assert torch.equal(tensor, want.get_parameter(name).to(tensor.dtype)), name
    assert model.config.dtype != torch.bfloat16, "the given config is not changed"


def test_the_tokenizer_comes_along(tmp_path):
    source = tmp_path / "in"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/a.jinja"):
        (source / name).write_text(name)
    (source / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    (source / "README.md").write_text("another model's card")
    model = tiny_model("llama")
    save_pretrained(model, tmp_path / "out", config=model.config, source=source)
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors",
        "tokenizer.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/a.jinja",
    }  # fmt: skip
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.temperature == 0.5


def test_saving_over_a_folder_replaces_the_model_and_nothing_else(tmp_path):
    folder = tmp_path / "out"
    tiny_model("llama", seed=1).save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    for seed in (2, 3, 4):
        model = tiny_model("llama", seed=seed)
        save_pretrained(model, folder, config=model.config, max_shard_bytes=200_000)
        got = AutoModelForCausalLM.from_pretrained(folder)
        assert differing(named_tensors(got), named_tensors(model)) == []
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert {p.name for p in folder.glob("*.safetensors")} == set(index["weight_map"].values())
        assert (folder / "notes.txt").read_text() == "mine"
    assert {p.name for p in folder.iterdir() if p.name.startswith(".")} == set()


def failing_write(rank, out):
    model = sharded(tiny_model("llama", seed=2), init_device_mesh("cpu", (4,)))
    write, count = export.write_tensor, []

    def full(file, entry, tensor):
        count.append(1)
        if rank == 2 and len(count) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, entry, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_tensor", full)
        save_pretrained(model, out, config=model.config)


def test_a_failed_save_is_an_error_on_every_rank_and_leaves_the_folder(tmp_path):
    folder = tmp_path / "out"
    tiny_model("llama", seed=1).save_pretrained(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    match = "rank 2 cannot write.*No space left on device"
    fails_on_ranks(4, failing_write, str(folder), error=PlanError, match=match)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    fails_on_ranks(4, failing_write, str(tmp_path / "new"), error=PlanError, match=match)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_what_a_killed_save_left_is_no_obstacle(tmp_path):
    for stale in (tmp_path / ".out.saving", tmp_path / "old" / ".saving"):
        stale.mkdir(parents=True)
        (stale / "model-00001-of-00001.safetensors").write_bytes(b"half")
    model = tiny_model("llama")
    for name in ("out", "old"):
        save_pretrained(model, tmp_path / name, config=model.config)
        got = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert differing(named_tensors(got), named_tensors(model)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "out"]


def test_arguments_that_cannot_be(tmp_path, monkeypatch):
    model = tiny_model("llama")
    (tmp_path / "file").write_text("")
    bad = dict(source=tmp_path / "nowhere", dtype="int7", max_shard_bytes=0)
    with pytest.raises(PlanError) as error:
        save_pretrained(model, tmp_path / "file", config=model.config, **bad)
    assert len(error.value.violations) == 4
    with pytest.raises(PlanError, match=r"cannot write.*Not a directory|NotADirectory"):
        save_pretrained(model, tmp_path / "file" / "out", config=model.config)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda p: type("U", (), {"free": 1000})())
    with pytest.raises(PlanError, match=r"[\d,]+ bytes to write.*1,000 bytes are free"):
        save_pretrained(model, tmp_path / "out", config=model.config)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_files_are_cut_at_the_limit_and_aligned():
    wide, narrow = torch.float32, torch.bfloat16
    layout = lay_out_files({"a": ((3,), narrow), "b": ((4,), wide), "c": ((9,), wide), "d": ((), torch.bool)}, 30)
    assert [layout.entries[n].file for n in "abcd"] == [0, 0, 1, 2]
    assert layout.entries["b"].offset < layout.entries["a"].offset
    assert all(e.offset % e.dtype.itemsize == 0 for e in layout.entries.values())
    assert layout.total_bytes == 6 + 16 + 36 + 1


def trains_saves_trains(rank, out):
    """K10: saving between steps changes nothing."""
    results = []
    ids = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    for save in (False, True):
        model = sharded(tiny_model("llama"), init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if save and step == 1:
                with torch.no_grad():
                    model(input_ids=ids, use_cache=False)
                save_pretrained(model, out, config=model.config)
        results.append(whole(model))
    return differing(*results)


def test_saving_between_steps_changes_nothing(tmp_path):
    assert run_ranks(2, trains_saves_trains, str(tmp_path / "out")) == [[], []]
