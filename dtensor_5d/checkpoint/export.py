"""Hugging Face folders out: unit by unit, each written by another rank, complete or not there at all."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtensor_5d.checkpoint.agree import agree, everyones, my_rank
from dtensor_5d.checkpoint.folder import INDEX_NAME
from dtensor_5d.checkpoint.gather import gather_to
from dtensor_5d.checkpoint.initial import strangers
from dtensor_5d.checkpoint.layout import Layout, create_files, lay_out, write_tensor
from dtensor_5d.checkpoint.template import Template, named_tensors, reshard, template_of, unit_of
from dtensor_5d.errors import Violation
from dtensor_5d.sections import sections_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["save_pretrained"]

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "*.model",
    "chat_template*", "additional_chat_templates", "generation_config.json", "*.py",
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    config: PretrainedConfig,
    source: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Writes an ordinary Hugging Face folder: what `AutoModelForCausalLM.from_pretrained` loads, bit for bit.

    Example: `save_pretrained(model, "out", config=config, source="Qwen3-0.6B", dtype="bf16")`.

    The weights go out unit by unit (a decoder layer, or a module outside the layers), in the format of the hub
    (per-expert keys where the family has them, tied tensors once), in files of at most `max_shard_bytes`. A unit is
    whole on the one rank that writes it; the others hold nothing but their own shards. `dtype`
    (None: as the parameters are) converts on the way; what the family keeps in fp32 stays so. Tokenizer files and the
    generation config are copied from `source`. All ranks call it, and all must see the same file system.

    The folder appears when it is complete; one that exists keeps its other files, and its old weights until the new
    ones are all written. A failed save leaves it as it was.

    Errors: `PlanError` on every rank: unusable arguments, no room (both sizes), a write that failed on any rank.
    """
    folder, source = Path(folder).absolute(), None if source is None else Path(source)
    template = template_of(model)
    reshard(model)
    agree([*strangers(template, model), *_argument_violations(folder, source, dtype, max_shard_bytes)])
    plan = _plan(template, model, dtype, max_shard_bytes)
    agree(_room_violations(folder, plan.layout.total_bytes))

    # Next to the folder while there is none, so that one rename makes it appear; inside where one exists already.
    staging = folder / ".saving" if folder.exists() else folder.parent / f".{folder.name}.saving"
    _together(lambda: _begin(staging, plan.layout), staging, first_rank_only=True)
    _together(lambda: _write_weights(template, model, plan, staging), staging)
    _together(lambda: _write_rest(template, model, plan, config, source, staging), staging, first_rank_only=True)
    _together(lambda: _commit(staging, folder, plan.layout), staging, first_rank_only=True)


@dataclass(frozen=True)
class _Plan:
    """Who writes what: the same on every rank."""

    units: Mapping[str, Sequence[str]]  # unit -> the model's names, in order
    hub: Mapping[str, Sequence[str]]  # unit -> names in the folder
    writer: Mapping[str, int]
    dtype: Mapping[str, torch.dtype]  # by the model's name
    layout: Layout


def _plan(template: Template, model: nn.Module, dtype: torch.dtype | str | None, max_shard_bytes: float) -> _Plan:
    from transformers.core_model_loading import revert_weight_conversion

    template.model._weight_conversions = getattr(model, "_weight_conversions", None)
    names = template.stored
    here = named_tensors(model)
    # One byte per tensor and rank: 0 for none here (another pipeline stage), else its dtype.
    codes = everyones(bytes(_code(here.get(n)) for n in names))
    nowhere = [n for n, held in zip(names, zip(*codes)) if not any(held)]
    agree(Violation(f"{n} is on none of {len(codes)} ranks", "each is needed on 1", "save all stages") for n in nowhere)
    held_dtype = {n: _DTYPES[max(held) - 1] for n, held in zip(names, zip(*codes))}
    asked = _as_dtype(dtype)
    final = _final_dtypes(template, held_dtype, asked)

    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(unit_of(name) or name.rpartition(".")[0], []).append(name)
    hub: dict[str, list[str]] = {}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for unit, members in units.items():
        whole = {n: torch.empty(template.tensors[n].shape, dtype=final[n], device="meta") for n in members}
        reverted = revert_weight_conversion(template.model, whole)
        hub[unit] = list(reverted)
        shapes.update({n: (tuple(t.shape), t.dtype) for n, t in reverted.items()})
    layout = lay_out(shapes, max_shard_bytes)

    position = {n: i for i, n in enumerate(names)}
    load = [0] * len(codes)
    writer = {}
    for unit, members in units.items():
        holders = [rank for rank, code in enumerate(codes) if all(code[position[n]] for n in members)]
        writer[unit] = min(holders, key=lambda rank: (load[rank], rank))
        load[writer[unit]] += sum(layout.entries[n].nbytes for n in hub[unit])
    return _Plan(units, hub, writer, final, layout)


def _code(tensor: torch.Tensor | None) -> int:
    """0: nothing of it here."""
    if tensor is None or (isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None):
        return 0
    return 1 + _DTYPES.index(tensor.dtype)


def _write_weights(template: Template, model: nn.Module, plan: _Plan, staging: Path) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    here, packed = named_tensors(model), sections_of(model)
    failure: Exception | None = None
    with contextlib.ExitStack() as stack:
        files: dict[int, BinaryIO] = {}
        for unit, members in plan.units.items():
            mine = plan.writer[unit] == my_rank()
            # Gathering is collective: this rank takes part in it to the end, even after its own disk gave up.
            whole = {}
            for name in members:
                tensor = gather_to(plan.writer[unit], here[name], packed.get(name)) if name in here else None
                if tensor is not None and failure is None:
                    whole[name] = tensor.to(plan.dtype[name])
            if not mine or failure is not None:
                continue
            try:
                reverted = revert_weight_conversion(template.model, whole)
                whole = {}
                for name in plan.hub[unit]:
                    entry = plan.layout.entries[name]
                    if entry.file not in files:
                        path = staging / plan.layout.files[entry.file]
                        files[entry.file] = stack.enter_context(open(path, "r+b"))
                    write_tensor(files[entry.file], entry, reverted.pop(name))
            except Exception as error:
                failure = error
        if failure is None:
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
    if failure is not None:
        raise failure


def _write_rest(
    template: Template, model: nn.Module, plan: _Plan, config: PretrainedConfig, source: Path | None, staging: Path
) -> None:
    """Index, config, generation config, tokenizer: everything but the weights."""
    (staging / INDEX_NAME).write_text(plan.layout.index())
    described = copy.deepcopy(config)
    described.architectures = [type(template.model).__name__]
    sizes: dict[torch.dtype, int] = {}
    for name, dtype in plan.dtype.items():
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + template.tensors[name].numel()
    described.dtype = str(max(sizes, key=lambda d: sizes[d])).removeprefix("torch.")
    described.save_pretrained(staging)
    if source is not None:
        for path in sorted({p for pattern in _TOKENIZER_FILES for p in source.glob(pattern)}):
            if path.is_dir():
                shutil.copytree(path, staging / path.name)
            else:
                shutil.copyfile(path, staging / path.name)
    generation = getattr(model, "generation_config", None)
    if generation is not None and not (staging / "generation_config.json").exists():
        generation.save_pretrained(staging)


def _begin(staging: Path, layout: Layout) -> None:
    if staging.exists():  # what a killed save left
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    create_files(layout, staging)


def _commit(staging: Path, folder: Path, layout: Layout) -> None:
    """Makes the staged files the folder's. What a reader finds is the old model or the new one.

    In an existing folder the index is the switch: new weight files come under names of their own, then the index that
    names them, and old weights go last.
    """
    if not folder.exists():
        os.rename(staging, folder)
        return
    old = [p for p in folder.glob("model*.safetensors") if p.is_file()]
    names = {name: name for name in layout.files}
    if any((folder / name).exists() for name in names):
        mark = 2
        while any((folder / f"model-{mark}{name[5:]}").exists() for name in names):
            mark += 1
        names = {name: f"model-{mark}{name[5:]}" for name in names}
        index = (staging / INDEX_NAME).read_text()
        for name, new in names.items():
            index = index.replace(f'"{name}"', f'"{new}"')
        (staging / INDEX_NAME).write_text(index)
    for name, new in names.items():
        os.replace(staging / name, folder / new)
    for path in sorted(staging.iterdir(), key=lambda p: p.name == INDEX_NAME):
        target = folder / path.name
        if path.is_dir() and target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    for path in old:
        path.unlink()
    staging.rmdir()


def _together(work: Callable[[], None], staging: Path, *, first_rank_only: bool = False) -> None:
    """Does `work` (on rank 0 only, if so), then raises on every rank what any rank met, the staged files removed."""
    failed = []
    if not first_rank_only or my_rank() == 0:
        try:
            work()
        except OSError as error:
            failed = [
                Violation(
                    f"rank {my_rank()} cannot write to {staging.parent}: {type(error).__name__}: {error}",
                    "every rank must be able to write to this one folder",
                    "make room, grant permission or share the file system, then save again",
                )
            ]
        # Whatever it is, the others must hear of it: they would wait for this rank for ever.
        except Exception as error:
            told = f"rank {my_rank()} cannot save: {type(error).__name__}: {error}"
            failed = [Violation(told, "config and generation config must be valid", "correct them, then save again")]
    try:
        agree(failed)
    except ValueError:
        if my_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _argument_violations(
    folder: Path, source: Path | None, dtype: torch.dtype | str | None, max_shard_bytes: float
) -> list[Violation]:
    found = []
    text = None if source is None else str(source)
    if folder.exists() and not folder.is_dir():
        found.append(Violation(f"{folder} is a file", "a folder is required", "give another path"))
    if source is not None and not source.is_dir():
        found.append(Violation(f"source={text!r} is no folder", "the folder with the tokenizer", "check the path"))
    if dtype is not None and (_as_dtype(dtype) is None):
        found.append(Violation(f"dtype={dtype!r}", "a floating dtype is required", "use bf16, fp16, fp32 or None"))
    if max_shard_bytes <= 0:
        found.append(Violation(f"max_shard_bytes={max_shard_bytes}", "at least 1 is required", "leave it at 5e9"))
    return found


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        dtype = _SHORT.get(dtype, getattr(torch, dtype, None))
    return dtype if isinstance(dtype, torch.dtype) and dtype in _DTYPES and dtype.is_floating_point else None


def _final_dtypes(
    template: Template, held: Mapping[str, torch.dtype], asked: torch.dtype | None
) -> dict[str, torch.dtype]:
    """As held, or as asked for the parameters that the family does not keep in fp32."""
    from transformers.core_model_loading import build_glob_alternation

    if asked is None:
        return dict(held)
    kept = template.model._get_dtype_plan(asked)
    pattern, by_group, _ = build_glob_alternation(list(kept))
    final = {}
    for name, dtype in held.items():
        found = pattern.search(name) if kept else None
        if found is not None:
            final[name] = kept[by_group[str(found.lastgroup)]]
        else:
            final[name] = asked if isinstance(template.tensors[name], nn.Parameter) else dtype
    return final


def _room_violations(folder: Path, needed: int) -> list[Violation]:
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free >= needed:
        return []
    return [
        Violation(
            f"{needed:,} bytes to write to {folder}",
            f"{free:,} bytes are free there",
            "make room, give another path, or save in a narrower dtype",
        )
    ]
