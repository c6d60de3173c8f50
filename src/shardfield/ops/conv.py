"""Convolutions, plain and transposed, of every stride, padding, dilation, groups and kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from shardfield.channels import convolved_by_channels
from shardfield.constant import constant
from shardfield.interior import convolve, interior, interior_pays
from shardfield.layout import Layout
from shardfield.plan import transposed_window, window
from shardfield.registry import register, summing, unsupported
from shardfield.spatial import each, spatial
from shardfield.tensor import ShardTensor, local_of
from shardfield.windowed import WindowPlan, window_plan, windowed

Tensor = torch.Tensor


def _padding(padding, kernel, dilation) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((r // 2, r - r // 2) for r in reach)
    return tuple((p, p) for p in each(padding, len(kernel)))


@constant
def _check(op, layout: Layout, lead: int) -> None:
    """Refuses what has no exact plan."""
    if layout.is_split(lead - 1):
        raise unsupported(op, f"its channels (dim {lead - 1}) are split", args=(layout,))


def _check_weight(op, input, weight, bias) -> None:
    if not isinstance(input, ShardTensor) or isinstance(bias, ShardTensor):
        raise unsupported(op, "its bias is split, its weight not", args=(input, weight, bias))


def _extents(layout: Layout, dim: int) -> tuple[int, ...]:
    return layout.extents(dim) or (layout.shape[dim],)


@constant
def _conv_plan(layout: Layout, lead, out_channels, kernel, stride, padding, dilation) -> WindowPlan:
    plans = {
        lead + i: window(_extents(layout, lead + i), k, stride[i], padding[i], dilation[i])
        for i, k in enumerate(kernel)
    }
    for plan in plans.values():
        if plan.size <= 0:
            raise RuntimeError(
                f"Kernel size {tuple(kernel)} can't be greater than the padded input size "
                f"(input {layout.shape}, padding {padding})"
            )
    return window_plan(layout, plans, (lead - 1, out_channels))


@register(F.conv1d, F.conv2d, F.conv3d, uses=False)
def conv(op, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Tensor:
    """Exact for every stride and split. Comm: one fetch per split spatial dim.

    With a weight split by channels, also what `convolved_by_channels` sends.
    """
    if isinstance(weight, ShardTensor):

        def call(x, w, b):
            return op(x, w, b, stride, padding, dilation, groups)

        return convolved_by_channels(op, input, weight, bias, 0, groups, call)
    return _conv(op, input, weight, bias, stride, padding, dilation, groups)


@summing
def _conv(op, input, weight, bias, stride, padding, dilation, groups) -> ShardTensor:
    _check_weight(op, input, weight, bias)
    dims = weight.dim() - 2
    kernel = tuple(weight.shape[2:])
    stride, dilation = each(stride, dims), each(dilation, dims)
    input, lead = spatial(op, input, dims)
    _check(op, input.layout, lead)
    pads = _padding(padding, kernel, dilation)
    plan = _conv_plan(input.layout, lead, weight.shape[0], kernel, stride, pads, dilation)
    if plan.steps:
        rest = [(0, 0) if lead + i in plan.moved else pad for i, pad in enumerate(pads)]
        padding = _uneven(rest)

    def act(block):
        if padding is None:  # "same" with an even reach: torch pads the odd row itself
            flat = [n for pair in reversed(rest) for n in pair]
            return op(F.pad(block, flat), weight, bias, stride, 0, dilation, groups)
        return op(block, weight, bias, stride, padding, dilation, groups)

    if len(plan.steps) == 1 and padding is not None and interior_pays(local_of(input), weight):
        (step,) = plan.steps
        i = step.dim - lead
        way = interior(step.plan, kernel[i], stride[i], dilation[i])
        if way is not None:

            def convolution(block, weight, bias, rows):
                pads = (*padding[:i], rows, *padding[i + 1 :])
                one = rows == 0 and block.shape[step.dim] == weight.shape[2 + i] == 1
                if one and op is F.conv3d:
                    return _in_two_dims(block, weight, bias, i, stride, pads, dilation, groups)
                return op(block, weight, bias, stride, pads, dilation, groups)

            return convolve(input, weight, bias, convolution, plan.layout, step, way)
    return windowed(input, plan, act, 0.0, weight, bias)


def _in_two_dims(block, weight, bias, i: int, stride, padding, dilation, groups) -> Tensor:
    """`conv3d` of one row with one tap: torch's kernels for it take four times as long on CPUs."""
    dim = block.dim() - 3 + i
    stride, padding, dilation = (s[:i] + s[i + 1 :] for s in (stride, padding, dilation))
    block, weight = block.squeeze(dim), weight.squeeze(2 + i)
    return F.conv2d(block, weight, bias, stride, padding, dilation, groups).unsqueeze(dim)


def _uneven(pads: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """Symmetric padding as torch's argument; None if some side differs."""
    if any(before != after for before, after in pads):
        return None
    return tuple(before for before, _ in pads)


@constant
def _transposed_plan(
    layout: Layout, lead, out_channels, kernel, stride, padding, output_padding, dilation
) -> tuple[WindowPlan, tuple[int, ...], tuple[int, ...]]:
    """The plan, and the padding and output padding of the local call."""
    plans = {
        lead + i: transposed_window(
            _extents(layout, lead + i), k, stride[i], padding[i], output_padding[i], dilation[i]
        )
        for i, k in enumerate(kernel)
    }
    for plan in plans.values():
        if plan.size <= 0:
            raise RuntimeError(f"transposed convolution of {layout.shape} has no output")
    whole = window_plan(layout, plans, (lead - 1, out_channels))
    pads, extras, crops = list(padding), list(output_padding), []
    for step, crop in zip(whole.steps, whole.crops, strict=True):
        i = step.dim - lead
        assert crop is not None
        rows = (step.plan.out_rows - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1
        start, length = crop[0], crop[1] - crop[0]
        extra = max(0, start + length - rows)
        # torch's own padding drops rows on both sides for free; narrow drops the rest.
        both = max(0, min(start, rows - start - length)) if not extra else 0
        pads[i], extras[i] = both, extra
        crops.append((start - both, length))
    plan = WindowPlan(whole.layout, whole.steps, whole.empty, tuple(crops), whole.moved)
    return plan, tuple(pads), tuple(extras)


@register(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, uses=False)
def conv_transpose(
    op, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
) -> Tensor:
    """Exact for every stride and split. Comm: as `conv`."""
    if isinstance(weight, ShardTensor):

        def call(x, w, b):
            return op(x, w, b, stride, padding, output_padding, groups, dilation)

        return convolved_by_channels(op, input, weight, bias, 1, groups, call)
    return _conv_transpose(
        op, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


@summing
def _conv_transpose(
    op, input, weight, bias, stride, padding, output_padding, groups, dilation
) -> ShardTensor:
    _check_weight(op, input, weight, bias)
    dims = weight.dim() - 2
    kernel = tuple(weight.shape[2:])
    stride, dilation = each(stride, dims), each(dilation, dims)
    padding, output_padding = each(padding, dims), each(output_padding, dims)
    input, lead = spatial(op, input, dims)
    _check(op, input.layout, lead)
    plan, pads, extras = _transposed_plan(
        input.layout,
        lead,
        weight.shape[1] * groups,
        kernel,
        stride,
        padding,
        output_padding,
        dilation,
    )

    def act(block):
        return op(block, weight, bias, stride, pads, extras, groups, dilation)

    return windowed(input, plan, act, 0.0, weight, bias)
