"""Dropout of elements and of channels, and rrelu: masks that do not depend on the split."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardfield.constant import constant
from shardfield.keyed import above, draw_key, uniform
from shardfield.layout import Factor, Layout
from shardfield.operands import written
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor


def _check_p(p: float) -> None:
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _dropped(op, input: ShardTensor, drawn: Layout, p: float, inplace: bool) -> ShardTensor:
    """Elements are zero where the mask of the layout `drawn`, which broadcasts, is."""
    mask = above(drawn, draw_key(input.device), p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    if not inplace:
        # torch.where keeps the bool mask for backward and nothing else.
        return wrap(torch.where(mask, local_of(input), 0).mul_(scale), input.layout)
    written(op, input).masked_fill_(~mask, 0).mul_(scale)
    return input


@register(F.dropout, torch.dropout, torch.dropout_, uses=False)
def dropout(op, input: ShardTensor, p=0.5, training=None, inplace=False, *, train=None):
    """The same global mask whatever the split; bool, one byte an element, kept. Comm: none."""
    _check_p(p)
    training = train if training is None else training
    if training is False or p == 0:
        return input
    return _dropped(op, input, input.layout, p, inplace or op is torch.dropout_)


@constant
def _channels(layout: Layout, lead: int) -> Layout:
    """Samples and channels alone; the other dims are one."""
    return Layout(layout.mesh, [*layout.dims[:lead], *((Factor(1),),) * (len(layout.dims) - lead)])


_UNBATCHED = {F.dropout1d: 2, F.dropout3d: 4}


@register(
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.feature_dropout,
    torch.feature_dropout_,
    uses=False,
)
def channel_dropout(
    op, input: ShardTensor, p=0.5, training=True, inplace=False, *, train=None
) -> ShardTensor:
    """Whole channels, the same on all ranks that hold parts of one. Comm: none."""
    _check_p(p)
    if not (training if train is None else train) or p == 0:
        return input
    lead = 1 if _UNBATCHED.get(op) == input.dim() else 2
    inplace = inplace or op is torch.feature_dropout_
    return _dropped(op, input, _channels(input.layout, lead), p, inplace)


_ALPHA = 1.7580993408473766
_OF_CHANNELS = {F.feature_alpha_dropout, torch.feature_alpha_dropout}


@register(
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
    uses=False,
)
def alpha_dropout(
    op, input: ShardTensor, p=0.5, training=False, inplace=False, *, train=None
) -> ShardTensor:
    """Dropout that keeps mean and variance of SELU networks. Comm: none."""
    _check_p(p)
    if not (training if train is None else train) or p == 0:
        return input
    if inplace:
        raise unsupported(op, "it is not done in place", "inplace=False", args=(input,))
    layout = input.layout
    local = local_of(input)
    if p == 1:
        return wrap(local * 0, layout)
    drawn = _channels(layout, 2) if op in _OF_CHANNELS else layout
    mask = above(drawn, draw_key(input.device), p)
    a = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    return wrap(torch.where(mask, local * a, -_ALPHA * a) + _ALPHA * a * p, layout)


@register(F.rrelu, torch.rrelu, torch.rrelu_, uses=False)
def rrelu(
    op, input: ShardTensor, lower=1 / 8, upper=1 / 3, training=False, inplace=False, generator=None
) -> ShardTensor:
    """Leaky relu whose slopes are drawn on [lower, upper) in training. Comm: none."""
    if generator is not None:
        raise unsupported(op, "only the default generator is known to agree on all ranks")
    layout = input.layout
    local = local_of(input)
    inplace = inplace or op is torch.rrelu_
    if training:
        slopes = uniform(layout, draw_key(input.device), local.dtype)
        slopes = torch.where(local.detach() > 0, 1, slopes.mul_(upper - lower).add_(lower))
    else:
        slopes = torch.where(local.detach() > 0, 1, (lower + upper) / 2).to(local.dtype)
    if not inplace:
        return wrap(local * slopes, layout)
    written(op, input).mul_(slopes)
    return input
