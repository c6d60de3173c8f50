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
import torch.nn.functional as F

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.distribute import layout_of
from shardfield.layout import Factor, Layout
from shardfield.operands import part_of_plain
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, describe, leaf, local_of, wrap

Tensor = torch.Tensor
_T = torch.Tensor
_compiling = torch.compiler.is_compiling

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


@constant
def _ranges(layout: Layout) -> tuple[Ranges, Ranges]:
    """This rank's ranges of the leading and of the trailing dims, cut by the global shape alone."""
    cut, size = len(layout.dims), 1
    while cut and size < _ROW:
        cut -= 1
        size *= layout.shape[cut]
    return _ranges_of(layout, 0, cut), _ranges_of(layout, cut, len(layout.dims))


def _ranges_of(layout: Layout, begin: int, end: int) -> Ranges:
    mesh = layout.mesh
    found, stride = [], 1
    for dim in reversed(layout.dims[begin:end]):
        for factor in reversed(dim):
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


def _index(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the key is added to: int64 per row of leading dims; and int32 numbers of the columns."""
    outer, inner = _ranges(layout)
    rows = (_numbers(outer, device) + 1) * _GOLDEN
    columns = (_numbers(inner, device) & 0xFFFFFFFF) ^ 0x80000000
    return rows, (columns - 0x80000000).to(torch.int32)


_kept_index = lru_cache(maxsize=64)(_index)


class Bits:
    """Independent, uniform int32 for this rank's elements of a layout.

    Args:
        layout: of the tensor that is filled.
        key: from `draw_key`.
    """

    def __init__(self, layout: Layout, key: Tensor) -> None:
        # Small, but a dozen operations: kept, where it is made of real tensors.
        eager = not _compiling() and type(key) is Tensor
        rows, self.columns = (_kept_index if eager else _index)(layout, key.device)
        halves = _splitmix64(rows + key).view(torch.int32).view(-1, 2)
        self.row_keys = halves[:, :1], halves[:, 1:]
        self.shape = layout.local_shape

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


def _above(bits: Bits, p: float) -> Tensor:
    """Bool, True with probability 1-p."""
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


def _uniform(layout: Layout, key: Tensor, dtype: torch.dtype) -> Tensor:
    bits = Bits(layout, key)

    def values(rows):
        u = _unit(bits, rows, dtype)
        if dtype in (torch.float16, torch.bfloat16):
            # Cut, not rounded, to the digits of the format, so that 1 never comes out.
            digits = 11 if dtype == torch.float16 else 8
            u = (u * 2.0**digits).floor() * 2.0**-digits
        return u

    return bits.fill(dtype, values)


def _normal(layout: Layout, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Box and Muller's transform of two uniform numbers."""
    bits = Bits(layout, key)

    def values(rows):
        radius = torch.log1p(-_unit(bits, rows, dtype, 0)).mul_(-2).sqrt_()
        return radius.mul_(_unit(bits, rows, dtype, 1).mul_(2 * pi).cos_())

    return bits.fill(dtype, values)


def _integers(layout: Layout, key: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    bits = Bits(layout, key)

    def values(rows):
        upper = _shifted(bits.hashed(rows, 0).long(), 33) << 32
        lower = bits.hashed(rows, 1).long() & 0xFFFFFFFF
        return (upper + lower).remainder_(high - low).add_(low)

    return bits.fill(dtype, values)


def _check_p(p: float) -> None:
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _dropped(op, input: ShardTensor, mask: Tensor, scale: float, inplace: bool) -> ShardTensor:
    local = local_of(input)
    if not inplace:
        # torch.where keeps the bool mask for backward and nothing else.
        return wrap(torch.where(mask, local, 0).mul_(scale), input.layout)
    _refuse_moved(op, input)
    local.masked_fill_(~mask, 0).mul_(scale)
    return input


def _refuse_moved(op, input) -> None:
    if input._moved:
        raise unsupported(
            op,
            "it writes into a view whose data had to move between ranks",
            "use the operation that returns a new tensor, or clone() first",
            "in-place",
            (input,),
        )


@register(F.dropout, torch.dropout, torch.dropout_, uses=False)
def dropout(op, input: ShardTensor, p=0.5, training=None, inplace=False, *, train=None):
    """The same global mask whatever the split; bool, one byte an element, kept. Comm: none."""
    _check_p(p)
    training = train if training is None else training
    inplace = inplace or op is torch.dropout_
    if training is False or p == 0:
        return input
    mask = _above(Bits(input.layout, draw_key(input.device)), p)
    return _dropped(op, input, mask, 0.0 if p == 1 else 1 / (1 - p), inplace)


@constant
def _channel_layout(layout: Layout, lead: int) -> Layout:
    """Samples and channels alone; the other dims are one."""
    return Layout(layout.mesh, [*layout.dims[:lead], *((Factor(1),),) * (len(layout.dims) - lead)])


def _channel_mask(input: ShardTensor, lead: int, p: float) -> Tensor:
    return _above(Bits(_channel_layout(input.layout, lead), draw_key(input.device)), p)


_UNBATCHED = {F.dropout1d: 2, F.dropout3d: 4}


@register(F.dropout1d, F.dropout2d, F.dropout3d, uses=False)
def channel_dropout(op, input: ShardTensor, p=0.5, training=True, inplace=False) -> ShardTensor:
    """Whole channels, the same on all ranks that hold parts of one. Comm: none."""
    _check_p(p)
    if not training or p == 0:
        return input
    mask = _channel_mask(input, 1 if _UNBATCHED.get(op) == input.dim() else 2, p)
    return _dropped(op, input, mask, 0.0 if p == 1 else 1 / (1 - p), inplace)


_ALPHA = 1.7580993408473766


@register(F.alpha_dropout, F.feature_alpha_dropout, uses=False)
def alpha_dropout(op, input: ShardTensor, p=0.5, training=False, inplace=False) -> ShardTensor:
    """Dropout that keeps mean and variance of SELU networks. Comm: none."""
    _check_p(p)
    if not training or p == 0:
        return input
    if inplace:
        raise unsupported(op, "it is not done in place", "inplace=False", args=(input,))
    if op is F.feature_alpha_dropout:
        mask = _channel_mask(input, 2, p)
    else:
        mask = _above(Bits(input.layout, draw_key(input.device)), p)
    local = local_of(input)
    if p == 1:
        return wrap(local * 0, input.layout)
    a = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    out = torch.where(mask, local * a, -_ALPHA * a) + _ALPHA * a * p
    return wrap(out, input.layout)


def _cast(op, input: ShardTensor, dtype, device, generator=None, memory_format=None):
    if generator is not None:
        raise unsupported(op, "only the default generator is known to agree on all ranks")
    if device is not None and torch.device(device).type != input.device.type:
        raise unsupported(op, f"a tensor on {input.device} makes none on {device}")
    return input.dtype if dtype is None else dtype


def _finished(local: Tensor, layout: Layout, requires_grad: bool) -> ShardTensor:
    return leaf(local, layout, True) if requires_grad else wrap(local, layout)


@register(torch.rand_like, torch.randn_like, uses=False)
def random_like(
    op,
    input: ShardTensor,
    *,
    dtype=None,
    layout=None,
    device=None,
    requires_grad=False,
    memory_format=None,
    generator=None,
) -> ShardTensor:
    """Uniform or normal numbers in the layout of `input`. Comm: none."""
    dtype = _cast(op, input, dtype, device, generator)
    make = _normal if op is torch.randn_like else _uniform
    local = make(input.layout, draw_key(input.device), dtype)
    return _finished(local, input.layout, requires_grad)


@register(torch.randint_like, uses=False)
def randint_like(
    op,
    input: ShardTensor,
    *bounds,
    low=0,
    high=None,
    dtype=None,
    layout=None,
    device=None,
    requires_grad=False,
    memory_format=None,
    generator=None,
) -> ShardTensor:
    """Integers in [low, high), in the layout and dtype of `input`. Comm: none."""
    dtype = _cast(op, input, dtype, device, generator)
    if bounds:
        low, high = bounds if len(bounds) == 2 else (low, bounds[0])
    if high is None or high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got {low} >= {high}")
    local = _integers(input.layout, draw_key(input.device), int(low), int(high), dtype)
    return _finished(local, input.layout, requires_grad)


@register(torch.bernoulli, _T.bernoulli, uses=False)
def bernoulli(op, input: ShardTensor, p=None, *, generator=None, out=None) -> ShardTensor:
    """0 or 1, with probability `p` or that of `input`. Comm: none."""
    if out is not None or generator is not None:
        raise unsupported(op, "out= and generator= are not supported", args=(input,))
    layout, key = input.layout, draw_key(input.device)
    if p is None:
        local = local_of(input).detach()
        return wrap(_chances(layout, key, local, local.dtype), layout)
    return wrap(_chances(layout, key, p, input.dtype), layout)


def _chances(layout: Layout, key: Tensor, p, dtype: torch.dtype) -> Tensor:
    """1 with probability `p` (a number or a local tensor), else 0."""
    if not isinstance(p, Tensor):
        if not 0 <= p <= 1:
            raise RuntimeError(f"bernoulli expects p to be in [0, 1], but got p={p}")
        return (~_above(Bits(layout, key), p)).to(dtype)
    precise = torch.float64 if p.dtype == torch.float64 else torch.float32
    return (_uniform(layout, key, precise) < p).to(dtype)


def _local_operand(op, value, layout: Layout):
    """A plain tensor (replicated) or ShardTensor beside a tensor of `layout`, as its local part."""
    if isinstance(value, ShardTensor):
        if value.shape != layout.shape:
            raise unsupported(op, f"{describe(value)} beside {layout}")
        return move(local_of(value), value.layout, layout, "bernoulli_").detach()
    if isinstance(value, Tensor):
        return part_of_plain(value.detach().expand(layout.shape), layout)
    return value


def _written(op, input, values: Tensor) -> ShardTensor:
    """Fills a tensor in place; its old value gets no gradient, as in torch."""
    local_of(input).copy_(values)
    return input


def _refuse_target(op, input, generator) -> None:
    if not isinstance(input, ShardTensor):
        raise unsupported(op, "it would write a sharded value into a plain tensor")
    _refuse_moved(op, input)
    if generator is not None:
        raise unsupported(op, "only the default generator is known to agree on all ranks")


@register(_T.bernoulli_, uses=False)
def bernoulli_(op, input: ShardTensor, p=0.5, *, generator=None) -> ShardTensor:
    """In place; `p` is a number or a tensor of this shape. Comm: none for a `p` in this layout."""
    _refuse_target(op, input, generator)
    layout = input.layout
    chance = _local_operand(op, p, layout)
    key = draw_key(input.device)
    return _written(op, input, _chances(layout, key, chance, input.dtype))


@register(_T.normal_, uses=False)
def normal_(op, input: ShardTensor, mean=0.0, std=1.0, *, generator=None) -> ShardTensor:
    """In place. Comm: none."""
    _refuse_target(op, input, generator)
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    values = _normal(input.layout, draw_key(input.device), input.dtype)
    return _written(op, input, values.mul_(std).add_(mean))


@register(_T.uniform_, uses=False)
def uniform_(op, input: ShardTensor, *bounds, generator=None, **named) -> ShardTensor:
    """In place, on [from, to). Comm: none."""
    _refuse_target(op, input, generator)
    low = bounds[0] if bounds else named.get("from", 0.0)
    high = bounds[1] if len(bounds) > 1 else named.get("to", 1.0)
    if high < low:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but got {low} > {high}")
    values = _uniform(input.layout, draw_key(input.device), input.dtype)
    return _written(op, input, values.mul_(high - low).add_(low))


def _made(make, shape, mesh, placements, sizes, dtype, requires_grad) -> Tensor:
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    layout = layout_of(shape, mesh, placements, sizes)
    device = torch.device(mesh.device_type)
    local = make(layout, draw_key(device), dtype or torch.get_default_dtype())
    if not layout.split_axes:
        return local.requires_grad_(requires_grad)
    return _finished(local, layout, requires_grad)


def rand(*shape, mesh, placements, sizes=None, dtype=None, requires_grad=False) -> Tensor:
    """A sharded `torch.rand` of this global shape, the same whatever the split. Comm: none.

    Example:
        >>> mesh = shardfield.init_mesh(domain=1)
        >>> shardfield.rand(4, 6, mesh=mesh, placements=[Shard(0)]).shape
        torch.Size([4, 6])
    """
    return _made(_uniform, shape, mesh, placements, sizes, dtype, requires_grad)


def randn(*shape, mesh, placements, sizes=None, dtype=None, requires_grad=False) -> Tensor:
    """A sharded `torch.randn` of this global shape, the same whatever the split. Comm: none."""
    return _made(_normal, shape, mesh, placements, sizes, dtype, requires_grad)


__all__ = ["Bits", "draw_key", "rand", "randn"]
