"""Max unpooling: values go back to where their indices say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardfield.comm.fetch import fetch
from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.operands import part_of_plain
from shardfield.plan import transposed_window
from shardfield.registry import register
from shardfield.spatial import each, spatial
from shardfield.tensor import ShardTensor, local_of
from shardfield.windowed import WindowPlan, window_plan, windowed

_DIMS = {F.max_unpool1d: 1, F.max_unpool2d: 2, F.max_unpool3d: 3}


@constant
def _dims_of(op) -> int:
    return _DIMS[op]


def unpooled_size(size, pooled, kernel, stride, padding) -> tuple[int, ...]:
    """The spatial output shape that is asked for, or the default one.

    Raises:
        ValueError: it is none that pooling could have come from, as in torch.
    """
    usual = [
        (n - 1) * s + k - 2 * p for n, k, s, p in zip(pooled, kernel, stride, padding, strict=True)
    ]
    if size is None:
        return tuple(usual)
    size = tuple(size)[2:] if len(size) == len(kernel) + 2 else tuple(size)
    if len(size) != len(kernel):
        raise ValueError(
            f"output_size should be a sequence containing {len(kernel)} or {len(kernel) + 2} "
            f"elements, but it has a length of '{len(size)}'"
        )
    for dim, (n, middle, step) in enumerate(zip(size, usual, stride, strict=True)):
        if not middle - step < n < middle + step:
            raise ValueError(
                f'invalid output_size "{size}" (dim {dim} must be between {middle - step} and '
                f"{middle + step})"
            )
    return size


@dataclass(frozen=True, eq=False, slots=True)
class UnpoolPlan:
    """An unpooling on one layout.

    Attributes:
        window: fetches of pooled rows, and the output layout.
        size: global spatial shape of the output.
        block: that of what the local call returns, before it is cropped.
        padding: of the local call.
        origins: per fetched spatial dim (dim, global row of the block's first).
    """

    window: WindowPlan
    size: tuple[int, ...]
    block: tuple[int, ...]
    padding: tuple[int, ...]
    origins: tuple[tuple[int, int], ...]


@constant
def _unpool_plan(layout: Layout, lead: int, kernel, stride, padding, asked) -> UnpoolPlan:
    size = unpooled_size(asked, layout.shape[lead:], kernel, stride, padding)
    plans = {}
    for i, k in enumerate(kernel):
        extents = layout.extents(lead + i) or (layout.shape[lead + i],)
        usual = (sum(extents) - 1) * stride[i] + k - 2 * padding[i]
        plans[lead + i] = transposed_window(extents, k, stride[i], padding[i], size[i] - usual)
    window = window_plan(layout, plans)
    block, pads, origins, crops = list(size), list(padding), [], []
    for step, crop in zip(window.steps, window.crops, strict=True):
        i = step.dim - lead
        assert crop is not None
        rows = (step.plan.out_rows - 1) * stride[i] + kernel[i]
        block[i], pads[i] = max(rows, crop[1]), 0
        crops.append((crop[0], crop[1] - crop[0]))
        wanted = plans[step.dim].wanted[layout.mesh.rank(layout.axes(step.dim))]
        first = (wanted[0].start or 0) if wanted else 0
        origins.append((i, first * stride[i] - padding[i]))
    window = WindowPlan(window.layout, window.steps, window.empty, tuple(crops), window.moved)
    return UnpoolPlan(window, size, tuple(block), tuple(pads), tuple(origins))


@register(F.max_unpool1d, F.max_unpool2d, F.max_unpool3d, uses=False)
def max_unpool(
    op, input: ShardTensor, indices, kernel_size, stride=None, padding=0, output_size=None
) -> ShardTensor:
    """Exact for indices of max pooling with these arguments; others are an error, as in torch.

    Comm: two fetches per split spatial dim, of values and of indices at the borders.
    """
    dims = _dims_of(op)
    kernel, padding = each(kernel_size, dims), each(padding, dims)
    stride = kernel if stride is None else each(stride, dims)
    asked = None if output_size is None else tuple(output_size)
    input, lead = spatial(op, input, dims)
    plan = _unpool_plan(input.layout, lead, kernel, stride, padding, asked)
    places = _like(op, indices, input.layout)
    for step in plan.window.steps:
        places = fetch(places, step.dim, step.plan, step.group, 0, op.__name__)

    def act(block):
        here = _in_block(places, lead, plan, kernel, stride) if plan.origins else places
        return op(block, here, kernel, stride, plan.padding, plan.block)

    return windowed(input, plan.window, act)


def _like(op, indices: torch.Tensor, layout: Layout) -> torch.Tensor:
    if isinstance(indices, ShardTensor):
        return move(local_of(indices), indices.layout, layout, op.__name__)
    return part_of_plain(indices, layout)


def _in_block(places: torch.Tensor, lead: int, plan: UnpoolPlan, kernel, stride) -> torch.Tensor:
    """Global flat positions -> those in the block; -1, at which torch raises, outside the window.

    What lies there may be of another rank, which has not got this row.
    """
    origins = dict(plan.origins)
    flat, scale, inside = torch.zeros_like(places), 1, None
    for i in reversed(range(len(plan.size))):
        at = places % plan.size[i] if i else places
        places = torch.div(places, plan.size[i], rounding_mode="floor")
        if i in origins:
            at = at - origins[i]
            rows = torch.arange(places.shape[lead + i], device=places.device) * stride[i]
            reach = at - rows.view(-1, *(1,) * (len(plan.size) - 1 - i))
            near = (reach >= 0) & (reach < kernel[i])
            inside = near if inside is None else inside & near
        flat = flat + at * scale
        scale *= plan.block[i]
    return flat if inside is None else torch.where(inside, flat, -1)
