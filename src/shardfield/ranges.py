"""Rows of split dims: slices of them, contiguous ranges, cuts at multiples."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout, cuts, even_extents, extents_of

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
        factor = contiguous_ranges(source, dim)
        source = source.replace({dim: (factor,)})
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


def contiguous_ranges(layout: Layout, dim: int) -> Factor:
    """The one split factor of a dim, or the one it takes to hold contiguous ranges, evenly cut."""
    factor = layout.contiguous(dim)
    if factor is not None:
        return factor
    size, axes = layout.shape[dim], layout.axes(dim)
    return Factor(size, axes, even_extents(size, layout.mesh.size(axes)))


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
