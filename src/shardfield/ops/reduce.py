"""Reductions over split and unsplit dims: sums, means, variances, extrema, any and all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardfield.comm.collectives import all_gather, all_reduce
from shardfield.comm.moments import accumulation_dtype, counts_over, moments
from shardfield.comm.reduce import reduce_sum, use
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout
from shardfield.registry import current_operation, groups_of, name_of, register, unsupported
from shardfield.tensor import ShardTensor, local_of, result

Tensor = torch.Tensor
Dims = int | Sequence[int] | None


@dataclass(frozen=True, eq=False, slots=True)
class Reduction:
    """A reduction of one layout.

    Attributes:
        dims: reduced dims, non-negative.
        layout: of the result.
        groups: process groups to reduce over; empty where every rank holds the dims whole.
        count: global elements reduced into one.
        counts: elements of every rank of `groups`, as `counts_over` orders them.
        held: elements this rank reduces into one.
        local_shape: of the result.
    """

    dims: tuple[int, ...]
    layout: Layout
    groups: tuple[str, ...]
    count: int
    counts: tuple[int, ...]
    held: int
    local_shape: tuple[int, ...]


@constant
def _reduction(op, layout: Layout, dim, keepdim: bool) -> Reduction:
    """Plans a reduction over `dim`: None or () for all dims.

    Raises:
        LayoutError: a dim that does not exist, or is given twice.
    """
    rank = len(layout.dims)
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(rank))
    dims = tuple(d + rank if d < 0 else d for d in given)
    if len(set(dims)) != len(dims) or not all(0 <= d < rank for d in dims):
        raise LayoutError(
            f"{name_of(op)} over dims {list(given)} of ShardTensor {layout}",
            f"dims lie in [-{rank}, {rank - 1}] and differ",
            "name each dim once",
            "operations",
        )
    kept = [
        (Factor(1),) if d in dims else factors
        for d, factors in enumerate(layout.dims)
        if keepdim or d not in dims
    ]
    out = Layout(layout.mesh, kept)
    axes = tuple(axis for d in dims for axis in layout.axes(d))
    return Reduction(
        dims,
        out,
        groups_of(layout, axes),
        prod(layout.shape[d] for d in dims),
        counts_over(layout, dims, axes),
        prod(layout.local_shape[d] for d in dims),
        out.local_shape,
    )


@constant
def _name(op) -> str:
    return op.__name__


def _operation(op) -> str | None:
    return None if torch.compiler.is_compiling() else current_operation()


def _dims(dim, axis):
    """`axis` is the name numpy gives to `dim`; torch takes both."""
    dim = dim if axis is None else axis
    return dim if dim is None or isinstance(dim, int) else tuple(dim)


def _no_out(op, out, input) -> None:
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=(input,))


def _refuse_complex(op, input) -> None:
    if local_of(input).is_complex():
        raise unsupported(op, "complex elements along a split dim", args=(input,))


@register(torch.sum, Tensor.sum, torch.mean, Tensor.mean, uses=False)
def total(
    op,
    input: ShardTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out=None,
    axis: Dims = None,
    keepdims: bool = False,
) -> Tensor:
    """Sum, or mean by the global count. Half precision is added up and sent in fp32.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-reduce of the result per mesh axis that splits a reduced dim; none backward.
    """
    _no_out(op, out, input)
    keepdim = keepdim or keepdims
    local, dims = local_of(input), _dims(dim, axis)
    plan = _reduction(op, input.layout, dims, keepdim)
    if not plan.groups:
        return result(op(local, plan.dims, keepdim, dtype=dtype), plan.layout)
    mean = op is torch.mean or op is Tensor.mean
    wanted = dtype or _default_dtype(local, mean)
    if mean and not (wanted.is_floating_point or wanted.is_complex):
        op(local, dtype=dtype)  # raises torch's own error, on every rank
    partial = torch.sum(local, plan.dims, keepdim, dtype=accumulation_dtype(wanted))
    if mean:
        partial = partial / plan.count
    reduced = reduce_sum(partial, plan.groups, _operation(op))
    return result(reduced.to(wanted), plan.layout)


def _default_dtype(local: Tensor, mean: bool) -> torch.dtype:
    """The type torch gives a sum or mean of `local`."""
    if local.is_floating_point():
        # CUDA's autocast runs sums in fp32, not means.
        wide = local.is_cuda and not mean and torch.is_autocast_enabled("cuda")
        return accumulation_dtype(local.dtype) if wide else local.dtype
    return local.dtype if local.is_complex() or mean else torch.int64


@register(
    torch.var,
    Tensor.var,
    torch.std,
    Tensor.std,
    torch.var_mean,
    torch.std_mean,
    uses=False,
)
def spread(
    op,
    input: ShardTensor,
    dim=None,
    unbiased=None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    out=None,
    axis: Dims = None,
    keepdims: bool = False,
):
    """Variance or standard deviation, with the mean or without, by the global count.

    The ranks' counts, means and centred second moments are merged in fp32 or fp64.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-gather of mean and second moment per mesh axis that splits a reduced dim; none
        backward.
    """
    _no_out(op, out, input)
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    keepdim = keepdim or keepdims
    plan = _reduction(op, input.layout, _dims(dim, axis), keepdim)
    local = local_of(input)
    # torch warns of an empty result, which here is only this rank's part.
    if not plan.groups and prod(plan.local_shape):
        found = op(local, plan.dims, correction=correction, keepdim=keepdim)
        if isinstance(found, tuple):
            return tuple(result(part, plan.layout) for part in found)
        return result(found, plan.layout)
    _refuse_complex(op, input)
    if not local.is_floating_point():
        op(local)  # raises torch's own error, on every rank
    mean, variance = moments(local, plan.dims, plan.counts, plan.groups, _operation(op))
    variance = variance * plan.count / max(plan.count - correction, 0.0)
    name = _name(op)
    found = variance.sqrt() if name.startswith("std") else variance
    parts = [found, mean] if name.endswith("mean") else [found]
    wrapped = [
        result(part.to(local.dtype).reshape(plan.local_shape), plan.layout) for part in parts
    ]
    return tuple(wrapped) if len(wrapped) > 1 else wrapped[0]


@register(torch.linalg.vector_norm, uses=False)
def vector_norm(
    op,
    x: ShardTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out=None,
) -> Tensor:
    """The p-norm over dims: the norm of the ranks' norms, so that no power overflows.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-gather of the result per mesh axis that splits a reduced dim (for infinite orders
        that of `amax`, for order 0 that of `sum`); none backward.
    """
    _no_out(op, out, x)
    local = local_of(x)
    plan = _reduction(op, x.layout, _dims(dim, None), keepdim)
    if not plan.groups:
        return result(op(local, ord, plan.dims, keepdim, dtype=dtype), plan.layout)
    if abs(ord) == float("inf"):
        sizes = (x if dtype is None else x.to(dtype)).abs()
        return (torch.amax if ord > 0 else torch.amin)(sizes, plan.dims, keepdim)
    if ord == 0:
        count = (x != 0).sum(plan.dims, keepdim)
        return count.to(dtype or local.abs().dtype)
    if ord < 0:
        raise unsupported(op, "a negative order has no value on a rank without rows", args=(x,))
    wanted = dtype or local.dtype
    wide = local.to(accumulation_dtype(wanted))
    found = _Norm.apply(wide, float(ord), plan.dims, plan.groups, _operation(op))
    return result(found.reshape(plan.local_shape).to(dtype or local.real.dtype), plan.layout)


class _Norm(torch.autograd.Function):
    """Norm of the ranks' norms. At zero its gradient is zero, as torch's is."""

    @staticmethod
    def forward(ctx, x, order, dims, groups, operation):
        found = torch.linalg.vector_norm(x, order, dims, keepdim=True)
        for group in groups:
            found = torch.linalg.vector_norm(all_gather(found, group, operation), order, 0)
        ctx.order, ctx.groups, ctx.operation = order, groups, operation
        ctx.save_for_backward(x, found)
        return found

    @staticmethod
    def backward(ctx, grad):
        x, found = ctx.saved_tensors
        grad = use(grad, ctx.groups, ctx.operation)
        found = use(found, ctx.groups, ctx.operation)
        unit = x / found
        if ctx.order != 2:
            unit = x.sgn() * unit.abs().pow(ctx.order - 1)
        return (unit * grad).masked_fill(found == 0, 0), None, None, None, None


@register(torch.norm, Tensor.norm, uses=False)
def norm(op, input: ShardTensor, p="fro", dim=None, keepdim=False, out=None, dtype=None):
    """As `torch.linalg.vector_norm`; matrix norms other than Frobenius's are refused."""
    _no_out(op, out, input)
    if p is not None and p != "fro" and not isinstance(p, (int, float)):
        raise unsupported(op, f"the matrix norm {p!r} needs whole matrices", args=(input,))
    order = 2 if p is None or p == "fro" else p
    return torch.linalg.vector_norm(input, order, _dims(dim, None), keepdim, dtype=dtype)


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
    _no_out(op, out, input)
    keepdim = keepdim or keepdims
    plan = _reduction(op, input.layout, _dims(dim, axis), keepdim)
    if not plan.groups:
        return result(op(local_of(input), plan.dims, keepdim), plan.layout)
    return _extreme(op, input, plan, _name(op) == "amax", False)


def _extreme(op, input: ShardTensor, plan: Reduction, largest: bool, nan_ties: bool) -> Tensor:
    _refuse_complex(op, input)
    if plan.count == 0:
        raise LayoutError(
            f"{name_of(op)} of ShardTensor {input.layout}",
            "it reduces no element to one",
            "reduce over dims that have elements",
            "operations",
        )
    local = local_of(input)
    found = _Extreme.apply(local, plan.dims, largest, nan_ties, plan.groups, _operation(op))
    return result(found.reshape(plan.local_shape), plan.layout)


@register(torch.max, Tensor.max, torch.min, Tensor.min)
def extreme_or_pairs(
    op, input, dim=None, keepdim: bool = False, *, other=None, out=None, axis=None
):
    """Largest or smallest element; with a dim, of each line and with its index; of two tensors.

    Layout, Comm: as `amax`. With a dim it must be unsplit: then none.
    """
    _no_out(op, out, input)
    largest = _name(op) == "max"
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return (torch.maximum if largest else torch.minimum)(input, other)
    dim = dim if axis is None else axis
    if dim is None:
        plan = _reduction(op, input.layout, None, False)
        if not plan.groups:
            return result(op(local_of(input)), plan.layout)
        return _extreme(op, input, plan, largest, True)
    return along(op, input, dim, keepdim)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, largest, nan_ties, groups, operation):
        if any(x.shape[dim] == 0 for dim in dims):
            shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
            found = x.new_full(shape, _least(x.dtype, largest))
        else:
            found = (torch.amax if largest else torch.amin)(x, dims, keepdim=True)
        found = _agreed(found, largest, groups, operation)
        ctx.dims, ctx.nan_ties, ctx.groups, ctx.operation = dims, nan_ties, groups, operation
        if x.dtype == torch.bool or not x.is_floating_point():
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


@register(torch.any, Tensor.any, torch.all, Tensor.all, uses=False)
def truth(op, input: ShardTensor, dim: Dims = None, keepdim: bool = False, *, out=None, axis=None):
    """Whether any, or all, elements are true.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-reduce of the result (a byte each) per mesh axis that splits a reduced dim.
    """
    _no_out(op, out, input)
    plan = _reduction(op, input.layout, _dims(dim, axis), keepdim)
    found = op(local_of(input), plan.dims, keepdim)
    sent = found.to(torch.uint8) if plan.groups else found
    for group in plan.groups:
        sent = all_reduce(sent, group, _operation(op), "max" if _name(op) == "any" else "min")
    return result(sent.to(found.dtype), plan.layout)


@register(
    torch.argmax,
    Tensor.argmax,
    torch.argmin,
    Tensor.argmin,
    torch.logsumexp,
    Tensor.logsumexp,
    torch.prod,
    Tensor.prod,
    torch.median,
    Tensor.median,
    uses=False,
)
def along(op, input: ShardTensor, dim=None, keepdim: bool = False, **kwargs):
    """Reductions for which the reduced dims must be unsplit. Comm: none."""
    layout = input.layout
    plan = _reduction(op, layout, _dims(dim, None), keepdim)
    if plan.layout.split_axes != layout.split_axes:
        raise unsupported(op, "a reduced dim is split", args=(input,))
    found = op(local_of(input), dim, keepdim, **kwargs)
    if isinstance(found, tuple):
        return type(found)(result(part, plan.layout) for part in found)
    return result(found, plan.layout)


@register(
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__index__,
    Tensor.__complex__,
    uses=False,
)
def scalar(op, input: ShardTensor, *args, **kwargs):
    """Refused: a rank holds only its part. Reductions over all dims give plain tensors."""
    raise unsupported(
        op,
        "a rank holds only its part of a sharded tensor, so its value would differ by rank",
        "reduce first (x.sum(), x.mean(), x.amax() give plain tensors), or x.full_tensor()",
        "scalars",
        (input,),
    )
