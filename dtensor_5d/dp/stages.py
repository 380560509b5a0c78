"""The data axis of a model that is cut into stages: its units are steered by the schedule (`ops.staged_units`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dtensor_5d.dp.fsdp import DataParallel
from dtensor_5d.ops.staged_units import StagedUnits

__all__ = ["StagedData"]


class StagedData(StagedUnits, DataParallel):
    """Steers a model that `shard` has sharded, or does nothing for one that it has not.

    owners: by stage of this rank, the modules whose parameters it uses. resharding: zero 3 with regather "visit".
    """

    def __init__(self, model: nn.Module, owners: Mapping[int, set[nn.Module]], *, resharding: bool) -> None:
        StagedUnits.__init__(self, model, owners, resharding=resharding)

    @property
    def shards(self) -> bool:
        """Whether there is anything to gather and to reduce."""
        return self._root is not None
