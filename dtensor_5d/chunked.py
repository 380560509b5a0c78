"""The loss of an unmodified Hugging Face model whose logits never exist all at once.

What such a model does to its logits (soft-cap, scale) stands in its own forward, between the head and the loss. So its
forward runs as it is, but the head hands on a promise:

    hidden --head--> PendingLogits(hidden) --model: / 30, tanh, * 30--> PendingLogits(hidden, 3 operations)
                                                                        |
    loss_sum(pending, labels, chunk): head, operations and loss, chunk after chunk over tokens

A `PendingLogits` keeps what acts on each logit alone, and answers for its shape and dtype. Asked for anything else (a
value, another operation, a write) it computes the logits whole and goes on with them: only memory depends on what a
model does, never a result.

FSDP2 sees a head that ran once, inside its hooks. Its parameters must stay gathered until the loss is there, as
`dp.fsdp` sees to; the promise carries the gradient's way back through the hooks.

Letters: B batch, S sequence, t tokens of a chunk, M model size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_map

from dtensor_5d.loss import token_loss_sum
from dtensor_5d.tensor.loss import Vocabulary, chunked_head_loss_sum, vocab_parallel_loss_sum

__all__ = ["PendingLogits", "loss_sum", "pending_logits", "tokens_at_a_time"]


def tokens_at_a_time(device: torch.device) -> int:
    """The chunk to use on a device: small enough to save memory, large enough to cost no time.

    Each chunk reads and writes the head's weight gradient once. Beside its three products that is nothing on a CPU
    (measured: 256 to 512 tokens are the fastest, as the logits stay in the cache); on an accelerator, with a hundred
    times the arithmetic and the memory not keeping up, it takes a few thousand tokens.
    """
    return 512 if device.type == "cpu" else 2048


@contextmanager
def pending_logits(head: nn.Module) -> Iterator[None]:
    """Inside, `head(hidden)` gives `PendingLogits`. Afterwards the head is what it was before.

    Example:
        >>> with pending_logits(model.lm_head):
        ...     logits = model(**inputs).logits
        >>> loss_sum(logits, shifted_labels, chunk=512).backward()
    """
    before = head.__dict__.get("forward")
    inner: Callable[..., Tensor] = head.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden.dim() != 3:
            return inner(hidden, *args, **kwargs)
        with torch.no_grad():
            like = inner(hidden[:, :0])
        return _promise(hidden, inner, (), like, [p for p in head.parameters() if p.requires_grad])

    head.forward = forward  # type: ignore[method-assign]  # of this instance, as long as this context
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before  # type: ignore[method-assign]


def loss_sum(logits: Tensor, shifted_labels: Tensor, chunk: int, *, vocab: Vocabulary | None = None) -> Tensor:
    """Cross entropy summed over supervised tokens, with at most the logits of `chunk` tokens at a time if they are
    pending. One backward only. Arguments and errors: as `chunked_head_loss_sum`."""
    if isinstance(logits, PendingLogits):
        if logits.is_pending:
            return chunked_head_loss_sum(logits.hidden, logits.computed, shifted_labels, chunk, vocab=vocab)
        logits = logits.whole()
    if vocab is None:
        return token_loss_sum(logits, shifted_labels)
    return vocab_parallel_loss_sum(logits, shifted_labels, vocab.group, vocab.start, vocab.end)


class PendingLogits(Tensor):
    """Logits [B, S, V] that are not computed yet; as a tensor in memory, the hidden states [B, S, M] they come from."""

    _head: Callable[[Tensor], Tensor]
    _operations: tuple[Callable[[Tensor], Tensor], ...]
    _like: Tensor  # logits of no tokens: V, dtype and device
    _whole: Tensor | None

    @property
    def is_pending(self) -> bool:
        """Whether the model has asked for nothing that takes whole logits."""
        return self._whole is None

    @property
    def hidden(self) -> Tensor:
        """The hidden states [B, S, M]; their gradient goes back through the hooks that this tensor has."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def computed(self, hidden: Tensor) -> Tensor:
        """The logits [B, t, V] of some hidden states [B, t, M]."""
        logits = self._head(hidden)
        for operation in self._operations:
            logits = operation(logits)
        return logits

    def whole(self) -> Tensor:
        """The logits [B, S, V], computed once."""
        if self._whole is None:
            self._whole = self.computed(self.hidden)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_GRAPH:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pending = [a for a in args if isinstance(a, PendingLogits)]
        if len(pending) == 1 and pending[0].is_pending:
            me = pending[0]
            if func in _OF_THE_SHAPE:
                return func(*(me._stand_in() if a is me else a for a in args), **kwargs)
            if func in _OF_EACH_LOGIT and all(_fits_every_chunk(a) for a in (*args, *kwargs.values()) if a is not me):
                return me._followed_by(func, args, kwargs)
        args, kwargs = tree_map(lambda a: a.whole() if isinstance(a, PendingLogits) else a, (args, kwargs))
        return func(*args, **kwargs)

    def _stand_in(self) -> Tensor:
        return self._like.new_empty(1).expand(*self.hidden.shape[:2], self._like.shape[-1])

    def _followed_by(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        def operation(logits: Tensor) -> Tensor:
            result: Tensor = func(*(logits if isinstance(a, PendingLogits) else a for a in args), **kwargs)
            return result

        with torch.no_grad():
            like = operation(self._like)
        return _promise(self.hidden, self._head, (*self._operations, operation), like, [])


def _promise(
    hidden: Tensor, head: Callable[[Tensor], Tensor], operations: Any, like: Tensor, parameters: list[nn.Parameter]
) -> Tensor:
    pending: PendingLogits = _Promise.apply(hidden, *parameters)
    pending._head, pending._operations, pending._like, pending._whole = head, operations, like, None
    return pending


class _Promise(Function):
    """Forward: the hidden states under another class; with a gradient to wait for if the head's parameters have one,
    even where the hidden states have none, or FSDP2 would not learn that backward comes. Backward: g."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        # Not `as_subclass`, which makes a view: FSDP2 warns of views.
        promise: Tensor = torch.Tensor._make_subclass(PendingLogits, hidden.detach())
        return promise

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *[None] * ctx.parameters


def _fits_every_chunk(argument: Any) -> bool:
    """Whether an operand means the same for the logits of some tokens as for all: one number, or one a column."""
    if not isinstance(argument, Tensor):
        return True
    return argument.dim() <= 1 and (argument.is_leaf or not argument.requires_grad)


def _named(*names: str) -> frozenset[Any]:
    return frozenset(f for name in names for owner in (torch, Tensor) if (f := getattr(owner, name, None)) is not None)


def _read(*names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name).__get__ for name in names)


_OF_EACH_LOGIT = _named(
    "mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__", "add", "__add__",
    "__radd__", "sub", "__sub__", "neg", "__neg__", "tanh", "clamp", "clip", "float", "double", "bfloat16", "half",
    "to", "type", "contiguous",
)  # fmt: skip
_OF_THE_SHAPE = _named("size", "dim", "numel", "is_floating_point") | _read("shape", "ndim", "dtype")
_OF_THE_GRAPH = _named("register_hook", "as_subclass") | _read("requires_grad", "grad_fn", "is_leaf", "_base", "device")
