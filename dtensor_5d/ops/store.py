"""Weight gradients that wait: the store of products that the W of a schedule runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Place", "WeightGradients", "accumulate", "home", "is_watched"]

# Autograd nodes that only look at a part of a tensor in another shape. Anything else between a parameter and a
# product (a cast, a collective, a parametrization) has a backward of its own, so that gradient cannot wait.
_VIEWS = frozenset(
    f"{name}Backward{i}"
    for name in ("Alias", "AsStrided", "Permute", "Select", "Slice", "Split", "Squeeze", "T", "Transpose", "Unbind",
                 "Unsqueeze", "View")
    for i in range(3)
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a view lies in its contiguous parameter (elements, as in `Tensor.as_strided`)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same view of another tensor laid out as the parameter (its gradient)."""
        return tensor.as_strided(self.size, self.stride, self.offset)


def home(weight: Tensor) -> tuple[Tensor, Place | None] | None:
    """The parameter that a weight is, or is a plain view of, and its place in it; None if its gradient cannot wait.

    A gradient cannot wait if something must see it on its way: hooks on the parameter, or any operation between
    the parameter and the product that is more than a view.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(4, 3))
        >>> home(p) == (p, None), home(p[1])[1], home(p * 2)
        (True, Place(size=(3,), stride=(1,), offset=3), None)
    """
    if weight._backward_hooks:
        return None
    if weight.is_leaf:
        return None if is_watched(weight) else (weight, None)
    node: Any = weight.grad_fn
    views = 0
    while node is not None and node.name() in _VIEWS:
        node, views = node.next_functions[0][0], views + 1
    if node is not None and node.name() == "_ToTorchTensorBackward":
        return _home_of_shard(weight, node, views)
    base: Any = weight._base
    if base is None or not base.is_leaf or is_watched(base) or isinstance(base, DTensor) or not base.is_contiguous():
        return None
    only_views = getattr(node, "variable", None) is base
    if not only_views or weight.dtype != base.dtype or _overlaps(weight):
        return None
    return base, _place_in(base, weight)


def _home_of_shard(weight: Tensor, node: Any, views: int) -> tuple[Tensor, Place | None] | None:
    """The same of a rank's own shard, which `DTensor.to_local` gave: its gradient is that of the shard if it was asked
    for with the parameter's own placements."""
    parameter: Any = getattr(node.next_functions[0][0], "variable", None)
    if not isinstance(parameter, DTensor) or is_watched(parameter) or parameter._backward_hooks:
        return None
    shard = parameter._local_tensor
    if tuple(node.grad_placements or ()) != tuple(parameter.placements) or weight.dtype != shard.dtype:
        return None
    if not views:
        return parameter, None
    return (parameter, _place_in(shard, weight)) if shard.is_contiguous() and not _overlaps(weight) else None


def _place_in(base: Tensor, view: Tensor) -> Place:
    return Place(tuple(view.shape), view.stride(), view.storage_offset() - base.storage_offset())


def is_watched(parameter: Tensor) -> bool:
    """Whether hooks wait for the gradient of a parameter: then autograd itself must deliver it."""
    # torch has no public way to ask for the hooks of a tensor.
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _overlaps(view: Tensor) -> bool:
    reach = 0
    for stride, size in sorted((st, si) for st, si in zip(view.stride(), view.shape) if si > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def accumulate(parameter: Tensor, gradient: Tensor, place: Place | None = None) -> None:
    """Adds a gradient to `parameter.grad`, in place where there is one: what autograd's own accumulation does.

    With FSDP2 the parameter is the gathered one, whose `.grad` is what the unit's reduction reads; it may be resharded
    (its storage empty) at this moment. A DTensor gradient takes the parameter's placements, so a partial one is
    reduced here (contract C2). A plain gradient of a DTensor is that of the rank's own shard.
    """
    with torch.no_grad():
        if isinstance(parameter, DTensor) and not isinstance(gradient, DTensor):
            _accumulate_shard(parameter, gradient, place)
            return
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        gradient = gradient.to(parameter.dtype)
        if place is None:
            if parameter.grad is None:
                # A fresh gradient may be a transposed view; optimizers want the parameter's own layout.
                parameter.grad = gradient if isinstance(gradient, DTensor) else _laid_out_as(parameter, gradient)
            else:
                parameter.grad.add_(gradient)
        else:
            if parameter.grad is None:
                parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=gradient.device)
            place.of(parameter.grad).add_(gradient)


def _accumulate_shard(parameter: DTensor, gradient: Tensor, place: Place | None) -> None:
    shard = parameter._local_tensor
    gradient = gradient.to(shard.dtype)
    if parameter.grad is None:
        first = _laid_out_as(shard, gradient) if place is None else torch.zeros_like(shard)
        if place is not None:
            place.of(first).add_(gradient)
        parameter.grad = DTensor.from_local(
            first, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
        return
    assert isinstance(parameter.grad, DTensor)
    held = parameter.grad._local_tensor
    (held if place is None else place.of(held)).add_(gradient)


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_strided(
        gradient.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


@dataclass(frozen=True)
class _Product:
    make: Callable[..., Tensor]
    held: tuple[Tensor, ...]
    versions: tuple[int, ...]
    parameter: Tensor
    place: Place | None


class WeightGradients:
    """Products `dW = f(input, output gradient)` that a backward queued and that run later, by key (a micro-batch).

    A product holds its input, its output gradient and the parameter *object*, never the parameter's data: FSDP2 may
    reshard between F, I and W. Running a key adds to `.grad` in the order of the backward, so memory does not grow with
    the number of micro-batches and the sums equal autograd's bit for bit (of a weight used twice in one forward: up to
    rounding, since autograd adds the two first).

    Example:
        >>> store = WeightGradients()
        >>> x, w = torch.ones(2, 3, requires_grad=True), torch.nn.Parameter(torch.ones(4, 3))
        >>> with store.deferring(0):                       # I of micro-batch 0
        ...     linear(x, w, None, store).sum().backward()
        >>> x.grad is not None, w.grad
        (True, None)
        >>> store.run(0), w.grad.sum()                     # W of micro-batch 0
        (1, tensor(24.))

    `land(parameter, gradient, place)` says where a gradient goes; the default adds to `parameter.grad`.
    """

    def __init__(self, land: Callable[[Tensor, Tensor, Place | None], None] = accumulate) -> None:
        self._land = land
        self._queues: dict[Hashable, list[_Product]] = {}
        self._key: Hashable | None = None
        self._open = False

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        # A copied model keeps reporting to the store that its runtime holds.
        return self

    @property
    def is_deferring(self) -> bool:
        """Whether a backward that runs now queues its weight products."""
        return self._open

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """The keys that have not run yet, oldest first."""
        return tuple(self._queues)

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Backwards inside queue their weight products under `key`. One key may be opened again before it runs.

        Errors: RuntimeError inside another `deferring`. If the backward fails, what it had queued is dropped.
        """
        if self._open:
            raise RuntimeError(f"deferring({key!r}) inside deferring({self._key!r}): one backward at a time")
        before = len(self._queues.setdefault(key, []))
        self._open, self._key = True, key
        try:
            yield
        except BaseException:
            del self._queues[key][before:]
            if not before:
                del self._queues[key]
            raise
        finally:
            self._open, self._key = False, None

    def add(
        self, parameter: Tensor, place: Place | None, make: Callable[..., Tensor], *held: Tensor
    ) -> None:
        """Queues `make(*held)` as a gradient of `parameter`. Only inside `deferring`."""
        assert self._open, "a product was queued outside `deferring`"
        versions = tuple(t._version for t in held)
        self._queues[self._key].append(_Product(make, held, versions, parameter, place))

    def run(self, key: Hashable) -> int:
        """Runs the products of `key` and returns how many there were; each is released before the next starts.

        Errors: KeyError if nothing was deferred under `key`; RuntimeError if an input was changed in place.
        """
        if self._open and key == self._key:
            raise RuntimeError(f"run({key!r}) while its backward is still queueing")
        if key not in self._queues:
            raise KeyError(f"no weight gradients wait under {key!r}; waiting: {list(self._queues)}")
        queue = self._queues.pop(key)
        queue.reverse()
        count = len(queue)
        while queue:
            product = queue.pop()
            if tuple(t._version for t in product.held) != product.versions:
                raise RuntimeError(
                    "a tensor needed for a waiting weight gradient was changed in place "
                    f"(parameter of shape {tuple(product.parameter.shape)}, key {key!r})"
                )
            with torch.no_grad():
                gradient = product.make(*product.held)
                self._land(product.parameter, gradient, product.place)
            del product, gradient
        return count

    def held_bytes(self) -> int:
        """Bytes that waiting products keep alive (each storage once): the weight-gradient stash of the simulator."""
        storages: dict[int, int] = {}
        for queue in self._queues.values():
            for product in queue:
                for tensor in product.held:
                    local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor
                    storage = local.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def clear(self) -> None:
        """Drops everything that waits (after a failed window)."""
        self._queues.clear()
