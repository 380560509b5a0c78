"""`Pipeline`: the engine of a model that is cut into stages. It knows all axes, as `engine.Loop` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.auxiliary import StagedAuxiliary
from dtensor_5d.batch import MicroBatch
from dtensor_5d.dp.stages import StagedData
from dtensor_5d.engine import Loop, Surrounding, TrainResult
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.watch import RouterWatch
from dtensor_5d.loss import LossFunction
from dtensor_5d.ops import WeightGradients
from dtensor_5d.options import Options
from dtensor_5d.pipeline.runtime import Record, Runtime, forwards_only, without_idle_gathers
from dtensor_5d.pipeline.split import StageView
from dtensor_5d.pipeline.stage import Forward, Stage
from dtensor_5d.pipeline.staging import Staging
from dtensor_5d.pipeline.tallies import Tallies
from dtensor_5d.pipeline.ties import summed_ties
from dtensor_5d.pipeline.timeline import measured_costs, measured_timeline
from dtensor_5d.pipeline.transport import Transport
from dtensor_5d.random import RandomStreams
from dtensor_5d.schedule import Costs, Schedule, Timeline, lower
from dtensor_5d.schedule.chosen import schedule_of
from dtensor_5d.tensor.state import TensorState

__all__ = ["Messages", "Pipeline"]


@dataclass(frozen=True)
class Messages:
    """What goes between stages: [B, S / tokens_cut, *hidden] of a dtype."""

    hidden: tuple[int, ...]
    dtype: torch.dtype
    tokens_cut: int = 1


class Pipeline(Loop):
    """Runs windows by a schedule. What a `Loop` does with the whole model, this does with the last stage."""

    def __init__(
        self, model: nn.Module, decoder: Decoder, data: StagedData, streams: RandomStreams, device: torch.device, *,
        multiple: int, world: dist.ProcessGroup, staging: Staging, store: WeightGradients, options: Options,
        messages: Messages, gather: str | None, reduce: str | None, tensor: TensorState | None = None,
        surroundings: Sequence[Surrounding] = (), routers: RouterWatch | None = None,
    ) -> None:  # fmt: skip
        ends = staging.rank == staging.last_rank
        super().__init__(
            staging.views[-1].module if ends else model, decoder, data, streams, device, multiple=multiple,
            tensor=tensor, surroundings=surroundings, routers=routers,
        )  # fmt: skip
        staged = data
        self.staging, self.staged, self.store, self.options = staging, staged, store, options
        self.messages, self.gather, self.reduce = messages, gather, reduce
        self.transport = Transport(staging.group, self.device)
        self.world = world
        self._lowered: dict[int, Schedule] = {}
        self._costs: Costs | None = None
        self._ran: tuple[Schedule, list[Record]] | None = None
        self._auxiliary: StagedAuxiliary | None = None  # of the window that runs
        self._beside = Transport(staging.group, torch.device("cpu"))

    def train(self, window: Sequence[MicroBatch], number: int, tokens: int, loss: LossFunction | None) -> TrainResult:
        if not self.staging.trained:
            asked = "run.step of a model whose parameters are all frozen"
            raise PlanError(Violation(asked, "1 trainable parameter is required", "use run.evaluate"))
        problems: list[Exception] = []

        def last(micro: MicroBatch) -> Tensor:
            return self._loss_of(micro, loss, tokens, problems)

        if self.routers is not None:
            self.routers.new_window()
        schedule = self.schedule_for(len(window))
        self._auxiliary = auxiliary = self._auxiliary_of(schedule, tokens)
        runtime = self._runtime(window, number, last)
        try:
            with self._window(), nullcontext() if auxiliary is None else auxiliary.tallies.window():
                results = runtime.run(schedule)
        finally:
            self._auxiliary = None
        self._ran = schedule, runtime.records
        if self.options.schedule == "zb-auto" and self._costs is None:
            # All ranks of the job must make the same schedule of it, or their reductions would not meet.
            self._costs = measured_costs(runtime.records, self.staging.cut.stages, self.world, self.device)
            self._lowered.clear()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in sorted(results):
            total += results[micro]
        if auxiliary is not None:
            total += auxiliary.share
        return TrainResult(total, problems[0] if problems else None)

    def loss_sum(self, window: Sequence[MicroBatch]) -> Tensor:
        results = self._forward_all(window, lambda micro: self._cross_entropy(micro))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in sorted(results):
            total += results[micro]
        return total

    def logits(self, micro: MicroBatch) -> Tensor:
        found = self._forward_all([micro], self._forward).get(0)
        return self._from_last(found)

    def forward_only(self) -> AbstractContextManager[None]:
        return self.staged.forward_only()

    def timeline(self) -> Timeline | None:
        """When everything ran in the window that ran last; None before the first one. A collective."""
        if self._ran is None:
            return None
        schedule, records = self._ran
        costs = measured_costs(records, self.staging.cut.stages, self.staging.group, self.device)
        return measured_timeline(schedule, records, costs, self.staging.group)

    def schedule_for(self, count: int) -> Schedule:
        """The lowered schedule of a window of `count` micro-batches. Errors: `PlanError` where there is none."""
        if count not in self._lowered:
            built = schedule_of(self.options, ranks=self._ranks, microbatches=count, costs=self._costs)
            lowered = lower(built, self.gather, self.reduce)
            self._lowered[count] = lowered.with_table(without_idle_gathers(row) for row in lowered.table)
        return self._lowered[count]

    def _forward_all(self, window: Sequence[MicroBatch], last: Callable[[MicroBatch], Tensor]) -> dict[int, Tensor]:
        schedule = lower(forwards_only(self.staging.cut.rank_of, len(window)), self.gather, None)
        return self._runtime(window, 0, last).run(schedule)

    def _runtime(self, window: Sequence[MicroBatch], number: int, last: Callable[[MicroBatch], Tensor]) -> Runtime:
        wanted = self.staging.sends_gradient
        stages = {}
        for view in self.staging.views:
            view.refresh()
            forward = self._forward_of(view, window, number, last)
            stages[view.number] = Stage(view.number, forward, self.store, sends_gradient=wanted[view.number])
        return Runtime(
            rank=self.staging.rank,
            stages={n: _Surrounded(stage, window, self) for n, stage in stages.items()},
            transport=self.transport,
            parameters=self.staged,
            shape=lambda micro: self._shape(window[micro]),
            dtype=self.messages.dtype,
            sends_gradient=wanted,
        )

    def _forward_of(
        self, view: StageView, window: Sequence[MicroBatch], number: int, last: Callable[[MicroBatch], Tensor]
    ) -> Forward:
        def forward(at: int, received: Tensor | None) -> Tensor:
            micro = window[at]
            with self.streams.of(number, at, view.number), self._watched_by_routers(micro):
                if view.number + 1 < self.staging.cut.stages:
                    out: Tensor = view(self.runnable(micro), received)
                else:
                    with view.receiving(received):
                        out = last(micro)
            if self._auxiliary is not None:
                self._auxiliary.after_forward(view.number, at)
            return out

        return forward

    def _auxiliary_of(self, schedule: Schedule, tokens: int) -> StagedAuxiliary | None:
        routers, cut = self.routers, self.staging.cut
        if routers is None or routers.coefficient is None or not tokens:
            return None  # no supervised token anywhere: no loss at all
        owners = {cut.owner(self.decoder, name) for name in self.decoder.routers}
        tells = [stage in owners for stage in range(cut.stages)]
        return StagedAuxiliary(
            routers, Tallies(self._beside, schedule, self.staging.rank, tells, routers.width), self.device
        )

    @contextmanager
    def _watched_by_routers(self, micro: MicroBatch) -> Iterator[None]:
        if self.routers is None or not torch.is_grad_enabled():
            yield
            return
        with self.routers.micro_batch(micro.counted(self.multiple)):
            yield

    def beside(self, stage: int, micro: int) -> Tensor | None:
        """What a stage goes backward from in I, beside its output."""
        return None if self._auxiliary is None else self._auxiliary.summand(stage, micro)

    def _shape(self, micro: MicroBatch) -> tuple[int, ...]:
        rows, length = self.runnable(micro)["input_ids"].shape
        return rows, length // self.messages.tokens_cut, *self.messages.hidden

    def _from_last(self, found: Tensor | None) -> Tensor:
        """What the rank of the last stage has, on all ranks of the pipeline."""
        about = [None if found is None else (tuple(found.shape), found.dtype)]
        group, source = self.staging.group, self.staging.last_rank
        dist.broadcast_object_list(about, group=group, group_src=source, device=torch.device("cpu"))
        assert about[0] is not None
        shape, dtype = about[0]
        out = torch.empty(shape, dtype=dtype, device=self.device) if found is None else found.contiguous()
        dist.broadcast(out, group=group, group_src=source)
        return out

    @property
    def _ranks(self) -> int:
        return self.staging.group.size()

    @contextmanager
    def _window(self) -> Iterator[None]:
        # Outside in: ties sum what tp and the data axis have summed.
        self.staged.reshard()
        try:
            with summed_ties(self.staging.ties, self.staging.group):
                if self.tensor is None:
                    with self.staged.window():
                        yield
                else:
                    with self.tensor.window():
                        with self.staged.window():
                            yield
                        self.staged.reshard()
        except BaseException:
            self.store.clear()
            raise


class _Surrounded:
    """A stage whose F and I run inside what the other axes put around a micro-batch."""

    def __init__(self, stage: Stage, window: Sequence[MicroBatch], engine: Pipeline) -> None:
        self.stage, self.window, self.engine = stage, window, engine

    def forward(self, micro: int, received: Tensor | None) -> Tensor:
        with self.engine.around(self.window[micro]):
            return self.stage.forward(micro, received)

    def backward_input(self, micro: int, gradient: Tensor | None) -> Tensor | None:
        beside = self.engine.beside(self.stage.number, micro)
        with self.engine.around(self.window[micro]):
            return self.stage.backward_input(micro, gradient, beside)

    def backward_weight(self, micro: int) -> None:
        self.stage.backward_weight(micro)
