"""What an `ExpertParallel` is given: wrong ones are told when it is made, not in a forward on some ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dtensor_5d.errors import Violation
from dtensor_5d.expert.transport import TRANSPORTS

__all__ = ["argument_violations"]

_DISPATCHES = ("all_to_all", "all_gather", "two_step")


def argument_violations(given: Mapping[str, Any]) -> list[Violation]:
    """given: dispatch, transport, capacity, ranks_per_node, same_tokens, overlap; see `ExpertParallel`."""
    bad = []
    dispatch, transport, capacity, lanes, same, overlap = (
        given[k] for k in ("dispatch", "transport", "capacity", "ranks_per_node", "same_tokens", "overlap")
    )
    if not (dispatch in _DISPATCHES if isinstance(dispatch, str) else callable(dispatch)):
        needs = f"must be one of {list(_DISPATCHES)} or a function of group and number of experts"
        bad.append(Violation(f"dispatch={dispatch!r}", needs, "choose one"))
    own = hasattr(transport, "there") and hasattr(transport, "back")
    if not (transport in TRANSPORTS if isinstance(transport, str) else own):
        needs = f"must be one of {list(TRANSPORTS)} or a Transport"
        bad.append(Violation(f"transport={transport!r}", needs, "choose one"))
    if capacity is not None:
        number = isinstance(capacity, (int, float)) and not isinstance(capacity, bool)
        if not (number and dispatch in ("all_to_all", "all_gather") and capacity > 0 and isfinite(capacity)):
            needs = "must be > 0 and finite, and dispatch all_to_all or all_gather"
            asked = f"capacity={capacity!r} with dispatch={dispatch!r}"
            bad.append(Violation(asked, needs, "use None to drop nothing, or another dispatch"))
    whole = isinstance(lanes, int) and not isinstance(lanes, bool) and lanes > 0
    if not whole and (lanes is not None or dispatch == "two_step"):
        asked = f"dispatch={dispatch!r} with ranks_per_node={lanes!r}"
        needs = "must say how many ranks share a node, a whole number > 0"
        bad.append(Violation(asked, needs, "give ranks_per_node"))
    if same is not None and not isinstance(same, DeviceMesh):
        asked = f"same_tokens of type {type(same).__name__}"
        bad.append(Violation(asked, "must be a DeviceMesh", "give for example mesh['tp']"))
    if overlap is not None and (not isinstance(overlap, str) or overlap == "experts"):
        needs = "must name a child of the block that runs beside its experts"
        bad.append(Violation(f"overlap={overlap!r}", needs, "give for example 'shared_experts', or leave it out"))
    return bad
