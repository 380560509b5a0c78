"""What routers do in a window: the load of every expert, the auxiliary loss, the bias that evens the load out.

Routers and experts are watched from outside, by hooks, whether or not the experts are cut over ranks. Only the first
forward of a micro-batch is watched: recomputation runs routers again, which is no new load.

Letters: E experts, T tokens of this rank, K choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtensor_5d.checkpoint.gather import whole
from dtensor_5d.checkpoint.template import fill, named_tensors
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.balance import Tally, balancing_loss, expert_load, tally, update_bias
from dtensor_5d.ops.exchange import own_part, total

__all__ = ["Auxiliary", "RouterWatch"]

_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class Auxiliary:
    """The auxiliary loss of a micro-batch of all data ranks, times its coefficient; on a stage the part of its layers.

    summand: whose gradients the ranks sum up. share: this rank's part of its value, for the reported loss.
    """

    summand: Tensor
    share: Tensor


class RouterWatch:
    """Watches the experts of a model, and its routers where an auxiliary loss is asked for.

    experts, routers: names, those of this rank. data: the ranks that read other tokens. cut: those over which the
    tokens of a row are cut (sequence parallelism around the experts). stages: those that have other layers.
    coefficient: of the auxiliary loss, None for none. scored: experts that take no indices (llama4, with no ranks of
    their own) -> the router beside them, which says what their tokens chose; "" where there is none.
    """

    def __init__(
        self, model: nn.Module, experts: Sequence[str], routers: Sequence[str], data: dist.ProcessGroup,
        *, cut: dist.ProcessGroup | None = None, stages: dist.ProcessGroup | None = None,
        coefficient: float | None = None, scored: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.coefficient = coefficient
        self._model, self._data, self._cut = model, data, cut
        self._stages = stages
        self._groups = [group for group in (data, cut) if group is not None and group.size() > 1]
        self._mask = torch.zeros(0, dtype=torch.bool)  # [T], of the micro-batch that is watched
        self._watching = False
        self._logits: list[tuple[Tensor, int]] = []
        self._sizes = {name: _experts_of(model.get_submodule(name)) for name in experts}
        self._window: dict[str, Tensor] = {}
        self._since: dict[str, Tensor] = {}  # of all windows since the last update of biases
        self._scored = dict(scored or {})
        self._uncounted = [n for n, r in self._scored.items() if not r or not hasattr(model.get_submodule(r), "top_k")]
        for name in experts:
            if name not in self._scored:
                model.get_submodule(name).register_forward_pre_hook(self._noting(name), with_kwargs=True)
            elif name not in self._uncounted:
                model.get_submodule(self._scored[name]).register_forward_hook(self._noting_scores(name))
        for name in routers if coefficient is not None else ():
            model.get_submodule(name).register_forward_hook(self._note_logits)

    @property
    def width(self) -> int:
        """How many numbers a tally has; 0 without experts."""
        return max(self._sizes.values(), default=-1) + 1

    def new_window(self) -> None:
        """From here on `load` counts anew."""
        self._window = {}

    def window_done(self) -> None:
        """The window that ran last was no failure: its load counts for the next update of biases."""
        for name, load in self._window.items():
            self._since[name] = self._since[name] + load if name in self._since else load

    @contextmanager
    def micro_batch(self, counted: Tensor) -> Iterator[None]:
        """Around the forward of a micro-batch. counted [B, S] bool: which of its tokens are no padding."""
        mine = counted if self._cut is None else own_part(counted, self._cut, 1)
        self._mask, self._logits, self._watching = mine.reshape(-1), [], True
        try:
            yield
        finally:
            self._watching = False

    def auxiliary(self) -> Auxiliary | None:
        """The auxiliary loss of the micro-batch that was watched last. Collective; None where none is asked for."""
        own = self.tally()
        return None if own is None else self.part_of(own, own.counts)

    def tally(self) -> Tally | None:
        """What the routers here did with the micro-batch that was watched last. Collective over the data ranks; None
        where no auxiliary loss is asked for, or no router is here."""
        logits, self._logits = self._logits, []
        if self.coefficient is None or not logits:
            return None
        return tally([x for x, _ in logits], logits[0][1], groups=self._groups, mask=self._mask)

    def part_of(self, own: Tally, counts: Tensor) -> Auxiliary:
        """The part that these layers have in the auxiliary loss of all layers, which `counts` counts."""
        assert self.coefficient is not None
        loss = balancing_loss(own, counts) * self.coefficient
        return Auxiliary(loss, loss.detach() / self._data.size())

    def load(self) -> dict[str, Tensor]:
        """Experts module -> [E] int64: tokens of the last window that chose each expert, of all ranks. Collective.

        Errors: `PlanError` for experts that take no indices beside a router that tells none.
        """
        if self._uncounted:
            asked, needs = f"the load of {self._uncounted[0]}", "its forward or the router beside it must tell indices"
            raise PlanError(Violation(asked, needs, "leave run.expert_load() out for this family"))
        own = self._summed(self._window)
        if self._stages is None or self._stages.size() == 1:
            return own
        every: list[dict[str, list[int]]] = [{} for _ in range(self._stages.size())]
        dist.all_gather_object(every, {name: counts.tolist() for name, counts in own.items()}, group=self._stages)
        return {name: torch.tensor(counts) for found in every for name, counts in found.items()}

    def update_biases(self, rate: float) -> None:
        """One step of every router's correction bias against the load since the last call. Collective."""
        tensors = named_tensors(self._model)
        biases = {name: _bias_beside(name, tensors, size) for name, size in self._sizes.items()}
        bare = [name for name, bias in biases.items() if bias is None]
        # A stage of a pipeline may have dense layers only.
        known = [(bare[:1], len(biases))]
        if self._stages is not None and self._stages.size() > 1:
            known *= self._stages.size()
            dist.all_gather_object(known, (bare[:1], len(biases)), group=self._stages)
        bare = [name for names, _ in known for name in names]
        if bare or not sum(count for _, count in known):
            asked = f"a bias update of {bare[0] if bare else 'a model without experts'}"
            needs = f"a router with a correction bias is required ({' or '.join(_BIASES)})"
            raise PlanError(Violation(asked, needs, "use the auxiliary loss: config.output_router_logits=True"))
        for name, load in self._summed(self._since).items():
            bias = tensors[str(biases[name])]
            full = whole(bias)
            fill(bias, update_bias(full.view(-1), load, rate).view_as(full))
        self._since = {}

    def _summed(self, loads: dict[str, Tensor]) -> dict[str, Tensor]:
        # Layers may have other numbers of experts, and a rank without a window has no counts yet.
        device = next(self._model.parameters()).device
        zeros = {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in self._sizes.items()}
        flat = torch.cat([loads.get(name, zero) for name, zero in zeros.items()]) if zeros else torch.zeros(0)
        for group in self._groups:
            flat = total(flat, group)
        return dict(zip(zeros, flat.split(list(self._sizes.values())))) if zeros else {}

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
            if index is not None:
                self._count(name, index)

        return note

    def _noting_scores(self, name: str) -> Any:
        def note(router: Any, args: tuple[Any, ...], out: tuple[Tensor, Tensor]) -> None:
            self._count(name, out[1].detach().topk(router.top_k, dim=-1).indices)

        return note

    def _count(self, name: str, index: Tensor) -> None:
        if not self._watching:
            return
        # One row for each token, also where a token comes as several rows of one choice each.
        load = expert_load(index.reshape(self._mask.numel(), -1), self._sizes[name], self._mask)
        self._window[name] = self._window[name] + load if name in self._window else load

    def _note_logits(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._watching:
            logits, _, index = out
            self._logits.append((logits.reshape(-1, logits.size(-1)), index.size(-1)))


def _experts_of(module: nn.Module) -> int:
    return next(p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3)


def _bias_beside(experts: str, tensors: dict[str, Tensor], size: int) -> str | None:
    """The name of the correction bias in the block around these experts."""
    block = experts.rpartition(".")[0] + "."
    fitting = (n for n, t in tensors.items() if n.startswith(block) and n.endswith(_BIASES) and t.numel() == size)
    return next(fitting, None)
