"""Random streams of dropout: distinct where the data is cut, equal in every run with the same seed (contract C11)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["RandomStreams", "SavedStream", "draw_seed", "is_random", "stream_seed", "switch_stream"]


def stream_seed(*parts: int | str) -> int:
    """A 63-bit seed from numbers and names, the same in every process (Python's own hash of a string is not)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def is_random(model: nn.Module) -> bool:
    """Whether the model draws random numbers in training: a dropout module or a dropout or jitter in its config."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return True
    config = getattr(model, "config", None)
    settings = config.to_dict() if config is not None else {}
    return any(
        isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        for name, value in settings.items()
        if any(word in name for word in ("dropout", "pdrop", "jitter", "layerdrop"))
    )


class RandomStreams:
    """One stream per (seed, window, micro-batch, data rank, stage); the process' own stream is left where it was.

    seed: the same on all ranks, whatever seed each process has. A model that draws nothing is not touched.
    """

    def __init__(self, model: nn.Module, data_rank: int, device: torch.device, *, seed: int) -> None:
        self._draws = is_random(model)
        self._seed = seed
        self._rank = data_rank
        self._devices = [device] if device.type != "cpu" else []

    @contextmanager
    def of(self, window: int, micro_batch: int, stage: int = 0) -> Iterator[None]:
        if not self._draws:
            yield
            return
        kind = self._devices[0].type if self._devices else "cuda"
        with torch.random.fork_rng(devices=self._devices, device_type=kind):
            torch.manual_seed(stream_seed("dropout", self._seed, window, micro_batch, self._rank, stage))
            yield


@dataclass(frozen=True)
class SavedStream:
    """Where the default generator of a device stood."""

    generator: torch.Generator
    state: torch.Tensor

    def restore(self) -> None:
        self.generator.set_state(self.state)


def draw_seed(device: torch.device) -> int:
    """The next number of the default stream, as a seed: the same on ranks whose streams are the same."""
    return int(torch.randint(1 << 62, (), generator=_default_generator(device), device=device))


def switch_stream(device: torch.device, *parts: int | str) -> SavedStream:
    """From here to `restore` the default generator draws the numbers that belong to `parts`.

    With a seed that was drawn from the stream itself, a recomputed layer that finds the stream where it was draws the
    same numbers again.
    """
    generator = _default_generator(device)
    saved = SavedStream(generator, generator.get_state())
    generator.manual_seed(stream_seed(*parts))
    return saved


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
