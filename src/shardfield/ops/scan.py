"""Running sums, products and log-sum-exps along a dim: local scans joined by the ranks' totals."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardfield.comm._torch import rank_of, size_of
from shardfield.comm.collectives import all_gather
from shardfield.comm.moments import accumulation_dtype
from shardfield.comm.move import move
from shardfield.comm.reduce import gather_partials, use
from shardfield.constant import constant
from shardfield.layout import Factor, Layout, even_extents
from shardfield.reduction import named, no_out, reduction, refuse_complex
from shardfield.registry import current_operation, register, unsupported
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class ScanPlan:
    """A scan of one layout.

    Attributes:
        dim: the scanned dim, non-negative.
        layout: in which the dim is held in contiguous ranges, in the order of the ranks.
        group: of the ranks that hold it; empty where every rank holds it whole.
    """

    dim: int
    layout: Layout
    group: str


@constant
def _plan(op, layout: Layout, dim: int) -> ScanPlan:
    dim = reduction(op, layout, dim, False).dims[0]
    axes = layout.axes(dim)
    if not axes or layout.mesh.size(axes) == 1:
        return ScanPlan(dim, layout, "")
    if layout.contiguous(dim) is None:
        size, ranks = layout.shape[dim], layout.mesh.size(axes)
        layout = layout.replace({dim: (Factor(size, axes, even_extents(size, ranks)),)})
    return ScanPlan(dim, layout, layout.mesh.group(axes))


@register(
    torch.cumsum,
    Tensor.cumsum,
    torch.cumprod,
    Tensor.cumprod,
    torch.logcumsumexp,
    Tensor.logcumsumexp,
    uses=False,
)
def scan(op, input: ShardTensor, dim: int, *, dtype: torch.dtype | None = None, out=None):
    """The local scan, joined to the total of the ranks before. Half precision is sent in fp32.

    Layout: the input's; a dim of several factors first moves to contiguous ranges.
    Comm: where `dim` is split, one all-gather of a row forward and one backward (`cumprod`
        backward: an all-reduce of a row for every rank).
    """
    no_out(op, out, input)
    plan = _plan(op, input.layout, dim)
    local, options = local_of(input), {} if dtype is None else {"dtype": dtype}
    if not plan.group:
        return wrap(op(local, dim, **options), input.layout)
    wanted = op(local.new_zeros(1), 0, **options).dtype
    local = move(local, input.layout, plan.layout, current_operation())
    local = local.to(accumulation_dtype(wanted))
    kind = named(op)
    if kind == "logcumsumexp":
        refuse_complex(op, input)
        y = _LogScan.apply(local, plan.dim, plan.group, False, current_operation())
    elif kind == "cumsum":
        total = local.sum(plan.dim, keepdim=True)
        y = torch.cumsum(local, plan.dim) + _Others.apply(
            total, plan.group, False, current_operation()
        )
    else:
        y = torch.cumprod(local, plan.dim) * _product_before(local, plan)
    return wrap(y.to(wanted), plan.layout)


@register(torch.cummax, Tensor.cummax, torch.cummin, Tensor.cummin, uses=False)
def running_extreme(op, input: ShardTensor, dim: int, *, out=None):
    """Along an unsplit dim. Layout: the input's. Comm: none.

    Raises:
        UnsupportedOperation: the dim is split.
    """
    no_out(op, out, input)
    if _plan(op, input.layout, dim).group:
        raise unsupported(op, "the dim along which it runs is split", args=(input,))
    found = op(local_of(input), dim)
    return type(found)([wrap(part, input.layout) for part in found])


def _elsewhere(parts: Tensor, group: str, after: bool, neutral: float) -> Tensor:
    """What the ranks hold, stacked; neutral where that rank is not before (or after) this one.

    Every rank reads all of it, so that their graphs are the same.
    """
    ranks, rank = torch.arange(size_of(group), device=parts.device), rank_of(group)
    kept = (ranks > rank) if after else (ranks < rank)
    return parts.where(kept.view(-1, *(1,) * (parts.dim() - 1)), neutral)


class _Others(torch.autograd.Function):
    """Sum over the ranks before this one, or after it: each is the adjoint of the other."""

    @staticmethod
    def forward(ctx, total, group, after, operation):
        ctx.saved = group, after, operation
        stacked = all_gather(total, group, operation)
        ctx.save_for_backward(total.new_empty(0))  # see fetch._Fetch.forward
        return _elsewhere(stacked, group, after, 0).sum(0)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        group, after, operation = ctx.saved
        name = operation and f"backward of {operation}"
        return _Others.apply(grad, group, not after, name), None, None, None


def _product_before(local: Tensor, plan: ScanPlan) -> Tensor:
    """Product of all rows of the ranks before this one; its gradient is exact beside zeros too."""
    total = local.prod(plan.dim, keepdim=True)
    totals = gather_partials(total, (plan.group,), current_operation())
    # A replicated value of which every rank uses another part.
    totals = use(totals, (plan.group,), current_operation())
    return _elsewhere(totals, plan.group, False, 1).prod(0)


class _LogScan(torch.autograd.Function):
    """Running log-sum-exp over the rows up to each, or (`after`) from each to the end."""

    @staticmethod
    def forward(ctx, x, dim, group, after, operation):
        y = _log_scan(x, dim, after)
        total = torch.logsumexp(x, dim, keepdim=True)
        stacked = all_gather(total, group, operation)
        y = torch.logaddexp(y, _elsewhere(stacked, group, after, float("-inf")).logsumexp(0))
        ctx.saved = dim, group, after, operation
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        dim, group, after, operation = ctx.saved
        name = operation and f"backward of {operation}"
        # The sum of grad * exp(x - y) over later rows, in logarithms, for either sign of grad.
        # Of the other sign a finite least, as torch's: -inf would be NaN when differentiated.
        size, least = grad.abs().log(), torch.finfo(grad.dtype).min
        signs = torch.stack((size.where(grad > 0, least), size.where(grad < 0, least)))
        sums = _LogScan.apply(signs - y, dim + 1, group, not after, name)
        positive, negative = (sums + x).exp()
        return positive - negative, None, None, None, None


def _log_scan(x: Tensor, dim: int, after: bool) -> Tensor:
    return x.flip(dim).logcumsumexp(dim).flip(dim) if after else x.logcumsumexp(dim)
