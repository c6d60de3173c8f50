"""Max and average pooling of every stride, padding, dilation and rounding; adaptive pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.nn.functional as F

from shardfield.comm.move import move
from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.layout import Factor, Layout, cuts, extents_of
from shardfield.plan import DimPlan, Segment, centre_cuts, window
from shardfield.registry import current_operation, groups_of, register, unsupported
from shardfield.tensor import ShardTensor, local_of, result, wrap
from shardfield.windowed import WindowPlan, holds_nothing, nothing, window_plan, windowed

_DIMS = {
    F.max_pool1d: 1,
    F.max_pool2d: 2,
    F.max_pool3d: 3,
    torch.max_pool1d: 1,
    torch.max_pool2d: 2,
    torch.max_pool3d: 3,
    F.max_pool1d_with_indices: 1,
    F.max_pool2d_with_indices: 2,
    F.max_pool3d_with_indices: 3,
    F.avg_pool1d: 1,
    F.avg_pool2d: 2,
    F.avg_pool3d: 3,
    F.adaptive_avg_pool1d: 1,
    F.adaptive_avg_pool2d: 2,
    F.adaptive_avg_pool3d: 3,
    F.adaptive_max_pool1d: 1,
    F.adaptive_max_pool2d: 2,
    F.adaptive_max_pool3d: 3,
    F.adaptive_max_pool1d_with_indices: 1,
    F.adaptive_max_pool2d_with_indices: 2,
    F.adaptive_max_pool3d_with_indices: 3,
}
_WITH_INDICES = (
    F.max_pool1d_with_indices,
    F.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
    F.adaptive_max_pool1d_with_indices,
    F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
)


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """One number per spatial dim, as torch spreads them."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


@dataclass(frozen=True, eq=False, slots=True)
class PoolPlan:
    """A pooling on one layout.

    Attributes:
        window: fetches and output layout.
        padding: what the local call pads; 0 along fetched dims.
        starts: global row of the first row of the block, per spatial dim.
        divisors: per fetched dim (dim, rows each output of this rank averages), for averages
            whose windows are not all full there.
    """

    window: WindowPlan
    padding: tuple[int, ...]
    starts: tuple[int, ...]
    divisors: tuple[tuple[int, tuple[int, ...]], ...]


@constant
def _dims_of(op) -> tuple[int, bool]:
    """Spatial dims of the function, and whether it returns indices."""
    return _DIMS[op], op in _WITH_INDICES


@constant
def _spatial(op, layout: Layout, dims: int) -> int:
    """Number of dims before the spatial ones, which may be split anyhow."""
    lead = len(layout.dims) - dims
    if lead not in (1, 2):
        raise unsupported(op, f"its input has {len(layout.dims)} dims", args=(layout,))
    for dim in range(lead, len(layout.dims)):
        if layout.contiguous(dim) is None:
            raise unsupported(op, f"dim {dim} is not held in contiguous ranges", args=(layout,))
    return lead


@constant
def _pool_plan(
    layout: Layout, lead: int, kernel, stride, padding, dilation, ceil_mode: bool, padded: bool
) -> PoolPlan:
    """`padded`: padding counts in averages."""
    plans: dict[int, DimPlan] = {}
    for i, k in enumerate(kernel):
        pad = padding[i]
        if pad < 0 or pad > (dilation[i] * (k - 1) + 1) // 2:
            raise RuntimeError(
                "pad should be non-negative and at most half of effective kernel size, "
                f"but got pad={pad}, kernel_size={k} and dilation={dilation[i]}"
            )
        extents = layout.extents(lead + i) or (layout.shape[lead + i],)
        plans[lead + i] = window(extents, k, stride[i], (pad, pad), dilation[i], ceil_mode)
        if plans[lead + i].size <= 0:
            raise RuntimeError(
                f"pooling {layout.shape} with kernel {kernel}, stride {stride}, padding {padding} "
                f"and dilation {dilation}: the output size is too small"
            )
    whole = window_plan(layout, plans)
    moved = whole.moved
    starts, divisors = [], []
    for i, k in enumerate(kernel):
        dim = lead + i
        if dim not in moved:
            starts.append(0)
            continue
        first = whole.layout.offset(dim)
        starts.append(first * stride[i] - padding[i])
        size, edge = layout.shape[dim], padding[i] if padded else 0
        counts = tuple(
            _inside(o * stride[i] - padding[i], k, size, edge)
            for o in range(first, first + whole.layout.local_shape[dim])
        )
        if any(count != k for count in counts):
            divisors.append((dim, counts))
    pads = tuple(0 if lead + i in moved else pad for i, pad in enumerate(padding))
    return PoolPlan(whole, pads, tuple(starts), tuple(divisors))


def _inside(start: int, kernel: int, size: int, edge: int) -> int:
    """Rows of a window that lie in the dim, or in its padding where that counts."""
    return min(start + kernel, size + edge) - max(start, -edge)


@register(
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    torch.max_pool1d,
    torch.max_pool2d,
    torch.max_pool3d,
    F.max_pool1d_with_indices,
    F.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
    uses=False,
)
def max_pool(
    op,
    input: ShardTensor,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=False,
):
    """Exact for every window and split; indices are global. Comm: one fetch per split dim."""
    dims, named = _dims_of(op)
    # Dynamo passes the function that decides by `return_indices`, eager torch the one it chose.
    indexed = named or return_indices
    more = {"return_indices": True} if indexed else {}
    kernel = _each(kernel_size, dims)
    steps = _each(stride, dims) if stride else kernel
    padding, dilation = _each(padding, dims), _each(dilation, dims)
    lead = _spatial(op, input.layout, dims)
    plan = _pool_plan(input.layout, lead, kernel, steps, padding, dilation, bool(ceil_mode), False)
    indices = None

    def act(block):
        nonlocal indices
        out = op(block, kernel, steps, plan.padding, dilation, ceil_mode, **more)
        if not indexed:
            return out
        indices = out[1]
        if plan.window.steps:
            indices = _global_indices(indices, block.shape[lead:], plan.starts, input.shape[lead:])
        return out[0]

    values = windowed(input, plan.window, act, _lowest(input.dtype), curved=True)
    if not indexed:
        return values
    if indices is None:
        indices = local_of(values).new_empty(plan.window.layout.local_shape, dtype=torch.int64)
    return values, wrap(indices, plan.window.layout)


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _global_indices(indices, block, starts, size) -> torch.Tensor:
    """Flat positions in this rank's block -> flat positions in the global spatial dims."""
    flat, scale = torch.zeros_like(indices), 1
    for rows, start, whole in zip(reversed(block), reversed(starts), reversed(size), strict=True):
        # A window of nothing but -inf names its first row, which may be fill: name a real one.
        at = (indices % rows + start).clamp(0, whole - 1)
        flat = flat + at * scale
        indices = torch.div(indices, rows, rounding_mode="floor")
        scale *= whole
    return flat


@register(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, uses=False)
def avg_pool(
    op,
    input: ShardTensor,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
) -> ShardTensor:
    """Exact for every window and split. Comm: one fetch per split dim."""
    dims, _ = _dims_of(op)
    kernel = _each(kernel_size, dims)
    steps = _each(stride, dims) if stride else kernel
    lead = _spatial(op, input.layout, dims)
    plan = _pool_plan(
        input.layout,
        lead,
        kernel,
        steps,
        _each(padding, dims),
        (1,) * dims,
        bool(ceil_mode),
        bool(count_include_pad),
    )
    more = () if divisor_override is None else (divisor_override,)

    def act(block):
        out = op(block, kernel, steps, plan.padding, ceil_mode, count_include_pad, *more)
        if divisor_override is None:
            for dim, counts in plan.divisors:
                # The local call divided by the whole window; few outputs at the borders differ.
                k = kernel[dim - lead]
                ratio = out.new_tensor([k / count for count in counts])
                out = out * ratio.view(-1, *(1,) * (out.dim() - 1 - dim))
        return out

    return windowed(input, plan.window, act, curved=True)


@dataclass(frozen=True, eq=False, slots=True)
class AdaptivePlan:
    """An adaptive pooling on one layout: some split dims shrink to one row, others stay split.

    Attributes:
        window: fetches along the dims that stay split, and the layout of what ranks compute.
        moved: per dim of `window.steps`, (first row, rows) of each output in this rank's block.
        single: split dims whose output is one row, the same on every rank.
        sizes: output size of the other spatial dims, None for those above.
        gathered: with `single` dims not summed up but whole: one row from each rank that has any.
        layout: of the result.
    """

    window: WindowPlan
    moved: tuple[tuple[tuple[int, int], ...], ...]
    single: tuple[int, ...]
    sizes: tuple[int | None, ...]
    gathered: Layout
    layout: Layout


def adaptive_range(index: int, size: int, out: int) -> tuple[int, int]:
    """Input rows [start, stop) that an output of adaptive pooling covers (torch's formula)."""
    return index * size // out, -(-(index + 1) * size // out)


def adaptive_window(extents: tuple[int, ...], out: int) -> DimPlan:
    """Plan of adaptive pooling to `out` rows along one split dim; centres stay with their owner."""
    size = sum(extents)
    points = cuts(extents)
    if out != size:
        points = centre_cuts(points, out, 2 * size, size, 2 * out)
    wanted = []
    for a, b in pairwise(points):
        first, last = adaptive_range(a, size, out)[0], adaptive_range(b - 1, size, out)[1]
        wanted.append((Segment(first, last - first),) if b > a else ())
    return DimPlan(out, extents_of(points), tuple(wanted))


@constant
def _adaptive_plan(
    layout: Layout, lead: int, asked: tuple[int | None, ...], one_row_each: bool
) -> AdaptivePlan:
    """`one_row_each`: ranks keep their own row of `single` dims instead of summing it up."""
    plans: dict[int, DimPlan] = {}
    single, sizes = [], []
    partial, gathered, final = {}, {}, {}
    for i, size in enumerate(asked):
        dim = lead + i
        size = layout.shape[dim] if size is None else size
        axes, extents = layout.axes(dim), layout.extents(dim)
        if size < 0 or layout.shape[dim] == 0:
            raise RuntimeError(
                f"adaptive pooling of {layout.shape} to {asked}: sizes must not be negative, nor "
                "the input empty"
            )
        if extents is None:
            sizes.append(size)
            final[dim] = (Factor(size),)
        elif size == 1:
            single.append(dim)
            sizes.append(None)
            rows = tuple(min(1, held) for held in extents)
            final[dim] = (Factor(1),)
            if one_row_each:
                partial[dim] = (Factor(sum(rows), axes, rows),)
                gathered[dim] = (Factor(sum(rows)),)
        else:
            plans[dim] = adaptive_window(extents, size)
            sizes.append(None if layout.mesh.size(axes) > 1 else size)
            final[dim] = (Factor(size, axes, plans[dim].extents),)
    fetches = window_plan(layout, plans)
    moved = []
    for step in fetches.steps:
        first, rows = fetches.layout.offset(step.dim), fetches.layout.local_shape[step.dim]
        total, count = layout.shape[step.dim], plans[step.dim].size
        ranges = [adaptive_range(o, total, count) for o in range(first, first + rows)]
        base = ranges[0][0] if ranges else 0
        moved.append(tuple((a - base, b - a) for a, b in ranges))
    out = layout.replace({**final, **partial})
    window = WindowPlan(out, fetches.steps, holds_nothing(out), fetches.crops, fetches.moved)
    return AdaptivePlan(
        window,
        tuple(moved),
        tuple(single),
        tuple(sizes),
        layout.replace({**final, **gathered}),
        layout.replace(final),
    )


@constant
def _adaptive_sizes(op, layout: Layout, output_size) -> tuple[int, tuple[int | None, ...]]:
    """Leading dims, and one size per spatial dim (None: as it is)."""
    dims = _DIMS[op]
    lead = _spatial(op, layout, dims)
    if output_size is None or isinstance(output_size, int):
        return lead, (output_size,) * dims
    return lead, tuple(output_size) * (dims if len(output_size) == 1 else 1)


def _sized(op, block, sizes):
    return op(block, sizes if len(sizes) > 1 else sizes[0])


@register(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, uses=False)
def adaptive_avg_pool(op, input: ShardTensor, output_size) -> torch.Tensor:
    """Exact for every size; a dim pooled to one row is no longer split.

    Comm: one all-reduce of the means where a split dim becomes 1, one fetch per other split dim.
    """
    lead, asked = _adaptive_sizes(op, input.layout, output_size)
    plan = _adaptive_plan(input.layout, lead, asked, False)
    dtype = input.dtype
    # Sums of many halves overflow: they travel in float32.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def act(block):
        # The mean over a box is the mean of means, dim by dim; torch.mean keeps no input.
        for step, ranges in zip(plan.window.steps, plan.moved, strict=True):
            rows = [block.narrow(step.dim, at, n).mean(step.dim, keepdim=True) for at, n in ranges]
            block = torch.cat(rows, step.dim)
        for dim in plan.single:
            block = block.sum(dim, keepdim=True, dtype=wide) / input.shape[dim]
        if any(size is not None for size in plan.sizes):
            block = _sized(op, block, plan.sizes)
        return block

    pooled = local_of(windowed(input, plan.window, act))
    if plan.single:
        axes = tuple(axis for dim in plan.single for axis in input.layout.axes(dim))
        operation = None if torch.compiler.is_compiling() else current_operation()
        pooled = reduce_sum(pooled.to(wide), groups_of(input.layout, axes), operation).to(dtype)
    return result(pooled, plan.layout)


@register(
    F.adaptive_max_pool1d,
    F.adaptive_max_pool2d,
    F.adaptive_max_pool3d,
    F.adaptive_max_pool1d_with_indices,
    F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
    uses=False,
)
def adaptive_max_pool(op, input: ShardTensor, output_size, return_indices=False):
    """Exact for every size; a dim pooled to one row is no longer split. No indices of split dims.

    Comm: a gather of the ranks' maxima where a split dim becomes 1, one fetch per other split dim.
    """
    layout = input.layout
    lead, asked = _adaptive_sizes(op, layout, output_size)
    plan = _adaptive_plan(layout, lead, asked, True)
    if return_indices or _dims_of(op)[1]:
        if any(layout.is_split(dim) for dim in range(lead, len(layout.dims))):
            raise unsupported(
                op, "the positions of maxima of a split dim are not computed", args=(layout,)
            )
        values, indices = op(local_of(input), output_size, return_indices=True)
        return wrap(values, plan.layout), wrap(indices, plan.layout)
    dims = tuple(step.dim for step in plan.window.steps)
    sizes = [1 if size is None else size for size in plan.sizes]

    def act(block):
        grid = []
        for ranges in product(*plan.moved):
            part = block
            for dim, (at, rows) in zip(dims, ranges, strict=True):
                part = part.narrow(dim, at, rows)
            grid.append(_sized(op, part, sizes))
        for dim, ranges in reversed(list(zip(dims, plan.moved, strict=True))):
            width = len(ranges)
            grid = [torch.cat(grid[i : i + width], dim) for i in range(0, len(grid), width)]
        return grid[0]

    best = local_of(windowed(input, plan.window, act))
    if plan.single:
        operation = None if torch.compiler.is_compiling() else current_operation()
        best = move(best, plan.window.layout, plan.gathered, operation)
        rest: list[int | None] = [None] * len(sizes)
        for dim in plan.single:
            rest[dim - lead] = 1
        empty = (plan.layout.local_shape, (best,))
        best = _sized(op, best, rest) if best.numel() else nothing(*empty)
    return result(best, plan.layout)
