"""Batch, instance and group norm, with statistics over split dims and split channels."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardfield.axes import DATA
from shardfield.comm._torch import resolve_group
from shardfield.comm.reduce import reduce_sum
from shardfield.comm.standardise import standardise
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.norms import (
    check_operands,
    norm_plan,
    normalised,
    part_of_parameter,
    whole_statistics,
)
from shardfield.registry import current_operation, groups_of, name_of, register, unsupported, used
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor


def _more_than_one(layout: Layout, count: int) -> None:
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
    replicas: tuple[str, ...] = (),
) -> ShardTensor:
    """Statistics over the whole batch of this replica; buffers alike on every rank.

    Args:
        replicas: process groups of ranks whose samples count too (`nn.SyncBatchNorm`).

    Layout: the input's.
    Comm: in training, per mesh axis that splits another dim than the channels, one all-gather of
        mean and second moment per channel forward and one all-reduce of as many numbers backward;
        where there are buffers and the channels are split, one all-to-all of both numbers. In
        evaluation none.
    """
    check_operands(op, input, running_mean, running_var, weight, bias)
    layout, local = input.layout, local_of(input)
    dims = tuple(d for d in range(len(layout.dims)) if d != 1)
    alone = bool(_groups(layout, 1))
    plan = norm_plan(layout, dims, (1,), 1, alone, replicas)
    if training and not replicas:
        _more_than_one(layout, prod([layout.shape[d] for d in dims]))
    weight, bias = part_of_parameter(weight, plan), part_of_parameter(bias, plan)
    if not local.shape[1] and not training:  # torch takes no block without channels
        return wrap(_affine(local, weight, bias), layout)
    if not training or plan.scope is None:
        mean, variance = (part_of_parameter(b, plan) for b in (running_mean, running_var))
        y = torch.batch_norm(
            local, weight, bias, mean, variance, training, momentum, eps,
            torch.backends.cudnn.enabled,
        )  # fmt: skip
        return wrap(y, layout)
    shape = (local.shape[0], local.shape[1], 1, prod(local.shape[2:]))
    y, mean, variance = standardise(
        local,
        shape,
        _view(weight, (1, -1, 1, 1)),
        _view(bias, (1, -1, 1, 1)),
        plan.scope,
        eps,
        current_operation(),
    )
    if running_mean is not None or running_var is not None:
        both = whole_statistics(torch.stack((mean.view(-1), variance.view(-1))), plan)
        _update(running_mean, both[0], momentum)
        _update(running_var, both[1], momentum)
    return normalised(y, input)


def _affine(empty: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What a rank without channels computes: nothing, on the graph of the others."""
    shape = (1, 0, *(1,) * (empty.dim() - 2))
    y = empty if weight is None else empty * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def synchronised_batch_norm(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """`nn.SyncBatchNorm.forward` of a ShardTensor: batch norm over all data replicas too.

    A process group given to the module says which replicas: all along the mesh axis `data`, or,
    where it holds none but this rank's, none.

    Comm: that of `batch_norm`, and as much again over the axis `data`.
    """
    if not self.training or not isinstance(input, ShardTensor):
        return _plain_forward(self, input)
    group = None if self.process_group is None else self.process_group.group_name
    layout = input.layout
    replicas = _replicas(layout, group)
    weight, bias = (
        None if value is None else used(value, layout.shared, layout)
        for value in (self.weight, self.bias)
    )
    tracked, momentum = self.track_running_stats, self.momentum or 0.0
    if tracked and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
    return batch_norm(
        F.batch_norm,
        input,
        self.running_mean if tracked else None,
        self.running_var if tracked else None,
        weight,
        bias,
        True,
        momentum,
        self.eps,
        replicas,
    )


# A module of torch's that asks for a GPU and calls a kernel of its own, before any function that
# could be registered.
_plain_forward = nn.SyncBatchNorm.forward
nn.SyncBatchNorm.forward = synchronised_batch_norm  # type: ignore[method-assign]


@constant
def _replicas(layout: Layout, group: str | None) -> tuple[str, ...]:
    """Process groups of the data replicas that belong to a process group; None: to the world."""
    mesh = layout.mesh
    if DATA not in mesh.names or mesh.size((DATA,)) == 1:
        return ()
    over_data = mesh.group((DATA,))
    if group is None:
        return (over_data,)
    ranks = set(dist.get_process_group_ranks(resolve_group(group)))
    replicas = set(dist.get_process_group_ranks(resolve_group(over_data)))
    if replicas <= ranks:
        return (over_data,)
    if len(replicas & ranks) > 1:
        raise unsupported(
            "SyncBatchNorm",
            "its process group holds some of the data replicas and not all",
            "use the default group, mesh['data'].get_group(), or nn.BatchNorm",
            args=(layout,),
        )
    return ()


@constant
def _groups(layout: Layout, dim: int) -> tuple[str, ...]:
    return groups_of(layout, layout.axes(dim))


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
        all-reduce of them per mesh axis of the batch.
    """
    check_operands(op, input, running_mean, running_var, weight, bias)
    layout, local = input.layout, local_of(input)
    if not use_input_stats:
        return batch_norm(op, input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = tuple(range(2, len(layout.dims)))
    tracked = running_mean is not None or running_var is not None
    batch = _groups(layout, 0)
    plan = norm_plan(layout, dims, (1,), 1, tracked and bool(batch or _groups(layout, 1)))
    _more_than_one(layout, prod(layout.shape[2:]))
    weight, bias = part_of_parameter(weight, plan), part_of_parameter(bias, plan)
    if plan.scope is None:
        block, weight, bias = _filled(local, weight, bias, 1)
        y = torch.instance_norm(
            block, weight, bias, running_mean, running_var, True, momentum, eps,
            torch.backends.cudnn.enabled,
        )  # fmt: skip
        return wrap(_unfilled(y, block, local), layout)
    samples, channels = local.shape[:2]
    y, mean, variance = standardise(
        local,
        (1, samples * channels, 1, prod(local.shape[2:])),
        _per_sample(weight, samples, channels, 1),
        _per_sample(bias, samples, channels, 1),
        plan.scope,
        eps,
        current_operation(),
    )
    if tracked:
        both = torch.stack((mean, variance)).view(2, samples, channels)
        both = reduce_sum(both.sum(1), batch, current_operation()) / layout.shape[0]
        both = whole_statistics(both, plan)
        _update(running_mean, both[0], momentum)
        _update(running_var, both[1], momentum)
    return normalised(y, input)


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

    Layout: the input's.
    Comm: where a spatial dim is split, or the channels within a group, per mesh axis, one
        all-gather of mean and second moment per sample and group forward and one all-reduce of as
        many numbers backward.
    """
    check_operands(op, input, weight, bias)
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
    plan = norm_plan(layout, tuple(range(2, len(layout.dims))), (1,), per)
    if op is F.group_norm:
        _more_than_one(layout, layout.shape[0] * per * prod(layout.shape[2:]))
    weight, bias = part_of_parameter(weight, plan), part_of_parameter(bias, plan)
    if plan.scope is None:
        block, weight, bias = _filled(local, weight, bias, per)
        y = torch.group_norm(block, block.shape[1] // per, weight, bias, eps, cudnn_enabled)
        return wrap(_unfilled(y, block, local), layout)
    # Of groups that ranks share, the block has one row a channel.
    per = per if plan.scope.members is None else 1
    samples, held = local.shape[0], local.shape[1] // per
    y, _, _ = standardise(
        local,
        (1, samples * held, per, prod(local.shape[2:])),
        _per_sample(weight, samples, held, per),
        _per_sample(bias, samples, held, per),
        plan.scope,
        eps,
        current_operation(),
    )
    return normalised(y, input, wide=True)


def _filled(local: Tensor, weight: Tensor | None, bias: Tensor | None, per: int):
    """An empty block (and parameters) as one of a single zero position, tied to it.

    torch refuses some empty blocks; and what a rank without elements computes must hang on the
    same graph as elsewhere, also when gradients are differentiated again.
    """
    if local.numel():
        return local, weight, bias
    shape = [1] * local.dim()
    shape[1] = max(local.shape[1], per)
    parameters = [
        p if p is None or len(p) == shape[1] else p.new_zeros(shape[1]) + p.sum()
        for p in (weight, bias)
    ]
    return local.new_zeros(shape) + local.sum(), *parameters


def _unfilled(y: Tensor, block: Tensor, local: Tensor) -> Tensor:
    return y if block is local else y.reshape(-1)[:0].view(local.shape)
