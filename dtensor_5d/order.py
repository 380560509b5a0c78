"""The sequence order: which global positions each context-parallel rank holds, and how to put them back.

An order is ranges, not lists: a million tokens on 64 ranks are 128 ranges. S = 16 on 2 ranks, as each kind cuts it
(rank 0 is `#`, rank 1 is `.`):

    none      ########........      contiguous; the last rank has the most causal work
    zigzag    ####........####      block r and block 2 ranks - 1 - r: exactly the same causal work everywhere
    striped   #.#.#.#.#.#.#.#.      every ranks-th token: the same work within one row of the mask
    document  ##....##|#..#|#..#    zig-zag inside each document (here 8 + 4 + 4 tokens): balanced on packed rows

Whatever the kind, a rank holds its positions in ascending order, so causal attention of a rank with itself is the
lower triangle. Nothing may rely on more than that: the ring masks by positions and documents (contract C3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import TypeVar

from dtensor_5d.errors import PlanError, Violation

__all__ = ["KINDS", "PADDING", "Document", "Order", "documents_from_ids", "documents_from_lengths", "length_multiple",
           "make_order"]  # fmt: skip

PADDING = -1
"""The document id of padding: it attends to nothing and counts as no work."""

T = TypeVar("T")
Pieces = tuple[range, ...]


@dataclass(frozen=True)
class Document:
    """One run of tokens in a row, `[start, stop)`, that attend only to one another."""

    start: int
    stop: int
    id: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_padding(self) -> bool:
        return self.id == PADDING


@dataclass(frozen=True)
class Order:
    """A permutation of the positions of one row, as ranges per rank. Made by `make_order`.

    Example: 16 tokens on 2 ranks.
        >>> order = make_order("zigzag", 16, 2)
        >>> order.pieces
        ((range(0, 4), range(12, 16)), (range(4, 8), range(8, 12)))
        >>> order.pairs()
        (68, 68)

    Units: positions are indices into the (padded) row; `pairs` counts (query, key) pairs, one head, one layer.
    """

    kind: str
    length: int
    ranks: int
    pieces: tuple[Pieces, ...]
    documents: tuple[Document, ...]

    @property
    def local_length(self) -> int:
        """Tokens that each rank holds."""
        return self.length // self.ranks

    def positions(self, rank: int) -> Iterator[int]:
        """Global positions of the tokens of `rank`, in its local order."""
        return chain.from_iterable(self.pieces[rank])

    def permutation(self) -> list[int]:
        """Place in the order -> global position; rank r owns places `r * local_length` to `(r + 1) * local_length`."""
        return list(chain.from_iterable(chain.from_iterable(self.pieces)))

    def inverse(self) -> list[int]:
        """Global position -> place in the order."""
        places = [0] * self.length
        place = 0
        for piece in chain.from_iterable(self.pieces):
            places[piece.start : piece.stop : piece.step] = range(place, place + len(piece))
            place += len(piece)
        return places

    def cut(self, values: Sequence[T], rank: int) -> list[T]:
        """The values of a row (ids, labels, document ids, ...) that belong to `rank`."""
        self._require_length("a row", len(values), self.length)
        return list(chain.from_iterable(values[p.start : p.stop : p.step] for p in self.pieces[rank]))

    def join(self, parts: Sequence[Sequence[T]]) -> list[T]:
        """The row whose cuts are `parts`, one for each rank: the inverse of `cut`."""
        self._require_length("the list of parts", len(parts), self.ranks)
        row: list[T] = [value for part in parts for value in part]
        self._require_length("the row of all parts", len(row), self.length)
        return [row[place] for place in self.inverse()]

    def document_ids(self, rank: int) -> list[int]:
        """Document id of each token of `rank` (`PADDING` where there is no document)."""
        return [self.documents[d].id for part, d in self._parts(rank) for _ in part]

    def pairs(self, window: int | None = None) -> tuple[int, ...]:
        """Attended (query, key) pairs per rank, counted where the query lives: causal, inside a document.

        `window`: a query sees at most that many tokens, itself included (Hugging Face's `sliding_window`).
        """
        if window is not None and window < 1:
            raise PlanError(Violation(f"window={window}", "a window has at least 1 token", "give None for no window"))
        return tuple(sum(self._pairs(part, d, window) for part, d in self._parts(r)) for r in range(self.ranks))

    def _parts(self, rank: int) -> Iterator[tuple[range, int]]:
        """The ranges of `rank`, split where a document ends, each with the index of its document."""
        starts = [d.start for d in self.documents]
        for piece in self.pieces[rank]:
            rest = piece
            while rest:
                d = bisect_right(starts, rest.start) - 1
                inside = min(len(rest), -(-(self.documents[d].stop - rest.start) // rest.step))
                yield rest[:inside], d
                rest = rest[inside:]

    def _pairs(self, part: range, document: int, window: int | None) -> int:
        # Query number t of its document sees min(t + 1, window) keys: an arithmetic series, then a constant.
        if self.documents[document].is_padding:
            return 0
        first = part.start - self.documents[document].start + 1
        growing = len(part) if window is None else max(0, min(len(part), (window - first) // part.step + 1))
        series = growing * first + part.step * growing * (growing - 1) // 2
        return series if window is None else series + (len(part) - growing) * window

    def _require_length(self, what: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise PlanError(Violation(f"{what} of {found}", f"this order needs {wanted}", f"give {wanted}"))


def length_multiple(kind: str, ranks: int) -> int:
    """What a sequence length must be a multiple of: `2 ranks` for zigzag, `ranks` for the others.

    Example:
        >>> length_multiple("zigzag", 4), length_multiple("document", 4)
        (8, 4)
    """
    if kind not in KINDS:
        raise PlanError(Violation(f"order {kind!r}", f"orders are {', '.join(KINDS)}", "choose one of these"))
    if ranks < 1:
        raise PlanError(Violation(f"an order for {ranks} ranks", "there must be at least 1 rank", "give the degree cp"))
    return 2 * ranks if kind == "zigzag" else ranks


def make_order(kind: str, length: int, ranks: int, documents: Sequence[Document] | None = None) -> Order:
    """The order of `kind` for a row of `length` tokens on `ranks` ranks; without `documents` the row is one document.

    Example: two documents of 5 and 3 tokens; token 0 is what does not fill the 4 blocks of the first one.
        >>> order = make_order("document", 8, 2, documents_from_lengths([5, 3]))
        >>> [list(order.positions(r)) for r in range(2)], order.pairs()
        ([[1, 4, 5, 7], [0, 2, 3, 6]], (11, 10))

    Errors: `PlanError` for an unknown kind, a length that is no multiple of `length_multiple(kind, ranks)`, and
    documents that do not fill the row.
    """
    multiple = length_multiple(kind, ranks)
    if length < 1 or length % multiple:
        padded = max(1, -(-length // multiple)) * multiple
        why = "2 x ranks" if kind == "zigzag" else "the ranks"
        raise PlanError(
            Violation(
                f"a sequence of {length} tokens in {kind} order on {ranks} ranks",
                f"the length must be a positive multiple of {why} = {multiple}",
                f"pad to {padded} tokens, or use fewer ranks",
            )
        )
    runs = (Document(0, length, 0),) if documents is None else tuple(documents)
    _require_full(runs, length)
    return Order(kind, length, ranks, _CUTS[kind](length, ranks, runs), runs)


def documents_from_ids(ids: Iterable[int]) -> tuple[Document, ...]:
    """The documents of a row, from one document id per token (`PADDING` for padding, at any place).

    Example:
        >>> documents_from_ids([0, 0, 7, -1])
        (Document(start=0, stop=2, id=0), Document(start=2, stop=3, id=7), Document(start=3, stop=4, id=-1))

    Errors: `PlanError` for an id that comes back after another one: its two runs would be one document.
    """
    found: list[Document] = []
    seen: dict[int, int] = {}
    start = 0
    for name, run in groupby(ids):
        stop = start + sum(1 for _ in run)
        if name in seen and name != PADDING:
            raise PlanError(
                Violation(
                    f"document id {name} at token {start}, which already ended at token {seen[name]}",
                    "a document must be 1 run of tokens",
                    "give each document of a row its own id",
                )
            )
        seen[name] = stop
        found.append(Document(start, stop, name))
        start = stop
    return tuple(found)


def documents_from_lengths(lengths: Sequence[int]) -> tuple[Document, ...]:
    """Documents with the ids 0, 1, 2, ... from their lengths in tokens."""
    if any(n < 1 for n in lengths):
        raise PlanError(Violation(f"document lengths {list(lengths)}", "each must be >= 1", "leave empty ones out"))
    stops = list(accumulate(lengths))
    return tuple(Document(stop - n, stop, i) for i, (n, stop) in enumerate(zip(lengths, stops)))


def _require_full(runs: tuple[Document, ...], length: int) -> None:
    at = 0
    for run in runs:
        if run.start != at or run.stop <= run.start:
            break
        at = run.stop
    else:
        if at == length:
            return
    raise PlanError(
        Violation(
            f"documents that cover tokens 0 to {at} of a row of {length}",
            f"documents must follow one another and fill all {length} tokens",
            f"add the rest as padding: Document({at}, {length}, PADDING)" if at < length else "shorten the documents",
        )
    )


def _contiguous(length: int, ranks: int, runs: tuple[Document, ...]) -> tuple[Pieces, ...]:
    n = length // ranks
    return tuple((range(r * n, (r + 1) * n),) for r in range(ranks))


def _striped(length: int, ranks: int, runs: tuple[Document, ...]) -> tuple[Pieces, ...]:
    return tuple((range(r, length, ranks),) for r in range(ranks))


def _zigzag(length: int, ranks: int, runs: tuple[Document, ...]) -> tuple[Pieces, ...]:
    return tuple(_zigzag_blocks(0, length // (2 * ranks), ranks, r) for r in range(ranks))


def _zigzag_blocks(start: int, block: int, ranks: int, rank: int) -> Pieces:
    first, last = start + rank * block, start + (2 * ranks - 1 - rank) * block
    return range(first, first + block), range(last, last + block)


def _per_document(length: int, ranks: int, runs: tuple[Document, ...]) -> tuple[Pieces, ...]:
    """Zig-zag inside each document, for documents of any length.

    The first `length % (2 ranks)` tokens of a document (they see the fewest keys) fill no block; these heads, of all
    documents together, are dealt out heaviest first in a snake. So ranks differ by less than 2 ranks pairs in all:
    the blocks are exactly even, and the gaps between the cards of one snake cannot overlap.
    """
    held: list[list[range]] = [[] for _ in range(ranks)]
    heads: list[tuple[int, int]] = []
    for run in runs:
        head = run.length % (2 * ranks)
        heads += [(0 if run.is_padding else t + 1, run.start + t) for t in range(head)]
        block = run.length // (2 * ranks)
        if block:
            for rank in range(ranks):
                held[rank] += _zigzag_blocks(run.start + head, block, ranks, rank)
    heads.sort(key=lambda work_and_place: (-work_and_place[0], work_and_place[1]))
    for i, (_, place) in enumerate(heads):
        turn, card = divmod(i, ranks)
        held[ranks - 1 - card if turn % 2 else card].append(range(place, place + 1))
    return tuple(_merged(sorted(pieces, key=lambda p: p.start)) for pieces in held)


def _merged(pieces: Iterable[range]) -> Pieces:
    """Neighbouring ranges made one."""
    out: list[range] = []
    for piece in pieces:
        if out and out[-1].stop == piece.start:
            out[-1] = range(out[-1].start, piece.stop)
        else:
            out.append(piece)
    return tuple(out)


_CUTS: dict[str, Callable[[int, int, tuple[Document, ...]], tuple[Pieces, ...]]] = {
    "none": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
    "document": _per_document,
}
KINDS = tuple(_CUTS)
