"""Rows of a table, picked by split indices."""

from __future__ import annotations

import torch

from shardfield.constant import constant
from shardfield.layout import Factor, Layout
from shardfield.registry import register, unsupported
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
    """Exact for every split of the indices, and of the table's columns.

    Layout: the dims of the indices, then the columns of the table.
    Comm: none; backward, the sum of the table's gradient over the axes of the indices.

    Raises:
        UnsupportedOperation: a table split by rows; gradients scaled by counts, or sparse ones.
    """
    table, picked = (
        value.layout if isinstance(value, ShardTensor) else tuple(value.shape)
        for value in (weight, indices)
    )
    layout = _layout(op, table, picked, bool(scale_grad_by_freq), bool(sparse))
    blocks = [local_of(v) if isinstance(v, ShardTensor) else v for v in (weight, indices)]
    return result(op(*blocks, padding_idx, scale_grad_by_freq, sparse), layout)


@constant
def _layout(op, table, indices, scaled: bool, sparse: bool) -> Layout:
    """Of the result; an operand is a Layout, or the shape of a plain one."""
    known = [operand for operand in (table, indices) if isinstance(operand, Layout)]
    if isinstance(table, Layout) and table.is_split(0):
        raise unsupported(op, "the rows of its table are split", args=known)
    if (scaled or sparse) and isinstance(indices, Layout):
        what = "scaled by how often an index occurs" if scaled else "sparse"
        raise unsupported(op, f"the gradient of its table is {what}", args=known)
    rows = _dims(indices)
    columns = _dims(table)[1]
    taken = {axis for dim in rows for factor in dim for axis in factor.axes}
    if taken.intersection(axis for factor in columns for axis in factor.axes):
        raise unsupported(op, "one mesh axis splits the indices and the columns", args=known)
    return Layout(known[0].mesh, [*rows, columns])


def _dims(operand) -> list:
    if isinstance(operand, Layout):
        return list(operand.dims)
    return [(Factor(size),) for size in operand]
