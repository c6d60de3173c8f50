"""Softmax and log-sum-exp along split dims: a maximum and a sum travel, not the tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardfield.comm.collectives import all_gather
from shardfield.comm.moments import accumulation_dtype
from shardfield.comm.reduce import reduce_sum, use
from shardfield.reduction import (
    Dims,
    dims_of,
    named,
    no_out,
    reduction,
    refuse_complex,
)
from shardfield.registry import current_operation, register
from shardfield.tensor import ShardTensor, local_of, result, wrap

Tensor = torch.Tensor


@register(
    F.softmax,
    torch.softmax,
    Tensor.softmax,
    torch.special.softmax,
    F.log_softmax,
    torch.log_softmax,
    Tensor.log_softmax,
    torch.special.log_softmax,
    uses=False,
)
def softmax(op, input: ShardTensor, dim: int | None = None, *args, **kwargs) -> ShardTensor:
    """Softmax and its logarithm. Saved for backward is the result, as torch does.

    Layout: the input's.
    Comm: where `dim` is split, per mesh axis, one all-gather of the maximum and the sum of every
        line forward, and one all-reduce of a number per line backward; else none.
    """
    layout, local = input.layout, local_of(input)
    if dim is None:  # F.softmax then takes the one of torch's first releases
        dim = 0 if len(layout.dims) in (0, 1, 3) else 1
    plan = reduction(op, layout, dim, True)
    if not plan.groups:
        return wrap(op(local, dim, *args, **kwargs), layout)
    # What torch says of the type, be it an error, on every rank.
    dtype = op(local.new_zeros(1), 0, *args, **kwargs).dtype
    logarithm = named(op) == "log_softmax"
    x = local if accumulation_dtype(local.dtype) == dtype else local.to(dtype)
    y = _Softmax.apply(x, plan.dims[0], logarithm, dtype, plan.groups, current_operation())
    return wrap(y, layout)


@register(F.softmin, uses=False)
def softmin(op, input: ShardTensor, dim: int | None = None, _stacklevel=3, dtype=None):
    """Softmax of the negated input."""
    return F.softmax(-input, dim, _stacklevel, dtype)


def _scale(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """This rank's maximum along `dim` (-inf where it has no row), and `x` less it."""
    if x.shape[dim]:
        most = x.amax(dim, keepdim=True)
    else:
        most = x.new_full([1 if d == dim else n for d, n in enumerate(x.shape)], float("-inf"))
    # Where all is -inf, exp(x) is the zero that exp(x - most) is not.
    return most, x - most.masked_fill(most == float("-inf"), 0)


class _Softmax(torch.autograd.Function):
    """Saves its result only. Its gradient needs one number a line of every rank."""

    @staticmethod
    def forward(ctx, x, dim, logarithm, dtype, groups, operation):
        wide = x.to(accumulation_dtype(x.dtype))
        most, y = _scale(wide, dim)
        powers = y.exp() if logarithm else y.exp_()
        both = torch.stack((most, powers.sum(dim, keepdim=True))).unsqueeze(0)
        for group in groups:
            both = all_gather(both, group, operation).flatten(0, 1)
        peak = both[:, 0].amax(0)
        total = (both[:, 1] * (both[:, 0] - peak).exp()).sum(0)
        if logarithm:
            y = (wide - peak).sub_(total.log())
        else:
            y = powers.mul_((most - peak).exp().div_(total))
        y = y.to(dtype)
        ctx.dim, ctx.logarithm, ctx.kind = dim, logarithm, x.dtype
        ctx.groups, ctx.operation = groups, operation
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        kind = accumulation_dtype(y.dtype)
        y, grad = y.to(kind), grad.to(kind)
        name = None if ctx.operation is None else f"backward of {ctx.operation}"
        partial = grad if ctx.logarithm else grad * y
        total = reduce_sum(partial.sum(ctx.dim, keepdim=True), ctx.groups, name)
        total = use(total, ctx.groups, name)
        found = grad - y.exp() * total if ctx.logarithm else y * (grad - total)
        return found.to(ctx.kind), None, None, None, None, None


@register(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp, uses=False)
def logsumexp(op, input: ShardTensor, dim: Dims, keepdim: bool = False, *, out=None) -> Tensor:
    """Logarithm of the sum of powers. Half precision is added up and sent in fp32.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: one all-gather of the result per mesh axis that splits a reduced dim; none backward.
    """
    no_out(op, out, input)
    local = local_of(input)
    plan = reduction(op, input.layout, dims_of(dim), keepdim)
    if not plan.groups:
        return result(op(local, plan.dims, keepdim), plan.layout)
    refuse_complex(op, input)
    if not local.is_floating_point():
        local = local.to(torch.get_default_dtype())
    found = _LogSumExp.apply(local, plan.dims, plan.groups, current_operation())
    return result(found.to(local.dtype).reshape(plan.local_shape), plan.layout)


class _LogSumExp(torch.autograd.Function):
    """Over `dims` and ranks, dims kept.

    Its gradient reads the global result: a rank whose elements are all -inf has no other.
    """

    @staticmethod
    def forward(ctx, x, dims, groups, operation):
        found = torch.logsumexp(x.to(accumulation_dtype(x.dtype)), dims, keepdim=True)
        for group in groups:
            found = torch.logsumexp(all_gather(found, group, operation), 0)
        ctx.groups, ctx.operation = groups, operation
        ctx.save_for_backward(x, found)
        return found

    @staticmethod
    def backward(ctx, grad):
        x, found = ctx.saved_tensors
        grad = use(grad, ctx.groups, ctx.operation)
        found = use(found, ctx.groups, ctx.operation)
        return (grad * (x - found).exp()).to(x.dtype), None, None, None
