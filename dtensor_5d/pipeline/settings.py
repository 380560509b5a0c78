"""What the ranks of a pipeline, and those of a data axis around it, were told: it must be the same before they run.

    over pp      options, the layers of every stage, what was trained when it was cut, tied weights, the model
    over data    the same without microbatches (a rank with fewer runs empty ones), and the units of `fully_shard`

Ranks compare a number for each, so that the error can say which one differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.families.context import ATTENTION
from dtensor_5d.options import Options
from dtensor_5d.pipeline.staging import Staging

__all__ = ["check_same", "numbered", "settings_of", "unfit_violations"]

# What of a config says nothing about what the stages compute together.
_FREE = (
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "label2id",
    "output_router_logits", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


def settings_of(model: nn.Module, decoder: Decoder, staging: Staging, options: Options) -> dict[str, object]:
    """What a model was cut by, under the words of an error. It does not change afterwards."""
    config: Any = model.config
    told = {k: v for k, v in config.to_dict().items() if k not in _FREE and not k.startswith("_")}
    return {
        "schedule": options.schedule,
        "microbatches": options.microbatches,
        "cut (layers_per_stage, chunks)": staging.cut,
        "requires_grad when it was cut": (staging.sends_gradient, staging.trained),
        "tied weights (tie_word_embeddings)": decoder.ties,
        "model": (decoder, json.dumps(told, sort_keys=True, default=lambda value: type(value).__name__)),
    }


def numbered(settings: Mapping[str, object]) -> dict[str, int]:
    """A number for each, which is the same where the setting is."""
    return {name: zlib.crc32(repr(setting).encode()) for name, setting in settings.items()}


def check_same(names: Sequence[str], rows: Sequence[Sequence[int]], where: str) -> None:
    """rows: of every rank, the numbers of the settings of these names. where: what the ranks have in common.

    Errors: `PlanError` that names the settings that differ.
    """
    bad = []
    for name, column in zip(names, zip(*rows)):
        other = next((rank for rank, value in enumerate(column) if value != column[0]), None)
        if other is not None:
            asked = f"{name} on rank {other} of {where}, not as on rank 0"
            bad.append(Violation(asked, f"all {len(rows)} ranks must have the same", "set it alike on all"))
    if bad:
        raise PlanError(bad)


def unfit_violations(model: nn.Module) -> list[Violation]:
    """What the pipeline axis cannot run without the rest of the package, whether asked for before or after the cut."""
    bad = []
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        change = "use dtensor_5d.parallelize, or set config.output_router_logits = False"
        asked = "PipelineParallel with output_router_logits=True"
        bad.append(Violation(asked, "the auxiliary loss spans all stages", change))
    configs = (getattr(module, "config", None) for module in model.modules())
    if any(getattr(config, "_attn_implementation", None) == ATTENTION for config in configs):
        asked, needs = "PipelineParallel beside ContextParallel", "stages do not hand on which rows were cut"
        bad.append(Violation(asked, needs, "use dtensor_5d.parallelize with the degrees pp and cp"))
    return bad
