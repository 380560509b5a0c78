"""A Hugging Face folder read as data: its weight files, the tensors in them, its config; every defect by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dtensor_5d.checkpoint.sources import FileTensor
from dtensor_5d.errors import Violation

__all__ = ["INDEX_NAME", "SINGLE_NAME", "Folder", "config_violations", "other_settings", "read_folder", "sample"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# What a model cannot differ in and still mean the same weights. Context length, rope and dropout may be changed.
_SAME = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok",
    "hidden_act",
)  # fmt: skip


# What says nothing about what the weights compute.
_FREE = (
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "output_router_logits", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """The tensors of a folder by key, none of them read yet, and what is wrong with it."""

    tensors: Mapping[str, FileTensor]
    config: Mapping[str, Any] | None
    violations: tuple[Violation, ...]


def read_folder(folder: Path) -> Folder:
    """Reads the index and the headers of all weight files, no weights. Never raises for a defect: it is told.

    As in transformers, `model.safetensors` goes before an index. Pickled weights are never opened.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        return _defect(
            f"the folder {folder} {what}",
            "a local folder with safetensors weights is required",
            "check the path, or fetch the model first (`hf download NAME --local-dir FOLDER`)",
        )
    files, violations = _weight_files(folder)
    tensors: dict[str, FileTensor] = {}
    for file in files:
        try:
            tensors.update(_headers(file))
        except (SafetensorError, OSError) as error:
            violations.append(
                Violation(
                    f"{file.name} ({file.stat().st_size if file.exists() else 0} bytes) cannot be read: {error}",
                    "a complete safetensors file is required",
                    "fetch or save it again",
                )
            )
    if not violations:
        violations += _index_violations(folder, tensors)
    config: Mapping[str, Any] | None = None
    if (folder / "config.json").is_file():
        try:
            config = json.loads((folder / "config.json").read_text())
        except ValueError as error:
            violations.append(Violation(f"{folder}/config.json is no JSON ({error})", "a config is", "fetch it again"))
    return Folder(tensors, config, tuple(violations))


def config_violations(found: Mapping[str, Any] | None, config: Any) -> list[Violation]:
    """Where the folder's config describes another model than `config`, the one to be filled."""
    if found is None:
        return []
    if "quantization_config" in found:
        method = found["quantization_config"].get("quant_method", "unknown")
        return [
            Violation(
                f"the folder's weights are quantised ({method})",
                "weights to train from must be floating point",
                "dequantise them first: from_pretrained, model.dequantize(), save_pretrained",
            )
        ]
    ours = config.to_dict()
    return [
        Violation(
            f"the folder's config has {key}={found[key]!r}",
            f"the model to fill has {key}={ours[key]!r}",
            "build the model from the folder's own config, or give the folder that fits",
        )
        for key in _SAME
        if found.get(key) is not None and ours.get(key) is not None and found[key] != ours[key]
    ]


def other_settings(found: Mapping[str, Any] | None, config: Any) -> list[str]:
    """Settings that change what the same weights compute (an epsilon, rope, a window) and differ from `config`."""
    ours, theirs = config.to_dict(), found or {}
    return [
        f"{key}={theirs[key]!r} (the model has {ours[key]!r})"
        for key in sorted(theirs)
        if key not in _FREE and key in ours and theirs[key] is not None and theirs[key] != ours[key]
    ]


def sample(tensors: Mapping[str, FileTensor]) -> str:
    """A short text from the names, shapes and some values of all tensors: other weights practically always differ.

    Raises what reading a file raises.
    """
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{key} {tensor.shape} {tensor.dtype}".encode())
        if 0 in tensor.shape:
            continue
        for edge in (0, -1):
            rows = [range(n)[edge] for n in tensor.shape[:-1]]
            index = [slice(i, i + 1) for i in rows] + [slice(0, min(n, 8)) for n in tensor.shape[-1:]]
            digest.update(repr(tensor.block(key, tuple(index)).tolist()).encode())
    return digest.hexdigest()


def _weight_files(folder: Path) -> tuple[list[Path], list[Violation]]:
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME], []
    index = folder / INDEX_NAME
    if not index.is_file():
        pickled = sorted(p.name for p in [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        there = sorted(p.name for p in folder.iterdir())
        if pickled:
            return [], [
                Violation(
                    f"{folder} has only pickled weights ({', '.join(pickled[:3])}, {len(pickled)} files)",
                    "safetensors are required: unpickling runs code",
                    "convert once: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)",
                )
            ]
        return [], [
            Violation(
                f"{folder} holds no weights ({len(there)} files: {', '.join(there[:5]) or 'none'})",
                f"{SINGLE_NAME} or {INDEX_NAME} with its files is required",
                "give the folder that holds them, or use init_weights(seed) to start without",
            )
        ]
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return [], [Violation(f"{index} cannot be read ({error!r})", "a JSON with a weight_map is", "fetch it again")]
    files = [folder / name for name in names]
    missing = [f.name for f in files if not f.is_file()]
    if not missing:
        return files, []
    return [], [
        Violation(
            f"{INDEX_NAME} names {len(names)} files, {len(missing)} of them are missing ({', '.join(missing[:3])})",
            f"all {len(names)} must be in {folder}",
            "fetch the missing ones",
        )
    ]


def _index_violations(folder: Path, tensors: Mapping[str, FileTensor]) -> list[Violation]:
    """Keys that the index promises and the files do not hold."""
    if (folder / SINGLE_NAME).is_file():
        return []
    promised = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    absent = sorted(set(promised) - set(tensors))
    if not absent:
        return []
    return [
        Violation(
            f"{INDEX_NAME} names {len(promised)} tensors, {len(absent)} of them are in no file ({absent[0]} first)",
            f"all {len(promised)} must be there",
            "fetch index and files from the same place again",
        )
    ]


def _headers(file: Path) -> dict[str, FileTensor]:
    handle = safe_open(str(file), framework="pt")

    def block(key: str, index: tuple[slice, ...]) -> torch.Tensor:
        return handle.get_slice(key)[index] if index else handle.get_tensor(key)

    tensors = {}
    for key in handle.keys():  # noqa: SIM118 (a safetensors handle is no dict: iterating it is not possible)
        entry = handle.get_slice(key)
        tensors[key] = FileTensor(key, tuple(entry.get_shape()), _DTYPES.get(entry.get_dtype(), torch.float32), block)
    return tensors


def _defect(asked: str, required: str, change: str) -> Folder:
    return Folder({}, None, (Violation(asked, required, change),))


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
