"""Folders that do not fit: one message with both numbers and the way out, on every rank, nothing touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtensor_5d import PlanError
from dtensor_5d.checkpoint import pretrained
from dtensor_5d.checkpoint.pretrained import load_pretrained
from tests.checkpoint.layouts import on_meta, sharded
from tests.families.tiny import tiny_config, tiny_model
from tests.harness import fails_on_ranks

ROWS = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tiny_model("llama").save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "folder"))


def change(folder, key, new):
    """Rewrites the file that holds `key`: new(tensors, index)."""
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = folder / index["weight_map"][key]
    tensors = load_file(file)
    new(tensors, index["weight_map"])
    save_file(tensors, file, metadata={"format": "pt"})
    index_file.write_text(json.dumps(index))


def absent(folder):
    shutil.rmtree(folder)


def a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


def empty(folder):
    for file in folder.glob("model*"):
        file.unlink()


def pickled(folder):
    empty(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def missing_key(folder):
    change(folder, ROWS, lambda tensors, index: (tensors.pop(ROWS), index.pop(ROWS)))


def unknown_key(folder):
    def add(tensors, index):
        tensors["model.layers.1.adapter.weight"] = torch.zeros(1)
        index["model.layers.1.adapter.weight"] = index[ROWS]

    change(folder, ROWS, add)


def other_shape(folder):
    change(folder, ROWS, lambda tensors, index: tensors.update({ROWS: torch.zeros(90, 64)}))


def truncated(folder):
    file = next(folder.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-100])


def garbage(folder):
    next(folder.glob("model-00002*")).write_bytes(b"\xff" * 64)


def missing_file(folder):
    next(folder.glob("model-00002*")).unlink()


def bad_index(folder):
    (folder / "model.safetensors.index.json").write_text("{")


def index_of_more(folder):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.more"] = index["weight_map"][ROWS]
    file.write_text(json.dumps(index))


def set_config(**values):
    def do(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return do


DEFECTS = [
    (absent, r"does not exist.*hf download"),
    (a_file, r"is a file"),
    (empty, r"holds no weights \(2 files.*init_weights"),
    (pickled, r"pytorch_model.bin, 1 files.*convert once"),
    (missing_key, rf"1 of 39 tensors of the model, missing.*{ROWS}"),
    (unknown_key, r"1 of 40 tensors in .*, unknown to the model \(model.layers.1.adapter.weight\)"),
    (other_shape, r"\[90, 64\].*\[96, 64\].*own config"),
    (truncated, r"model-00002.* bytes\) cannot be read"),
    (garbage, r"model-00002.*\(64 bytes\) cannot be read"),
    (missing_file, r"names \d+ files, 1 of them are missing \(model-00002"),
    (bad_index, r"index.json cannot be read"),
    (index_of_more, r"names 40 tensors, 1 of them are in no file \(model.more first\)"),
    (set_config(model_type="mistral"), r"model_type='mistral'.*model_type='llama'"),
    (set_config(num_attention_heads=4), r"num_attention_heads=4.*num_attention_heads=8"),
    (set_config(quantization_config={"quant_method": "fp8"}), r"quantised \(fp8\).*dequantise"),
]


@pytest.mark.parametrize("defect, message", DEFECTS, ids=lambda d: getattr(d, "__name__", ""))
def test_a_defect_is_told_before_anything_is_touched(folder, defect, message):
    defect(folder)
    model = on_meta(tiny_config("llama"))
    with pytest.raises(PlanError, match=message):
        load_pretrained(model, folder, device="cpu")
    assert all(p.is_meta for p in model.parameters())


def test_all_defects_of_a_folder_in_one_message(folder):
    missing_key(folder)
    unknown_key_elsewhere = "model.norm.weight"
    change(folder, unknown_key_elsewhere, lambda t, index: t.update({unknown_key_elsewhere: torch.zeros(65)}))
    with pytest.raises(PlanError) as error:
        load_pretrained(on_meta(tiny_config("llama")), folder, device="cpu")
    assert len(error.value.violations) == 2


def test_another_family_and_another_size(good):
    with pytest.raises(PlanError, match=r"model_type='llama'.*model_type='qwen3'"):
        load_pretrained(on_meta(tiny_config("qwen3")), good, device="cpu")
    with pytest.raises(PlanError, match=r"hidden_size=64.*hidden_size=32"):
        load_pretrained(on_meta(tiny_config("llama", hidden_size=32)), good, device="cpu")


def test_an_expert_is_missing(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = tensors.pop("model.layers.2.mlp.experts.3.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert gone.shape == (48, 64)
    with pytest.raises(PlanError, match=r"model.layers.2.mlp.experts.gate_up_proj cannot be made of the 15 tensors"):
        load_pretrained(on_meta(tiny_config("qwen3_moe")), tmp_path, device="cpu")


def test_tied_weights_that_differ(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"differ in the folder: 2 tensors.*1 tensor.*tie_word_embeddings=False"):
        load_pretrained(on_meta(tiny_config("llama", tie_word_embeddings=True)), tmp_path, device="cpu")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tied = on_meta(tiny_config("llama", tie_word_embeddings=True))
    load_pretrained(tied, tmp_path, device="cpu")
    assert torch.equal(tied.lm_head.weight, tensors["lm_head.weight"])


def ties_apart(rank, folder):
    model = on_meta(tiny_config("llama", tie_word_embeddings=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "_BLOCK", 8)
        load_pretrained(model, folder, device="cpu")


def test_tied_weights_that_differ_where_another_rank_looks(tmp_path):
    """And each block of rows is read by one rank."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][17] += 1  # rows 16 to 23 are rank 2's
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fails_on_ranks(3, ties_apart, str(tmp_path), error=PlanError, match=r"^lm_head.weight and model.embed.* differ")


def test_a_wrapper_is_no_model(good):
    with pytest.raises(PlanError, match=r"class Linear.*not a wrapper"):
        load_pretrained(torch.nn.Linear(2, 2), good, device="cpu")
    model = on_meta(tiny_config("llama"))
    model.model.extra = torch.nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(PlanError, match=r"holds model\.extra"):
        load_pretrained(model, good, device="cpu")


def each_its_folder(rank, folders):
    from torch.distributed.device_mesh import init_device_mesh

    model = sharded(on_meta(tiny_config("llama")), init_device_mesh("cpu", (3,)))
    load_pretrained(model, folders[rank], device="cpu")


def test_a_defect_that_one_rank_sees_stops_all(good, folder):
    missing_file(folder)
    fails_on_ranks(
        3, each_its_folder, [str(good), str(folder), str(good)], error=PlanError,
        match=r"on 1 of 3 ranks \(first: 1\), .*1 of them are missing",
    )  # fmt: skip


def broken_read(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh

    from dtensor_5d.checkpoint import sources

    model = sharded(on_meta(tiny_config("llama")), init_device_mesh("cpu", (2,)))
    read = sources.FileTensor.read

    def failing(self, runs):
        if rank == 1 and self.key == ROWS:
            raise OSError("Input/output error")
        return read(self, runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.FileTensor, "read", failing)
        load_pretrained(model, folder, device="cpu")


def test_a_disk_that_fails_on_one_rank_stops_all(good):
    fails_on_ranks(2, broken_read, str(good), error=PlanError, match=rf"on 1 of 2 ranks .*{ROWS}.*Input/output error")
