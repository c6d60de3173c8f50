"""Diagonals and triangles: every rank takes those of its rows and columns."""

from __future__ import annotations

import torch

from shardfield.constant import constant
from shardfield.layout import Factor, Layout, cuts, extents_of, wrapped
from shardfield.ranges import in_ranges
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, local_of, marked, result

_T = torch.Tensor


@constant
def _diagonal_plan(op, layout: Layout, offset: int, first: int, second: int) -> tuple[Layout, int]:
    """The layout of the diagonal, and the offset of this rank's part in its block."""
    torch.empty(layout.shape, device="meta").diagonal(offset, first, second)  # raises as torch
    split = [dim for dim in (first, second) if layout.is_split(dim)]
    if len(split) > 1:
        raise unsupported(
            op,
            f"dims {first} and {second} are both split, so that few ranks hold any of it",
            "redistribute so that one of them is whole",
            args=(layout,),
        )
    rows, columns = layout.shape[first], layout.shape[second]
    # Elements are [begin, end) along either dim.
    begin, end = max(0, -offset), min(rows, columns - offset)
    factor, here = Factor(max(0, end - begin)), offset
    if split:
        have, shift = layout.dims[split[0]][0], 0
        if split[0] == second:
            shift = offset
        points = [min(max(point - begin - shift, 0), factor.size) for point in cuts(have.extents)]
        factor = Factor(factor.size, have.axes, extents_of(points))
        here += layout.offset(first) - layout.offset(second)
    rest = [dim for index, dim in enumerate(layout.dims) if index not in (first, second)]
    return Layout(layout.mesh, [*rest, (factor,)]), here


@register(torch.diagonal, _T.diagonal, uses=False)
def diagonal(op, input: ShardTensor, offset=0, dim1=0, dim2=1) -> torch.Tensor:
    """A local view. Layout: split as the one of the two dims that is split. Comm: none."""
    first, second = wrapped(dim1, input.dim()), wrapped(dim2, input.dim())
    input = in_ranges(input, first, second)
    out, here = _diagonal_plan(op, input._layout, offset, first, second)
    return marked(result(local_of(input).diagonal(here, first, second), out), input._moved)


@constant
def _triangle(layout: Layout, diagonal: int) -> int:
    return diagonal + layout.offset(-2) - layout.offset(-1)


@register(torch.tril, _T.tril, torch.triu, _T.triu, uses=False)
def triangle(op, input: ShardTensor, diagonal: int = 0) -> torch.Tensor:
    """Layout: unchanged. Comm: none."""
    input = in_ranges(input, input.dim() - 2, input.dim() - 1)
    return result(op(local_of(input), _triangle(input._layout, diagonal)), input._layout)


@register(torch.diag, _T.diag, uses=False)
def diag(op, input: ShardTensor, diagonal: int = 0) -> torch.Tensor:
    """The diagonal of a matrix, copied. Comm: none."""
    if input.dim() != 2:
        raise unsupported(op, "it makes a matrix of a split vector", args=(input,))
    return input.diagonal(diagonal, 0, 1).clone()
