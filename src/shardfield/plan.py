"""Plans: which global range every rank owns, and which it wants. Pure, cached, no communication."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardfield.layout import Dim, cuts, extents_of

Run = tuple[int, int]
"""A half-open global range `(start, stop)` that a rank owns."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows a rank wants: `start, start+step, ...`; `start=None` means `length` rows of fill."""

    start: int | None
    length: int
    step: int = 1


FILL = None
Wanted = tuple[tuple[Segment, ...], ...]
"""For every rank the segments it wants, in order."""


@lru_cache(maxsize=4096)
def runs_of(dim: Dim) -> tuple[tuple[Run, ...], ...]:
    """Global runs of a dim held at every row-major coordinate of its axes, in local order.

    `dim` is any product of factors; a split dim of one factor has a single run per rank.
    """
    ranks: list[tuple[Run, ...]] = [((0, 1),)]
    for factor in dim:
        points = cuts(factor.extents) if factor.axes else (0, factor.size)
        shares = list(zip(points, points[1:], strict=False))
        ranks = [
            tuple(
                (index * factor.size + a, index * factor.size + b)
                for start, stop in runs
                for index in range(start, stop)
            )
            for runs in ranks
            for a, b in shares
        ]
    return tuple(_joined(runs) for runs in ranks)


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Drops empty runs and joins adjacent ones."""
    joined: list[Run] = []
    for start, stop in runs:
        if stop <= start:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def wanted_runs(dim: Dim) -> Wanted:
    """What every rank wants to hold `dim`."""
    return tuple(tuple(Segment(a, b - a) for a, b in runs) for runs in runs_of(dim))


def wanted_whole(size: int, ranks: int) -> Wanted:
    """Every rank wants every row."""
    return ((Segment(0, size),),) * ranks


def clip(start: int, stop: int, size: int) -> tuple[Segment, ...]:
    """Rows [start, stop) of a dim of `size` rows; what lies outside is fill."""
    if stop <= start:
        return ()
    before = min(max(0, -start), stop - start)
    after = min(max(0, stop - size), stop - start - before)
    inner = stop - start - before - after
    segments = (
        Segment(FILL, before),
        Segment(start + before, inner),
        Segment(FILL, after),
    )
    return tuple(segment for segment in segments if segment.length)


@dataclass(frozen=True, slots=True)
class DimPlan:
    """How one split dim of a windowed operation maps to its output.

    Attributes:
        size: global output size.
        extents: output rows of every rank.
        wanted: input rows every rank needs so that the unpadded operation on them yields at
            least its output rows.
        crop: rows to drop before, then keep, of the local result, per rank; None for all.
    """

    size: int
    extents: tuple[int, ...]
    wanted: Wanted
    crop: tuple[Run, ...] | None = None


def centre_cuts(
    points: Sequence[int], size: int, scale: int, shift: int, unit: int
) -> tuple[int, ...]:
    """Output cuts such that output `o` goes to the rank that owns row `(scale*o + shift)/unit`.

    Rational arithmetic: the centre of output o is `(scale*o + shift)/unit` in input rows, clamped
    into the input. Monotone in every argument; the ends are 0 and `size`.
    """
    ends = {points[-1]: size, 0: 0}
    inner = [
        ends.get(point, min(max(-((shift - point * unit) // scale), 0), size))
        for point in points[1:-1]
    ]
    return (0, *inner, size)


@lru_cache(maxsize=4096)
def window(
    extents: tuple[int, ...],
    kernel: int,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
    ceil_mode: bool = False,
) -> DimPlan:
    """Plan of a sliding window (convolution, pooling, unfold) along one split dim.

    Args:
        extents: input rows of every rank.
        padding: rows added before and after the whole dim.

    Returns:
        Its plan; `size` is 0 or negative where the window does not fit, as in torch an error.
    """
    total = sum(extents)
    reach = dilation * (kernel - 1)
    span = total + sum(padding) - reach - 1
    size = (span // stride if not ceil_mode else -(-span // stride)) + 1
    if ceil_mode and (size - 1) * stride >= total + padding[0]:
        size -= 1  # torch: the last window must start inside the input or its left padding
    if size <= 0:
        return DimPlan(size, (), ())
    points = cuts(extents)
    if size == total:
        out = points
    else:
        out = centre_cuts(points, size, 2 * stride, reach - 2 * padding[0], 2)
    wanted = tuple(
        clip(a * stride - padding[0], (b - 1) * stride - padding[0] + reach + 1, total)
        if b > a
        else ()
        for a, b in zip(out, out[1:], strict=False)
    )
    return DimPlan(size, extents_of(out), wanted)


@lru_cache(maxsize=4096)
def transposed_window(
    extents: tuple[int, ...],
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    dilation: int = 1,
) -> DimPlan:
    """Plan of a transposed convolution along one split dim.

    Output row `o` receives from input row `i` where `o = i*stride - padding + j*dilation`.
    `crop` gives, per rank, the rows of the local unpadded result that it owns; rows past its end
    (output padding) receive nothing but the bias.
    """
    total = sum(extents)
    reach = dilation * (kernel - 1)
    size = (total - 1) * stride - 2 * padding + reach + output_padding + 1
    if size <= 0:
        return DimPlan(size, (), ())
    points = cuts(extents)
    if size == total * stride:
        out = tuple(point * stride for point in points)
    else:
        # Input row i writes around i*stride - padding + reach/2; cut half a stride before that.
        out = centre_cuts(points, size, 2, stride - reach + 2 * padding - 1, 2 * stride)
    wanted, crop = [], []
    for a, b in zip(out, out[1:], strict=False):
        if b <= a:
            wanted.append(())
            crop.append((0, 0))
            continue
        last = min((b - 1 + padding) // stride, total - 1)
        # A row between two windows (stride > kernel) counts from the input row before it.
        first = min(max(-((reach - a - padding) // stride), 0), last, (a + padding) // stride)
        wanted.append((Segment(first, last + 1 - first),))
        start = a + padding - first * stride
        crop.append((start, start + b - a))
    return DimPlan(size, extents_of(out), tuple(wanted), tuple(crop))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the assembled result.

    Attributes:
        source: "local", "received" or "fill".
        start: first row in the source.
        length: rows of the result.
        step: 1 as is, -1 reversed, 0 one row repeated `length` times.
        rows: rows taken from the source.
    """

    source: str
    start: int
    length: int
    step: int
    rows: int


@dataclass(frozen=True, eq=False, slots=True)
class Exchange:
    """One rank's side of a fetch: what it sends, what it receives, how it puts it together.

    Attributes:
        rows: rows of the local block.
        sends: for every rank the local `(start, length)` slabs it gets, in order.
        receives: rows that come from every rank.
        pieces: the result, in order.
        out_rows: rows of the result.
        silent: no rank sends anything; then no collective is entered.
        core: index of the piece that is the whole local block, if there is one.
        returns: for every rank that rows came from, the indices of their pieces, in the order
            in which they arrived.
    """

    rows: int
    sends: tuple[tuple[Run, ...], ...]
    receives: tuple[int, ...]
    pieces: tuple[Piece, ...]
    out_rows: int
    silent: bool
    core: int | None
    returns: tuple[tuple[int, ...], ...]

    @property
    def sent_rows(self) -> int:
        """Rows this rank sends in the forward, and receives in the backward."""
        return sum(length for slabs in self.sends for _, length in slabs)


def _overlaps(segment: Segment, index: _Owners):
    """Parts of a segment by owner, in reading order: (owner, local start, length, step)."""
    if segment.start is None or not segment.length:
        return
    if segment.step == 0:
        owner, at, _ = index.find(segment.start)
        yield owner, at, segment.length, 0
    elif segment.step == 1:
        position, left = segment.start, segment.length
        while left:
            owner, at, room = index.find(position)
            take = min(room, left)
            yield owner, at, take, 1
            position, left = position + take, left - take
    else:
        position, left = segment.start, segment.length
        while left:
            owner, at, _ = index.find(position)
            take = min(index.behind(position), left)
            yield owner, at - take + 1, take, -1
            position, left = position - take, left - take


class _Owners:
    """Finds the owner and local row of a global row."""

    def __init__(self, owned: Sequence[Sequence[Run]]) -> None:
        runs = []
        for owner, ranges in enumerate(owned):
            at = 0
            for start, stop in ranges:
                if stop > start:
                    runs.append((start, stop, owner, at))
                    at += stop - start
        self.runs = sorted(runs)
        self.starts = [run[0] for run in self.runs]

    def _run(self, position: int):
        return self.runs[bisect_right(self.starts, position) - 1]

    def find(self, position: int) -> tuple[int, int, int]:
        """(owner, local row, rows up to the end of its run)."""
        start, stop, owner, at = self._run(position)
        return owner, at + position - start, stop - position

    def behind(self, position: int) -> int:
        """Rows of the run up to and including `position`."""
        return position - self._run(position)[0] + 1


@lru_cache(maxsize=4096)
def exchange(owned: tuple[tuple[Run, ...], ...], wanted: Wanted, rank: int) -> Exchange:
    """What `rank` sends and receives so that every rank gets what it wants.

    Args:
        owned: global runs every rank holds, in local order; together they tile the dim.
        wanted: segments every rank wants.
    """
    index = _Owners(owned)
    ranks = len(owned)
    rows = sum(stop - start for start, stop in owned[rank])
    sends: list[list[Run]] = [[] for _ in range(ranks)]
    silent = True
    for other in range(ranks):
        for segment in wanted[other]:
            for owner, at, length, step in _overlaps(segment, index):
                if owner == other:
                    continue
                silent = False
                if owner == rank:
                    sends[other].append((at, min(length, 1) if step == 0 else length))
    mine = [
        (segment, list(_overlaps(segment, index))) for segment in wanted[rank] if segment.length
    ]
    receives = [0] * ranks
    for _, parts in mine:
        for owner, _, length, step in parts:
            if owner != rank:
                receives[owner] += min(length, 1) if step == 0 else length
    offset = [0, *receives]
    for source in range(ranks):
        offset[source + 1] += offset[source]
    pieces: list[Piece] = []
    returns: list[list[int]] = [[] for _ in range(ranks)]
    core = None
    for segment, parts in mine:
        if segment.start is None:
            pieces.append(Piece("fill", 0, segment.length, 1, 0))
        for owner, at, length, step in parts:
            rows_taken = min(length, 1) if step == 0 else length
            if owner == rank:
                if step == 1 and at == 0 and length == rows and core is None:
                    core = len(pieces)
                pieces.append(Piece("local", at, length, step, rows_taken))
            else:
                returns[owner].append(len(pieces))
                pieces.append(Piece("received", offset[owner], length, step, rows_taken))
                offset[owner] += rows_taken
    return Exchange(
        rows,
        tuple(tuple(slabs) for slabs in sends),
        tuple(receives),
        tuple(pieces),
        sum(piece.length for piece in pieces),
        silent,
        core,
        tuple(tuple(order) for order in returns if order),
    )
