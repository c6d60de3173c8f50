"""Vector and matrix norms over split and unsplit dims, and what divides by them."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F

from shardfield.comm.collectives import all_gather
from shardfield.comm.moments import accumulation_dtype
from shardfield.comm.reduce import use
from shardfield.reduction import Dims, dims_of, no_out, reduction
from shardfield.registry import current_operation, register, unsupported
from shardfield.tensor import ShardTensor, local_of, result

Tensor = torch.Tensor


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
    no_out(op, out, x)
    local = local_of(x)
    plan = reduction(op, x.layout, dims_of(dim), keepdim)
    if not plan.groups:
        return result(op(local, ord, plan.dims, keepdim, dtype=dtype), plan.layout)
    if abs(ord) == inf:
        sizes = (x if dtype is None else x.to(dtype)).abs()
        return (torch.amax if ord > 0 else torch.amin)(sizes, plan.dims, keepdim)
    wanted = dtype or local.dtype
    if ord == 0:
        return (x != 0).sum(plan.dims, keepdim).to(_real(wanted))
    wide = local.to(accumulation_dtype(wanted))
    found = _Norm.apply(wide, float(ord), plan.dims, plan.groups, current_operation())
    return result(found.reshape(plan.local_shape).to(_real(wanted)), plan.layout)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


class _Norm(torch.autograd.Function):
    """Norm of the ranks' norms. At zero its gradient is zero, as torch's is."""

    @staticmethod
    def forward(ctx, x, order, dims, groups, operation):
        if order < 0 and not all(x.shape[dim] for dim in dims):
            # What has no element adds nothing to a sum of negative powers.
            shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
            found = x.real.new_full(shape, inf) if x.is_complex() else x.new_full(shape, inf)
        else:
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
        if ctx.order == 1:
            unit = x.sgn()
        elif ctx.order != 2:
            unit = x.sgn() * unit.abs().pow(ctx.order - 1)
            if ctx.order < 1:
                unit = unit.masked_fill(x == 0, 0)
        return (unit * grad).masked_fill(found == 0, 0), None, None, None, None


@register(torch.norm, Tensor.norm, uses=False)
def norm(op, input: ShardTensor, p="fro", dim=None, keepdim=False, out=None, dtype=None):
    """As `torch.linalg.vector_norm`; the nuclear norm is refused."""
    no_out(op, out, input)
    if p is not None and p != "fro" and not isinstance(p, (int, float)):
        raise unsupported(op, f"the matrix norm {p!r} needs whole matrices", args=(input,))
    order = 2 if p is None or p == "fro" else p
    return torch.linalg.vector_norm(input, order, dims_of(dim), keepdim, dtype=dtype)


@register(torch.linalg.norm, uses=False)
def linalg_norm(
    op,
    A: ShardTensor,  # noqa: N803
    ord=None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    out=None,
    dtype=None,
):
    """A vector norm, or with an order and two dims a matrix norm."""
    no_out(op, out, A)
    dims = dims_of(dim)
    plan = reduction(op, A.layout, dims, keepdim)
    if not plan.groups:
        return result(op(local_of(A), ord, dim, keepdim, dtype=dtype), plan.layout)
    if ord is not None and len(plan.dims) > 2:
        raise unsupported(op, "an order is for one dim or two", "pass dim=", args=(A,))
    if ord is not None and len(plan.dims) == 2:
        return torch.linalg.matrix_norm(A, ord, plan.dims, keepdim, dtype=dtype)
    return torch.linalg.vector_norm(A, 2 if ord is None else ord, dims, keepdim, dtype=dtype)


@register(torch.linalg.matrix_norm, uses=False)
def matrix_norm(
    op,
    A: ShardTensor,  # noqa: N803
    ord="fro",
    dim=(-2, -1),
    keepdim: bool = False,
    *,
    out=None,
    dtype=None,
):
    """Frobenius's, and the largest or smallest sum of a row (order ±inf) or column (±1).

    Layout, Comm: as `vector_norm`, or those of `sum` and `amax`. Of unsplit matrices every norm,
        without communication.

    Raises:
        UnsupportedOperation: another norm of split matrices, which needs singular values.
    """
    no_out(op, out, A)
    pair = dims_of(dim)
    plan = reduction(op, A.layout, pair, keepdim)
    if not plan.groups:
        return result(op(local_of(A), ord, dim, keepdim, dtype=dtype), plan.layout)
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, pair, keepdim, dtype=dtype)
    if ord not in (1, -1, inf, -inf):
        raise unsupported(op, f"the matrix norm {ord!r} needs whole matrices", args=(A,))
    sizes = (A if dtype is None else A.to(dtype)).abs()
    added, other = plan.dims if abs(ord) == 1 else plan.dims[::-1]
    sums = sizes.sum(added, keepdim=True)
    most = (torch.amax if ord > 0 else torch.amin)(sums, other, keepdim=True)
    return most if keepdim else most.sum(plan.dims)


@register(F.normalize, uses=False)
def normalize(op, input, p=2.0, dim=1, eps=1e-12, out=None) -> Tensor:
    """Layout: the input's. Comm: forward that of `vector_norm`, and as much again backward."""
    no_out(op, out, input)
    return input / torch.linalg.vector_norm(input, p, dims_of(dim), True).clamp_min(eps)


@register(torch.cosine_similarity, uses=False)
def cosine_similarity(op, x1, x2, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Of two operands that broadcast.

    Layout: the other dims keep their splits; plain once none is split.
    Comm: where `dim` is split, one all-gather of each norm and one all-reduce of the result per
        mesh axis, and one all-reduce of each norm backward.
    """
    if isinstance(x1, ShardTensor) and isinstance(x2, ShardTensor) and x1.layout is x2.layout:
        plan = reduction(op, x1.layout, dim, False)
        if not plan.groups:
            return result(op(local_of(x1), local_of(x2), dim, eps), plan.layout)
    if x1.shape != x2.shape:
        x1, x2 = x1 * torch.ones_like(x2), x2 * torch.ones_like(x1)
    return (_directed(x1, dim, eps) * _directed(x2, dim, eps)).sum(dim)


def _directed(x: Tensor, dim: int, eps: float) -> Tensor:
    """`x` over its norm, which torch clamps under no_grad: gradients pass the clamp."""
    length = torch.linalg.vector_norm(x, 2, dim, True)
    return x / (length + (length.clamp_min(eps) - length).detach())
