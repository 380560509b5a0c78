"""In which order the modules of a model run, found on a copy without weights whose decoder layers do nothing.

The copy shares no tensor with the model: every parameter and buffer outside the layers becomes an empty one on the
meta device, and every layer a stand-in that hands its input on. So the cost does not grow with the model's size.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_5d.errors import PlanError, Violation

__all__ = ["Order", "trace_order"]

_TOKENS = 8


@dataclass(frozen=True)
class Order:
    """Who ran when. All names are module names; `before`, `between` and `after` hold modules that own a parameter.

    base: the module whose forward runs the layers. before: what ran before the first layer. between: after the first
    and before the last one. after: after the last one. visits: the numbers of the layers in the order they ran.
    tuples: whether the model takes element 0 of what a layer returns. hidden: the shape of what a layer takes, behind
    [B, S].
    """

    base: str
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    visits: tuple[int, ...]
    tuples: bool
    hidden: tuple[int, ...]


def trace_order(model: nn.Module, layers: str) -> Order:
    """Run a weightless copy of `model` once and say in which order its modules ran.

    `layers` is the name of the `ModuleList` of decoder layers. The model itself is neither run nor changed.
    Errors: `PlanError` where the copy does not run, or runs without its layers.

    Example:
        >>> trace_order(llama, "model.layers").after
        ('model.norm', 'lm_head')
    """
    # One layer alone cannot show what the model does with its result, so there both are tried, the stricter one first.
    attempts = (True, False) if len(list(model.get_submodule(layers).children())) == 1 else (False,)
    for tuples in attempts:
        try:
            log = _run(model, layers, tuples)
            break
        except Exception as error:
            if tuples is attempts[-1]:
                raise PlanError(
                    Violation(
                        f"{type(model).__name__} did not run on {_TOKENS} tokens without weights "
                        f"({type(error).__name__}: {error})",
                        "its modules must run from input_ids alone on the meta device",
                        "give the plain Hugging Face model, before hooks or wrappers replace its forward",
                    )
                ) from error
    if log.base is None:
        raise PlanError(
            Violation(
                f"{type(model).__name__} ran without its layers {layers}",
                "every decoder layer must run in the model's forward",
                "give the causal language model that runs them",
            )
        )
    return log.order()


class _Layer(nn.Module):
    """Stands for a decoder layer: hands its hidden states on; attributes that the model reads come from the layer."""

    def __init__(self, number: int, layer: nn.Module, log: _Log) -> None:
        super().__init__()
        # Not as a submodule: the copy must not contain the weights.
        self.__dict__.update(number=number, layer=layer, log=log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.log.visit(self.number, args[0] if args else kwargs["hidden_states"])
        return (hidden,) if self.log.tuples else hidden


class _Log:
    """Collects what runs: the stack of modules that are open, and who started when."""

    def __init__(self, tuples: bool) -> None:
        self.tuples = tuples
        self.stack: list[str] = []
        self.base: str | None = None
        self.events: list[str | int] = []
        self.dims = 0
        self.hidden: tuple[int, ...] = ()

    def visit(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        self.events.append(number)
        if self.base is None:
            self.base, self.dims = self.stack[-1], hidden.dim()
            self.hidden = tuple(hidden.shape[2:])
        elif hidden.dim() < self.dims:
            # Element 0 was taken of the tensor that the layer before handed on: the model expects a tuple.
            self.tuples = True
            hidden = hidden.unsqueeze(0)
        return hidden

    def order(self) -> Order:
        assert self.base is not None
        visits = [i for i, event in enumerate(self.events) if isinstance(event, int)]

        def names(start: int, stop: int) -> tuple[str, ...]:
            return tuple(dict.fromkeys(event for event in self.events[start:stop] if isinstance(event, str)))

        return Order(
            base=self.base,
            before=names(0, visits[0]),
            between=names(visits[0], visits[-1]),
            after=names(visits[-1], len(self.events)),
            visits=tuple(event for event in self.events if isinstance(event, int)),
            tuples=self.tuples,
            hidden=self.hidden,
        )


class _AnswerZero(TorchDispatchMode):
    """Code that asks a meta tensor for its value (is there padding? is the text long?) gets 0 or False and goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._local_scalar_dense and args[0].is_meta:
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, layers: str, tuples: bool) -> _Log:
    log = _Log(tuples)
    copied = _weightless(model, layers, log).eval()
    for name, module in copied.named_modules():
        if not isinstance(module, _Layer):
            _watch(module, name, log)
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    # Without layers there are no router logits for the auxiliary loss that a config can ask for.
    asked = getattr(model.config, "output_router_logits", False)
    more = {"output_router_logits": False} if asked else {}
    # The default device too: what the model makes without naming a device must meet the rest on meta.
    with torch.no_grad(), _AnswerZero(), torch.device("meta"):
        copied(input_ids=tokens, use_cache=False, **more)
    return log


def _watch(module: nn.Module, name: str, log: _Log) -> None:
    owns = any(parameter is not None for parameter in module._parameters.values())

    def enter(_module: nn.Module, _args: Any) -> None:
        log.stack.append(name)
        if owns:
            log.events.append(name)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        log.stack.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _weightless(model: nn.Module, layers: str, log: _Log) -> nn.Module:
    # deepcopy takes from the memo what stands there already. It finds the old objects by id; they stay alive with
    # the model. Config, bound methods and references between modules are copied consistently.
    memo: dict[int, Any] = {}
    for number, layer in enumerate(model.get_submodule(layers).children()):
        memo[id(layer)] = _Layer(number, layer, log)
    for name, module in model.named_modules():
        if name.startswith(layers + "."):
            continue
        # Hooks of the user must not fire.
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            memo[id(hooks)] = OrderedDict()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
