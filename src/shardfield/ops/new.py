"""Tensors made like another: `x.new_zeros(shape)` and its kin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of, wrap

_T = torch.Tensor


@register(_T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full, uses=False)
def new_constant(op, input: ShardTensor, size: int | Sequence[int], *args, **kwargs):
    """A constant of the type and device of `input`. Comm: none.

    Layout: that of `input` if the shapes are equal, else plain: every rank has all of it.
    """
    if isinstance(size, int):
        # Only new_full takes further positional arguments; for the rest they are sizes.
        size, args = ((size,), args) if op is _T.new_full else ((size, *args), ())
    shape = _local_shape(input._layout, tuple(size))
    if shape is None:
        return op(local_of(input), size, *args, **kwargs)
    return wrap(op(local_of(input), shape, *args, **kwargs), input._layout)


@constant
def _local_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """What this rank holds of a tensor of this global shape; None if not split like `layout`."""
    return layout.local_shape if shape == layout.shape else None


@register(_T.new_tensor, uses=False)
def new_tensor(op, input: ShardTensor, data, **kwargs):
    """A plain tensor of Python values, the same on every rank. Comm: none."""
    return op(local_of(input), data, **kwargs)


@register(torch.numel, uses=False)
def numel(op, input: ShardTensor) -> int:
    """Global number of elements."""
    return input.numel()
