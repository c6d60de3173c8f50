"""Which keys are neighbours of which queries, and in what tiles they are computed. Pure arithmetic.

Every dim is planned alone: the neighbours of a query are the product of those along each dim.

Source: neighborhood attention (Hassani et al., arXiv:2204.07143), dilated (arXiv:2209.15001),
causal (arXiv:2403.04690) and strided (arXiv:2504.16922), as NATTEN's documentation defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from shardfield.layout import cuts
from shardfield.plan import Run, Segment, Wanted


class Window(NamedTuple):
    """The neighbourhoods along one dim.

    Attributes:
        size: global rows.
        kernel: neighbours of a query, itself included.
        stride: queries that share one window.
        dilation: distance of neighbours; a query and its neighbours are equal modulo it.
        causal: the neighbours end with the query, and are fewer at the start.
    """

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False

    def neighbours(self, row: int) -> range:
        """Global rows of the keys that a query meets."""
        at, residue = divmod(row, self.dilation)
        rows = -(-(self.size - residue) // self.dilation)  # of this residue
        group = at - at % self.stride
        if self.causal:
            start = max(0, min(group + self.stride, rows) - self.kernel)
            stop = at + 1
        else:
            centre = min(group + self.stride // 2, rows - 1)
            start = min(max(0, centre - self.kernel // 2), rows - self.kernel)
            stop = start + self.kernel
        last = (stop - 1) * self.dilation + residue
        return range(start * self.dilation + residue, last + 1, self.dilation)

    def reach(self, start: int, stop: int) -> Run:
        """The least range that holds all neighbours of rows `start..stop-1`.

        Neighbours move on with the query within each residue: the ends show it.
        """
        if stop <= start:
            return (start, start)
        first = range(start, min(stop, start + self.dilation))
        last = range(max(start, stop - self.dilation), stop)
        return (
            min(self.neighbours(row).start for row in first),
            max(self.neighbours(row).stop for row in last),
        )


def wanted_keys(window: Window, extents: Sequence[int]) -> Wanted:
    """The key rows that every rank needs for its queries: one range that holds its own rows."""
    points = cuts(extents)
    found = [window.reach(a, b) for a, b in zip(points, points[1:], strict=False)]
    return tuple((Segment(a, b - a),) if b > a else () for a, b in found)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Equal tiles along one dim: `count` behind each other, of `residues` rows side by side.

    Tile `(n, c)` holds the query rows `query + c + step * (rows * n + i)`, `i < rows`, and the key
    rows `key + c + step * (rows * n + j)`, `j < keys`, of the local blocks.

    Attributes:
        step: the dilation.
        ranges: for every query row of a tile the keys `start..stop-1` of the tile that it meets.
    """

    query: int
    key: int
    count: int
    residues: int
    rows: int
    keys: int
    step: int
    ranges: tuple[Run, ...]

    @property
    def open(self) -> bool:
        """Whether every query meets every key."""
        return set(self.ranges) == {(0, self.keys)}


def tiles_of(window: Window, start: int, stop: int, first_key: int, rows: int) -> tuple[Tiles, ...]:
    """Tiles of the query rows `start..stop-1`, each of them in one.

    Args:
        first_key: global row at which the block of keys starts.
        rows: query rows of a tile, a multiple of the stride.
    """
    found: list[tuple[Tiles, ...]] = []
    for row in range(start, min(stop, start + window.dilation)):
        here = _of_residue(window, range(row, stop, window.dilation), start, first_key, rows)
        if found and tuple(_moved(tiles, found[-1][0].residues) for tiles in found[-1]) == here:
            found[-1] = tuple(replace(t, residues=t.residues + 1) for t in found[-1])
        else:
            found.append(here)
    return tuple(tiles for group in found for tiles in group)


def _moved(tiles: Tiles, by: int) -> Tiles:
    return replace(tiles, query=tiles.query + by, key=tiles.key + by, residues=1)


def _of_residue(
    window: Window, queries: range, start: int, first_key: int, rows: int
) -> tuple[Tiles, ...]:
    step = window.dilation
    found: list[Tiles] = []
    # Cut where windows are shared, so that tiles are equal.
    at, cut = 0, rows - queries.start // step % window.stride
    while at < len(queries):
        here = [window.neighbours(row) for row in queries[at:cut]]
        base, end = min(r.start for r in here), max(r.stop for r in here)
        tiles = Tiles(
            queries[at] - start,
            base - first_key,
            1,
            1,
            len(here),
            -(-(end - base) // step),
            step,
            tuple(((r.start - base) // step, (r.start - base) // step + len(r)) for r in here),
        )
        if found and _behind(found[-1]) == tiles:
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(tiles)
        at, cut = cut, cut + rows
    return tuple(found)


def _behind(last: Tiles) -> Tiles:
    """The tile that would continue these."""
    on = last.step * last.rows * last.count
    return replace(last, query=last.query + on, key=last.key + on, count=1)


LOAD = {"cpu": 48.0, "cuda": 128.0}
"""What taking a row of keys into a tile costs, in products of a query and a key.

Measured on CPU; on accelerators a guess at kernels that compute blocks of 64 and more rows."""

MOST_SCORES = 1 << 20
"""Scores of a tile at most: its mask is as large."""


@lru_cache(maxsize=1024)
def tile_rows(
    windows: tuple[Window, ...], queries: tuple[int, ...], load: float
) -> tuple[int, ...]:
    """Query rows of a tile along each dim, the cheapest.

    A tile computes all its queries with the union of their keys: small tiles compute less that is
    masked away, and take every key into more tiles.

    Args:
        queries: rows of the local block.
        load: see `LOAD`.
    """

    def cost(rows: tuple[int, ...]) -> tuple[float, int]:
        keys = prod(
            min(n - w.stride + w.kernel, -(-w.size // w.dilation))
            for n, w in zip(rows, windows, strict=True)
        )
        size = prod(rows)
        too_large = size * keys > MOST_SCORES
        return (keys * (1 + load / size) if not too_large else float(size * keys) * load, -size)

    return min(product(*map(_parts, windows, queries)), key=cost)


def _parts(window: Window, queries: int) -> list[int]:
    """Tile sizes that cut the queries of one residue into about equal parts."""
    rows = max(1, -(-queries // window.dilation))
    parts, found = 1, set()
    while True:
        for times in (2 * parts, 3 * parts):
            size = -(-rows // (times // 2))
            found.add(-(-size // window.stride) * window.stride)
        if parts >= rows:
            return sorted(found)
        parts *= 2


__all__ = ["LOAD", "Tiles", "Window", "tile_rows", "tiles_of", "wanted_keys"]
