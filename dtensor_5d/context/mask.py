"""Which keys a query sees, as a short list of simple tiles: found from positions and documents, never from an order.

A *share* is what one member of the ring holds of one row. It falls into *stretches*: the tokens of one document (or of
one chunk of it, llama4), in ascending position. Tokens see only their own stretch of the row, so a tile is never cut
by a document. Padding is in no stretch, hence in no tile: whatever it holds, NaN too, is not read. A stretch is a few
*runs*, ranges of positions: two runs with the same step meet in a band of the mask,

    j in [i + low, i + high]      i, j: token numbers within the tile

which is all three kinds of tile. FULL: no bounds. CAUSAL: high = 0, no low, square. BAND: a sliding window.
S = 8 on 2 ranks in zig-zag order, causal; rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5:

                keys of rank 0           keys of rank 1
                 0 1 6 7                  2 3 4 5
    queries  0   \\ . . .                  . . . .
    of       1   # \\ . .    one CAUSAL    . . . .   one FULL tile, rows 6 7; rank 1 needs only
    rank 0   6   # # \\ .    tile          # # # #   the columns 0 1 of rank 0, one FULL tile
             7   # # # \\                  # # # #

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.order import Order

__all__ = ["Band", "Mask", "Share", "Stretch", "Tile", "sees", "share_of", "tiles_between"]


@dataclass(frozen=True)
class Mask:
    """What a layer lets a query see, inside its document.

    causal: keys up to the query's own position; else all. window: at most that many of these, itself included
    (Hugging Face's `sliding_window`: j > i - window). chunk: only keys of the same chunk of that many tokens, counted
    from the first token of the document (llama4; the same as Hugging Face's rule for one document a row, padded left
    or right. With packed rows Hugging Face counts from the start of the row; here a packed document sees what it
    would see alone).

    Errors: `PlanError` for a window or chunk below 1, and for a window that is not causal.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        bad = [
            Violation(f"{name}={value}", "must be at least 1 token", f"give None for no {name}")
            for name, value in (("window", self.window), ("chunk", self.chunk))
            if value is not None and value < 1
        ]
        if self.window is not None and not self.causal:
            bad.append(
                Violation(f"window={self.window} with causal=False", "a sliding window looks back only",
                          "set causal=True, or window=None")
            )  # fmt: skip
        if bad:
            raise PlanError(bad)


@dataclass(frozen=True)
class Band:
    """The keys that a tile's queries see: query i sees key j if i + low <= j <= i + high (None: no bound)."""

    low: int | None = None
    high: int | None = None

    @property
    def is_full(self) -> bool:
        return self.low is None and self.high is None

    @property
    def is_causal(self) -> bool:
        return self.low is None and self.high == 0


@dataclass(frozen=True)
class Tile:
    """One call of block attention: rows of the batch, a slice of the local queries and one of the block's keys."""

    rows: slice
    q: slice
    k: slice
    band: Band = Band()


@dataclass(frozen=True)
class Stretch:
    """Tokens `[start, stop)` of a share that belong to one document or chunk (`key`), at the positions of `runs`."""

    key: tuple[int, int]
    start: int
    runs: tuple[range, ...]

    @property
    def stop(self) -> int:
        return self.start + sum(map(len, self.runs))

    @property
    def first(self) -> int:
        return self.runs[0][0]

    @property
    def last(self) -> int:
        return self.runs[-1][-1]


Share = tuple[Stretch, ...]


def share_of(order: Order, ranks: Sequence[int], chunk: int | None = None) -> Share:
    """What `ranks` hold together of a row, in ascending position: their tokens that are not padding, as stretches.

    Example: rank 0 of 2 holds 0 1 6 7 of two documents of 3 and 5 tokens.
        >>> order = make_order("zigzag", 8, 2, documents_from_lengths([3, 5]))
        >>> share_of(order, [0])
        (Stretch(key=(0, 0), start=0, runs=(range(0, 2),)), Stretch(key=(1, 0), start=2, runs=(range(6, 8),)))
    """
    found: list[Stretch] = []
    at, document = 0, 0
    for piece in held(order, ranks):
        rest = piece
        while rest:
            while order.documents[document].stop <= rest.start:
                document += 1
            owner = order.documents[document]
            number, stop = 0, owner.stop
            if chunk is not None:
                number = (rest.start - owner.start) // chunk
                stop = min(stop, owner.start + (number + 1) * chunk)
            part = rest[: -(-(stop - rest.start) // rest.step)]
            rest = rest[len(part) :]
            if not owner.is_padding:
                key = (document, number)
                if found and found[-1].key == key:
                    found[-1] = Stretch(key, found[-1].start, (*found[-1].runs, part))
                else:
                    found.append(Stretch(key, at, (part,)))
            at += len(part)
    return tuple(found)


def held(order: Order, ranks: Sequence[int]) -> tuple[range, ...]:
    """The positions that `ranks` hold together, ascending, as few ranges."""
    if len(ranks) == 1:
        return order.pieces[ranks[0]]
    if len(ranks) == order.ranks:
        return (range(order.length),)
    pieces = sorted((p for r in ranks for p in order.pieces[r]), key=lambda p: p.start)
    if any(a[-1] > b[0] for a, b in pairwise(pieces)):
        stripes = _interleaved(pieces)
        return (stripes,) if stripes is not None else tuple(_joined(range(p, p + 1) for p in merge(*pieces)))
    return tuple(_joined(pieces))


def _interleaved(pieces: Sequence[range]) -> range | None:
    """Evenly spaced stripes as the finer stripe that they are together."""
    step, rest = divmod(pieces[0].step, len(pieces))
    even = all(p.step == pieces[0].step and p[0] == pieces[0][0] + i * step for i, p in enumerate(pieces))
    same = len({len(p) for p in pieces}) == 1
    return range(pieces[0][0], pieces[-1][-1] + 1, step) if even and same and not rest else None


def _joined(pieces: Iterable[range]) -> Iterator[range]:
    """Ascending ranges, each as long as it can be."""
    whole: range | None = None
    for piece in pieces:
        if whole is None:
            whole = piece
            continue
        step = piece[0] - whole[-1]
        if (len(whole) == 1 or whole.step == step) and (len(piece) == 1 or piece.step == step):
            whole = range(whole[0], piece[-1] + 1, step)
        else:
            yield whole
            whole = piece
    if whole is not None:
        yield whole


def sees(q: Share, k: Share, mask: Mask) -> bool:
    """Whether any query of one share sees any key of the other."""
    return any(True for _ in _tiles(q, k, mask, slice(None)))


def tiles_between(q: Sequence[Share], k: Sequence[Share], mask: Mask, batch: int) -> tuple[Tile, ...]:
    """The tiles of one member's queries with another's keys, over all rows of the batch.

    `q`, `k`: one share per row, or one for all rows. Neighbouring rows that are cut alike go together.
    """
    pairs = [(a, b) for a, b in zip(q, k)]
    found: list[Tile] = []
    start = 0
    for row in range(1, len(pairs) + 1):
        if row == len(pairs) or pairs[row] != pairs[start]:
            rows = slice(0, batch) if len(pairs) == 1 else slice(start, row)
            found += _merged(list(_tiles(*pairs[start], mask, rows)))
            start = row
    return tuple(found)


def _tiles(q: Share, k: Share, mask: Mask, rows: slice) -> Iterator[Tile]:
    keys = {stretch.key: stretch for stretch in k}
    for mine in q:
        theirs = keys.get(mine.key)
        if theirs is None or (mask.causal and theirs.first > mine.last):
            continue
        whole = Tile(rows, slice(mine.start, mine.stop), slice(theirs.start, theirs.stop))
        window = mask.window
        if window is not None and mine.last - theirs.first < window:
            window = None
        if window is None and (not mask.causal or theirs.last <= mine.first):
            yield whole
        elif window is None and mine.runs == theirs.runs:
            # The same ascending positions on both sides, whatever gaps are between them: the lower triangle.
            yield Tile(rows, whole.q, whole.k, Band(None, 0))
        else:
            for q_at, q_run in _numbered(mine):
                for k_at, k_run in _numbered(theirs):
                    for a, b, band in _met(q_run, k_run, window):
                        yield Tile(rows, _moved(a, q_at), _moved(b, k_at), band)


def _numbered(stretch: Stretch) -> Iterator[tuple[int, range]]:
    at = stretch.start
    for run in stretch.runs:
        yield at, run
        at += len(run)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


Piece = tuple[slice, slice, Band]


def _met(q: range, k: range, window: int | None) -> Iterator[Piece]:
    """The tiles of two runs of one document under a causal mask, numbered within the runs."""
    if len(q) > 1 and len(k) > 1 and q.step != k.step:
        for i in range(len(q)):  # never from our orders; right for any
            for a, b, band in _met(q[i : i + 1], k, window):
                yield _moved(a, i), b, band
        return
    step = k.step if len(q) == 1 else q.step
    # Query i is at q[0] + i step, key j at k[0] + j step: seen if 0 <= ahead + (i - j) step < window.
    ahead = q[0] - k[0]
    high = ahead // step
    first = max(0, -high)
    if window is None:
        yield from _below(first, len(q), len(k), high)
        return
    low = (ahead - window) // step + 1
    last = min(len(q), len(k) - low)
    if first >= last or low > high:  # out of reach, or the window falls between two keys
        return
    if last - 1 + low <= 0:  # the window ends before the first key for all of them
        yield from _below(first, last, len(k), high)
        return
    left, right = max(0, first + low), min(len(k), last + high)
    low, high = low + first - left, high + first - left
    full = last - first - 1 + low <= 0 and high >= right - left - 1
    yield slice(first, last), slice(left, right), Band() if full else Band(low, high)


def _below(first: int, last: int, keys: int, high: int) -> Iterator[Piece]:
    """Rows [first, last), each of which sees the keys up to i + high: a square triangle, and what is full around it."""
    if first >= last:
        return
    left = first + high  # the last key that the first row sees
    if left >= keys - 1:
        yield slice(first, last), slice(0, keys), Band()
        return
    side = min(last - first, keys - left)
    if left > 0:
        yield slice(first, first + side), slice(0, left), Band()
    yield slice(first, first + side), slice(left, left + side), Band() if side == 1 else Band(None, 0)
    if first + side < last:
        yield slice(first + side, last), slice(0, keys), Band()


def _merged(tiles: list[Tile]) -> list[Tile]:
    """Full tiles side by side made one, along the keys, then along the queries: fewer and larger calls."""
    for along in ("k", "q"):
        other = "q" if along == "k" else "k"
        kept: list[Tile] = []
        open_ends: dict[tuple[int, int, int], int] = {}  # (other side, end of this side) -> index of a full tile
        for tile in tiles:
            if not tile.band.is_full:
                kept.append(tile)
                continue
            side, across = getattr(tile, along), getattr(tile, other)
            index = open_ends.pop((across.start, across.stop, side.start), None)
            if index is None:
                index = len(kept)
                kept.append(tile)
            else:
                grown = slice(getattr(kept[index], along).start, side.stop)
                kept[index] = (
                    Tile(tile.rows, across, grown) if along == "k" else Tile(tile.rows, grown, across)
                )
            open_ends[across.start, across.stop, side.stop] = index
        tiles = kept
    return tiles
