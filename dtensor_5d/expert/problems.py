"""What is wrong with a routing: gathered in a window of a `Run`, so that all ranks can end together, else raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Problems"]


class Problems:
    """Where dispatches put a wrong index or weight.

    Ranks of other expert-parallel groups know nothing of it and would wait. So a `Run` gathers what comes up in its
    windows and ends all ranks together; a forward that the user runs has no such end, and the error comes at once.
    """

    def __init__(self) -> None:
        self._waiting = False
        self._first: Exception | None = None

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Around the forwards and backwards of a window: the first problem waits for `taken`."""
        self._first, self._waiting = None, True
        try:
            yield
        finally:
            self._waiting = False

    def add(self, error: Exception) -> None:
        """Errors: `error` itself, outside of a window."""
        if not self._waiting:
            raise error
        self._first = self._first or error  # what follows comes from the first one

    def taken(self) -> Exception | None:
        """The first problem of the last window, once; or None."""
        first, self._first = self._first, None
        return first
