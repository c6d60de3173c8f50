"""Whole tensors compared, elements looked up in a plain table, and counted."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardfield.comm.collectives import all_reduce
from shardfield.constant import constant
from shardfield.layout import Factor, Layout
from shardfield.operands import block
from shardfield.registry import current_operation, groups_of, register, unsupported
from shardfield.tensor import ShardTensor, local_of, result, wrap

Tensor = torch.Tensor


@register(torch.equal, Tensor.equal, uses=False)
def equal(op, input, other) -> bool:
    """Whether all elements are equal. Comm: one all-reduce of a byte per mesh axis that splits."""
    if input.shape != other.shape:
        return False
    return bool((input == other).all())


@register(torch.allclose, Tensor.allclose, uses=False)
def allclose(op, input, other, rtol=1e-5, atol=1e-8, equal_nan=False) -> bool:
    """Whether all elements are close. Comm: as `equal`."""
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@register(Tensor.__contains__, uses=False)
def contains(op, input, element) -> bool:
    """Whether an element is among the global ones. Comm: as `equal`."""
    return bool((input == element).any())


@register(Tensor.is_same_size, torch.is_same_size, uses=False)
def is_same_size(op, input, other) -> bool:
    """Whether the global shapes are equal. Comm: none."""
    return input.shape == other.shape


@register(torch.masked_select, Tensor.masked_select, uses=False)
def masked_select(op, input, mask, *, out=None):
    """Refused: how many elements a rank would hold depends on the values."""
    raise unsupported(
        op,
        "the number of elements it returns depends on the values, on every rank otherwise",
        "torch.where or masked_fill, or (x * mask).sum() / mask.sum()",
        "indexing",
        (input, mask),
    )


@constant
def _table(layout: Layout) -> Layout:
    """The layout of a table of which every rank wants all."""
    return Layout(layout.mesh, [(Factor(size),) for size in layout.shape])


def _looked_up(values, table, act) -> Tensor:
    """`act` on this rank's values and the whole table."""
    if isinstance(table, ShardTensor):
        whole = _table(table.layout)
        table = block(table, whole, whole)
    if not isinstance(values, ShardTensor):
        return act(values, table)
    return wrap(act(local_of(values), table), values.layout)


@register(torch.bucketize, uses=False)
def bucketize(op, input, boundaries, *, out_int32=False, right=False, out=None) -> Tensor:
    """Layout: the input's. Comm: none, for plain boundaries."""
    given = {"out_int32": out_int32, "right": right}
    return _looked_up(input, boundaries, lambda x, table: op(x, table, **given))


@register(torch.searchsorted, uses=False)
def searchsorted(op, sorted_sequence, input, *, sorter=None, **given) -> Tensor:
    """In a table of one dim. Layout, Comm: as `bucketize`."""
    if sorted_sequence.dim() != 1 or isinstance(sorter, ShardTensor):
        raise unsupported(
            op, "rows of their own for every sample", args=(sorted_sequence, input, sorter)
        )
    return _looked_up(input, sorted_sequence, lambda x, table: op(table, x, sorter=sorter, **given))


@register(torch.isin, uses=False)
def isin(op, elements, test_elements, *, assume_unique=False, invert=False, out=None) -> Tensor:
    """Layout: that of the elements. Comm: none, for plain test elements."""
    given = {"assume_unique": assume_unique, "invert": invert}
    return _looked_up(elements, test_elements, lambda x, table: op(x, table, **given))


@register(torch.bincount, Tensor.bincount, uses=False)
def bincount(op, input, weights=None, minlength: int = 0) -> Tensor:
    """How often every number occurs, or the sum of its weights. Layout: plain.

    Comm: that of `max`, and one all-reduce of the counts per mesh axis that splits.
    """
    if input.dim() != 1 or (weights is not None and weights.shape != input.shape):
        raise unsupported(op, "numbers, and weights if any, are 1-d and of one size")
    layout = next(x._layout for x in (input, weights) if isinstance(x, ShardTensor))
    length = max(minlength, int(input.max()) + 1 if input.numel() else 0)
    local, shares = (None if x is None else block(x, layout, layout) for x in (input, weights))
    counts = op(local, shares, length)
    if weights is not None and input.numel():
        # Of no numbers, torch counts in int64, weighted or not; here they may be this rank's only.
        counts = counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    for group in groups_of(layout, layout.split_axes):
        counts = all_reduce(counts, group, current_operation())
    return counts


@constant
def _with_classes(layout: Layout, classes: int) -> Layout:
    return Layout(layout.mesh, [*layout.dims, (Factor(classes),)])


@register(F.one_hot, uses=False)
def one_hot(op, input: ShardTensor, num_classes: int = -1) -> Tensor:
    """Layout: the input's, and classes whole. Comm: none; for unknown classes that of `max`."""
    if num_classes < 0:
        num_classes = int(input.max()) + 1
    return result(op(local_of(input), num_classes), _with_classes(input.layout, num_classes))
