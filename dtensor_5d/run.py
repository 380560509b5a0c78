"""`Run`: a parallel model with the few calls of a training loop."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.expert_rules import auxiliary_coefficient
from dtensor_5d.agree import Agreement
from dtensor_5d.checkpoint import pretrained
from dtensor_5d.checkpoint.gather import whole_model
from dtensor_5d.context.rows import RowCutter
from dtensor_5d.dp.fsdp import DataParallel
from dtensor_5d.dp.grads import clip_grads_, grad_norm
from dtensor_5d.engine import Engine
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.problems import Problems
from dtensor_5d.expert.watch import RouterWatch
from dtensor_5d.loss import LossFunction
from dtensor_5d.mesh import Mesh
from dtensor_5d.names import Names
from dtensor_5d.plan import Plan
from dtensor_5d.reading import Batch, Reader
from dtensor_5d.schedule import Timeline
from dtensor_5d.sections import sections_of
from dtensor_5d.staged import Pipeline
from dtensor_5d.tensor.compare import first_difference
from dtensor_5d.tensor.state import TensorState

__all__ = ["Run"]


@dataclass(frozen=True)
class Parts:
    """What `parallelize` found out and made on the way, for `Run` to work with."""

    decoder: Decoder
    names: Names
    reader: Reader
    engine: Engine
    data: DataParallel
    tensor: TensorState | None
    experts: Problems | None
    context: RowCutter | None
    routers: RouterWatch | None
    agreement: Agreement


class Run:
    """What `parallelize` returns. Every method is called by all ranks alike, unless it says otherwise.

    `model` stays an ordinary Hugging Face module: `run.model(**inputs)` works. `data_rank`, `data_size`: which share
    of the data this rank must read. `sequence_multiple`: other lengths are padded inside.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, parts: Parts) -> None:
        self.model = model
        self.plan = plan
        self.mesh = mesh
        self.data_rank: int = mesh.data_rank
        self.data_size: int = mesh.data_size
        self.sequence_multiple = parts.reader.rules.multiple
        self._parts = parts
        self._source: str | Path | None = None
        self._windows = 0
        self._has_weights = False

    # --- training

    def step(self, batch: Batch | Sequence[Batch], loss: LossFunction | None = None) -> torch.Tensor:
        """One window: forward and backward of all its micro-batches. Adds to `.grad`, never zeroes it.

        batch: this data rank's rows, a dict of [B, S] tensors, or several of them; each is cut along B into
        `microbatches` parts, and the window is all of them. loss: `fn(logits [B, S, V], shifted labels [B, S]) -> sum`
        in place of cross entropy, a sum over tokens: what a token adds depends on its own logits and label only. It is
        called with the tokens of this rank (under cp [B, S / cp], in another order; padding has label -100), so what
        mixes the tokens of a row needs cp=1. Returns the mean over all supervised tokens of the window on all ranks: a
        0-dim tensor, the same everywhere; 0 (with gradients of 0, and a warning) when there is none.
        The model is put into training mode. Errors: `PlanError` on every rank, before any forward, when any rank's
        batch is wrong; after the window, on every rank, when a custom `loss` failed on any (drop the gradients then).
        """
        self._require_weights("step")
        window = self._parts.reader.window(batch, need_labels=True, ready=self._require_gradients)
        if window.tokens == 0:
            what = (
                "no supervised token in this window (every label that is predicted is -100): loss and gradients are 0"
            )
            warnings.warn(what, stacklevel=2)
        if not self.model.training:
            self.model.train()
        with self._gathering():
            done = self._parts.engine.train(window.micro, self._windows, window.tokens, loss)
        self._agree(done.problem, asked=loss is not None)
        if self._parts.routers is not None:
            self._parts.routers.window_done()
        self._windows += 1
        # As precise as the weights: fp64 for fp64 models, else fp32.
        return self._summed(done.loss).to(torch.promote_types(self._dtype, torch.float32))

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, replicas counted once: a 0-dim tensor, the same on all ranks."""
        counted = self._parts.names.counted(self.named_parameters())
        return grad_norm(counted, group=self.mesh["world"].get_group(), stages=self.mesh.degrees.pp)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns the norm before that."""
        if not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise PlanError(Violation(f"max_norm={max_norm!r}", "must be > 0", "give for example 1.0"))
        norm = self.grad_norm()
        clip_grads_(self.parameters(), max_norm, norm)
        return norm

    def update_expert_bias(self, rate: float) -> None:
        """Balances experts without an auxiliary loss: once per optimizer step, after it.

        Each router's correction bias moves by `rate` against the load (of all tokens of all ranks since the last call,
        padding not counted); its mean stays 0. Errors: `PlanError` for a family whose routers have no such bias.
        """
        error = None
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < float("inf"):
            error = PlanError(Violation(f"a bias update of rate={rate!r}", "must be > 0", "give for example 0.001"))
        bits = 0 if error is not None else int.from_bytes(struct.pack("<d", rate), "little", signed=True)
        every = [row[0] for row in self._parts.agreement.check(error, bits)]
        if len(set(every)) > 1:
            other = next(rank for rank, value in enumerate(every) if value != bits)
            asked = f"a bias update of rate={rate!r} here and of another on rank {other}"
            raise PlanError(Violation(asked, "all ranks must take the same step", "give the same rate on every rank"))
        self._parts.data.reshard()
        self._watch("update_expert_bias").update_biases(float(rate))

    # --- looking

    def expert_load(self) -> dict[str, torch.Tensor]:
        """Experts module -> [E] int64: how many tokens of the last window chose each expert, over all ranks.

        Padding is no load; a token counts once for each of its choices. Errors: `PlanError` for a dense model.
        """
        return self._watch("expert_load").load()

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """(mean loss over all supervised tokens, their number) of forwards without gradients, the same on all ranks.

        Ranks may bring different numbers of batches. Eval mode inside, the mode is restored. No supervised token at
        all: (0.0, 0).
        """
        self._require_weights("evaluate")
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        count = 0
        with self._looking():
            for window in self._parts.reader.windows(batches):
                count += window.tokens
                total += self._parts.engine.loss_sum(window.micro)
        self._agree()
        return (self._summed(total).item() / count if count else 0.0), count

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits [B, S, V] of this data rank's batch, whole vocabulary, original token order. A debugging aid.

        Eval mode, no gradients, the mode is restored; `microbatches` is ignored; labels are not needed.
        """
        self._require_weights("logits")
        micro = self._parts.reader.window(batch, need_labels=False, parts=1).micro[0]
        with self._looking():
            out = self._parts.engine.logits(micro)
        self._agree()
        if micro.is_empty:
            return out.new_empty(*micro.inputs["input_ids"].shape, out.shape[-1])
        if self._parts.context is not None:
            out = self._parts.context.joined(out, micro)
        return out[:, : micro.length]

    def timeline(self) -> Timeline | None:
        """When every action of the last window ran on every rank of a pipeline (seconds); None where there is none yet.

        `simulate(t.schedule, t.costs)` says what the schedule promises with the costs that were measured.
        """
        engine = self._parts.engine
        return engine.timeline() if isinstance(engine, Pipeline) else None

    def first_difference(self, batch: Batch) -> str | None:
        """The first module whose output is not the same, bit for bit, on the ranks of tp. A debugging aid.

        Compared is what every rank of tp has whole. None: there is no difference (or no such axis).
        """
        micro = self._parts.reader.window(batch, need_labels=False, parts=1).micro[0]
        if self.mesh.degrees.pp > 1:
            asked, needs = "run.first_difference with pp > 1", "it runs the whole model, and no rank has it"
            raise PlanError(Violation(asked, needs, "use it with pp=1 and the same tp"))
        if self._parts.tensor is None:
            return None
        with self._looking(), self._parts.engine.around(micro):
            found = first_difference(self.model, self._parts.tensor, self._parts.engine.runnable(micro))
        self._agree()
        return found

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter of every stage as a full tensor on every rank, by Hugging Face name. A debugging aid."""
        return self._whole(dict(self.named_parameters()))

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of every parameter of every stage as a full tensor on every rank, zeros where there is none."""
        return self._whole(
            {
                name: torch.zeros(p.shape, dtype=p.dtype, device=p.device) if p.grad is None else p.grad
                for name, p in self.named_parameters()
            }
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """The stored parameters of this rank, for an optimizer."""
        self._parts.data.reshard()
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, stored parameter) of this rank; tied ones once, under their first name."""
        self._parts.data.reshard()
        return self.model.named_parameters()

    # --- weights

    def init_weights(self, seed: int) -> None:
        """Fresh weights as the family initialises them: the same seed gives the same weights on any layout."""
        pretrained.init_weights(self.model, seed, device=self._device)

    def load_pretrained(self, folder: str | Path) -> None:
        """Weights from a Hugging Face folder; every rank reads only its slices."""
        pretrained.load_pretrained(self.model, self._path(folder), device=self._device)
        self._source = folder

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """An ordinary Hugging Face folder that `from_pretrained` loads bit-equal (dtype None: as stored)."""
        self._require_weights("save_pretrained")
        folder = self._path(folder)
        pretrained.save_pretrained(self.model, folder, config=self.model.config, source=self._source, dtype=dtype)

    # --- inside

    def _watch(self, what: str) -> RouterWatch:
        if self._parts.routers is None:
            asked, needs = f"run.{what} of a dense model", "experts are needed"
            raise PlanError(Violation(asked, needs, "use a mixture of experts"))
        return self._parts.routers

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def _device(self) -> torch.device:
        return self.mesh.device

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return whole_model(tensors, self._parts.names, self.mesh["pp"], sections_of(self.model))

    def _summed(self, value: torch.Tensor) -> torch.Tensor:
        # Over the pipeline too, whose last stage has the loss.
        for group in (self.mesh["loss"], self.mesh["pp"]):
            if group.size() > 1:
                dist.all_reduce(value, group=group.get_group())
        return value

    @contextmanager
    def _looking(self) -> Iterator[None]:
        modes = [module.training for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self._gathering(), self._parts.engine.forward_only():
                yield
        finally:
            for module, mode in zip(self.model.modules(), modes):
                module.training = mode

    def _gathering(self) -> AbstractContextManager[None]:
        """Around what `_agree` ends: a wrong routing waits for it."""
        return nullcontext() if self._parts.experts is None else self._parts.experts.gathering()

    def _agree(self, problem: Exception | None = None, asked: bool = False) -> None:
        """Raises on all ranks what one rank met in a window: until here it stayed in step with the others.

        asked: a loss function of the user's could have failed.
        """
        experts = self._parts.experts
        if experts is not None:
            problem = experts.taken() or problem
        if asked or experts is not None:
            self._parts.agreement.check(problem)

    def _require_gradients(self) -> None:
        asked = "run.step under torch.no_grad()" if not torch.is_grad_enabled() else ""
        stages = self.mesh.degrees.pp  # one may be frozen; its engine knows of all
        if stages == 1 and not any(p.requires_grad for p in self.model.parameters()):
            asked = "run.step of a model whose parameters are all frozen"
        if asked:
            raise PlanError(Violation(asked, "1 trainable parameter and gradients are required", "use run.evaluate"))
        engine, routers = self._parts.engine, self._parts.routers
        if routers is not None and routers.coefficient != auxiliary_coefficient(self.model):
            asked = "output_router_logits or router_aux_loss_coef that changed after parallelize"
            needs = f"the auxiliary loss is settled there (coefficient {routers.coefficient})"
            raise PlanError(Violation(asked, needs, "set the config before parallelize"))
        if isinstance(engine, Pipeline):
            engine.staging.check_trained()

    def _path(self, folder: str | Path) -> Path:
        error = None
        if not isinstance(folder, (str, Path)):
            error = PlanError(Violation(f"a folder {folder!r}", "must be a path", "give a str or a pathlib.Path"))
        self._parts.agreement.check(error)
        return Path(folder)

    def _require_weights(self, what: str) -> None:
        if self._has_weights:
            return
        self._has_weights = not any(p.is_meta for p in self.model.parameters())
        if not self._has_weights:
            raise PlanError(
                Violation(f"run.{what} of a model on meta", "weights must be there first",
                          "call run.load_pretrained(folder) or run.init_weights(seed)")
            )  # fmt: skip
