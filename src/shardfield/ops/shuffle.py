"""Shuffles: pixels between channels and space, channels between groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardfield.comm.fetch import fetch
from shardfield.constant import constant
from shardfield.layout import Layout, cuts
from shardfield.plan import Exchange, Segment, exchange, runs_of
from shardfield.ranges import aligned, divided, in_ranges, moved_to, multiplied
from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of, wrap


@constant
def _pixel_layouts(op, layout: Layout, factor: int) -> tuple[Layout, Layout]:
    """The layout that keeps what is shuffled together on one rank, and that of the result."""
    op(torch.empty(layout.shape, device="meta"), factor)  # raises where torch raises
    height, width, channels = (len(layout.dims) - back for back in (2, 1, 3))
    block = factor * factor
    if op is F.pixel_shuffle:
        source = aligned(layout, ((channels, block),))
        out = {dim: multiplied(source.dims[dim], factor) for dim in (height, width)}
        out[channels] = divided(source.dims[channels], block)
    else:
        source = aligned(layout, ((height, factor), (width, factor)))
        out = {dim: divided(source.dims[dim], factor) for dim in (height, width)}
        out[channels] = multiplied(source.dims[channels], block)
    return source, source.replace(out)


@register(F.pixel_shuffle, uses=False)
def pixel_shuffle(op, input: ShardTensor, upscale_factor: int) -> ShardTensor:
    """Layout: every split stays with its dim. Comm: none; one fetch where a cut is no multiple.

    That is, of `upscale_factor**2` along the channels.
    """
    return _shuffled(op, input, upscale_factor)


@register(F.pixel_unshuffle, uses=False)
def pixel_unshuffle(op, input: ShardTensor, downscale_factor: int) -> ShardTensor:
    """Layout: every split stays with its dim. Comm: none; one fetch where a cut is no multiple.

    That is, of `downscale_factor` along height or width.
    """
    return _shuffled(op, input, downscale_factor)


def _shuffled(op, input: ShardTensor, factor: int) -> ShardTensor:
    source, out = _pixel_layouts(op, input._layout, factor)
    local = local_of(moved_to(input, source))
    # torch's own gradient has the wrong shape where there is nothing to shuffle.
    return wrap(op(local, factor) if local.numel() else local.reshape(out.local_shape), out)


def shuffled_rows(
    start: int, stop: int, groups: int, size: int
) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
    """Channels [start, stop) of a shuffle: those to read, group by group, and their order then."""
    per = size // groups
    segments, order, at = [], [], 0
    for group in range(groups):
        first, last = (-((group - end) // groups) for end in (start, stop))
        if last > first:
            segments.append(Segment(group * per + first, last - first))
            order += [(row * groups + group, at + row - first) for row in range(first, last)]
            at += last - first
    return tuple(segments), tuple(place for _, place in sorted(order))


@constant
def _channel_plan(layout: Layout, groups: int) -> tuple[Exchange, str, tuple[int, ...]] | None:
    """The fetch of a channel shuffle, its group and the order of what arrives; None: no fetch."""
    F.channel_shuffle(torch.empty(layout.shape, device="meta"), groups)
    mesh, axes = layout.mesh, layout.axes(1)
    if mesh.size(axes) == 1:
        return None
    points, rank = cuts(layout.dims[1][0].extents), mesh.rank(axes)
    rows = [
        shuffled_rows(a, b, groups, layout.shape[1])
        for a, b in zip(points, points[1:], strict=False)
    ]
    wanted = tuple(segments for segments, _ in rows)
    return exchange(runs_of(layout.dims[1]), wanted, rank), mesh.group(axes), rows[rank][1]


@register(F.channel_shuffle, torch.native_channel_shuffle, uses=False)
def channel_shuffle(op, input: ShardTensor, groups: int) -> ShardTensor:
    """Layout: unchanged. Comm: none; one fetch where the channels are split."""
    input = in_ranges(input, 1)
    plan = _channel_plan(input._layout, groups)
    if plan is None:
        return wrap(op(local_of(input), groups), input._layout)
    step, group, order = plan
    local = fetch(local_of(input), 1, step, group, 0.0, op.__name__)
    places = torch.tensor(order, dtype=torch.int64, device=local.device)
    return wrap(local.index_select(1, places), input._layout)
