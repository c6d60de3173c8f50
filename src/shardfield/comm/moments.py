"""Mean and variance over split dims, merged from the ranks' counts, means and second moments."""

from __future__ import annotations

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


def merge(
    mean: torch.Tensor,
    second: torch.Tensor,
    counts: tuple[int, ...],
    groups: tuple[str, ...],
    operation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global mean and biased variance from those of the ranks. Not differentiable.

    Args:
        mean: this rank's mean; anything where it holds no element.
        second: this rank's sum of squared deviations from its own mean.
        counts: elements of every rank, from `counts_over`.

    Comm: one all-gather of both per group; nothing else, as every rank knows the counts.
    """
    total = sum(counts)
    if not groups:
        return mean, second / total
    both = torch.stack((mean, second))
    for group in groups:
        both = all_gather(both, group, operation)
    both = both.view(len(counts), 2, *mean.shape)
    means, seconds = both[:, 0], both[:, 1]
    if len(set(counts)) == 1:
        merged = means.mean(0)
        within = (means - merged).square_().sum(0).mul_(counts[0])
    else:
        weights = torch.tensor(counts, dtype=mean.dtype).to(mean.device, non_blocking=True)
        weights = weights.view(-1, *(1,) * mean.dim())
        merged = (means * weights).sum(0) / total
        within = ((means - merged).square_() * weights).sum(0)
    return merged, within.add_(seconds.sum(0)).div_(total)


def moments(
    x: torch.Tensor,
    dims: tuple[int, ...],
    counts: tuple[int, ...],
    groups: tuple[str, ...],
    operation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global mean and biased variance of a split tensor, dims kept. Differentiable twice.

    Args:
        x: this rank's block, perhaps empty.
        dims: local dims to reduce, those split over `groups` among them.

    Returns:
        Replicated over `groups`; fp32 for half-precision input.

    Comm: forward, one all-gather per group; backward, none (that of the second derivative sums).
    """
    return _Moments.apply(x, dims, counts, groups, operation)


class _Moments(torch.autograd.Function):
    """Saves the block and the mean; autograd of a composition would also keep the deviations."""

    @staticmethod
    def forward(ctx, x, dims, counts, groups, operation):
        held = prod([x.shape[dim] for dim in dims])
        mean = x.sum(dims, keepdim=True, dtype=accumulation_dtype(x.dtype)) / max(held, 1)
        second = (x - mean).square_().sum(dims, keepdim=True)
        mean, variance = merge(mean, second, counts, groups, operation)
        ctx.total, ctx.groups, ctx.operation = sum(counts), groups, operation
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx, grad_mean, grad_variance):
        x, mean = ctx.saved_tensors
        # Replicated values meet the split block: their own gradients are partial here.
        mean, grad_mean, grad_variance = (
            use(value, ctx.groups, ctx.operation) for value in (mean, grad_mean, grad_variance)
        )
        grad = ((x - mean) * (2 * grad_variance) + grad_mean) / ctx.total
        return grad.to(x.dtype), None, None, None, None
