"""Rows of a table, picked by split indices."""

from __future__ import annotations

import torch

from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.layout import Factor, Layout
from shardfield.registry import current_operation, groups_of, register, unsupported
from shardfield.tensor import ShardTensor, local_of, result

Tensor = torch.Tensor


@register(torch.embedding)
def embedding(
    op,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Exact for every split of the indices, and of the table's rows or columns.

    Layout: the dims of the indices, then the columns of the table.
    Comm: none; backward, the sum of the table's gradient over the axes of the indices. Of a table
        split by rows, one all-reduce of the result over their axis forward, none backward.

    Raises:
        UnsupportedOperation: rows split in several ranges, or over an axis of the indices;
            gradients scaled by counts, or sparse ones.
    """
    table, picked = (
        value.layout if isinstance(value, ShardTensor) else tuple(value.shape)
        for value in (weight, indices)
    )
    layout = _layout(op, table, picked, bool(scale_grad_by_freq), bool(sparse))
    rows, at = [local_of(v) if isinstance(v, ShardTensor) else v for v in (weight, indices)]
    if not isinstance(table, Layout) or not table.is_split(0):
        return result(op(rows, at, padding_idx, scale_grad_by_freq, sparse), layout)
    _check(at, table.shape[0])
    start, groups = _held_rows(table)
    here = (at >= start) & (at < start + rows.shape[0])
    if not rows.shape[0]:  # nothing is picked, but the table joins the graph as elsewhere
        rows = rows.new_zeros(1, *rows.shape[1:]) + rows.sum()
    padding = padding_idx - start if 0 <= padding_idx - start < rows.shape[0] else -1
    found = op(rows, torch.where(here, at - start, 0), padding, scale_grad_by_freq, sparse)
    found = torch.where(here.unsqueeze(-1), found, 0.0)
    return result(reduce_sum(found, groups, current_operation()), layout)


def _check(indices: Tensor, rows: int) -> None:
    """Refuses what torch refuses; a rank that looks at its own rows only would not see it."""
    inside = ((indices >= 0) & (indices < rows)).all()
    try:
        torch._assert_async(inside, f"embedding: an index is not one of {rows} rows")
    except RuntimeError as error:  # on CPU, where it is at once
        raise IndexError(f"index out of range in self: the table has {rows} rows") from error


@constant
def _held_rows(table: Layout) -> tuple[int, tuple[str, ...]]:
    """First row of the table that this rank holds, and the groups over which it is split."""
    return table.offset(0), groups_of(table, table.axes(0))


@constant
def _layout(op, table, indices, scaled: bool, sparse: bool) -> Layout:
    """Of the result; an operand is a Layout, or the shape of a plain one."""
    known = [operand for operand in (table, indices) if isinstance(operand, Layout)]
    if isinstance(table, Layout) and table.contiguous(0) is None:
        raise unsupported(op, "its table's rows are split in several ranges", args=known)
    by_rows = isinstance(table, Layout) and table.is_split(0)
    if (scaled or sparse) and (by_rows or isinstance(indices, Layout)):
        what = "scaled by how often an index occurs" if scaled else "sparse"
        raise unsupported(op, f"the gradient of its table is {what}", args=known)
    rows = _dims(indices)
    columns = _dims(table)[1]
    taken = {axis for dim in rows for factor in dim for axis in factor.axes}
    if taken.intersection(axis for dim in _dims(table) for factor in dim for axis in factor.axes):
        raise unsupported(op, "one mesh axis splits the indices and the table", args=known)
    return Layout(known[0].mesh, [*rows, columns])


def _dims(operand) -> list:
    if isinstance(operand, Layout):
        return list(operand.dims)
    return [(Factor(size),) for size in operand]
