"""Hugging Face folders in: every rank reads its own slices of the weights, in place, after all agreed that they fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dtensor_5d.checkpoint.agree import SHOWN, agree, agree_on, everyones, my_rank, short
from dtensor_5d.checkpoint.conversion import Converted, convert
from dtensor_5d.checkpoint.export import save_pretrained
from dtensor_5d.checkpoint.folder import Folder, config_violations, other_settings, read_folder, sample
from dtensor_5d.checkpoint.initial import init_weights, rebuild_buffers, strangers
from dtensor_5d.checkpoint.slices import local_part, local_slices
from dtensor_5d.checkpoint.sources import Source
from dtensor_5d.checkpoint.template import Template, materialise, named_tensors, reshard, template_of
from dtensor_5d.errors import Violation
from dtensor_5d.sections import sections_of

# Buffers that older versions of transformers saved and the models of today compute.
_OLD_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

_BLOCK = 1024  # rows that are compared at a time

__all__ = ["init_weights", "load_pretrained", "local_slices", "save_pretrained"]


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path, *, device: torch.device | str) -> None:
    """Fills `model` from a Hugging Face folder; each rank reads from disk only the slices that it stores.

    Example: `load_pretrained(model, "Qwen3-0.6B", device="cuda")` on a model built on meta and `fully_shard`ed.

    Parameters may be plain or DTensors of any placement and mesh, on meta (they get memory on `device`) or in memory
    (overwritten where they are). They stay the same `Parameter` objects, so an optimizer made before keeps working,
    and keep their dtype: bf16 files fill fp32 master weights exactly. Per-expert files fill fused parameters. Ties
    stay; buffers that no file holds are computed anew. A model that lacks layers (a pipeline stage) takes its own.
    All ranks call it.

    Errors: `PlanError`, on every rank alike and before any weight is touched: no folder, no (or only pickled) weights,
    unreadable files, another model's config, missing or unexpected tensors, other shapes. A file that fails while it
    is read raises on every rank too, but leaves the model half loaded.
    """
    folder = Path(folder)
    template = template_of(model)
    found = read_folder(folder)
    violations = [*strangers(template, model), *found.violations]
    if not found.violations:
        violations += config_violations(found.config, template.model.config)
    agree(violations)
    _same_everywhere(folder, found)
    if (others := other_settings(found.config, template.model.config)) and my_rank() == 0:
        warnings.warn(f"the folder {folder} was saved with other settings: {', '.join(others)}", stacklevel=2)
    converted = convert(template.model, found.tensors)
    reshard(model)
    agree(_misfits(folder, template, converted, model))

    sources = {template.first_name[name]: source for name, source in converted.sources.items()}
    materialise(model, device)
    failed: list[Violation] = []
    done: set[int] = set()
    packed = sections_of(model)
    for name, tensor in named_tensors(model).items():
        if name in template.rebuilt or id(tensor) in done:
            continue
        done.add(id(tensor))
        try:
            runs = local_slices(tensor, packed.get(name))
            local_part(tensor).copy_(sources[template.first_name[name]].read(runs))
        # Also what a memory-mapped read raises; the other ranks must hear of it, whatever it is.
        except Exception as error:
            told = f"{name} could not be read from {folder} ({error})"
            failed.append(Violation(told, "every tensor must be readable", "fetch the folder again"))
    failed += rebuild_buffers(model, template)
    agree(failed)
    # What transformers notes after loading: by which rules the keys are turned back when the model is saved.
    model._weight_conversions = converted.rules


def _same_everywhere(folder: Path, found: Folder) -> None:
    seen, failed = "", []
    try:
        seen = sample(found.tensors)
    except Exception as error:  # whatever a read raises: the other ranks must hear of it
        failed = [Violation(f"{folder} cannot be read ({error})", "every file must be readable", "fetch it again")]
    agree(failed)
    asked, needs = f"the weights in {folder}", "all ranks must read the same weights"
    agree_on(seen, asked, needs, "give every rank the same folder")


def _misfits(folder: Path, template: Template, converted: Converted, model: nn.Module) -> list[Violation]:
    """Everything that does not fit between the folder's tensors and the model's. Collective."""
    here = named_tensors(model)
    sources = converted.sources
    named = {template.first_name[name] for name in sources}
    missing = [n for n in template.stored if n not in named]
    unexpected = _not_ignored(template, converted.unexpected)
    shapes = []
    for name, source in sources.items():
        wanted = tuple((here[name] if name in here else template.tensors[name]).shape)
        if source.shape != wanted:
            shapes.append(
                Violation(
                    f"{name} has shape {list(source.shape)} in {folder}",
                    f"the model's is {list(wanted)}",
                    "build the model from the folder's own config, or give the folder that fits",
                )
            )
    found = len(sources) + len(unexpected)
    fits = "give the folder of this model, or build the model from the folder's config"
    return [
        *short(converted.violations),
        *_counted(f"of {len(template.stored)} tensors of the model, missing in {folder}", missing, "all of them", fits),
        *_counted(f"of {found} tensors in {folder}, unknown to the model", unexpected, "none may be left over", fits),
        *short(shapes),
        *_untied(folder, template, sources),
    ]


def _not_ignored(template: Template, unexpected: set[str]) -> list[str]:
    """Unexpected keys without those that the family says may be there (buffers of older versions, extra heads)."""
    from transformers.utils.loading_report import LoadStateDictInfo

    info = LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    template.model._adjust_missing_and_unexpected_keys(info)
    return sorted(key for key in info.unexpected_keys if not key.endswith(_OLD_BUFFERS))


def _untied(folder: Path, template: Template, sources: dict[str, Source]) -> list[Violation]:
    """Tensors that the model ties and the folder holds several times, with different values. Collective.

    A model of many ranks is loaded by the slice; here too each rank compares some blocks of rows only.
    """
    by_tensor: dict[str, list[str]] = {}
    for name in sources:
        by_tensor.setdefault(template.first_name[name], []).append(name)
    pairs = [(first, other) for first, *others in by_tensor.values() for other in others]
    if not pairs:
        return []
    differ, unreadable = [], []
    for first, other in pairs:
        try:
            if not _equal(sources[first], sources[other]):
                differ.append((first, other))
        except Exception as error:  # whatever a read raises: the other ranks must hear of it
            told = f"{first} or {other} could not be read from {folder} ({error})"
            unreadable.append(Violation(told, "every tensor must be readable", "fetch the folder again"))
    found = dict.fromkeys(pair for there in everyones(differ) for pair in there)
    return unreadable + [
        Violation(
            f"{first} and {other} differ in the folder: 2 tensors",
            "the model ties them: 1 tensor",
            "set tie_word_embeddings=False in the config, or remove one from the folder",
        )
        for first, other in found
    ]


def _equal(a: Source, b: Source) -> bool:
    """Whether two sources hold the same values, as far as this rank's blocks of rows go."""
    if a.shape != b.shape:
        return False
    rows, ranks = a.shape[0], dist.get_world_size() if dist.is_initialized() else 1
    for start in range(my_rank() * _BLOCK, rows, ranks * _BLOCK):
        runs = ((slice(start, min(start + _BLOCK, rows)),), *((slice(0, n),) for n in a.shape[1:]))
        if not torch.equal(a.read(runs), b.read(runs)):
            return False
    return True


def _counted(what: str, names: Iterable[str], required: str, change: str) -> list[Violation]:
    names = list(names)
    if not names:
        return []
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return [Violation(f"{len(names)} {what} ({shown})", required, change)]
