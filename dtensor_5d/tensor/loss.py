"""Cross entropy over a vocabulary that is cut over ranks, and over hidden states whose logits never exist all at once.

                      tp = 1                                  tp = 3 (V = 7)
    logits    [B, S, V] on every rank           [B, S, 3] | [B, S, 3] | [B, S, 1]      never gathered
    exchanged nothing                           3 numbers a token and rank

Letters: B batch, S sequence, T tokens (B x S), t tokens of a chunk, M model size, V vocabulary, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dtensor_5d.loss import IGNORE, token_loss_sum
from dtensor_5d.ops.exchange import gathered

__all__ = ["Vocabulary", "chunked_head_loss_sum", "vocab_parallel_loss_sum"]


@dataclass(frozen=True)
class Vocabulary:
    """The ids `start <= id < end` whose logits this rank of `group` computes; the ranks' ranges cover all ids once."""

    group: dist.ProcessGroup
    start: int
    end: int


def vocab_parallel_loss_sum(
    logits_local: Tensor, shifted_labels: Tensor, group: dist.ProcessGroup, vocab_start: int, vocab_end: int
) -> Tensor:
    """Cross entropy summed over supervised tokens, of logits cut along the vocabulary: the same on all ranks.

    logits_local [B, S, vocab_end - vocab_start]: this rank's columns, maybe none; shifted_labels [B, S]: global ids,
    the same on all ranks, -100 = not supervised. One all-gather of 3 numbers a token in forward, nothing in backward.
    fp64 stays fp64, all else is computed in fp32. Each rank's gradient is that of its own columns, so what comes
    before the head must sum its gradient over the group (`identity_all_reduce`, `all_gather_reduce_scatter`).
    A token that is not supervised adds exactly 0, whatever its logits are; a label that no rank holds gives infinity.
    Errors: ValueError, before the exchange, for logits of another width (gathered ones) and for a DTensor.

    Example:
        >>> rank, (start, end) = group.rank(), [(0, 4), (4, 7)][group.rank()]
        >>> hidden = identity_all_reduce(hidden, group)
        >>> vocab_parallel_loss_sum(F.linear(hidden, weight[start:end]), labels, group, start, end)
    """
    if isinstance(logits_local, DTensor):
        raise ValueError("logits are a DTensor: give the local shard, to_local(grad_placements=[Shard(-1)])")
    if logits_local.size(-1) != vocab_end - vocab_start:
        raise ValueError(
            f"logits of {logits_local.size(-1)} columns for the ids {vocab_start} to {vocab_end}: "
            f"must be {vocab_end - vocab_start} columns, this rank's own and not gathered"
        )
    loss: Tensor = _VocabularyLossSum.apply(
        logits_local.flatten(0, -2), shifted_labels.flatten(), group, vocab_start, vocab_end
    )
    return loss


class _VocabularyLossSum(Function):
    """Forward: per token the rank's largest logit, sum of exponentials and logit of the label, all-gathered (3 x n x T
    numbers) and combined in the same way everywhere; keeps the exponentials. Backward: (softmax - one-hot) of the
    own columns, made in the kept buffer; tokens that are not supervised are set to 0. So one backward only.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, start: int, end: int) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        ignored = labels == IGNORE
        mine = (labels >= start) & (labels < end)
        local = (labels - start).masked_fill(~mine, 0).unsqueeze(1)
        facts = logits.new_empty(3, len(labels), dtype=wide)
        top, total, target = facts.unbind()
        if end > start:
            # Columns that are all -inf must weigh 0, and -inf - -inf is NaN: hence the finite floor.
            top.copy_(logits.amax(dim=-1)).clamp_min_(torch.finfo(wide).min)
            e = torch.sub(logits, top.unsqueeze(1)).exp_()
            torch.sum(e, dim=-1, out=total)
            target.copy_(logits.gather(1, local).squeeze(1)).masked_fill_(~mine, -torch.inf)
        else:
            e = logits.to(wide)
            facts.copy_(facts.new_tensor([torch.finfo(wide).min, 0.0, -torch.inf]).unsqueeze(1).expand_as(facts))
        every = gathered(facts.unsqueeze(0), group, 0)
        tops, totals, targets = every.unbind(1)
        highest = tops.amax(0)
        weights = (tops - highest).exp()
        whole = (totals * weights).sum(0)
        nll = highest + whole.log() - targets.amax(0)
        ctx.dtype = logits.dtype
        # Of e to the softmax: the exponentials are relative to the rank's own largest logit.
        ctx.save_for_backward(e, weights[group.rank()] / whole, local, mine, ignored)
        return nll.masked_fill(ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, scale, local, mine, ignored = ctx.saved_tensors
        g = grads[0].to(out.dtype)
        # In place: torch sees the saved tensor change and refuses a second backward through it by name.
        out.mul_((scale * g).unsqueeze(1))
        if out.size(1):
            out.scatter_add_(1, local, torch.where(mine, -g, 0.0).unsqueeze(1))
        out.masked_fill_(ignored.unsqueeze(1), 0.0)
        return out.to(ctx.dtype), None, None, None, None


def chunked_head_loss_sum(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    shifted_labels: Tensor,
    chunk: int,
    *,
    vocab: Vocabulary | None = None,
) -> Tensor:
    """Cross entropy summed over supervised tokens, of `head(hidden)`, of which at most `chunk` tokens exist at a time.

    hidden [B, S, M]; head: hidden [1, t, M] -> logits [1, t, V] (all that the model does between its last hidden
    state and its loss, token by token: projection, scale, soft-cap); shifted_labels [B, S], -100 = not supervised.
    vocab: head gives this rank's columns only, and the loss is `vocab_parallel_loss_sum` (whose rule for the gradient
    before the head holds: sum it once, of `hidden`, and not inside `head`).

    Gradients are computed with the loss, chunk after chunk: nothing is computed twice, and what lives from forward to
    backward is the gradient of `hidden` and of what `head` reads (fp32 sums where the weights are 16 bits wide). So
    one backward only. `head` may read parameters, frozen or not, tied or not, but no other tensor that needs a
    gradient; the first chunk tells which. With up to `chunk` tokens it is the plain computation.
    Errors: ValueError for a chunk < 1 and for a `head` that reads such a tensor.

    Example:
        >>> chunked_head_loss_sum(hidden, lambda x: 30 * torch.tanh(lm_head(x) / 30), labels, 1024).backward()
    """
    if chunk < 1:
        raise ValueError(f"a chunk of {chunk} tokens: must be at least 1")
    tokens = shifted_labels.numel()
    if tokens <= chunk:
        return _loss(head(hidden), shifted_labels, vocab)
    states, labels = hidden.reshape(1, tokens, -1), shifted_labels.reshape(1, tokens)
    bounds = [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
    if not torch.is_grad_enabled():
        return torch.stack([_loss(head(states[:, a:b]), labels[:, a:b], vocab) for a, b in bounds]).sum()
    work = _Chunks(head, vocab, hidden)
    for a, b in bounds:
        work.run(states, labels, a, b)
    total = torch.stack(work.losses).sum()
    loss: Tensor = _Known.apply(total, [work.d_hidden, *work.gradients()], hidden, *work.leaves)
    return loss


def _loss(logits: Tensor, labels: Tensor, vocab: Vocabulary | None) -> Tensor:
    if vocab is None:
        return token_loss_sum(logits, labels)
    return vocab_parallel_loss_sum(logits, labels, vocab.group, vocab.start, vocab.end)


class _Chunks:
    """Losses and gradients of chunk after chunk."""

    def __init__(self, head: Callable[[Tensor], Tensor], vocab: Vocabulary | None, hidden: Tensor) -> None:
        self.losses: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.d_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        self._head, self._vocab = head, vocab
        self._products = _SumInPlace()
        self._grads: list[Tensor | None] = []

    def run(self, states: Tensor, labels: Tensor, a: int, b: int) -> None:
        part = states[:, a:b].detach().requires_grad_(self.d_hidden is not None)
        oldest = torch.autograd._get_sequence_nr()
        with self._products:
            logits = self._head(part)
        loss = _loss(logits, labels[:, a:b], self._vocab)
        del logits
        if not self.losses:
            self.leaves = _leaves(loss, part, oldest)
            self._grads = [None] * len(self.leaves)
        self.losses.append(loss.detach())
        wanted = ([] if self.d_hidden is None else [part]) + self.leaves
        if not wanted:
            return
        grads = list(torch.autograd.grad(loss, wanted, allow_unused=True))
        if self.d_hidden is not None:
            first = grads.pop(0)
            self.d_hidden.view(states.shape)[:, a:b] = 0.0 if first is None else first
        self._grads = [_added(total, g) for total, g in zip(self._grads, grads)]

    def gradients(self) -> list[Tensor | None]:
        """Of each leaf."""
        return [_added(self._products.sums.get(id(leaf)), g) for leaf, g in zip(self.leaves, self._grads)]


def _added(total: Tensor | None, g: Tensor | None) -> Tensor | None:
    """`total + g`, in place if there is a total. Of 16-bit gradients in fp32: a sum of many would lose what one large
    product keeps."""
    if g is None or total is not None:
        return total if g is None or total is None else total.add_(g)
    # A copy, because autograd may hand out one tensor as two gradients.
    return g.to(torch.promote_types(g.dtype, torch.float32), copy=True)


def _leaves(loss: Tensor, part: Tensor, oldest: int) -> list[Tensor]:
    """The leaves that a chunk's loss depends on, beside the chunk. Errors: ValueError for a dependency on an older
    operation, whose gradient several chunks would ask for."""
    found: dict[int, Tensor] = {}
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        elif node._sequence_nr() < oldest:
            raise ValueError(
                f"head reads a tensor made by an earlier {node.name()}: it may read parameters and its argument only"
            )
        stack.extend(following for following, _ in node.next_functions)
    found.pop(id(part), None)
    return list(found.values())


class _SumInPlace(TorchFunctionMode):
    """While on, the weight gradients of `F.linear` with a parameter go into `sums` (by the parameter's id): the matrix
    product of a later chunk adds to that of the earlier ones, where autograd would make both and then add."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and _is_parameter(args):
            return _LinearIntoSum.apply(self.sums, args[0], args[1], args[2] if len(args) > 2 else None)
        return func(*args, **(kwargs or {}))


def _is_parameter(args: Sequence[Any]) -> bool:
    x, weight = args[:2]
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2
    return plain and weight.is_leaf and weight.requires_grad and not torch.is_autocast_enabled(x.device.type)


class _LinearIntoSum(Function):
    """Forward: y = x w^T + b. Backward: dx = g w; db = sum of g; g^T x is added to the sum of this weight, and autograd
    is told of no weight gradient."""

    @staticmethod
    def forward(ctx: Any, sums: dict[int, Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.sums, ctx.key = sums, id(weight)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = grads[0].flatten(0, -2)
        rows = x.flatten(0, -2)
        total = ctx.sums.get(ctx.key)
        if total is None:
            product = g.t() @ rows
            ctx.sums[ctx.key] = product.to(torch.promote_types(product.dtype, torch.float32))
        elif total.dtype == g.dtype:
            total.addmm_(g.t(), rows)
        else:
            total.add_(g.t() @ rows)
        dx = grads[0] @ weight if ctx.needs_input_grad[1] else None
        db = g.sum(0) if ctx.needs_input_grad[3] else None
        return None, dx, None, db


class _Known(Function):
    """Forward: the loss. Backward: the gradients that came with it, times g; scaled in place, so once."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *leaves: Tensor) -> Tensor:
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0]
        scaled = [None if d is None else d.mul_(g).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.dtypes)]
        return None, None, *scaled
