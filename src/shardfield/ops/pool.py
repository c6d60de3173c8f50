"""Max and average pooling of every stride, padding, dilation and rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.plan import DimPlan, window
from shardfield.registry import register
from shardfield.spatial import each, global_positions, spatial
from shardfield.tensor import ShardTensor, local_of, wrap
from shardfield.windowed import WindowPlan, window_plan, windowed

_DIMS = {
    F.max_pool1d: 1,
    F.max_pool2d: 2,
    F.max_pool3d: 3,
    torch.max_pool1d: 1,
    torch.max_pool2d: 2,
    torch.max_pool3d: 3,
    F.max_pool1d_with_indices: 1,
    F.max_pool2d_with_indices: 2,
    F.max_pool3d_with_indices: 3,
    F.avg_pool1d: 1,
    F.avg_pool2d: 2,
    F.avg_pool3d: 3,
    F.lp_pool1d: 1,
    F.lp_pool2d: 2,
    F.lp_pool3d: 3,
}
_WITH_INDICES = (
    F.max_pool1d_with_indices,
    F.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
)


@dataclass(frozen=True, eq=False, slots=True)
class PoolPlan:
    """A pooling on one layout.

    Attributes:
        window: fetches and output layout.
        padding: what the local call pads; 0 along fetched dims.
        starts: global row of the first row of the block, per spatial dim.
        divisors: per fetched dim (dim, rows each output of this rank averages), for averages
            whose windows are not all full there.
    """

    window: WindowPlan
    padding: tuple[int, ...]
    starts: tuple[int, ...]
    divisors: tuple[tuple[int, tuple[int, ...]], ...]


@constant
def _dims_of(op) -> tuple[int, bool]:
    """Spatial dims of the function, and whether it returns indices."""
    return _DIMS[op], op in _WITH_INDICES


@constant
def _pool_plan(
    layout: Layout, lead: int, kernel, stride, padding, dilation, ceil_mode: bool, padded: bool
) -> PoolPlan:
    """`padded`: padding counts in averages."""
    plans: dict[int, DimPlan] = {}
    for i, k in enumerate(kernel):
        pad = padding[i]
        if pad < 0 or pad > (dilation[i] * (k - 1) + 1) // 2:
            raise RuntimeError(
                "pad should be non-negative and at most half of effective kernel size, "
                f"but got pad={pad}, kernel_size={k} and dilation={dilation[i]}"
            )
        extents = layout.extents(lead + i) or (layout.shape[lead + i],)
        plans[lead + i] = window(extents, k, stride[i], (pad, pad), dilation[i], ceil_mode)
        if plans[lead + i].size <= 0:
            raise RuntimeError(
                f"pooling {layout.shape} with kernel {kernel}, stride {stride}, padding {padding} "
                f"and dilation {dilation}: the output size is too small"
            )
    whole = window_plan(layout, plans)
    moved = whole.moved
    starts, divisors = [], []
    for i, k in enumerate(kernel):
        dim = lead + i
        if dim not in moved:
            starts.append(0)
            continue
        first = whole.layout.offset(dim)
        starts.append(first * stride[i] - padding[i])
        size, edge = layout.shape[dim], padding[i] if padded else 0
        counts = tuple(
            _inside(o * stride[i] - padding[i], k, size, edge)
            for o in range(first, first + whole.layout.local_shape[dim])
        )
        if any(count != k for count in counts):
            divisors.append((dim, counts))
    pads = tuple(0 if lead + i in moved else pad for i, pad in enumerate(padding))
    return PoolPlan(whole, pads, tuple(starts), tuple(divisors))


def _inside(start: int, kernel: int, size: int, edge: int) -> int:
    """Rows of a window that lie in the dim, or in its padding where that counts."""
    return min(start + kernel, size + edge) - max(start, -edge)


@register(
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    torch.max_pool1d,
    torch.max_pool2d,
    torch.max_pool3d,
    F.max_pool1d_with_indices,
    F.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
    uses=False,
)
def max_pool(
    op,
    input: ShardTensor,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=False,
):
    """Exact for every window and split; indices are global. Comm: one fetch per split dim."""
    dims, named = _dims_of(op)
    # Dynamo passes the function that decides by `return_indices`, eager torch the one it chose.
    indexed = named or return_indices
    more = {"return_indices": True} if indexed else {}
    kernel = each(kernel_size, dims)
    steps = each(stride, dims) if stride else kernel
    padding, dilation = each(padding, dims), each(dilation, dims)
    input, lead = spatial(op, input, dims)
    plan = _pool_plan(input.layout, lead, kernel, steps, padding, dilation, bool(ceil_mode), False)
    indices = None

    def act(block):
        nonlocal indices
        out = op(block, kernel, steps, plan.padding, dilation, ceil_mode, **more)
        if not indexed:
            return out
        indices = out[1]
        if plan.window.steps:
            indices = global_positions(indices, block.shape[lead:], plan.starts, input.shape[lead:])
        return out[0]

    values = windowed(input, plan.window, act, _lowest(input.dtype), curved=True)
    if not indexed:
        return values
    if indices is None:
        indices = local_of(values).new_empty(plan.window.layout.local_shape, dtype=torch.int64)
    return values, wrap(indices, plan.window.layout)


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


@register(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, uses=False)
def avg_pool(
    op,
    input: ShardTensor,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
) -> ShardTensor:
    """Exact for every window and split. Comm: one fetch per split dim."""
    dims, _ = _dims_of(op)
    kernel = each(kernel_size, dims)
    steps = each(stride, dims) if stride else kernel
    input, lead = spatial(op, input, dims)
    plan = _pool_plan(
        input.layout,
        lead,
        kernel,
        steps,
        each(padding, dims),
        (1,) * dims,
        bool(ceil_mode),
        bool(count_include_pad),
    )
    more = () if divisor_override is None else (divisor_override,)

    def act(block):
        out = op(block, kernel, steps, plan.padding, ceil_mode, count_include_pad, *more)
        if divisor_override is None:
            for dim, counts in plan.divisors:
                # The local call divided by the whole window; few outputs at the borders differ.
                k = kernel[dim - lead]
                ratio = out.new_tensor([k / count for count in counts])
                out = out * ratio.view(-1, *(1,) * (out.dim() - 1 - dim))
        return out

    return windowed(input, plan.window, act, curved=True)


_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@register(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, uses=False)
def lp_pool(op, input: ShardTensor, norm_type, kernel_size, stride=None, ceil_mode=False):
    """As torch defines it: by averages of powers, or maxima. Comm: one fetch per split dim."""
    dims, _ = _dims_of(op)
    kernel = each(kernel_size, dims)
    stride = kernel if stride is None else stride
    if norm_type == float("inf"):
        return _MAX[dims](input.abs(), kernel, stride, 0, 1, ceil_mode)
    if norm_type == -float("inf"):
        return -_MAX[dims](-input.abs(), kernel, stride, 0, 1, ceil_mode)
    mean = _AVERAGE[dims](input.pow(norm_type), kernel, stride, 0, ceil_mode)
    window = 1
    for rows in kernel:
        window *= rows
    return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(window).pow(1.0 / norm_type)
