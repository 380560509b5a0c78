"""F, I and W of a micro-batch on one stage.

    F  the stage's forward; its graph is kept
    I  backward of that graph: the gradient of what was received. Products queue their weight gradient (`ops`)
    W  the queued products, in the order of backward

What waits for W: every product of a weight (linear layers, embeddings, fused experts). What does not, and comes in I:
biases, norms, convolutions, the head of a long window (whose gradient is made with the loss), whatever has a hook.
A recomputed layer runs its second forward in I, once. Gradients add up in place, so memory does not grow with the
number of micro-batches: what is alive is the graph from F to I and inputs and output gradients from I to W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_5d.ops import WeightGradients

__all__ = ["Forward", "Stage"]

Forward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, what was received) -> what is sent on, or a 0-dim loss on the last stage."""


@dataclass
class _Graph:
    received: Tensor | None
    out: Tensor


class Stage:
    """Runs one stage, micro-batch by micro-batch, in any order that its schedule asks for.

    receives_gradient: whether anything before this stage is trained, so that somebody waits for its input gradient.
    """

    def __init__(self, number: int, forward: Forward, store: WeightGradients, *, sends_gradient: bool) -> None:
        self.number, self._forward, self._store, self._sends_gradient = number, forward, store, sends_gradient
        self._graphs: dict[int, _Graph] = {}

    def forward(self, micro: int, received: Tensor | None) -> Tensor:
        """F: what is sent on (on the last stage the loss), without its graph."""
        if received is not None and torch.is_grad_enabled():
            received = received.detach().requires_grad_(self._sends_gradient)
        out = self._forward(micro, received)
        if torch.is_grad_enabled():
            self._graphs[micro] = _Graph(received, out)
        return out.detach()

    def backward_input(self, micro: int, gradient: Tensor | None, beside: Tensor | None = None) -> Tensor | None:
        """I: the gradient of what was received; None on the first stage, or where nothing before is trained.

        beside: a 0-dim loss of the same graph that does not go through the output (the routers' own).
        """
        graph = self._graphs.pop(micro)
        roots: list[tuple[Tensor, Tensor | None]] = []
        # Hidden states without a gradient: nobody trains what made them, though inputs may have been asked for one
        # (enable_input_require_grads). A 0-dim loss needs none.
        if graph.out.requires_grad and (gradient is not None or graph.out.dim() == 0):
            roots.append((graph.out, gradient))
        if beside is not None and beside.requires_grad:
            roots.append((beside, None))
        if roots:
            with self._store.deferring((self.number, micro)):
                torch.autograd.backward(*zip(*roots))
        if graph.received is None or not self._sends_gradient:
            return None
        found = graph.received.grad
        return torch.zeros_like(graph.received) if found is None else found

    def backward_weight(self, micro: int) -> None:
        """W."""
        key = (self.number, micro)
        if key in self._store.waiting:
            self._store.run(key)

    def clear(self) -> None:
        """Drops what a failed window has left."""
        self._graphs.clear()
