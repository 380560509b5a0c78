"""Between a module and its caller: inputs, parameters and outputs on their way, the module's own forward untouched.

    caller -> before(inputs) -> [forward with parameters as `reads` give them] -> after(output) -> caller
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["Interposed", "interposed", "map_hidden", "map_output"]

_NOTE = "_dtensor_5d_interposed"


class Interposed:
    """What stands between; several styles can add to one module. Set as the module's forward on the instance.

    reads: parameter name -> what forward sees in its place. compute: in place of the module's own forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.compute: Callable[..., Any] = module.forward
        self.reads: dict[str, Callable[[Tensor], Tensor]] = {}
        self.before: list[Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self.after: list[Callable[[Any], Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for change in self.before:
            args, kwargs = change(args, kwargs)
        held: dict[str, Any] = self._module._parameters
        stored = {name: held[name] for name in self.reads}
        try:
            for name, read in self.reads.items():
                if stored[name] is not None:
                    held[name] = read(stored[name])
            out = self.compute(*args, **kwargs)
        finally:
            held.update(stored)
        for change_output in self.after:
            out = change_output(out)
        return out


def interposed(module: nn.Module) -> Interposed:
    """What stands between this module and its caller, made on first use."""
    if _NOTE not in module.__dict__:
        module.__dict__[_NOTE] = Interposed(module)
        module.forward = module.__dict__[_NOTE]
    made: Interposed = module.__dict__[_NOTE]
    return made


def map_hidden(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """For `before`: changes the hidden states, wherever a block takes them (first argument, or by name)."""

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
        return (change(args[0]), *args[1:]), kwargs

    return before


def map_output(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """For `after`: changes the output, or the first element of several."""

    def after(out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return after
