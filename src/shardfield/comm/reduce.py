"""Sums over mesh axes and their adjoints; partial results and whole dims for every rank."""

from __future__ import annotations

import torch

from shardfield.comm._torch import captures_leaf, rank_of
from shardfield.comm.collectives import all_gather, all_reduce
from shardfield.comm.fetch import _assemble
from shardfield.plan import Exchange, Run


def reduce_sum(
    partial: torch.Tensor, groups: tuple[str, ...], operation: str | None = None
) -> torch.Tensor:
    """Partial sums of the ranks of `groups` -> their sum, the same on every rank.

    Comm: one all-reduce per group forward, none backward.
    """
    if not groups:
        return partial
    return _Reduce.apply(partial, groups, operation)


def use(value: torch.Tensor, groups: tuple[str, ...], operation: str | None = None) -> torch.Tensor:
    """A replicated value about to meet split operands: identity, its gradient is summed.

    What an operation returned is used by all operations over the same groups as one, so that the
    gradients of queries, keys and values are added up before they are summed over ranks (of
    leaves not: see ADR 4).

    Comm: none forward, one all-reduce per group backward, for all uses of a value that is no leaf.
    """
    if not groups:
        return value
    if torch.compiler.is_dynamo_compiling() or value.grad_fn is None or not torch.is_grad_enabled():
        return _Use.apply(value, groups, operation)
    known = getattr(value, "_shardfield_uses", None)
    if known is None:
        known = value._shardfield_uses = {}  # type: ignore[attr-defined]
    found, version = known.get(groups, (None, -1))
    if found is None or version != value._version:
        found = _Use.apply(value, groups, operation)
        known[groups] = found, value._version
    return found


def scale_gradient(
    value: torch.Tensor, factor: int, groups: tuple[str, ...], operation: str | None = None
) -> torch.Tensor:
    """Identity whose gradient is multiplied by `factor`, the number of ranks of `groups`.

    For parameters whose wrapper averages gradients (see parallelize). `torch.autograd.grad` does
    not pass through the wrapper; there the gradient is summed over `groups` instead.
    """
    return value if factor == 1 else _ScaleGradient.apply(value, factor, groups, operation)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, groups, operation):
        ctx.groups, ctx.operation = groups, operation
        for group in groups:
            partial = all_reduce(partial, group, operation)
        ctx.save_for_backward(partial.new_empty(0))  # see _Fetch.forward
        return partial

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return _Use.apply(grad, ctx.groups, ctx.operation), None, None


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, groups, operation):
        ctx.groups, ctx.operation = groups, operation
        return value.detach()

    @staticmethod
    def backward(ctx, grad):
        name = None if ctx.operation is None else f"backward of {ctx.operation}"
        return _Reduce.apply(grad, ctx.groups, name), None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, factor, groups, operation):
        ctx.saved = factor, groups, operation
        return value.detach()

    @staticmethod
    def backward(ctx, grad):
        factor, groups, operation = ctx.saved
        if not torch.compiler.is_dynamo_compiling() and captures_leaf(ctx.next_functions[0][0]):
            name = None if operation is None else f"backward of {operation}"
            return _Reduce.apply(grad, groups, name), None, None, None
        return grad * factor, None, None, None


class _Gather(torch.autograd.Function):
    """Split -> replicated. The gradient of a replicated value is replicated: take a part."""

    @staticmethod
    def forward(ctx, local, dim, runs, plan, group, operation):
        ctx.saved = dim, runs, plan, group, operation
        out = _assemble(local, dim, plan, group, 0.0, operation)
        ctx.save_for_backward(local.new_empty(0))  # see _Fetch.forward
        return out

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return _Slice.apply(grad, *ctx.saved), None, None, None, None, None


class _Slice(torch.autograd.Function):
    """Replicated -> split, with a gradient that is gathered: the adjoint of `_Gather`."""

    @staticmethod
    def forward(ctx, value, dim, runs, plan, group, operation):
        ctx.saved = dim, runs, plan, group, operation
        parts = [value.narrow(dim, start, stop - start) for start, stop in runs]
        return torch.cat(parts or [value.narrow(dim, 0, 0)], dim)

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, *ctx.saved), None, None, None, None, None


def gather(
    local: torch.Tensor,
    dim: int,
    runs: tuple[Run, ...],
    plan: Exchange,
    group: str,
    operation: str | None = None,
) -> torch.Tensor:
    """The whole dim on every rank.

    Args:
        runs: global rows this rank holds.
        plan: exchange in which every rank wants every row.

    Comm: one ragged all-to-all forward, none backward.
    """
    return _Gather.apply(local, dim, runs, plan, group, operation)


def shard(
    value: torch.Tensor,
    dim: int,
    runs: tuple[Run, ...],
    plan: Exchange,
    group: str,
    operation: str | None = None,
) -> torch.Tensor:
    """This rank's rows of a replicated value; arguments as in `gather`.

    Comm: none forward, one ragged all-to-all backward.
    """
    return _Slice.apply(value, dim, runs, plan, group, operation)


def gather_partials(
    partial: torch.Tensor, groups: tuple[str, ...], operation: str | None = None
) -> torch.Tensor:
    """Partial results of the ranks of `groups` -> all of them, along a new leading dim.

    The same on every rank, in the order of the ranks of one group; differentiable twice.

    Comm: one all-gather per group forward (each but the first of what the ones before gathered),
        none backward.
    """
    stacked = partial.unsqueeze(0)
    for group in groups:
        stacked = _Stack.apply(stacked, group, operation).flatten(0, 1)
    return stacked


class _Stack(torch.autograd.Function):
    """Split -> replicated. The gradient of a replicated value is replicated: take this rank's."""

    @staticmethod
    def forward(ctx, partial, group, operation):
        ctx.saved = group, operation
        stacked = all_gather(partial, group, operation)
        ctx.save_for_backward(partial.new_empty(0))  # see fetch._Fetch.forward
        return stacked

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return _Own.apply(grad, *ctx.saved), None, None


class _Own(torch.autograd.Function):
    """The adjoint of `_Stack`."""

    @staticmethod
    def forward(ctx, stacked, group, operation):
        ctx.saved = group, operation
        return stacked[rank_of(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        return _Stack.apply(grad, *ctx.saved), None, None
