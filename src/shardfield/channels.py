"""Convolutions whose weight is split by output or input channels, as linear maps are by features.

Seen from one coordinate along the axes of the channels, such a convolution is an ordinary one of
fewer channels: output channels stay where they were computed, and what the input channels of
different ranks contribute is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout
from shardfield.operands import part_of_plain
from shardfield.registry import current_operation, groups_of, unsupported, used
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def convolved_by_channels(
    op, input: Tensor, weight: ShardTensor, bias: Tensor | None, out: int, groups: int, call: Call
) -> Tensor:
    """A convolution with a weight split along dim 0 or 1.

    Args:
        out: the dim of `weight` that is the output channels; the other one (0 or 1) is contracted.
        call: the convolution of an input, a weight and a bias whose channels are whole.

    Comm: of output channels, one all-reduce of the input's gradient per axis; of input channels,
        one of the result. What `call` sends.
    """
    layout, channel = weight._layout, input.dim() - weight.dim() + 1
    described = input._layout if isinstance(input, ShardTensor) else tuple(input.shape)
    _check(op, layout, described, channel, groups)
    if layout.is_split(out):
        axes = layout.axes(out)
        blocks = local_of(weight), _part(bias, layout, out)
        held = blocks[0].shape[out]
        rows, added = _one(blocks[0], out), None if blocks[1] is None else _one(blocks[1], 0)
        y = call(_whole(input, axes, layout), rows, added)
        return _laid(y, channel, held, layout, out)
    within = _of_channels(input, channel, 1 - out, layout)
    y = call(within, _one(local_of(weight), 1 - out), None)
    local = local_of(y) if isinstance(y, ShardTensor) else y
    total = reduce_sum(local, groups_of(layout, layout.axes(1 - out)), current_operation())
    found = wrap(total, y._layout) if isinstance(y, ShardTensor) else total
    return found if bias is None else found + bias.view(-1, *(1,) * (weight.dim() - 2))


@constant
def _check(op, weight: Layout, input, channel: int, groups: int) -> None:
    rule = None
    if groups != 1:
        rule = "its weight is split and its channels are in groups"
    elif any(weight.is_split(d) for d in range(2, len(weight.dims))):
        rule = "its kernel is split"
    elif weight.is_split(0) == weight.is_split(1):
        rule = "its weight is split by input and output channels at once"
    elif isinstance(input, Layout):
        split = set(weight.split_axes)
        elsewhere = {a for d in range(len(input.dims)) if d != channel for a in input.axes(d)}
        if split & elsewhere:
            rule = "one mesh axis splits its weight and positions of its input"
    if rule is not None:
        raise unsupported(op, rule, args=[x for x in (input, weight) if isinstance(x, Layout)])


def _whole(input: Tensor, axes: tuple[str, ...], layout: Layout) -> Tensor:
    """The input on its way into a computation that is split over the output channels."""
    if not isinstance(input, ShardTensor):
        return used(input, axes, layout)
    return wrap(used(local_of(input), axes, layout), input._layout)


def _part(bias: Tensor | None, layout: Layout, out: int) -> Tensor | None:
    if bias is None or isinstance(bias, ShardTensor):
        return None if bias is None else local_of(bias)
    axes = layout.axes(out)
    return part_of_plain(used(bias, axes, layout), _channels_at(layout, out, bias.shape, 0))


def _one(value: Tensor, dim: int) -> Tensor:
    """At least one channel, of zeros: torch convolves none. Tied to the value in autograd."""
    if value.shape[dim]:
        return value
    shape = list(value.shape)
    shape[dim] = 1
    return value.new_zeros(shape) + value.sum()


def _laid(y: Tensor, channel: int, held: int, layout: Layout, out: int) -> ShardTensor:
    """The result of this rank's output channels, as a part of all of them."""
    local = local_of(y) if isinstance(y, ShardTensor) else y
    if not held:
        local = local.narrow(channel, 0, 0)
    if isinstance(y, ShardTensor):
        return wrap(local, _exchanged(y._layout, channel, layout, out))
    return wrap(local, _channels_at(layout, out, y.shape, channel))


def _of_channels(input: Tensor, channel: int, of: int, layout: Layout) -> Tensor:
    """This rank's channels of the input, as a tensor that has no others."""
    local = local_of(input) if isinstance(input, ShardTensor) else input
    if not isinstance(input, ShardTensor) or not input._layout.is_split(channel):
        target = _channels_at(layout, of, local.shape, channel)
        local = part_of_plain(used(local, layout.axes(of), layout), target)
    elif not _agree(input._layout, channel, layout, of):
        raise unsupported(
            current_operation(),
            "the input channels of its weight are split otherwise than those of its input",
            args=(input,),
        )
    local = _one(local, channel)
    if not isinstance(input, ShardTensor):
        return local
    rest = _alone(input._layout, channel, local.shape[channel])
    return wrap(local, rest) if rest.shared else local


@constant
def _channels_at(weight: Layout, of: int, shape: Sequence[int], channel: int) -> Layout:
    """A shape whose dim `channel` is split as dim `of` of a weight, whole otherwise."""
    dims: list[Dim] = [(Factor(size),) for size in shape]
    dims[channel] = weight.dims[of]
    return Layout(weight.mesh, dims)


@constant
def _exchanged(layout: Layout, channel: int, weight: Layout, of: int) -> Layout:
    return layout.replace({channel: weight.dims[of]})


@constant
def _agree(layout: Layout, channel: int, weight: Layout, of: int) -> bool:
    return layout.dims[channel] == weight.dims[of]


@constant
def _alone(layout: Layout, channel: int, held: int) -> Layout:
    """The layout seen from one coordinate along the axes of its channels."""
    return layout.replace({channel: (Factor(held),)})
