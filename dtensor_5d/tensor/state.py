"""What the styles of one model share: the group, and what a `Run` switches on around its windows.

Some parameters stay whole although each rank uses them on its own part only: per-head norms, routers, the layers' norms
under sequence parallelism, kv heads that several ranks hold. Each rank then has one summand of their gradient. Alone, a
style sums at once, in backward: exact with any data axis around it, but one small all-reduce per parameter and
micro-batch. A `Run` defers that to the end of its window: one all-reduce of what is left on the rank after FSDP2's
reduction, in the dtype of the stored gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_5d.ops import identity_all_reduce
from dtensor_5d.tensor.loss import Vocabulary

__all__ = ["TensorState"]


@dataclass
class TensorState:
    """group: the ranks of the axis. sequence: tokens can be cut between blocks. cut: those of this forward are (not
    where their number does not divide, outside of a `Run`'s windows, which are padded; nor where `whole` asks for it:
    what the model makes of its routers' outputs needs those of all tokens). summed: (owner, parameter name,
    ranks with a summand) of every parameter whose gradient is summed. deferred: at the end of the window. whole_logits:
    the head gathers its output. draws: training draws random numbers. seed: of this forward, the same on all ranks.
    whole_outputs: modules whose output every rank has whole. vocabulary: the head's columns on this rank."""

    group: dist.ProcessGroup
    sequence: bool = False
    draws: bool = False
    seed: int = 0
    whole_outputs: frozenset[str] = frozenset()
    vocabulary: Vocabulary | None = None
    cut: bool = field(init=False)
    whole: bool = False
    deferred: bool = False
    whole_logits: bool = True
    summed: list[tuple[nn.Module, str, dist.ProcessGroup]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cut = self.sequence

    @staticmethod
    def on(mesh: DeviceMesh, sequence: bool = False) -> TensorState:
        """The state of a style that is used alone."""
        return TensorState(mesh.get_group(), sequence)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def sum_gradient(self, owner: nn.Module, name: str, group: dist.ProcessGroup) -> None:
        """Notes that the gradient of this parameter is a summand on each rank of `group`; once, however often told."""
        if not any(o is owner and n == name for o, n, _ in self.summed):
            self.summed.append((owner, name, group))

    def summand(self, used: Tensor, group: dist.ProcessGroup) -> Tensor:
        """A parameter on its way into a forward that sees a part only."""
        return used if self.deferred else identity_all_reduce(used, group)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around the micro-batches between two optimizer steps: sums are taken once, at the end."""
        before = [_parameter(owner, name).grad for owner, name, _ in self.summed]
        for owner, name, _ in self.summed:
            _parameter(owner, name).grad = None
        self.deferred = True
        try:
            yield
            self._sum_gradients()
        finally:
            self.deferred = False
            for (owner, name, _), old in zip(self.summed, before):
                parameter = _parameter(owner, name)
                if old is not None:  # of earlier windows, summed already
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    @contextmanager
    def cut_logits(self) -> Iterator[Vocabulary | None]:
        """Around forwards whose loss takes the rank's own columns of the logits: which ones. None: of a whole head."""
        self.whole_logits = False
        try:
            yield self.vocabulary
        finally:
            self.whole_logits = True

    def _sum_gradients(self) -> None:
        groups: dict[tuple[str, torch.dtype], tuple[dist.ProcessGroup, list[Tensor]]] = {}
        for owner, name, group in self.summed:
            grad = _parameter(owner, name).grad
            if grad is not None:
                local = grad._local_tensor if isinstance(grad, DTensor) else grad
                groups.setdefault((group.group_name, local.dtype), (group, []))[1].append(local)
        for key in sorted(groups, key=str):
            group, parts = groups[key]
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=group)
            for part, new in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(new.view_as(part))


def _parameter(owner: nn.Module, name: str) -> nn.Parameter:
    return cast(nn.Parameter, owner._parameters[name])
