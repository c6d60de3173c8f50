"""Extrema over split and unsplit dims, and where they are."""

from __future__ import annotations

import torch

from shardfield.comm.collectives import all_reduce
from shardfield.comm.reduce import use
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.plan import Run, runs_of
from shardfield.reduction import (
    Dims,
    Reduction,
    dims_of,
    named,
    no_out,
    reduction,
    refuse_complex,
)
from shardfield.registry import current_operation, name_of, register
from shardfield.tensor import ShardTensor, local_of, result

Tensor = torch.Tensor

# Larger than every index: the offer of a rank that does not hold the extreme.
_NOWHERE = 2**63 - 1


@register(torch.amax, Tensor.amax, torch.amin, Tensor.amin, uses=False)
def extreme(
    op,
    input: ShardTensor,
    dim: Dims = (),
    keepdim: bool = False,
    *,
    out=None,
    axis: Dims = None,
    keepdims: bool = False,
) -> Tensor:
    """Largest or smallest element. Its gradient is shared equally among ties on all ranks.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: per mesh axis that splits a reduced dim, one all-reduce of the result (and, for floats,
        of a NaN flag beside it) forward, one of the number of ties backward.
    """
    no_out(op, out, input)
    keepdim = keepdim or keepdims
    plan = reduction(op, input.layout, dims_of(dim, axis), keepdim)
    if not plan.groups:
        return result(op(local_of(input), plan.dims, keepdim), plan.layout)
    return _extreme(op, input, plan, named(op) == "amax", False)


@register(torch.aminmax, Tensor.aminmax, uses=False)
def both_extremes(
    op, input: ShardTensor, *, dim: int | None = None, keepdim: bool = False, out=None
):
    """Smallest and largest element. Layout, Comm: twice that of `amax`."""
    no_out(op, out, input)
    plan = reduction(op, input.layout, dim, keepdim)
    if not plan.groups:
        low, high = op(local_of(input), dim=dim, keepdim=keepdim)
        low, high = result(low, plan.layout), result(high, plan.layout)
    else:
        low, high = (_extreme(op, input, plan, largest, False) for largest in (False, True))
    return torch.return_types.aminmax((low, high))


@register(torch.max, Tensor.max, torch.min, Tensor.min, uses=False)
def extreme_or_pairs(
    op, input, dim=None, keepdim: bool = False, *, other=None, out=None, axis=None
):
    """Largest or smallest element; with a dim, of each line and its first index; of two tensors.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: without a dim as `amax`. With one that is split, per mesh axis, one all-reduce of the
        result (and, for floats, of a NaN flag beside it), and one of the indices; none backward.
    """
    no_out(op, out, input)
    largest = named(op) == "max"
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return (torch.maximum if largest else torch.minimum)(input, other)
    dim = dim if axis is None else axis
    plan = reduction(op, input.layout, dim, keepdim)
    local = local_of(input)
    if dim is None:
        if not plan.groups:
            return result(op(local), plan.layout)
        return _extreme(op, input, plan, largest, True)
    if plan.groups:
        _check(op, input, plan)
        values, indices = _Pick.apply(
            local, plan.dims[0], largest, input.layout, plan.groups, current_operation()
        )
        values, indices = values.reshape(plan.local_shape), indices.reshape(plan.local_shape)
    else:
        values, indices = op(local, dim, keepdim)
    kind = torch.return_types.max if largest else torch.return_types.min
    return kind((result(values, plan.layout), result(indices, plan.layout)))


@register(torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin, uses=False)
def position(op, input: ShardTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The first global index of the extreme along a dim, or in the flattened tensor.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: per mesh axis that splits a reduced dim, one all-reduce of the values (and, for floats,
        of a NaN flag beside them) and one of the indices.
    """
    layout, local = input.layout, local_of(input).detach()
    plan = reduction(op, layout, dim, keepdim)
    if not plan.groups:
        return result(op(local, dim, keepdim), plan.layout)
    _check(op, input, plan)
    op(local.new_ones(1))  # raises torch's own error of a type, on every rank
    block = _filled(local, plan.dims, named(op) == "argmax")
    at = op(block, None if dim is None else plan.dims[0], True)
    if dim is None:
        values = block.flatten()[at.flatten()].view_as(at)
    else:
        values = block.gather(plan.dims[0], at)
    index = _global(at, layout, plan.dims, tuple(block.shape), bool(local.numel()))
    index, _ = _first(values, index, named(op) == "argmax", plan.groups, current_operation())
    return result(index.reshape(plan.local_shape), plan.layout)


def _check(op, input: ShardTensor, plan: Reduction) -> None:
    refuse_complex(op, input)
    if plan.count == 0:
        raise LayoutError(
            f"{name_of(op)} of ShardTensor {input.layout}",
            "it reduces no element to one",
            "reduce over dims that have elements",
            "operations",
        )


def _extreme(op, input: ShardTensor, plan: Reduction, largest: bool, nan_ties: bool) -> Tensor:
    _check(op, input, plan)
    local = local_of(input)
    found = _Extreme.apply(local, plan.dims, largest, nan_ties, plan.groups, current_operation())
    return result(found.reshape(plan.local_shape), plan.layout)


class _Extreme(torch.autograd.Function):
    """The extreme over `dims` and ranks, dims kept."""

    @staticmethod
    def forward(ctx, x, dims, largest, nan_ties, groups, operation):
        block = _filled(x, dims, largest)
        found = (torch.amax if largest else torch.amin)(block, dims, keepdim=True)
        found = _agreed(found, largest, groups, operation)
        ctx.dims, ctx.nan_ties, ctx.groups, ctx.operation = dims, nan_ties, groups, operation
        if not x.is_floating_point():
            ctx.mark_non_differentiable(found)
        ctx.save_for_backward(x, found)
        return found

    @staticmethod
    def backward(ctx, grad):
        x, found = ctx.saved_tensors
        name = None if ctx.operation is None else f"backward of {ctx.operation}"
        hits = x == found
        if ctx.nan_ties:  # torch: max() shares the gradient among NaNs, amax() makes it NaN
            hits = hits | (x.isnan() & found.isnan())
        ties = hits.sum(ctx.dims, keepdim=True)
        for group in ctx.groups:
            ties = all_reduce(ties, group, name)
        share = use(grad, ctx.groups, ctx.operation) / ties
        return share * hits, None, None, None, None, None


class _Pick(torch.autograd.Function):
    """The extreme along `dim` and its first global index, the dim kept; saves positions only."""

    @staticmethod
    def forward(ctx, x, dim, largest, layout, groups, operation):
        block = _filled(x, (dim,), largest)
        values, at = (torch.max if largest else torch.min)(block, dim, keepdim=True)
        index = _global(at, layout, (dim,), tuple(block.shape), bool(x.shape[dim]))
        first, values = _first(values, index, largest, groups, operation)
        ctx.mark_non_differentiable(*((first,) if x.is_floating_point() else (first, values)))
        ctx.save_for_backward(at, first == index)
        ctx.dim, ctx.rows, ctx.groups, ctx.operation = dim, x.shape[dim], groups, operation
        return values, first

    @staticmethod
    def backward(ctx, grad, _):
        at, mine = ctx.saved_tensors
        grad = use(grad, ctx.groups, ctx.operation) * mine
        if ctx.rows:
            shape = list(grad.shape)
            shape[ctx.dim] = ctx.rows
            placed = grad.new_zeros(shape).scatter(ctx.dim, at, grad)
        else:
            placed = grad.narrow(ctx.dim, 0, 0)
        return placed, None, None, None, None, None


def _filled(x: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    """The block; where it has no row to reduce, one that never wins."""
    if all(x.shape[dim] for dim in dims):
        return x
    shape = [max(n, 1) if d in dims else n for d, n in enumerate(x.shape)]
    return x.new_full(shape, _least(x.dtype, largest))


def _least(dtype: torch.dtype, largest: bool):
    """The neutral element of max (or of min)."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if largest else limits.max


def _agreed(found: Tensor, largest: bool, groups: tuple[str, ...], operation) -> Tensor:
    """The extreme over all ranks. A NaN anywhere wins, as in torch; backends drop it."""
    reduction = "max" if largest else "min"
    if not found.is_floating_point():
        sent = found.to(torch.uint8) if found.dtype == torch.bool else found
        for group in groups:
            sent = all_reduce(sent, group, operation, reduction)
        return sent.to(found.dtype)
    missing = found.isnan()
    flag = missing.to(found.dtype) if largest else -missing.to(found.dtype)
    least = _least(found.dtype, largest)
    both = torch.stack((found.masked_fill(missing, least), flag))
    for group in groups:
        both = all_reduce(both, group, operation, reduction)
    return both[0].masked_fill(both[1] != 0, float("nan"))


def _first(values: Tensor, index: Tensor, largest: bool, groups: tuple[str, ...], operation):
    """The first index of the extreme over all ranks, and the extreme.

    Args:
        values: this rank's extreme.
        index: its first global index.
    """
    found = _agreed(values, largest, groups, operation)
    hits = values == found
    if values.is_floating_point():
        hits = hits | (values.isnan() & found.isnan())
    index = index.masked_fill(~hits, _NOWHERE)
    for group in groups:
        index = all_reduce(index, group, operation, "min")
    return index, found


@constant
def _runs_here(layout: Layout, dims: tuple[int, ...]) -> tuple[tuple[Run, ...], ...]:
    """This rank's global runs of every dim."""
    found = []
    for dim in dims:
        axes = layout.axes(dim)
        found.append(runs_of(layout.dims[dim])[layout.mesh.rank(axes) if axes else 0])
    return tuple(found)


def _global(
    at: Tensor, layout: Layout, dims: tuple[int, ...], shape: tuple[int, ...], held: bool
) -> Tensor:
    """Global indices in the flattened `dims`, from those in a block of `shape`.

    The order of a rank's elements is that of the whole tensor, so that its first is the first of
    its own there too.

    Args:
        held: this rank has elements; else its indices are larger than any.
    """
    if not held:
        return at.new_full(at.shape, _NOWHERE)
    index, stride = torch.zeros_like(at), 1
    for dim, runs in reversed([*zip(dims, _runs_here(layout, dims), strict=True)]):
        row, at = at % shape[dim], at // shape[dim]
        if len(runs) == 1:
            row = row + runs[0][0]
        else:
            rows = [torch.arange(start, stop, device=at.device) for start, stop in runs]
            row = torch.cat(rows)[row]
        index = index + row * stride
        stride *= layout.shape[dim]
    return index
