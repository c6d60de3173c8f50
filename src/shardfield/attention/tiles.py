"""Neighborhood attention of local blocks, tile by tile: an operation with its own backward.

Kept for backward: queries, keys, values, output and log-sum-exp. Tiles and masks are made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

import torch

from shardfield.attention import kernels
from shardfield.attention.neighbors import LOAD, Tiles, Window, tile_rows, tiles_of

Tensor = torch.Tensor

TAKEN = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of keys and values that are taken into tiles at a time; on CPU, what the cache holds."""


@dataclass(frozen=True, slots=True)
class Span:
    """One dim of the local problem.

    Attributes:
        window: neighbourhoods.
        start: global row of the first query.
        rows: queries.
        first_key: global row of the first key of the block.
    """

    window: Window
    start: int
    rows: int
    first_key: int


def neighborhood(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> Tensor:
    """Attention of queries to their neighbours.

    Args:
        q: `(B, *rows, H, D)`.
        k: `(B, *key rows, Hk, D)`; `H` is a multiple of `Hk`.
        v: `(B, *key rows, Hk, Dv)`.
        spans: one per spatial dim; the key rows hold all neighbours.

    Returns:
        `(B, *rows, H, Dv)`. Once differentiable.

    Comm: none.
    """
    numbers = [n for s in spans for n in (*map(int, s.window), s.start, s.rows, s.first_key)]
    return _forward(q, k, v, numbers, scale)[0]


_NUMBERS = 8  # of a span; operations take no other kinds of arguments


def _unpacked(size, kernel, stride, dilation, causal, start, rows, first_key) -> Span:
    return Span(Window(size, kernel, stride, dilation, bool(causal)), start, rows, first_key)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("shardfield::neighborhood_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _like_results(q, v)
    for grid in _grids(q, k, v, spans):
        block = kernels.Block(scale, bias=_bias(grid, q.dtype, q.device))
        queries = grid.queries(q)
        keys, values = (_heads_as(queries, grid.keys(x)) for x in (k, v))
        part, sums = kernels.forward(queries, keys, values, block)
        grid.write(out, part)
        grid.write(lse, sums.unsqueeze(-1))
    return out, lse


@_forward.register_fake
def _(q, k, v, spans, scale):
    return _like_results(q, v)


def _like_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((*q.shape[:-1], 1), dtype=_precise(q.dtype))


@torch.library.custom_op("shardfield::neighborhood_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    spans: Sequence[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=_precise(x.dtype)) for x in (k, v))
    for grid in _grids(q, k, v, spans):
        block = kernels.Block(scale, bias=_bias(grid, q.dtype, q.device))
        queries, above, result, sums = (grid.queries(x) for x in (q, grad, out, lse))
        keys, values = (_heads_as(queries, grid.keys(x)) for x in (k, v))
        pq, pk, pv, _ = kernels.backward(
            above, queries, keys, values, result, sums.squeeze(-1).contiguous(), block, False
        )
        grid.write(dq, pq)
        grid.add(dk, pk)
        grid.add(dv, pv)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_backward.register_fake
def _(grad, q, k, v, out, lse, spans, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.spans, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx, grad, _):
    return *_backward(grad, *ctx.saved_tensors, ctx.spans, ctx.scale), None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _heads_as(queries: Tensor, keys: Tensor) -> Tensor:
    """Keys of tiles, as many heads as queries."""
    group = queries.shape[1] // keys.shape[1]
    return keys if group == 1 else keys.repeat_interleave(group, 1)


@dataclass(frozen=True, slots=True)
class Grid:
    """Equal tiles of all spatial dims: those of each, combined.

    Tiles of a block are `(N, H, rows, D)`: samples and tiles, heads, rows of all dims.
    """

    dims: tuple[Tiles, ...]

    def queries(self, x: Tensor) -> Tensor:
        """Tiles of queries, or of what has their rows."""
        return _flat(_tiled(x, self.dims, [(t.query, t.rows) for t in self.dims]))

    def keys(self, x: Tensor) -> Tensor:
        """Tiles of keys; each row is in as many as need it."""
        return _flat(_tiled(x, self.dims, [(t.key, t.keys) for t in self.dims]))

    def write(self, x: Tensor, tiles: Tensor) -> None:
        """Writes tiles of queries to their rows."""
        place = _tiled(x, self.dims, [(t.query, t.rows) for t in self.dims])
        place.copy_(tiles.transpose(1, 2).reshape(place.shape))

    def add(self, x: Tensor, tiles: Tensor) -> None:
        """Adds tiles of keys to their rows.

        Tiles overlap, and slices of them as long as the way from one to the next do not.
        """
        group = tiles.shape[1] // x.shape[-2]
        if group != 1:
            tiles = tiles.unflatten(1, (-1, group)).sum(2)
        whole = [(t.key, t.keys) for t in self.dims]
        dims = len(self.dims)
        tiles = tiles.transpose(1, 2).reshape(_tiled(x, self.dims, whole).shape)
        for slices in product(*map(_slices, self.dims)):
            part = tiles
            for dim, (at, length) in enumerate(slices):
                part = part.narrow(1 + 2 * dims + dim, at, length)
            rows = [
                (t.key + t.step * at, length)
                for t, (at, length) in zip(self.dims, slices, strict=True)
            ]
            _tiled(x, self.dims, rows).add_(part)


def _slices(tiles: Tiles) -> list[tuple[int, int]]:
    length = tiles.rows if tiles.count > 1 else tiles.keys
    return [(at, min(length, tiles.keys - at)) for at in range(0, tiles.keys, length)]


def _tiled(x: Tensor, dims: Sequence[Tiles], rows: Sequence[tuple[int, int]]) -> Tensor:
    """A view `(B, *counts, *residues, *lengths, H, D)` of a block.

    Args:
        rows: along each dim the first row of the first tile, and the rows of a tile.
    """
    spatial = x.stride()[1:-2]
    shape = [t.count for t in dims] + [t.residues for t in dims] + [length for _, length in rows]
    strides = [s * t.step * t.rows for s, t in zip(spatial, dims, strict=True)]
    strides += [*spatial, *(s * t.step for s, t in zip(spatial, dims, strict=True))]
    offset = sum(s * start for s, (start, _) in zip(spatial, rows, strict=True))
    return x.as_strided(
        (x.shape[0], *shape, *x.shape[-2:]),
        (x.stride(0), *strides, *x.stride()[-2:]),
        x.storage_offset() + offset,
    )


def _flat(view: Tensor) -> Tensor:
    outer = 1 + 2 * ((view.dim() - 3) // 3)
    rows = prod(view.shape[outer:-2])
    return view.reshape(prod(view.shape[:outer]), rows, *view.shape[-2:]).transpose(1, 2)


def _grids(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[int]) -> Iterator[Grid]:
    """All tiles, in batches that take a bounded number of keys at a time."""
    if not q.numel():
        return
    kind = q.device.type
    row = k.shape[-2] * (k.shape[-1] + v.shape[-1])
    most = TAKEN.get(kind, TAKEN["cuda"]) // max(1, row * q.shape[0])
    yield from _planned(tuple(spans), LOAD.get(kind, LOAD["cuda"]), most)


@lru_cache(maxsize=256)
def _planned(numbers: tuple[int, ...], load: float, most: int) -> tuple[Grid, ...]:
    spans = [_unpacked(*numbers[at : at + _NUMBERS]) for at in range(0, len(numbers), _NUMBERS)]
    windows, queries = tuple(s.window for s in spans), tuple(s.rows for s in spans)
    rows = tile_rows(windows, queries, load)
    dims = [
        tiles_of(s.window, s.start, s.start + s.rows, s.first_key, n)
        for s, n in zip(spans, rows, strict=True)
    ]
    return tuple(grid for combined in product(*dims) for grid in _batches(combined, most))


def _batches(dims: tuple[Tiles, ...], most: int) -> Iterator[Grid]:
    """Cuts the tiles along their first dim, so that a batch takes about `most` key rows."""
    first = dims[0]
    each = prod(t.keys * t.residues for t in dims) * prod(t.count for t in dims[1:])
    together = max(1, most // each)
    for at in range(0, first.count, together):
        on = first.step * first.rows * at
        count = min(together, first.count - at)
        cut = replace(first, query=first.query + on, key=first.key + on, count=count)
        yield Grid((cut, *dims[1:]))


def _bias(grid: Grid, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What is added to the scores of every tile of a grid: -inf where query and key do not meet."""
    if all(tiles.open for tiles in grid.dims):
        return None
    return _mask(tuple((t.keys, t.ranges) for t in grid.dims), dtype, device)


@lru_cache(maxsize=32)
def _mask(patterns, dtype: torch.dtype, device: torch.device) -> Tensor:
    meets = torch.ones(1, 1, dtype=torch.bool)
    for keys, ranges in patterns:
        column = torch.arange(keys)
        start, stop = torch.tensor(ranges).unsqueeze(-1).unbind(1)
        here = (start <= column) & (column < stop)
        meets = (meets[:, None, :, None] & here[None, :, None, :]).flatten(2).flatten(0, 1)
    zero = torch.zeros((), dtype=dtype).expand(meets.shape)
    return zero.masked_fill(~meets, float("-inf"))[None, None].to(device)


__all__ = ["Span", "neighborhood"]
