"""Random numbers keyed to the global index: the same whatever the number of ranks and the split.

A call draws one 64-bit key from the default generator, on every rank the same (`init_mesh` seeds
the ranks of one domain group alike, replicas on `data` differently). The number at an element is a
hash of the key and its global row-major index, so nothing depends on who holds it, a call takes
the same generator state whatever the local size, and a checkpointed block recomputes its mask from
the state torch restores. The reference is the same program on one rank, not torch's own stream.

Source: splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) for
the leading dims; triple32 (C. Wellons, github.com/skeeto/hash-prospector) for the trailing ones.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch

from shardfield.constant import constant
from shardfield.layout import Layout

Tensor = torch.Tensor
_compiling = torch.compiler.is_dynamo_compiling

_ROW = 256
"""Trailing dims are hashed together up to at least this many elements."""

_CHUNK = 1 << 16
"""Elements hashed at a time on a CPU, so that temporaries stay in cache."""


def _signed(value: int, bits: int) -> int:
    """The two's-complement reading of an unsigned constant."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_SPLIT = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
_TRIPLE = (_signed(0xED5AD4BB, 32), _signed(0xAC4C1B51, 32), 0x31848BAB)

Ranges = tuple[tuple[int, int, int], ...]
"""(first, count, stride) of every factor of some dims: where this rank's elements lie."""


Spans = tuple[tuple[int, int, int], ...]
"""(dim, first, count): global indices of some dims, in place of those that this rank holds."""


@constant
def _ranges(layout: Layout, spans: Spans) -> tuple[Ranges, Ranges]:
    """Ranges of the leading and of the trailing dims, cut by the global shape alone."""
    cut, size = len(layout.dims), 1
    while cut and size < _ROW:
        cut -= 1
        size *= layout.shape[cut]
    return _ranges_of(layout, spans, 0, cut), _ranges_of(layout, spans, cut, len(layout.dims))


def _ranges_of(layout: Layout, spans: Spans, begin: int, end: int) -> Ranges:
    mesh = layout.mesh
    given = {dim: (first, count) for dim, first, count in spans}
    found, stride = [], 1
    for dim in reversed(range(begin, end)):
        if dim in given:
            found.append((*given[dim], stride))
            stride *= layout.shape[dim]
            continue
        for factor in reversed(layout.dims[dim]):
            first, count = 0, factor.size
            if factor.axes:
                rank = mesh.rank(factor.axes)
                first, count = sum(factor.extents[:rank]), factor.extents[rank]
            found.append((first, count, stride))
            stride *= factor.size
    return tuple(reversed(found))


def _numbers(ranges: Ranges, device: torch.device) -> Tensor:
    """Row-major global indices, flat, int64."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for first, count, stride in ranges:
        along = torch.arange(first, first + count, device=device) * stride
        numbers = (numbers.unsqueeze(-1) + along).flatten()
    return numbers


def draw_key(device: torch.device) -> Tensor:
    """A 0-d int64 key from the default generator of the device. Comm: none; alike on all ranks."""
    return torch.randint(-(1 << 62), 1 << 62, (), dtype=torch.int64, device=device)


def _shifted(x: Tensor, by: int) -> Tensor:
    """`x >> by` with zeros from the left: torch's shift repeats the sign."""
    bits = 64 if x.dtype == torch.int64 else 32
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)


def _splitmix64(x: Tensor) -> Tensor:
    """The finalizer of splitmix64, in place on int64."""
    x.bitwise_xor_(_shifted(x, 30)).mul_(_SPLIT[0])
    x.bitwise_xor_(_shifted(x, 27)).mul_(_SPLIT[1])
    return x.bitwise_xor_(_shifted(x, 31))


def _index(layout: Layout, spans: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the key is added to: int64 per row of leading dims; and int32 numbers of the columns."""
    outer, inner = _ranges(layout, spans)
    rows = (_numbers(outer, device) + 1) * _GOLDEN
    columns = (_numbers(inner, device) & 0xFFFFFFFF) ^ 0x80000000
    return rows, (columns - 0x80000000).to(torch.int32)


_kept_index = lru_cache(maxsize=64)(_index)


class Bits:
    """Independent, uniform int32 for this rank's elements of a layout.

    Args:
        layout: of the tensor that is filled.
        key: from `draw_key`.
        spans: of dims along which other elements are meant than this rank's.
    """

    def __init__(self, layout: Layout, key: Tensor, spans: Spans = ()) -> None:
        # Small, but a dozen operations: kept, where it is made of real tensors.
        eager = not _compiling() and type(key) is Tensor
        rows, self.columns = (_kept_index if eager else _index)(layout, spans, key.device)
        halves = _splitmix64(rows + key).view(torch.int32).view(-1, 2)
        self.row_keys = halves[:, :1], halves[:, 1:]
        self.shape = list(layout.local_shape)
        for dim, _, count in spans:
            self.shape[dim] = count

    def blocks(self) -> list[slice]:
        """Slices of rows to hash one after the other."""
        rows, width = self.row_keys[0].shape[0], self.columns.shape[0]
        if _compiling() or self.columns.device.type != "cpu":
            return [slice(0, rows)]
        step = max(1, _CHUNK // max(1, width))
        return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]

    def hashed(self, rows: slice, stream: int) -> Tensor:
        """Bits of some rows, (rows, columns) int32; every stream is independent."""
        first, second = self.row_keys[0][rows], self.row_keys[1][rows]
        x = self.columns + first
        if stream:
            x.add_(_signed(stream * 0x9E3779B9 & 0xFFFFFFFF, 32))
        x.bitwise_xor_(_shifted(x, 17)).mul_(_TRIPLE[0])
        # The second key comes in between: 64 bits of key make rows and calls independent.
        x.bitwise_xor_(_shifted(x, 11)).bitwise_xor_(second).mul_(_TRIPLE[1])
        x.bitwise_xor_(_shifted(x, 15)).mul_(_TRIPLE[2])
        return x.bitwise_xor_(_shifted(x, 14))

    def fill(self, dtype: torch.dtype, values) -> Tensor:
        """`values(rows)` for all blocks, in the local shape."""
        blocks = self.blocks()
        if len(blocks) == 1:
            return values(blocks[0]).to(dtype).reshape(self.shape)
        size = self.row_keys[0].shape[0], self.columns.shape[0]
        out = torch.empty(size, dtype=dtype, device=self.columns.device)
        for rows in blocks:
            out[rows] = values(rows)
        return out.view(self.shape)


def above(layout: Layout, key: Tensor, p: float, spans: Spans = ()) -> Tensor:
    """Bool, True with probability 1-p."""
    bits = Bits(layout, key, spans)
    bound = round(p * (1 << 32)) - (1 << 31)
    if bound > (1 << 31) - 1:
        return bits.columns.new_zeros(bits.shape, dtype=torch.bool)
    return bits.fill(torch.bool, lambda rows: bits.hashed(rows, 0) >= bound)


def _unit(bits: Bits, rows: slice, dtype: torch.dtype, stream: int = 0) -> Tensor:
    """Uniform on [0, 1): 24 bits, or 53 for float64."""
    high = bits.hashed(rows, 2 * stream)
    if dtype != torch.float64:
        return _shifted(high, 8).to(torch.float32).mul_(2.0**-24)
    low = _shifted(bits.hashed(rows, 2 * stream + 1), 6).double()
    return (_shifted(high, 5).double().mul_(2.0**26) + low).mul_(2.0**-53)


def uniform(layout: Layout, key: Tensor, dtype: torch.dtype) -> Tensor:
    """On [0, 1)."""
    bits = Bits(layout, key)

    def values(rows):
        u = _unit(bits, rows, dtype)
        if dtype in (torch.float16, torch.bfloat16):
            # Cut, not rounded, to the digits of the format, so that 1 never comes out.
            digits = 11 if dtype == torch.float16 else 8
            u = (u * 2.0**digits).floor() * 2.0**-digits
        return u

    return bits.fill(dtype, values)


def normal(layout: Layout, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Box and Muller's transform of two uniform numbers."""
    bits = Bits(layout, key)

    def values(rows):
        radius = torch.log1p(-_unit(bits, rows, dtype, 0)).mul_(-2).sqrt_()
        return radius.mul_(_unit(bits, rows, dtype, 1).mul_(2 * pi).cos_())

    return bits.fill(dtype, values)


def integers(layout: Layout, key: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """On [low, high)."""
    bits = Bits(layout, key)

    def values(rows):
        upper = _shifted(bits.hashed(rows, 0).long(), 33) << 32
        lower = bits.hashed(rows, 1).long() & 0xFFFFFFFF
        return (upper + lower).remainder_(high - low).add_(low)

    return bits.fill(dtype, values)


def exponential(layout: Layout, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Of rate 1, and never 0, of which users take the logarithm."""
    bits = Bits(layout, key)
    least = 2.0**-25
    return bits.fill(
        dtype, lambda rows: torch.log1p(-_unit(bits, rows, dtype)).neg_().clamp_min_(least)
    )
