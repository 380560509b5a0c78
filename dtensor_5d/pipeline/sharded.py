"""What `fully_shard`, after `PipelineParallel`, has made of a model: what it must be, and who else must agree."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.agree import Agreement
from dtensor_5d.errors import Violation
from dtensor_5d.pipeline.settings import check_same
from dtensor_5d.pipeline.staging import Staging

__all__ = ["agreed_on_all", "data_groups", "leaving_dtype", "logits_dtype", "sharding_violations", "tie_layout"]


def sharding_violations(model: nn.Module, staging: Staging) -> list[Violation]:
    """What is wrong with the units of a model that a schedule is to gather and reduce."""
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    bad = []
    if units and not isinstance(model, FSDPModule):
        asked = f"fully_shard on {units[0]} and not on the model"
        needs = "its root reduces the gradients of all that no other unit has"
        bad.append(Violation(asked, needs, "call fully_shard(model, mesh=mesh['dp']) last"))
    pipeline = set(dist.get_process_group_ranks(staging.group)) - {dist.get_rank()}
    for group in data_groups(model):
        both = sorted(pipeline & set(dist.get_process_group_ranks(group)))
        if both:
            asked = f"fully_shard over ranks {dist.get_process_group_ranks(group)}"
            needs = f"rank {both[0]} among them has other stages than rank {dist.get_rank()}"
            bad.append(Violation(asked, needs, "give it the mesh of the data axis alone, mesh['dp']"))
    return bad


def data_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups over which units gather and reduce, each once; none for a model that is not sharded."""
    found: dict[str, dist.ProcessGroup] = {}
    for state in _states(model):
        for group in state._fsdp_param_groups:
            for name in ("shard_process_group", "replicate_process_group"):
                ranks = getattr(group.mesh_info, name, None)
                if ranks is not None:
                    found[ranks.group_name] = ranks
    return list(found.values())


def agreed_on_all(
    groups: Sequence[dist.ProcessGroup], device: torch.device, error: Exception | None, *values: int,
    same: Mapping[str, int] | None = None,
) -> list[int]:  # fmt: skip
    """The largest of each value over all ranks of all groups. same: see `check_same`. Errors: on every rank, where any
    has one."""
    most, same = list(values), same or {}
    for group in groups:  # one after the other, so that what one has heard the next one hears
        try:
            rows = Agreement(group, group.size(), device).check(error, *most, *same.values())
            check_same([*same], [row[len(most) :] for row in rows], f"the data axis ({group.size()} ranks)")
            most = [max(column) for column in zip(*rows)][: len(most)]
        except Exception as problem:
            error = problem
    if error is not None:
        raise error
    return most


def leaving_dtype(model: nn.Module, decoder: Decoder, staging: Staging) -> torch.dtype | None:
    """The dtype that the units of this rank's layers give to hidden states; None: that in which they came."""
    last = decoder.layer(staging.cut.layers(staging.views[0].number)[-1])
    pieces = last.split(".")
    for end in range(len(pieces), -1, -1):
        module = model.get_submodule(".".join(pieces[:end]))
        if isinstance(module, FSDPModule):
            policy = _policy(module)
            return (policy.output_dtype if end == len(pieces) else None) or policy.param_dtype
    return None


def logits_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that the root's policy asks for what the model returns."""
    return _policy(model).output_dtype if isinstance(model, FSDPModule) else None


def tie_layout(staging: Staging) -> int:
    """A number that is the same where copies of tied weights are cut in the same way; 0 without any."""
    cuts = []
    for tie in staging.ties:
        weight = tie.parameter
        cuts.append((tuple(weight.shape), str(weight.placements) if isinstance(weight, DTensor) else ""))
    return zlib.crc32(repr(cuts).encode()) if cuts else 0


def _states(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)
            if id(state) not in seen:
                seen.add(id(state))
                yield state


def _policy(module: nn.Module) -> MixedPrecisionPolicy:
    state: Any = fully_shard.state(module)
    policy: MixedPrecisionPolicy = state._mp_policy
    return policy
