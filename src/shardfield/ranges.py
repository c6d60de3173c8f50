"""Rows of split dims: slices of them, contiguous ranges, cuts at multiples."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout, cuts, even_extents, extents_of
from shardfield.registry import current_operation
from shardfield.tensor import ShardTensor, local_of, wrap

Cut = tuple[int, int, int]
"""Rows `start, start+step, ...` before `stop` of one dim; as `slice.indices` gives them."""


@dataclass(frozen=True, eq=False, slots=True)
class SlicePlan:
    """Slices along the dims of a layout, seen from this rank.

    Attributes:
        layout: of the result.
        source: the layout to move to first; the given one if nothing moves.
        cuts: (dim, local start, stop, step) to take of the local tensor.
    """

    layout: Layout
    source: Layout
    cuts: tuple[tuple[int, int, int, int], ...]


def rows_in(cut: Cut, before: int) -> int:
    """How many rows of a slice lie before a global row."""
    start, stop, step = cut
    return max(0, -((start - min(before, stop)) // step))


@constant
def slice_plan(layout: Layout, wanted: tuple[Cut | None, ...]) -> SlicePlan:
    """The plan of one slice per dim (None: all rows)."""
    source, taken, dims = layout, [], list(layout.dims)
    for dim, cut in enumerate(wanted):
        if cut is None or cut == (0, layout.shape[dim], 1):
            continue
        if not layout.is_split(dim):
            taken.append((dim, *cut))
            dims[dim] = (Factor(rows_in(cut, layout.shape[dim])),)
            continue
        inner = _inner_cut(layout.dims[dim], cut)
        if inner is not None:
            factor, unit = layout.dims[dim][0], layout.local_shape[dim]
            unit //= max(factor.size, 1)
            start, stop, _ = inner
            taken.append((dim, start * unit, stop * unit, 1))
            dims[dim] = (Factor(stop - start), *layout.dims[dim][1:])
            continue
        source = ranges_of(source, (dim,))
        factor = source.dims[dim][0]
        points = [rows_in(cut, point) for point in cuts(factor.extents)]
        rank = layout.mesh.rank(factor.axes)
        start, stop, step = cut
        first = start + points[rank] * step - cuts(factor.extents)[rank]
        count = points[rank + 1] - points[rank]
        last = first + (count - 1) * step + 1
        taken.append((dim, first, last, step) if count else (dim, 0, 0, 1))
        dims[dim] = (Factor(points[-1], factor.axes, extents_of(points)),)
    return SlicePlan(Layout(layout.mesh, dims), source, tuple(taken))


def _inner_cut(dim: Dim, cut: Cut) -> Cut | None:
    """A slice in whole steps of a dim's leading whole factor, in units of it; else None."""
    start, stop, step = cut
    unit = prod(factor.size for factor in dim[1:])
    if dim[0].axes or step != 1 or not unit or start % unit or max(start, stop) % unit:
        return None
    return start // unit, max(start, stop) // unit, 1


def cut_of(index: slice, size: int) -> Cut:
    """A slice as (start, stop, step) of a dim.

    Raises:
        ValueError: its step is not positive, as in torch.
    """
    if index.step is not None and index.step <= 0:
        raise ValueError("step must be greater than zero")
    start, stop, step = index.indices(size)
    return start, max(start, stop), step


def sliced(op, local: torch.Tensor, layout: Layout, wanted: tuple[Cut | None, ...]):
    """This rank's rows of a slice: (local, its layout, whether data moved).

    Comm: none, but for a slice of a merged dim, which moves to contiguous ranges first.
    """
    plan = slice_plan(layout, wanted)
    local = move(local, layout, plan.source, op.__name__)
    for dim, start, stop, step in plan.cuts:
        if step == 1:
            local = local.narrow(dim, start, stop - start)
        else:
            local = local[(slice(None),) * dim + (slice(start, stop, step),)]
    return local, plan.layout, plan.source is not layout


@constant
def ranges_of(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """`layout` with contiguous ranges of these dims; those that have none are cut evenly."""
    changes = {}
    for dim in dims:
        if layout.contiguous(dim) is None:
            size, axes = layout.shape[dim], layout.axes(dim)
            changes[dim] = (Factor(size, axes, even_extents(size, layout.mesh.size(axes))),)
    return layout.replace(changes)


def in_ranges(x: ShardTensor, *dims: int) -> ShardTensor:
    """`x` with contiguous ranges of these dims. Comm: none where it has them, else one fetch."""
    return moved_to(x, ranges_of(x._layout, dims))


def moved_to(x: ShardTensor, target: Layout) -> ShardTensor:
    """`x` in another layout, split over the same axes; itself where nothing moves."""
    if target is x._layout:
        return x
    operation = None if torch.compiler.is_dynamo_compiling() else current_operation()
    moved = wrap(move(local_of(x), x._layout, target, operation), target)
    moved._moved = True
    return moved


@constant
def aligned(layout: Layout, units: tuple[tuple[int, int], ...]) -> Layout:
    """`layout` with the cuts of some dims at multiples of a unit, the nearest ones.

    Args:
        units: (dim, unit) for each; the unit divides the size of the dim.
    """
    changes = {}
    for dim, unit in units:
        if all(extent % unit == 0 for factor in layout.dims[dim][-1:] for extent in factor.extents):
            continue
        factor = ranges_of(layout, (dim,)).dims[dim][0]
        points = [(point + unit // 2) // unit * unit for point in cuts(factor.extents)]
        changes[dim] = (Factor(factor.size, factor.axes, extents_of(points)),)
    return layout.replace(changes)


def divided(dim: Dim, unit: int) -> Dim:
    """A dim of which `unit` neighbours, never cut apart, become one row."""
    *outer, last = dim or (Factor(1),)
    extents = tuple(extent // unit for extent in last.extents)
    return (*outer, Factor(last.size // unit, last.axes, extents))


def multiplied(dim: Dim, unit: int) -> Dim:
    """A dim of which every row becomes `unit` neighbours."""
    return (*dim, Factor(unit))
