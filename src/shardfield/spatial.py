"""Spatial dims: their arguments, which of them an operation takes, positions in all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.ranges import moved_to, ranges_of
from shardfield.registry import unsupported
from shardfield.tensor import ShardTensor


def each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """One number per spatial dim, as torch spreads them."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


@constant
def _spatial(op, layout: Layout, dims: int) -> tuple[int, Layout]:
    lead = len(layout.dims) - dims
    if lead not in (1, 2):
        raise unsupported(op, f"its input has {len(layout.dims)} dims", args=(layout,))
    return lead, ranges_of(layout, tuple(range(lead, len(layout.dims))))


def spatial(op, x: ShardTensor, dims: int) -> tuple[ShardTensor, int]:
    """`x` with its spatial dims in contiguous ranges, and the number of dims before them.

    Comm: none, but for a spatial dim that was merged of several: one fetch.
    """
    lead, target = _spatial(op, x._layout, dims)
    return moved_to(x, target), lead


def global_positions(
    indices: torch.Tensor, block: Sequence[int], starts: Sequence[int], size: Sequence[int]
) -> torch.Tensor:
    """Flat positions in the spatial dims of a block -> flat positions in the global ones.

    Args:
        block: spatial shape of the block.
        starts: global row of its first row, per dim.
        size: global spatial shape.
    """
    flat, scale = torch.zeros_like(indices), 1
    for rows, start, whole in zip(reversed(block), reversed(starts), reversed(size), strict=True):
        # A window of nothing but -inf names its first row, which may be fill: name a real one.
        at = (indices % rows + start).clamp(0, whole - 1)
        flat = flat + at * scale
        indices = torch.div(indices, rows, rounding_mode="floor")
        scale *= whole
    return flat
