"""Sliding windows as data: `F.unfold` and `F.fold` (im2col), `Tensor.unfold`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from shardfield.constant import constant
from shardfield.layout import Factor, Layout, wrapped
from shardfield.plan import transposed_window, window
from shardfield.ranges import aligned, divided, in_ranges, moved_to, multiplied
from shardfield.registry import register
from shardfield.spatial import each, spatial
from shardfield.tensor import ShardTensor, marked
from shardfield.windowed import WindowPlan, holds_nothing, window_plan, windowed

_T = torch.Tensor


def _extents(layout: Layout, dim: int) -> tuple[int, ...]:
    return layout.extents(dim) or (layout.shape[dim],)


@constant
def _unfold_plan(layout: Layout, lead: int, kernel, dilation, padding, stride) -> WindowPlan:
    """The output still has a dim for the windows along each spatial dim."""
    whole = torch.empty(layout.shape, device="meta")
    F.unfold(whole, kernel, dilation, padding, stride)  # raises where torch raises
    plans = {}
    for i, k in enumerate(kernel):
        pads = (padding[i], padding[i])
        plans[lead + i] = window(_extents(layout, lead + i), k, stride[i], pads, dilation[i])
    plan = window_plan(layout, plans)
    channels = multiplied(layout.dims[lead - 1], prod(kernel))
    out = plan.layout.replace({lead - 1: channels})
    return WindowPlan(out, plan.steps, plan.empty, plan.crops, plan.moved)


@register(F.unfold, uses=False)
def unfold(op, input: ShardTensor, kernel_size, dilation=1, padding=0, stride=1) -> torch.Tensor:
    """Layout: channels and windows are split as the dims that they come from.

    Comm: one fetch per split spatial dim.
    """
    input, lead = spatial(op, input, 2)
    kernel, dilation = each(kernel_size, 2), each(dilation, 2)
    padding, stride = each(padding, 2), each(stride, 2)
    plan = _unfold_plan(input.layout, lead, kernel, dilation, padding, stride)
    pads = tuple([0 if lead + i in plan.moved else pad for i, pad in enumerate(padding)])

    def act(block):
        columns = op(block, kernel, dilation, pads, stride)
        return columns.unflatten(lead, plan.layout.local_shape[lead:])

    return windowed(input, plan, act).flatten(lead)


@dataclass(frozen=True, eq=False, slots=True)
class FoldPlan:
    """A fold on one layout, whose windows have a dim for each spatial dim.

    Attributes:
        window: fetches of windows, and the output layout.
        size: of the output of the local call.
        padding: of the local call.
    """

    window: WindowPlan
    size: tuple[int, ...]
    padding: tuple[int, ...]


@constant
def _fold_layout(layout: Layout, lead: int, output_size, kernel, dilation, padding, stride):
    """The layout whose windows and channels can be told apart, and the windows per dim."""
    whole = torch.empty(layout.shape, device="meta")
    F.fold(whole, output_size, kernel, dilation, padding, stride)  # raises where torch raises
    counts = tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, d, p, s in zip(output_size, kernel, dilation, padding, stride, strict=True)
    )
    return aligned(layout, ((lead - 1, prod(kernel)),)), counts


@constant
def _fold_plan(layout: Layout, lead: int, output_size, kernel, dilation, padding, stride):
    plans, size, pads, crops = {}, list(output_size), list(padding), []
    for i, k in enumerate(kernel):
        count, d, p, s = layout.shape[lead + i], dilation[i], padding[i], stride[i]
        more = output_size[i] - ((count - 1) * s - 2 * p + d * (k - 1) + 1)
        plans[lead + i] = transposed_window(_extents(layout, lead + i), k, s, p, more, d)
    plan = window_plan(layout, plans)
    for step, crop in zip(plan.steps, plan.crops, strict=True):
        i = step.dim - lead
        assert crop is not None
        rows = (step.plan.out_rows - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1
        size[i], pads[i] = max(rows, crop[1]), 0
        crops.append((crop[0], crop[1] - crop[0]))
    out = plan.layout.replace({lead - 1: divided(layout.dims[lead - 1], prod(kernel))})
    whole = WindowPlan(out, plan.steps, holds_nothing(out), tuple(crops), plan.moved)
    return FoldPlan(whole, tuple(size), tuple(pads))


@register(F.fold, uses=False)
def fold(
    op, input: ShardTensor, output_size, kernel_size, dilation=1, padding=0, stride=1
) -> torch.Tensor:
    """Layout: the output's dims are split as the windows along them.

    Comm: one fetch per split spatial dim; one more where channels or rows of windows are cut apart.
    """
    lead = input.dim() - 1
    kernel, dilation = each(kernel_size, 2), each(dilation, 2)
    padding, stride = each(padding, 2), each(stride, 2)
    asked = each(output_size, 2), kernel, dilation, padding, stride
    source, counts = _fold_layout(input.layout, lead, *asked)
    windows: Any = moved_to(input, source).unflatten(lead, counts)
    windows, _ = spatial(op, windows, 2)
    plan = _fold_plan(windows.layout, lead, *asked)

    def act(block):
        columns = block.flatten(lead)
        return op(columns, plan.size, kernel, dilation, plan.padding, stride)

    return windowed(windows, plan.window, act)


@constant
def _sliding_plan(layout: Layout, dim: int, size: int, step: int) -> WindowPlan:
    """The plan of the windows, whose rows are the last dim."""
    torch.empty(layout.shape, device="meta").unfold(dim, size, step)  # raises where torch raises
    plan = window_plan(layout, {dim: window(_extents(layout, dim), size, step)})
    out = Layout(layout.mesh, (*plan.layout.dims, (Factor(size),)))
    return WindowPlan(out, plan.steps, plan.empty, plan.crops, plan.moved)


@register(_T.unfold, uses=False)
def sliding(op, input: ShardTensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """A local view of the windows that start at a rank's rows.

    Layout: windows stay where the middle of them is. Comm: one fetch where the dim is split.
    """
    dim = wrapped(dimension, input.dim())
    input = in_ranges(input, dim)
    plan = _sliding_plan(input.layout, dim, size, step)
    copied = torch.compiler.is_dynamo_compiling()

    def act(block):
        rows = op(block, dim, size, step)
        # Compilers return a view by its strides, and lose the gradients of rows that overlap.
        return rows.clone() if copied else rows

    return marked(windowed(input, plan, act), copied or bool(plan.steps) or input._moved)
