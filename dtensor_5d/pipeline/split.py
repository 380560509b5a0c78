"""One Hugging Face model a rank, in which the layers of other ranks do nothing, and a view of it for every stage.

    model on rank 1 of 2, a V of 4 stages over 8 layers      0 1 [2 3] [4 5] 6 7        the others: `Passed`
    view of stage 1                                          0 > [2 3] |                > what was received goes in
    view of stage 2                                              0 1 2 > [4 5] |        | here the forward ends

The list of layers keeps its length and every module its name, so layer numbers, attention kinds, state-dict keys and
rules of other axes stay right. Only hidden states go from stage to stage; every stage runs the model's own forward for
masks and rotary tables. What that forward does before the first layer (scales, learned positions) is thrown away where
hidden states were received, and it ends behind the stage's last layer, so what follows runs on the last stage only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dtensor_5d.adapters.decoder import Decoder
from dtensor_5d.adapters.stand_in import Passed, StandIn, hidden_of, stand_in_for

__all__ = ["Cut", "StageView", "keep_stages", "view_of"]


@dataclass(frozen=True)
class Cut:
    """counts: layers of every stage. rank_of: the rank that holds a stage."""

    counts: tuple[int, ...]
    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.counts)

    def layers(self, stage: int) -> range:
        """The numbers of a stage's layers.

        Example:
            >>> Cut((2, 3), (0, 1)).layers(1)
            range(2, 5)
        """
        start = sum(self.counts[:stage])
        return range(start, start + self.counts[stage])

    def of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def owner(self, decoder: Decoder, name: str) -> int:
        """The stage that has a parameter or module of this name. A tied one has others; see `Decoder.ties`."""
        if name.startswith(decoder.layers + "."):
            number = int(name[len(decoder.layers) + 1 :].partition(".")[0])
            return next(s for s in range(self.stages) if number in self.layers(s))
        last = any(name == module or name.startswith(module + ".") for module in decoder.after)
        first = any(name == module or name.startswith(module + ".") for module in decoder.before)
        return self.stages - 1 if last and not first else 0


def keep_stages(model: nn.Module, decoder: Decoder, cut: Cut, rank: int) -> None:
    """Takes everything out of `model`, in place, that the stages of `rank` do not have."""
    mine = cut.of(rank)
    owned = {number for stage in mine for number in cut.layers(stage)}
    layers = model.get_submodule(decoder.layers)
    for number in range(decoder.n_layers):
        if number not in owned:
            name = str(number)
            setattr(layers, name, Passed(getattr(layers, name), decoder.tuple_layers))
    gone: list[str] = []
    for name in _outside(decoder):
        if cut.owner(decoder, name) not in mine and not any(name.startswith(outer + ".") for outer in gone):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, stand_in_for(model.get_submodule(name)))
            gone.append(name)


def _outside(decoder: Decoder) -> list[str]:
    """Owners of parameters outside the layers, those around others first."""
    return sorted({*decoder.before, *decoder.after, *decoder.other}, key=lambda name: name.count("."))


class _Enter(Passed):
    """The slot before a stage's first layer: puts in what was received."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.given(self.hidden)


class _Leave(Passed):
    """The slot behind a stage's last layer: ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Left(hidden_of(args, kwargs))


class _Left(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__("a stage has ended")
        self.hidden = hidden


class StageView:
    """One stage of a model: the model's own forward from what was received to what is sent on.

    `module` is a model like the one it was made of, with the same layer objects; what it is made of (flags, hooks,
    other modules) is looked up anew by `refresh`.
    """

    def __init__(self, number: int, module: nn.Module, clones: Sequence[_Clone], enter: _Enter | None) -> None:
        self.number, self.module = number, module
        self._clones, self._enter = clones, enter

    @property
    def is_first(self) -> bool:
        """Whether it takes ids and no hidden states."""
        return self._enter is None

    def refresh(self) -> None:
        """Takes over what has changed in the model (training or not, a config)."""
        for clone in self._clones:
            clone.refresh()

    def __call__(self, inputs: Mapping[str, Tensor], hidden: Tensor | None) -> Any:
        """The hidden states for the next stage; on the last one what the model returns."""
        with self.receiving(hidden):
            try:
                return self.module(**inputs, use_cache=False)
            except _Left as left:
                return left.hidden

    def receiving(self, hidden: Tensor | None) -> _Receiving:
        """Around forwards of `module`: they start from `hidden`."""
        return _Receiving(self._enter, hidden)


class _Receiving:
    def __init__(self, enter: _Enter | None, hidden: Tensor | None) -> None:
        assert (enter is None) == (hidden is None), "hidden states go to every stage but the first"
        self.enter, self.hidden = enter, hidden

    def __enter__(self) -> None:
        if self.enter is not None:
            self.enter.hidden = self.hidden

    def __exit__(self, *_: object) -> None:
        if self.enter is not None:
            self.enter.hidden = None


@dataclass(frozen=True)
class _Clone:
    """A module with another's state and some children of its own."""

    of: nn.Module
    module: nn.Module
    children: Mapping[str, nn.Module]

    def refresh(self) -> None:
        self.module.__dict__.update(self.of.__dict__)
        self.module.__dict__["_modules"] = {**self.of._modules, **self.children}


def view_of(model: nn.Module, decoder: Decoder, cut: Cut, stage: int) -> StageView:
    """A view of a model that `keep_stages` has left this stage. Made before hooks and wrappers change its classes."""
    own = cut.layers(stage)
    replaced: dict[str, nn.Module] = {}
    enter: _Enter | None = None
    for number in range(decoder.n_layers):
        name = decoder.layer(number)
        layer = model.get_submodule(name)
        if number == own.start - 1:
            replaced[name] = enter = _Enter(layer, decoder.tuple_layers)
        elif number == own.stop:
            replaced[name] = _Leave(layer, decoder.tuple_layers)
        elif number not in own:
            replaced[name] = layer if isinstance(layer, Passed) else Passed(layer, decoder.tuple_layers)
    present = dict(model.named_modules())
    for name in _outside(decoder):
        module = present.get(name)  # None: inside what another rank has
        if cut.owner(decoder, name) == stage or name not in decoder.before:
            continue  # what runs after the layers is not reached on other stages
        if (
            module is not None
            and not isinstance(module, StandIn)
            and not any(name.startswith(f"{n}.") for n in replaced)
        ):
            replaced[name] = stand_in_for(module)
    clones: list[_Clone] = []
    return StageView(stage, _cloned(model, "", replaced, clones), clones, enter)


def _cloned(module: nn.Module, name: str, replaced: Mapping[str, nn.Module], clones: list[_Clone]) -> nn.Module:
    """A clone of every module around what is replaced; all others are the same objects."""
    if name in replaced:
        return replaced[name]
    inside = f"{name}." if name else ""
    if not any(other.startswith(inside) for other in replaced):
        return module
    children = {
        leaf: _cloned(child, inside + leaf, replaced, clones)
        for leaf, child in module.named_children()
        if any(other == inside + leaf or other.startswith(f"{inside}{leaf}.") for other in replaced)
    }
    kind: Any = type(module)
    made = _Clone(module, kind.__new__(kind), children)
    clones.append(made)
    made.refresh()
    return made.module
