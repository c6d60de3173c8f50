"""Batch, instance, group, layer and RMS norm, with statistics over split dims."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F

from shardfield.comm.moments import accumulation_dtype, counts_over
from shardfield.comm.reduce import reduce_sum, use
from shardfield.comm.standardise import Scope, standardise
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.operands import part_of_plain
from shardfield.registry import current_operation, groups_of, name_of, register, unsupported
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class NormPlan:
    """What a norm's statistics cover on one layout.

    Attributes:
        dims: the statistic's dims.
        scope: ranks to merge statistics with; None where every rank holds its statistic's dims
            whole, so that the plain operation on the local block is exact.
        parameters: layout of weight and bias; None where every rank needs them whole.
    """

    dims: tuple[int, ...]
    scope: Scope | None
    parameters: Layout | None


@constant
def _plan(
    op,
    layout: Layout,
    dims: tuple[int, ...],
    channels: tuple[int, ...],
    unit: int,
    whole: bool = False,
) -> NormPlan:
    """Plans statistics over `dims`.

    Args:
        channels: dims that weight and bias have.
        unit: channels that share a statistic; a split of the channels must not cut them apart.
            0 if they must not be split at all.
        whole: plan statistics of this rank alone where no dim is split.

    Raises:
        UnsupportedOperation: channels split, or not at multiples of `unit`.
    """
    axes = tuple(axis for d in dims for axis in layout.axes(d))
    inner = [d for d in channels if layout.is_split(d)]
    parameters = None
    if inner:
        parameters = Layout(layout.mesh, [layout.dims[d] for d in channels])
    if inner and inner[0] not in dims:
        extents = layout.extents(inner[0])
        if not unit or extents is None or any(n % unit for n in extents):
            raise unsupported(
                op,
                f"its channels are split as {layout}, which cuts a statistic or a buffer apart",
                "split the channels at multiples of channels/groups, or another dim",
            )
    groups = groups_of(layout, axes)
    if not groups and not whole:
        return NormPlan(dims, None, parameters)
    counts = tuple(count * max(unit, 1) for count in counts_over(layout, dims, axes))
    return NormPlan(dims, Scope(counts, groups, sum(counts)), parameters)


def _operation() -> str | None:
    return None if torch.compiler.is_compiling() else current_operation()


def _part(parameter: Tensor | None, plan: NormPlan) -> Tensor | None:
    if parameter is None or plan.parameters is None:
        return parameter
    return part_of_plain(parameter, plan.parameters)


def _check(op, input, *others) -> None:
    if not isinstance(input, ShardTensor) or any(isinstance(o, ShardTensor) for o in others):
        raise unsupported(op, "its weight, bias or buffers are split", args=(input, others))


def _result(y: Tensor, input: ShardTensor, wide: bool = False) -> ShardTensor:
    """In the type of the input; in fp32 where CUDA's autocast runs the operation so (`wide`)."""
    local = local_of(input)
    dtype = local.dtype
    if wide and local.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = accumulation_dtype(dtype)
    return wrap(y.view(local.shape).to(dtype), input.layout)


def _more_than_one(op, layout: Layout, count: int) -> None:
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {layout.shape}"
        )


@register(F.batch_norm)
def batch_norm(
    op,
    input: ShardTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:
    """Statistics over the whole batch of this replica; buffers alike on every rank.

    Layout: the input's. Channels (dim 1) must be unsplit.
    Comm: in training, per mesh axis, one all-gather of mean and second moment per channel forward
        and one all-reduce of as many numbers backward. In evaluation none.
    """
    _check(op, input, running_mean, running_var, weight, bias)
    layout, local = input.layout, local_of(input)
    dims = tuple(d for d in range(len(layout.dims)) if d != 1)
    plan = _plan(op, layout, dims, (1,), 0)
    count = prod([layout.shape[d] for d in dims])
    if training:
        _more_than_one(op, layout, count)
    if not training or plan.scope is None:
        y = torch.batch_norm(
            local, weight, bias, running_mean, running_var, training, momentum, eps,
            torch.backends.cudnn.enabled,
        )  # fmt: skip
        return wrap(y, layout)
    shape = (local.shape[0], local.shape[1], 1, prod(local.shape[2:]))
    y, mean, variance = standardise(
        local.reshape(shape),
        _view(weight, (1, -1, 1, 1)),
        _view(bias, (1, -1, 1, 1)),
        plan.scope,
        eps,
        _operation(),
    )
    _update(running_mean, mean.view(-1), momentum)
    _update(running_var, variance.view(-1) * (count / (count - 1)), momentum)
    return _result(y, input)


@register(F.instance_norm)
def instance_norm(
    op,
    input: ShardTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:
    """Statistics of every sample and channel; buffers, if any, alike on every rank.

    Layout: the input's.
    Comm: as `batch_norm`, numbers per sample and channel; buffers and a split batch, one more
        all-reduce per mesh axis of the batch.
    """
    _check(op, input, running_mean, running_var, weight, bias)
    layout, local = input.layout, local_of(input)
    if not use_input_stats:
        return batch_norm(op, input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = tuple(range(2, len(layout.dims)))
    tracked = running_mean is not None or running_var is not None
    batch = _batch_groups(layout)
    plan = _plan(op, layout, dims, (1,), 0 if tracked else 1, bool(tracked and batch))
    count = prod(layout.shape[2:])
    _more_than_one(op, layout, count)
    weight, bias = _part(weight, plan), _part(bias, plan)
    if plan.scope is None:
        block, weight, bias = _filled(local, weight, bias, 1)
        y = torch.instance_norm(
            block, weight, bias, running_mean, running_var, True, momentum, eps,
            torch.backends.cudnn.enabled,
        )  # fmt: skip
        return wrap(_unfilled(y, block, local), layout)
    samples, channels = local.shape[:2]
    y, mean, variance = standardise(
        local.reshape(1, samples * channels, 1, prod(local.shape[2:])),
        _per_sample(weight, samples, channels, 1),
        _per_sample(bias, samples, channels, 1),
        plan.scope,
        eps,
        _operation(),
    )
    if tracked:
        both = torch.stack((mean, variance)).view(2, samples, channels)
        both = reduce_sum(both.sum(1), batch, _operation()) / layout.shape[0]
        _update(running_mean, both[0], momentum)
        _update(running_var, both[1] * (count / (count - 1)), momentum)
    return _result(y, input)


@constant
def _batch_groups(layout: Layout) -> tuple[str, ...]:
    return groups_of(layout, layout.axes(0))


def _update(buffer: Tensor | None, value: Tensor, momentum: float) -> None:
    if buffer is not None:
        with torch.no_grad():
            buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum)


def _view(parameter: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if parameter is None else parameter.view(shape)


def _per_sample(parameter: Tensor | None, samples: int, groups: int, per: int) -> Tensor | None:
    """(C) -> (1, samples * groups, per, 1): the same for every sample."""
    if parameter is None:
        return None
    return parameter.expand(samples, groups * per).reshape(1, samples * groups, per, 1)


@register(F.group_norm, torch.group_norm)
def group_norm(
    op,
    input: ShardTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> ShardTensor:
    """Statistics of every sample and group of channels.

    Layout: the input's. A split of the channels must keep groups whole.
    Comm: where a spatial dim is split, per mesh axis, one all-gather of mean and second moment per
        sample and group forward and one all-reduce of as many numbers backward.
    """
    _check(op, input, weight, bias)
    layout, local = input.layout, local_of(input)
    channels = layout.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise LayoutError(
            f"{name_of(op)} with {num_groups} groups of ShardTensor {layout}",
            "the number of channels (dim 1) is a multiple of the number of groups",
            "change num_groups or the channels of the layer before",
            "operations",
        )
    per = channels // num_groups
    plan = _plan(op, layout, tuple(range(2, len(layout.dims))), (1,), per)
    if op is F.group_norm:
        _more_than_one(op, layout, layout.shape[0] * per * prod(layout.shape[2:]))
    weight, bias = _part(weight, plan), _part(bias, plan)
    if plan.scope is None:
        block, weight, bias = _filled(local, weight, bias, per)
        y = torch.group_norm(block, block.shape[1] // per, weight, bias, eps, cudnn_enabled)
        return wrap(_unfilled(y, block, local), layout)
    samples, held = local.shape[0], local.shape[1] // per
    y, _, _ = standardise(
        local.reshape(1, samples * held, per, prod(local.shape[2:])),
        _per_sample(weight, samples, held, per),
        _per_sample(bias, samples, held, per),
        plan.scope,
        eps,
        _operation(),
    )
    return _result(y, input, wide=True)


def _filled(local: Tensor, weight: Tensor | None, bias: Tensor | None, per: int):
    """An empty block (and parameters) as one of a single zero sample and group, tied to it.

    torch refuses some empty blocks; and what a rank without elements computes must hang on the
    same graph as elsewhere, also when gradients are differentiated again.
    """
    if local.numel():
        return local, weight, bias
    shape = [max(n, 1) for n in local.shape]
    shape[1] = max(local.shape[1], per)
    parameters = [
        p if p is None or len(p) == shape[1] else p.new_zeros(shape[1]) + p.sum()
        for p in (weight, bias)
    ]
    return local.new_zeros(shape) + local.sum(), *parameters


def _unfilled(y: Tensor, block: Tensor, local: Tensor) -> Tensor:
    return y if block is local else y.reshape(-1)[:0].view(local.shape)


@constant
def _last_dims_plan(op, layout: Layout, shape: tuple[int, ...]) -> NormPlan:
    """Plans statistics over the last dims, of global shape `shape`.

    Raises:
        LayoutError: the last dims have another shape.
    """
    first = len(layout.dims) - len(shape)
    if not shape or first < 0 or layout.shape[first:] != shape:
        raise LayoutError(
            f"{name_of(op)} over {shape} of ShardTensor {layout}",
            "normalized_shape is the global shape of the last dims",
            "pass that shape, not this rank's",
            "operations",
        )
    dims = tuple(range(first, len(layout.dims)))
    return _plan(op, layout, dims, dims, 0)


@register(F.layer_norm, torch.layer_norm)
def layer_norm(
    op,
    input: ShardTensor,
    normalized_shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ShardTensor:
    """Statistics over the last dims, split or not.

    Layout: the input's.
    Comm: where a normalised dim is split, per mesh axis, one all-gather of mean and second moment
        per row forward and one all-reduce of as many numbers backward; else none.
    """
    _check(op, input, weight, bias)
    layout, local = input.layout, local_of(input)
    plan = _last_dims_plan(op, layout, tuple(normalized_shape))
    if plan.scope is None:
        return wrap(torch.layer_norm(local, normalized_shape, weight, bias, eps), layout)
    dims = plan.dims
    held = prod([local.shape[d] for d in dims])
    rows = prod(local.shape[: dims[0]])
    weight, bias = _part(weight, plan), _part(bias, plan)
    y, _, _ = standardise(
        local.reshape(1, rows, 1, held),
        None if weight is None else weight.reshape(1, 1, 1, held),
        None if bias is None else bias.reshape(1, 1, 1, held),
        plan.scope,
        eps,
        _operation(),
    )
    return _result(y, input, wide=True)


@register(F.rms_norm, torch.rms_norm)
def rms_norm(
    op,
    input: ShardTensor,
    normalized_shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> ShardTensor:
    """Root mean square over the last dims, split or not.

    Layout: the input's.
    Comm: where a normalised dim is split, per mesh axis, one all-reduce of a number per row
        forward and one backward; else none.
    """
    _check(op, input, weight)
    layout, local = input.layout, local_of(input)
    plan = _last_dims_plan(op, layout, tuple(normalized_shape))
    if plan.scope is None:
        return wrap(torch.rms_norm(local, normalized_shape, weight, eps), layout)
    eps = torch.finfo(local.dtype).eps if eps is None else eps
    x = local.to(accumulation_dtype(local.dtype))
    square = reduce_sum(x.square().sum(plan.dims, keepdim=True), plan.scope.groups, _operation())
    scale = (square / plan.scope.total + eps).rsqrt()
    y = x * use(scale, plan.scope.groups, _operation())
    weight = _part(weight, plan)
    if weight is not None:
        y = y * weight
    return _result(y, input)
