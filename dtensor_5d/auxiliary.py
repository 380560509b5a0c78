"""The auxiliary loss of routers whose layers are on several stages: exactly that of one process.

It is a product of sums over all layers, E sum over e of f_e p_e. The probabilities p are sums, of which each stage has
its own; only the counts f, which have no gradient, must be known everywhere, and they travel in time (`Tallies`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_5d.expert.balance import Tally
from dtensor_5d.expert.watch import RouterWatch
from dtensor_5d.pipeline.tallies import Tallies

__all__ = ["StagedAuxiliary"]


class StagedAuxiliary:
    """That of one window. share: this rank's part of its value, for the reported loss; complete after the window."""

    def __init__(self, routers: RouterWatch, tallies: Tallies, device: torch.device) -> None:
        self.tallies = tallies
        self.share = torch.zeros((), dtype=torch.float64, device=device)
        self._routers = routers
        self._own: dict[tuple[int, int], Tally] = {}

    def after_forward(self, stage: int, micro: int) -> None:
        """Keeps what the routers of a stage just did, and tells the other stages."""
        own = self._routers.tally()
        if own is not None:
            self._own[stage, micro] = own
            self.tallies.tell(stage, micro, own.counts)

    def summand(self, stage: int, micro: int) -> Tensor | None:
        """What to go backward from, beside the stage's output; None for a stage without routers."""
        own = self._own.pop((stage, micro), None)
        if own is None:
            return None
        part = self._routers.part_of(own, self.tallies.total(micro).to(own.counts.device))
        self.share += part.share
        return part.summand
