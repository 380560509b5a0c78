"""Shared experts run while tokens travel: the block's own call of them, made earlier.

    the model's block                                  what happens
    experts(tokens, indices, weights)                  tokens leave | shared(x) | tokens are there | experts | ...
    ... + shared(x)                                    what shared(x) gave

The call is made by the experts' forward (`SharedExperts.run`) on the tensor that the block was given, hooks and all.
When the block makes it later, it gets what was made: only for that very tensor, unchanged, and only once; any other
call is computed as it is. Nothing is kept from one forward of the block to the next, whether it ends well or not.

It needs a block that calls its shared experts after its experts, and on its own input: `families/facts.py` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Around", "SharedExperts"]

# What nn.Module's call looks up on the instance and runs: hooks and forward.
_CALL = "_call_impl"


class SharedExperts:
    """The shared experts of one block."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._input: Tensor | None = None

    @contextmanager
    def expected(self, x: Tensor) -> Iterator[None]:
        """Around one forward of the block. x: what it will call its shared experts with."""
        self._input = x
        try:
            yield
        finally:
            self._input = None
            self.module.__dict__.pop(_CALL, None)

    def run(self) -> None:
        """Makes the call now, once for each forward of the block."""
        x, self._input = self._input, None
        if x is not None and not x.is_inference():  # it does not tell whether it was changed
            out = self.module(x)
            self.module.__dict__[_CALL] = _Made(self.module, x, out)


class _Made:
    """In place of the module's next call: what the earlier one made of the same tensor."""

    def __init__(self, module: nn.Module, x: Tensor, out: Any) -> None:
        self.module, self.x, self.out = module, x, out
        self.version = x._version

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module.__dict__.pop(_CALL, None)
        same = len(args) == 1 and not kwargs and args[0] is self.x and self.x._version == self.version
        return self.out if same else self.module(*args, **kwargs)


class Around:
    """The forward of a block, unchanged, around which its input is expected by its shared experts."""

    def __init__(self, forward: Callable[..., Any], shared: SharedExperts) -> None:
        self.forward, self.shared = forward, shared

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with self.shared.expected(hidden_states):
            return self.forward(hidden_states, *args, **kwargs)
