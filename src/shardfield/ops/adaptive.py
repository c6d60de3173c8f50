"""Adaptive pooling: windows of sizes that follow from the shape."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.nn.functional as F

from shardfield.comm.move import move
from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.layout import Factor, Layout, cuts, extents_of
from shardfield.plan import DimPlan, Segment, centre_cuts
from shardfield.registry import current_operation, groups_of, register
from shardfield.spatial import global_positions, spatial
from shardfield.tensor import ShardTensor, local_of, result
from shardfield.windowed import WindowPlan, holds_nothing, window_plan, windowed

_DIMS = {
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
_INDEXED = {
    1: F.adaptive_max_pool1d_with_indices,
    2: F.adaptive_max_pool2d_with_indices,
    3: F.adaptive_max_pool3d_with_indices,
}


@dataclass(frozen=True, eq=False, slots=True)
class AdaptivePlan:
    """An adaptive pooling on one layout: some split dims shrink to one row, others stay split.

    Attributes:
        window: fetches along the dims that stay split, and the layout of what ranks compute.
        moved: per dim of `window.steps`, (first row, rows) of each output in this rank's block.
        single: split dims whose output is one row, the same on every rank.
        sizes: output size of the other spatial dims, None for those above.
        starts: global row of the first row of this rank's block, per spatial dim.
        gathered: with `single` dims not summed up but whole: one row from each rank that has any.
        layout: of the result.
    """

    window: WindowPlan
    moved: tuple[tuple[tuple[int, int], ...], ...]
    single: tuple[int, ...]
    sizes: tuple[int | None, ...]
    starts: tuple[int, ...]
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
    single, sizes, starts = [], [], [0] * len(asked)
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
        elif size == 1 and layout.mesh.size(axes) == 1:
            sizes.append(1)
            final[dim] = (Factor(1),)
        elif size == 1:
            single.append(dim)
            sizes.append(None)
            starts[i] = layout.offset(dim)
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
        starts[step.dim - lead] = base
        moved.append(tuple((a - base, b - a) for a, b in ranges))
    out = layout.replace({**final, **partial})
    window = WindowPlan(out, fetches.steps, holds_nothing(out), fetches.crops, fetches.moved)
    return AdaptivePlan(
        window,
        tuple(moved),
        tuple(single),
        tuple(sizes),
        tuple(starts),
        layout.replace({**final, **gathered}),
        layout.replace(final),
    )


def _each_size(output_size, dims: int) -> tuple[int | None, ...]:
    """One size per spatial dim; None: as it is."""
    if output_size is None or isinstance(output_size, int):
        return (output_size,) * dims
    return tuple(output_size) * (dims if len(output_size) == 1 else 1)


@constant
def _dims_of(op) -> int:
    return _DIMS[op]


def _sized(op, block, sizes):
    return op(block, sizes if len(sizes) > 1 else sizes[0])


@register(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, uses=False)
def adaptive_avg_pool(op, input: ShardTensor, output_size) -> torch.Tensor:
    """Exact for every size; a dim pooled to one row is no longer split.

    Comm: one all-reduce of the means where a split dim becomes 1, one fetch per other split dim.
    """
    dims = _dims_of(op)
    input, lead = spatial(op, input, dims)
    plan = _adaptive_plan(input.layout, lead, _each_size(output_size, dims), False)
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
        operation = None if torch.compiler.is_dynamo_compiling() else current_operation()
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
    """Exact for every size; a dim pooled to one row is no longer split. Indices are global.

    Comm: a gather of the ranks' maxima, and one of their positions, where a split dim becomes 1;
        one fetch per other split dim.
    """
    dims = _dims_of(op)
    input, lead = spatial(op, input, dims)
    plan = _adaptive_plan(input.layout, lead, _each_size(output_size, dims), True)
    with_indices = _INDEXED[dims]
    sizes = tuple([1 if size is None else size for size in plan.sizes])
    whole = input.shape[lead:]
    indices = None

    def act(block):
        nonlocal indices
        values, places = [], []
        for ranges in product(*plan.moved):
            part, starts = block, list(plan.starts)
            for step, (at, rows) in zip(plan.window.steps, ranges, strict=True):
                part = part.narrow(step.dim, at, rows)
                starts[step.dim - lead] += at
            value, place = _sized(with_indices, part, sizes)
            values.append(value)
            if any(starts) or part.shape[lead:] != whole:
                place = global_positions(place, part.shape[lead:], starts, whole)
            places.append(place)
        steps = [step.dim for step in plan.window.steps]
        indices = _tiled(places, steps, plan.moved)
        return _tiled(values, steps, plan.moved)

    best = local_of(windowed(input, plan.window, act, curved=True))
    if indices is None:
        indices = best.new_empty(best.shape, dtype=torch.int64)
    if plan.single:
        operation = None if torch.compiler.is_dynamo_compiling() else current_operation()
        best = move(best, plan.window.layout, plan.gathered, operation)
        indices = move(indices, plan.window.layout, plan.gathered, operation)
        best, indices = _first_largest(best, indices, plan.single)
    if return_indices or with_indices is op:
        return result(best, plan.layout), result(indices, plan.layout)
    return result(best, plan.layout)


def _tiled(parts: list[torch.Tensor], dims, counts) -> torch.Tensor:
    """Joins a row-major grid of parts along `dims`."""
    for dim, ranges in reversed(list(zip(dims, counts, strict=True))):
        width = len(ranges)
        parts = [torch.cat(parts[i : i + width], dim) for i in range(0, len(parts), width)]
    return parts[0]


def _first_largest(values: torch.Tensor, places: torch.Tensor, dims: tuple[int, ...]):
    """The largest values over some dims, and where they are, as torch picks among equal ones.

    That is the first one in row-major order, but the last of NaNs.
    """
    top = values.detach().amax(dims, keepdim=True)
    isnan = top.isnan()
    candidate = torch.where(isnan, values.isnan(), values == top)
    order = torch.where(candidate, torch.where(isnan, -places, places), _NOWHERE)
    first = order.amin(dims, keepdim=True).abs()
    picked = candidate & (places == first)
    return torch.where(picked, values, 0).sum(dims, keepdim=True), first


_NOWHERE = torch.iinfo(torch.int64).max
