"""Local response norm: a window over the channels."""

from __future__ import annotations

import torch.nn.functional as F

from shardfield.constant import constant
from shardfield.layout import Layout, cuts
from shardfield.plan import DimPlan, clip
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, local_of, wrap
from shardfield.windowed import WindowPlan, holds_nothing, nothing, window_plan, windowed


@constant
def _plan(op, layout: Layout, size: int) -> WindowPlan:
    """Every rank's channels and those that its windows reach."""
    extents = layout.extents(1)
    if extents is None:
        raise unsupported(
            op,
            "its channels are not held in contiguous ranges",
            "x.redistribute(...) so that another dim is split",
            args=(layout,),
        )
    before, after, points = size // 2, (size - 1) // 2, cuts(extents)
    wanted, crop = [], []
    for start, stop in zip(points, points[1:], strict=False):
        first = max(0, start - before)
        last = min(points[-1], stop + after)
        wanted.append(clip(first, last, points[-1]) if stop > start else ())
        crop.append((start - first, stop - start) if stop > start else (0, 0))
    plan = DimPlan(points[-1], extents, tuple(wanted), tuple(crop))
    return window_plan(layout, {1: plan})


@register(F.local_response_norm, uses=False)
def local_response_norm(
    op,
    input: ShardTensor,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> ShardTensor:
    """Divides by a power of the mean square of `size` channels around each.

    Layout: the input's.
    Comm: where the channels are split, one fetch of those that windows reach.
    """
    layout, local = input.layout, local_of(input)
    if layout.is_split(1):
        plan = _plan(op, layout, size)
        return windowed(input, plan, lambda x: op(x, size, alpha, beta, k), curved=True)
    if holds_nothing(layout):
        # torch hands an empty block through, and then its second derivative is not the others'.
        return wrap(nothing(layout.local_shape, (local,), None, curved=True), layout)
    return wrap(op(local, size, alpha, beta, k), layout)
