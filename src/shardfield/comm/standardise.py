"""Standardises a split block: what every norm is, as one autograd function.

It saves the block, the weight and the statistics, as torch's fused norms do. On CPU its passes over
memory are those of torch's kernels for batch norm, which take given statistics per channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfield.comm.collectives import all_reduce
from shardfield.comm.moments import Scope, accumulation_dtype, merge, moments
from shardfield.comm.reduce import reduce_sum, use

Tensor = torch.Tensor

_OVER = (0, 2, 3)
# Squares are added up in runs of this length, and the runs' sums by torch's cascade: one running
# fp32 sum over a whole volume would lose digits.
_RUN = 1024


def standardise(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    scope: Scope,
    eps: float,
    operation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(x - mean) / sqrt(var + eps) * weight + bias`, statistics over dims 0, 2, 3 and all ranks.

    Args:
        x: this rank's block.
        shape: how to read it, (B, G, K, L): G statistics, each over B x K x L elements and ranks.
        weight, bias: broadcast to that: (1, G, K, 1) per channel, or (1, 1, 1, L) per element.

    Returns:
        The result, shaped as `x`, in the type of accumulation; mean and unbiased variance
        (1, G, 1, 1), without gradient, the same on every rank to the last bit. Differentiable
        twice.

    Comm: one all-gather of 2G numbers per group forward, one all-reduce of 2G numbers per group
        backward (if `x` requires grad); G counts those of all ranks where these share some.
    """
    return _Standardise.apply(x, tuple(shape), weight, bias, scope, eps, operation)


def _deviations(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's mean, sum of squared deviations, and the deviations themselves (fresh)."""
    dtype = accumulation_dtype(x.dtype)
    held = x.shape[0] * x.shape[2] * x.shape[3]
    mean = x.sum(_OVER, keepdim=True, dtype=dtype) / max(held, 1)
    deviations = x - mean
    if deviations.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return mean, deviations.square().sum(_OVER, keepdim=True), deviations
    # A norm reads the deviations once, where square().sum() would write as many again.
    rows, rest = divmod(x.shape[3], _RUN)
    second = torch.zeros_like(mean)
    if rows:
        runs = deviations[..., : rows * _RUN].unflatten(3, (rows, _RUN))
        second = torch.linalg.vector_norm(runs, dim=4).square_().sum(_OVER, keepdim=True)
    if rest:
        tail = torch.linalg.vector_norm(deviations[..., rows * _RUN :], dim=3, keepdim=True)
        second = second + tail.square_().sum(_OVER, keepdim=True)
    return mean, second, deviations


class _Standardise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shape, weight, bias, scope, eps, operation):
        local_mean, second, y = _deviations(x.reshape(shape))
        mean, variance, total = merge(local_mean, second, scope, operation)
        scale = scope.spread((variance + eps).rsqrt())
        shift = (local_mean - scope.spread(mean)) * scale
        if weight is not None:
            if weight.shape[3] == 1:
                scale, shift = scale * weight, shift * weight
            else:
                y, scale, shift = y.mul_(scale).add_(shift), weight, None
        if bias is not None:
            shift = bias if shift is None else shift + bias
        y = y.mul_(scale)
        if shift is not None:
            y = y.add_(shift)
        ctx.scope, ctx.eps, ctx.operation, ctx.shape = scope, eps, operation, shape
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        others = total - 1 if scope.replicas else max(total - 1, 1)
        unbiased = variance * (total / others)
        ctx.mark_non_differentiable(mean, unbiased)
        ctx.save_for_backward(x, weight, mean, variance, total if scope.replicas else None)
        # Not a view to autograd: an operation in place on one costs four more passes backward.
        return torch.ops.aten._unsafe_view(y, x.shape), mean, unbiased

    @staticmethod
    def backward(ctx, grad, *_):
        whole, weight, mean, variance, total = ctx.saved_tensors
        x, grad = whole.reshape(ctx.shape), grad.reshape(ctx.shape)
        scope, name = ctx.scope, ctx.operation and f"backward of {ctx.operation}"
        if total is None:
            total = scope.total
        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4]
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            # Someone will differentiate this: statistics that know how they depend on x.
            groups = (*scope.groups, *scope.replicas)
            mean, variance = (use(value, groups, name) for value in moments(x, _OVER, scope, name))
        mean, scale = scope.spread(mean), scope.spread((variance + ctx.eps).rsqrt())
        if _fused(x, weight) and not torch.is_grad_enabled():
            found = _fused_gradients(grad, x, weight, mean, scale, scope, total, name, needs[0])
        else:
            found = _gradients(grad, x, weight, mean, scale, scope, total, name)
        grad_x, grad_weight, grad_bias = found
        if weight is None or not needs[1]:
            grad_weight = None
        else:
            grad_weight = grad_weight.sum_to_size(weight.shape).to(weight.dtype)
        if ctx.bias_like is None or not needs[2]:
            grad_bias = None
        else:
            grad_bias = grad_bias.sum_to_size(ctx.bias_like[0]).to(ctx.bias_like[1])
        grad_x = grad_x.to(x.dtype).view(whole.shape) if needs[0] else None
        return grad_x, None, grad_weight, grad_bias, None, None, None


def _gradients(grad, x, weight, mean, scale, scope: Scope, total, name):
    """Gradients of x, weight, bias (unreduced), in operations that can be differentiated."""
    normal = (x - mean) * scale
    wanted = grad if weight is None else grad * weight
    sums = torch.stack(
        (wanted.sum(_OVER, keepdim=True), (wanted * normal).sum(_OVER, keepdim=True))
    )
    groups = (*scope.groups, *scope.replicas)
    sums = use(reduce_sum(scope.collect(sums), groups, name) / total, groups, name)
    sums = scope.spread(sums)
    return (wanted - sums[0] - normal * sums[1]) * scale, grad * normal, grad


def _fused(x: Tensor, weight: Tensor | None) -> bool:
    """Whether torch's CPU kernels for batch norm apply: a weight per channel at most."""
    per_channel = weight is None or weight.shape[3] == 1
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_dynamo_compiling()
        and x.dtype in (torch.float32, torch.float64)
        and per_channel
    )


def _fused_gradients(grad, x, weight, mean, scale, scope: Scope, total, name, needs_x):
    """As `_gradients`: one pass for the sums, and one and a half for the gradient of x."""
    samples, statistics, per, length = x.shape
    shape = (samples, statistics * per, length)
    rows, grads = x.reshape(shape), grad.reshape(shape)
    means = mean.expand(1, statistics, per, 1).reshape(-1)
    scales = scale.expand(1, statistics, per, 1).reshape(-1)
    if x.numel():
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grads, rows, None, None, None, means, scales, True, 0.0, [False, True, True]
        )
    else:
        grad_weight, grad_bias = torch.zeros_like(means), torch.zeros_like(means)
    grad_weight = grad_weight.view(1, statistics, per, 1)
    grad_bias = grad_bias.view(1, statistics, per, 1)
    if not needs_x:
        return None, grad_weight, grad_bias
    sums = torch.stack((grad_bias, grad_weight))
    if weight is not None:
        sums = sums * weight
    sums = scope.collect(sums.sum(3, keepdim=True))
    for group in (*scope.groups, *scope.replicas):
        sums = all_reduce(sums, group, name)
    sums = scope.spread(sums / -total)
    if not x.numel():
        return torch.zeros_like(x), grad_weight, grad_bias
    sums = sums * scale
    slope = (sums[1] * scale).expand(1, statistics, per, 1).reshape(-1)
    offset = sums[0].expand(1, statistics, per, 1).reshape(-1)
    # slope * (x - mean) + offset in one pass: batch norm's evaluation with unit variance.
    ones = torch.ones_like(means)
    grad_x, _, _ = torch.native_batch_norm(rows, slope, offset, means, ones, False, 0.0, 0.0)
    factor = scale if weight is None else scale * weight
    grad_x.addcmul_(grads, factor.expand(1, statistics, per, 1).reshape(1, -1, 1))
    return grad_x.view(x.shape), grad_weight, grad_bias
