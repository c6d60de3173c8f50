"""Mean and variance over split dims, merged from the ranks' counts, means and second moments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from shardfield.comm.collectives import all_gather
from shardfield.comm.reduce import use
from shardfield.constant import constant
from shardfield.layout import Layout


@constant
def counts_over(layout: Layout, dims: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Elements that each rank along `axes` holds over `dims`, in the order `merge` gathers them."""
    mesh = layout.mesh
    axes = tuple(axis for axis in axes if mesh.size((axis,)) > 1)
    coordinate = list(mesh.coordinate)
    counts = []
    for indices in product(*(range(mesh.size((axis,))) for axis in reversed(axes))):
        for axis, index in zip(reversed(axes), indices, strict=True):
            coordinate[mesh.names.index(axis)] = index
        shape = layout.local_shape_at(coordinate)
        counts.append(prod(shape[dim] for dim in dims))
    return tuple(counts)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type statistics are computed and sent in: at least fp32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True, eq=False, slots=True)
class Members:
    """Statistics of several channels each, of which a rank may hold some channels only.

    Attributes:
        samples: samples this rank holds.
        ids: the statistic of every channel this rank holds.
        counts: for every rank, the channels it holds of each statistic.
        rank: this rank's place in `counts`.
    """

    samples: int
    ids: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    rank: int


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Who shares a statistic.

    Attributes:
        counts: elements that every rank contributes, in the order of `counts_over`; with
            `members`, of each channel it holds.
        groups: process groups of the ranks.
        total: elements of all ranks; not of replicas.
        members: what joins local channels to statistics; None where each is one.
        replicas: process groups of ranks that hold other samples, of an unknown number.
    """

    counts: tuple[int, ...]
    groups: tuple[str, ...]
    total: int
    members: Members | None = None
    replicas: tuple[str, ...] = ()

    def spread(self, value: torch.Tensor) -> torch.Tensor:
        """Values of the statistics -> of what the local block has one for: (..., S, 1, 1)."""
        if self.members is None:
            return value
        picked = value.index_select(-2, _ids(self.members, value))
        return picked.flatten(-3, -2).unsqueeze(-2)

    def collect(self, parts: torch.Tensor) -> torch.Tensor:
        """The adjoint of `spread`: adds up what belongs to one statistic, on this rank."""
        if self.members is None:
            return parts
        held = self.members
        parts = parts.squeeze(-2).unflatten(-2, (held.samples, len(held.ids)))
        sums = parts.new_zeros((*parts.shape[:-2], len(held.counts[0]), 1))
        return sums.index_add(-2, _ids(held, parts), parts)


def _ids(held: Members, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(held.ids, dtype=torch.int64).to(like.device, non_blocking=True)


def merge(
    mean: torch.Tensor, second: torch.Tensor, scope: Scope, operation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, int | torch.Tensor]:
    """Global mean, biased variance and count from those of the ranks. Not differentiable.

    Args:
        mean: this rank's mean; anything where it holds no element.
        second: this rank's sum of squared deviations from its own mean.

    Returns:
        All three of the whole statistic; the count is a tensor where there are replicas.

    Comm: one all-gather of both per group; nothing else, as every rank knows the counts, but those
        of replicas, which are gathered beside.
    """
    counts, total = scope.counts, scope.total
    weights = None
    if scope.members is not None:
        mean, second, weights = _of_members(mean, second, scope)
    elif len(set(counts)) > 1:
        weights = torch.tensor(counts, dtype=mean.dtype).to(mean.device, non_blocking=True)
        weights = weights.view(-1, *(1,) * mean.dim())
    if not scope.groups:
        variance = second / total
    else:
        both = torch.stack((mean, second))
        for group in scope.groups:
            both = all_gather(both, group, operation)
        both = both.view(len(counts), 2, *mean.shape)
        mean, variance = _merged(both[:, 0], both[:, 1], weights, counts[0], total)
    for group in scope.replicas:
        count = torch.full_like(mean, 1.0) * total
        three = all_gather(torch.stack((mean, variance * total, count)), group, operation)
        total = three[:, 2].sum(0)
        mean, variance = _merged(three[:, 0], three[:, 1], three[:, 2], 0, total)
    return mean, variance, total


def _merged(means, seconds, weights, count: int, total):
    """Mean and biased variance of parts; `count` is that of each where they have no weights."""
    if weights is None:
        mean = means.mean(0)
        within = (means - mean).square_().sum(0).mul_(count)
    else:
        mean = (means * weights).sum(0) / total
        within = ((means - mean).square_() * weights).sum(0)
    return mean, within.add_(seconds.sum(0)).div_(total)


def _of_members(mean: torch.Tensor, second: torch.Tensor, scope: Scope):
    """This rank's mean and second moment of every statistic, and all ranks' counts of them."""
    held = scope.members
    assert held is not None
    channels = torch.tensor(held.counts, dtype=mean.dtype).to(mean.device, non_blocking=True)
    channels = channels.view(len(held.counts), *(1,) * (mean.dim() - 2), -1, 1)
    per = torch.tensor(scope.counts, dtype=mean.dtype).to(mean.device, non_blocking=True)
    joined = scope.collect(mean) / channels[held.rank].clamp(min=1)
    apart = (mean - scope.spread(joined)).square() * scope.counts[held.rank]
    return joined, scope.collect(second + apart), channels * per.view(-1, *(1,) * mean.dim())


def moments(
    x: torch.Tensor, dims: tuple[int, ...], scope: Scope, operation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global mean and biased variance of a split tensor, dims kept. Differentiable twice.

    Args:
        x: this rank's block, perhaps empty.
        dims: local dims to reduce, those split over `scope.groups` among them.

    Returns:
        Replicated over the groups; fp32 for half-precision input.

    Comm: forward, one all-gather per group; backward, none (that of the second derivative sums).
    """
    return _Moments.apply(x, dims, scope, operation)


class _Moments(torch.autograd.Function):
    """Saves the block and the mean; autograd of a composition would also keep the deviations."""

    @staticmethod
    def forward(ctx, x, dims, scope, operation):
        held = prod([x.shape[dim] for dim in dims])
        mean = x.sum(dims, keepdim=True, dtype=accumulation_dtype(x.dtype)) / max(held, 1)
        second = (x - mean).square_().sum(dims, keepdim=True)
        mean, variance, total = merge(mean, second, scope, operation)
        ctx.scope, ctx.operation = scope, operation
        ctx.save_for_backward(x, mean, total if scope.replicas else None)
        return mean, variance

    @staticmethod
    def backward(ctx, grad_mean, grad_variance):
        x, mean, total = ctx.saved_tensors
        scope = ctx.scope
        if total is None:
            total = scope.total
        # Replicated values meet the split block: their own gradients are partial here.
        mean, grad_mean, grad_variance = (
            scope.spread(use(value / by, (*scope.groups, *scope.replicas), ctx.operation))
            for value, by in ((mean, 1), (grad_mean, total), (grad_variance, total))
        )
        grad = (x - mean) * (2 * grad_variance) + grad_mean
        return grad.to(x.dtype), None, None, None
