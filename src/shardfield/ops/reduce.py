"""Sums, means, products, variances, any and all over split and unsplit dims."""

from __future__ import annotations

from math import prod

import torch

from shardfield.comm.collectives import all_reduce
from shardfield.comm.moments import Scope, accumulation_dtype, moments
from shardfield.comm.reduce import gather_partials, reduce_sum
from shardfield.reduction import Dims, dims_of, named, no_out, reduction
from shardfield.registry import current_operation, register, unsupported
from shardfield.tensor import ShardTensor, local_of, result

Tensor = torch.Tensor


@register(torch.sum, Tensor.sum, torch.mean, Tensor.mean, torch.nansum, Tensor.nansum, uses=False)
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
    """Sum, with NaNs or without, or mean by the global count; half precision is sent in fp32.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-reduce of the result per mesh axis that splits a reduced dim; none backward.
    """
    no_out(op, out, input)
    keepdim = keepdim or keepdims
    local, dims = local_of(input), dims_of(dim, axis)
    plan = reduction(op, input.layout, dims, keepdim)
    if not plan.groups:
        return result(op(local, plan.dims, keepdim, dtype=dtype), plan.layout)
    mean = op is torch.mean or op is Tensor.mean
    wanted = dtype or _default_dtype(local, mean)
    if mean and not (wanted.is_floating_point or wanted.is_complex):
        op(local, dtype=dtype)  # raises torch's own error, on every rank
    add = torch.nansum if named(op) == "nansum" else torch.sum
    partial = add(local, plan.dims, keepdim, dtype=accumulation_dtype(wanted))
    if mean:
        partial = partial / plan.count
    reduced = reduce_sum(partial, plan.groups, current_operation())
    return result(reduced.to(wanted), plan.layout)


def _default_dtype(local: Tensor, mean: bool) -> torch.dtype:
    """The type torch gives a sum or mean of `local`."""
    if local.is_floating_point():
        # CUDA's autocast runs sums in fp32, not means.
        wide = local.is_cuda and not mean and torch.is_autocast_enabled("cuda")
        return accumulation_dtype(local.dtype) if wide else local.dtype
    return local.dtype if local.is_complex() or mean else torch.int64


@register(torch.nanmean, Tensor.nanmean, uses=False)
def nanmean(
    op,
    input: ShardTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out=None,
) -> Tensor:
    """Mean of the elements that are numbers.

    Layout: as `sum`.
    Comm: one all-reduce of the sum and the count per mesh axis that splits a reduced dim.
    """
    no_out(op, out, input)
    local = local_of(input)
    plan = reduction(op, input.layout, dims_of(dim), keepdim)
    wanted = dtype or local.dtype
    if not plan.groups or not (wanted.is_floating_point and local.is_floating_point()):
        return result(op(local, plan.dims, keepdim, dtype=dtype), plan.layout)
    kind = accumulation_dtype(wanted)
    both = torch.stack(
        (
            torch.nansum(local, plan.dims, keepdim, dtype=kind),
            local.isnan().logical_not_().sum(plan.dims, keepdim, dtype=kind),
        )
    )
    both = reduce_sum(both, plan.groups, current_operation())
    return result((both[0] / both[1]).to(wanted), plan.layout)


@register(torch.count_nonzero, Tensor.count_nonzero, uses=False)
def count_nonzero(op, input: ShardTensor, dim: Dims = None) -> Tensor:
    """Layout, Comm: as `sum`."""
    local = local_of(input)
    plan = reduction(op, input.layout, dims_of(dim), False)
    partial = op(local, plan.dims)
    return result(reduce_sum(partial, plan.groups, current_operation()), plan.layout)


@register(torch.prod, Tensor.prod, uses=False)
def product(
    op,
    input: ShardTensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Product; its gradient is exact beside zeros too.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-gather of the result per mesh axis that splits a reduced dim; none backward.
    """
    local = local_of(input)
    plan = reduction(op, input.layout, dim, keepdim)
    given = () if dim is None else (dim, keepdim)
    if not plan.groups:
        return result(op(local, *given, dtype=dtype), plan.layout)
    wanted = dtype or _default_dtype(local, False)
    partial = torch.prod(local, *given, dtype=accumulation_dtype(wanted))
    partials = gather_partials(partial, plan.groups, current_operation())
    return result(torch.prod(partials, 0).to(wanted), plan.layout)


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
    no_out(op, out, input)
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    keepdim = keepdim or keepdims
    plan = reduction(op, input.layout, dims_of(dim, axis), keepdim)
    local = local_of(input)
    # torch warns of an empty result, which here is only this rank's part.
    if not plan.groups and prod(plan.local_shape):
        found = op(local, plan.dims, correction=correction, keepdim=keepdim)
        if isinstance(found, tuple):
            return tuple(result(part, plan.layout) for part in found)
        return result(found, plan.layout)
    if local.is_complex():
        local = torch.view_as_real(local)
    elif not local.is_floating_point():
        op(local)  # raises torch's own error, on every rank
    scope = Scope(plan.counts, plan.groups, plan.count)
    mean, variance = moments(local, plan.dims, scope, current_operation())
    if input.is_complex():
        mean, variance = torch.view_as_complex(mean), variance.sum(-1)
    variance = variance * plan.count / max(plan.count - correction, 0.0)
    name = named(op)
    found = variance.sqrt() if name.startswith("std") else variance
    found = result(found.to(local.dtype).reshape(plan.local_shape), plan.layout)
    if not name.endswith("mean"):
        return found
    return found, result(mean.to(input.dtype).reshape(plan.local_shape), plan.layout)


@register(torch.any, Tensor.any, torch.all, Tensor.all, uses=False)
def truth(op, input: ShardTensor, dim: Dims = None, keepdim: bool = False, *, out=None, axis=None):
    """Whether any, or all, elements are true.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-reduce of the result (a byte each) per mesh axis that splits a reduced dim.
    """
    no_out(op, out, input)
    plan = reduction(op, input.layout, dims_of(dim, axis), keepdim)
    found = op(local_of(input), plan.dims, keepdim)
    sent = found.to(torch.uint8) if plan.groups else found
    for group in plan.groups:
        sent = all_reduce(sent, group, current_operation(), "max" if named(op) == "any" else "min")
    return result(sent.to(found.dtype), plan.layout)


@register(
    torch.median,
    Tensor.median,
    torch.nanmedian,
    Tensor.nanmedian,
    torch.mode,
    Tensor.mode,
    uses=False,
)
def middle(op, input: ShardTensor, dim: int | None = None, keepdim: bool = False, *, out=None):
    """Median and mode over unsplit dims.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: none.

    Raises:
        UnsupportedOperation: a reduced dim is split.
    """
    no_out(op, out, input)
    dim = -1 if dim is None and named(op) == "mode" else dim
    given = () if dim is None else (dim, keepdim)
    return _whole(op, input, dim, keepdim, given)


@register(torch.kthvalue, Tensor.kthvalue, uses=False)
def kthvalue(op, input: ShardTensor, k: int, dim: int = -1, keepdim: bool = False, *, out=None):
    """The k-th smallest along an unsplit dim. Layout, Comm, Raises: as `median`."""
    no_out(op, out, input)
    return _whole(op, input, dim, keepdim, (k, dim, keepdim))


def _whole(op, input: ShardTensor, dim: int | None, keepdim: bool, given: tuple):
    plan = reduction(op, input.layout, dim, keepdim)
    if plan.groups:
        raise unsupported(
            op,
            "a reduced dim is split, and ranks of elements do not follow from those of the parts",
            args=(input,),
        )
    found = op(local_of(input), *given)
    if isinstance(found, tuple):
        return type(found)([result(part, plan.layout) for part in found])
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
