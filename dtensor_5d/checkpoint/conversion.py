"""From the keys of a checkpoint to the names of the model: transformers' own rules, read as expressions of slices.

The rules (`conversion_mapping`) say which keys are renamed and which pieces make one parameter. Stacking and joining,
which is what mixture-of-experts checkpoints need, become `Stacked` and `Joined`, so that any placement reads only its
part. (transformers slices the pieces first and joins them after, which puts the wrong rows into a contiguous shard of
a joined dim, and fails on a rank without experts.) Any other rule runs as transformers wrote it, on whole tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dtensor_5d.checkpoint.sources import Computed, Conversion, FileTensor, Joined, Source, Stacked, read_whole
from dtensor_5d.errors import Violation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Converted", "convert"]


@dataclass
class Converted:
    """Sources by the model's names, keys that no name takes, broken conversions, and the rules that were used."""

    sources: dict[str, Source] = field(default_factory=dict)
    unexpected: set[str] = field(default_factory=set)
    violations: list[Violation] = field(default_factory=list)
    rules: list[Any] = field(default_factory=list)


@dataclass
class _Pieces:
    """What one converter collects for one target: by source pattern, in the order of the keys."""

    converter: Any
    by_pattern: dict[str, list[tuple[str, FileTensor]]] = field(default_factory=dict)


def convert(template: PreTrainedModel, tensors: Mapping[str, FileTensor]) -> Converted:
    """Assigns every tensor of a checkpoint to the names of `template` (the whole model, on meta). Reads no weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(template)
    renamings = [r for r in rules if isinstance(r, WeightRenaming)]
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known = template.state_dict()
    prefix = template.base_model_prefix
    out = Converted()
    pieces: dict[str, _Pieces] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:  # a rule for older checkpoints took a key that was right already
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            out.unexpected.add(key)
        elif pattern is None:
            out.sources[name] = tensors[key]
        else:
            new = pieces.setdefault(name, _Pieces(by_pattern[pattern]))
            new.by_pattern.setdefault(pattern, []).append((key, tensors[key]))
    for name, collected in pieces.items():
        try:
            out.sources.update(_put_together(template, name, collected))
        # Whatever a rule of transformers raises for pieces that do not fit: it is the folder that is wrong.
        except Exception as error:
            count = sum(len(found) for found in collected.by_pattern.values())
            out.violations.append(
                Violation(
                    f"{name} cannot be made of the {count} tensors found for it ({error})",
                    "all its pieces, in equal shapes, are required",
                    "fetch the folder again, or give the one of this model",
                )
            )
    out.rules = [rule for rule in rules if rule.was_used()]
    return out


def _put_together(template: PreTrainedModel, name: str, pieces: _Pieces) -> dict[str, Source]:
    expression = _expression(pieces)
    if expression is not None:
        return {name: expression}
    conversion = Conversion(lambda: _run(template, name, pieces, read_whole))
    on_meta = _run(template, name, pieces, lambda s: torch.empty(s.shape, dtype=s.dtype, device="meta"))
    return {n: Computed(n, tuple(t.shape), t.dtype, conversion) for n, t in on_meta.items()}


def _expression(pieces: _Pieces) -> Source | None:
    """The pieces as stacks and joins, or None where the rule does more than that."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    converter = pieces.converter
    if len(converter.target_patterns) != 1:
        return None
    # In the order of the rule's patterns: gate before up.
    state: list[list[Source]] = [
        [source for _, source in pieces.by_pattern[p]] for p in converter.source_patterns if p in pieces.by_pattern
    ]
    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            state = [[Stacked(parts, operation.dim)] for parts in state]
        elif type(operation) is Concatenate:
            state = [[Joined([source for parts in state for source in parts], operation.dim)]]
        else:
            return None
    return state[0][0] if len(state) == 1 and len(state[0]) == 1 else None


def _run(
    template: PreTrainedModel, name: str, pieces: _Pieces, read: Callable[[FileTensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """transformers' own conversion of whole tensors, real ones or on meta."""
    converter = copy.deepcopy(pieces.converter)
    for pattern, found in pieces.by_pattern.items():
        for key, source in found:
            converter.add_tensor(name, key, pattern, read(source))
    result = converter.convert(name, model=template, config=template.config)
    return {n: t[0] if isinstance(t, list) else t for n, t in result.items()}
