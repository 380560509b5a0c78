"""`Run`: a parallel model with the few calls of a training loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.agree import Agreement
from dtensor_5d.batch import BatchRules, MicroBatch, cut_window, fingerprint
from dtensor_5d.checkpoint import pretrained
from dtensor_5d.checkpoint.gather import whole
from dtensor_5d.chunked import loss_sum, pending_logits, tokens_at_a_time
from dtensor_5d.dp.fsdp import DataParallel
from dtensor_5d.dp.grads import clip_grads_, grad_norm
from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.loss import LossFunction, nothing
from dtensor_5d.mesh import Mesh
from dtensor_5d.plan import Plan
from dtensor_5d.random import RandomStreams
from dtensor_5d.sections import sections_of
from dtensor_5d.tensor.compare import first_difference
from dtensor_5d.tensor.state import TensorState

__all__ = ["Run"]

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """What `parallelize` found out and made on the way, for `Run` to work with."""

    decoder: Decoder
    batch_rules: BatchRules
    data: DataParallel
    tensor: TensorState | None
    agreement: Agreement
    streams: RandomStreams


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
        self.sequence_multiple = parts.batch_rules.multiple
        self._parts = parts
        self._source: str | Path | None = None
        self._windows = 0
        self._has_weights = False

    # --- training

    def step(self, batch: Batch | Sequence[Batch], loss: LossFunction | None = None) -> torch.Tensor:
        """One window: forward and backward of all its micro-batches. Adds to `.grad`, never zeroes it.

        batch: this data rank's rows, a dict of [B, S] tensors, or several of them; each is cut along B into
        `microbatches` parts, and the window is all of them. loss: `fn(logits [B, S, V], shifted labels [B, S]) -> sum`
        in place of cross entropy. Returns the mean over all supervised tokens of the window on all ranks: a 0-dim
        tensor, the same everywhere; 0 (with gradients of 0, and a warning) when there is none.
        The model is put into training mode. Errors: `PlanError` on every rank, before any forward, when any rank's
        batch is wrong; after the window, on every rank, when a custom `loss` failed on any (drop the gradients then).
        """
        self._require_weights("step")
        self._require_gradients()
        window, most, tokens = self._agreed(batch, need_labels=True)
        if tokens == 0:
            what = (
                "no supervised token in this window (every label that is predicted is -100): loss and gradients are 0"
            )
            warnings.warn(what, stacklevel=2)
        device = self._device
        window += [MicroBatch.missing(device)] * (most - len(window))
        if not self.model.training:
            self.model.train()
        total = torch.zeros((), dtype=torch.float64, device=device)
        problems: list[Exception] = []
        with self._window():
            for number, micro in enumerate(window):
                self._parts.data.micro_batch(is_last=number + 1 == most)
                with self._parts.streams.of(self._windows, number):
                    part = self._loss_of(micro, loss, tokens, problems)
                    part.backward()
                total += part.detach()
        if loss is not None:  # a loss that failed on one rank left it in step with the others until here
            self._parts.agreement.check(problems[0] if problems else None)
        self._windows += 1
        # As precise as the weights: fp64 for fp64 models, else fp32.
        return self._summed(total).to(torch.promote_types(self._dtype, torch.float32))

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, replicas counted once: a 0-dim tensor, the same on all ranks."""
        return grad_norm(self.parameters())

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns the norm before that."""
        if not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise PlanError(Violation(f"max_norm={max_norm!r}", "must be > 0", "give for example 1.0"))
        norm = self.grad_norm()
        clip_grads_(self.parameters(), max_norm, norm)
        return norm

    # --- looking

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """(mean loss over all supervised tokens, their number) of forwards without gradients, the same on all ranks.

        Ranks may bring different numbers of batches. Eval mode inside, the mode is restored. No supervised token at
        all: (0.0, 0).
        """
        self._require_weights("evaluate")
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        count = 0
        source = _each(batches)
        with self._looking():
            while True:
                window, most, tokens, more = self._next_batch(source)
                if not more:
                    break
                count += tokens
                for micro in window + [MicroBatch.missing(self._device)] * (most - len(window)):
                    total += self._loss_of(micro, None, 1, []).detach()
        return (self._summed(total).item() / count if count else 0.0), count

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits [B, S, V] of this data rank's batch, whole vocabulary, original token order. A debugging aid.

        Eval mode, no gradients, the mode is restored; `microbatches` is ignored; labels are not needed.
        """
        self._require_weights("logits")
        window, _, _ = self._agreed(batch, need_labels=False, parts=1)
        with self._looking():
            micro = window[0]
            out = self._forward(micro)
        if micro.is_empty:
            return out.new_empty(*micro.inputs["input_ids"].shape, out.shape[-1])
        return out[:, : micro.length]

    def first_difference(self, batch: Batch) -> str | None:
        """The first module whose output is not the same, bit for bit, on the ranks of tp. A debugging aid.

        Compared is what every rank of tp has whole. None: there is no difference (or no such axis).
        """
        window, _, _ = self._agreed(batch, need_labels=False, parts=1)
        if self._parts.tensor is None:
            return None
        with self._looking():
            return first_difference(self.model, self._parts.tensor, window[0].runnable(self.sequence_multiple))

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every named parameter as a full tensor on every rank, by Hugging Face name. A debugging aid."""
        packed = sections_of(self.model)
        return {name: whole(p, packed.get(name)) for name, p in self.named_parameters()}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of every named parameter as a full tensor on every rank, zeros where there is none."""
        packed = sections_of(self.model)
        return {
            name: torch.zeros(p.shape, dtype=p.dtype, device=p.device)
            if p.grad is None
            else whole(p.grad, packed.get(name))
            for name, p in self.named_parameters()
        }

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

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def _device(self) -> torch.device:
        return self.mesh.device

    def _agreed(
        self, batch: Batch | Sequence[Batch], *, need_labels: bool, parts: int | None = None
    ) -> tuple[list[MicroBatch], int, int]:
        """This rank's micro-batches, the largest number of them on any rank, supervised tokens of all ranks."""
        window: list[MicroBatch] = []
        error: Exception | None = None
        try:
            window = self._cut(batch, need_labels, parts)
        except Exception as problem:
            error = problem
        every = self._exchanged(error, window)
        return window, max(row[0] for row in every), self._tokens(every)

    def _next_batch(self, source: Iterator[Batch]) -> tuple[list[MicroBatch], int, int, bool]:
        window: list[MicroBatch] = []
        error: Exception | None = None
        more = True
        try:
            batch = next(source, None)
            more = batch is not None
            window = self._cut(batch, True, None) if batch is not None else []
        except Exception as problem:
            error = problem
        every = self._exchanged(error, window, int(more))
        return window, max(row[0] for row in every), self._tokens(every), any(row[3] for row in every)

    def _exchanged(self, error: Exception | None, window: list[MicroBatch], *more: int) -> list[list[int]]:
        """By rank: micro-batches, supervised tokens, what the batch is, `more`. Errors: `PlanError` on every rank
        where ranks that must read the same batch do not."""
        peers = self.mesh.world_size // self.data_size
        what = fingerprint(window) if peers > 1 else 0
        every = self._parts.agreement.check(error, len(window), sum(m.tokens for m in window), what, *more)
        share = self.mesh.axes["data"].index
        first = {share(rank): rank for rank in reversed(range(len(every)))}
        for rank, row in enumerate(every):
            other = first[share(rank)]
            if row != every[other]:
                raise PlanError(
                    Violation(f"other rows on rank {rank} than on rank {other}",
                              f"both have data_rank {share(rank)} of {self.data_size}: they must read the same batch",
                              "read the rows of run.data_rank, not of the process's rank")
                )  # fmt: skip
        return every

    def _tokens(self, every: list[list[int]]) -> int:
        """Supervised tokens of all ranks, those of ranks that read the same rows once."""
        share = self.mesh.axes["data"].index
        return sum({share(rank): row[1] for rank, row in enumerate(every)}.values())

    def _cut(self, batch: Batch | Sequence[Batch], need_labels: bool, parts: int | None) -> list[MicroBatch]:
        return cut_window(
            batch,
            parts or self.plan.options.microbatches,
            self._parts.batch_rules,
            self._device,
            need_labels=need_labels,
        )

    def _forward(self, micro: MicroBatch) -> torch.Tensor:
        # Without use_cache=False transformers builds a cache even in training, and packed documents see each other.
        inputs = micro.runnable(self.sequence_multiple)
        logits: torch.Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    def _loss_of(
        self, micro: MicroBatch, loss: LossFunction | None, tokens: int, problems: list[Exception]
    ) -> torch.Tensor:
        """This micro-batch's part of the global mean; what the user's loss raises is put into `problems`."""
        if loss is None:
            return self._cross_entropy(micro) / max(tokens, 1)
        logits = self._forward(micro)
        if micro.tokens == 0 or micro.labels is None:
            return nothing(logits)
        try:
            value = loss(logits, micro.labels)
            if not isinstance(value, torch.Tensor) or value.dim() or not value.requires_grad:
                asked = f"a loss function that returned {value!r}"
                needs = "must return a 0-dim tensor that depends on the logits"
                raise PlanError(Violation(asked, needs, "return the sum over supervised tokens"))
            return value / tokens
        except Exception as problem:
            problems.append(problem)
            return nothing(logits)

    def _cross_entropy(self, micro: MicroBatch) -> torch.Tensor:
        """The sum over supervised tokens, chunk by chunk where there are many, over the rank's own columns under tp."""
        chunk, head = tokens_at_a_time(self._device), self._parts.decoder.head
        with ExitStack() as stack:
            vocab = None
            if self._parts.tensor is not None:
                vocab = stack.enter_context(self._parts.tensor.cut_logits())
            if head is not None and micro.labels is not None and micro.labels.numel() > chunk:
                stack.enter_context(pending_logits(self.model.get_submodule(head)))
            logits = self._forward(micro)
            if micro.labels is None or micro.is_empty:
                return nothing(logits)
            # Inside: chunk by chunk, the head runs again.
            return loss_sum(logits, micro.labels, chunk, vocab=vocab)

    def _summed(self, value: torch.Tensor) -> torch.Tensor:
        group = self.mesh["loss"]
        if group.size() > 1:
            dist.all_reduce(value, group=group.get_group())
        return value

    @contextmanager
    def _window(self) -> Iterator[None]:
        data, tensor = self._parts.data, self._parts.tensor
        if tensor is None:
            with data.window():
                yield
            return
        data.reshard()  # names lead to stored gradients, here and where they are summed
        with tensor.window():
            with data.window():
                yield
            data.reshard()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        modes = [module.training for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self._parts.data.forward_only():
                yield
        finally:
            for module, mode in zip(self.model.modules(), modes):
                module.training = mode

    def _require_gradients(self) -> None:
        asked = "run.step under torch.no_grad()" if not torch.is_grad_enabled() else ""
        if not any(p.requires_grad for p in self.model.parameters()):
            asked = "run.step of a model whose parameters are all frozen"
        if asked:
            raise PlanError(Violation(asked, "1 trainable parameter and gradients are required", "use run.evaluate"))

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


def _each(batches: Iterable[Batch]) -> Iterator[Batch]:
    yield from batches  # what is wrong with them shows at the first next(), where all ranks hear of it
