"""Padding and cropping in every mode, with pads wider than a shard."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from shardfield.comm.fetch import fetch
from shardfield.constant import constant
from shardfield.layout import Factor, Layout, cuts, even_extents, extents_of
from shardfield.plan import FILL, Exchange, Segment, exchange, runs_of
from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of, result


@dataclass(frozen=True, eq=False, slots=True)
class PadPlan:
    """A padding of one layout, seen from this rank.

    Attributes:
        layout: of the result.
        steps: (dim, fetch, group) of every padded dim that is split over more than one rank.
        rest: torch's argument for the other dims.
        pieces: (dim, rows) of the other dims where torch's own operation is not used.
    """

    layout: Layout
    steps: tuple[tuple[int, Exchange, str], ...]
    rest: tuple[int, ...]
    pieces: tuple[tuple[int, tuple[Segment, ...]], ...] = ()


def padded_rows(
    mode: str, start: int, stop: int, size: int, crop: tuple[int, int] = (0, 0)
) -> tuple[Segment, ...]:
    """Where rows [start, stop) of a padded dim come from; negative ones lie before row 0.

    Args:
        mode: of `F.pad`.
        size: rows of the dim that is padded.
        crop: rows that negative pads drop at both ends; a circle closes without them.
    """
    if stop <= start:
        return ()
    before, after = min(stop, 0) - start, stop - max(start, size)
    inner = min(stop, size) - max(start, 0)
    high = max(start, size)
    if mode == "reflect":
        ends = Segment(-start, before, -1), Segment(2 * (size - 1) - high, after, -1)
    elif mode == "circular":
        ends = Segment(start + size - crop[1], before), Segment(high - size + crop[0], after)
    elif mode == "replicate":
        ends = Segment(0, before, 0), Segment(size - 1, after, 0)
    else:
        ends = Segment(FILL, before), Segment(FILL, after)
    found = (ends[0], Segment(max(start, 0), inner), ends[1])
    return tuple(segment for segment in found if segment.length > 0)


def padded_extents(extents: tuple[int, ...], before: int, after: int) -> tuple[int, ...]:
    """Rows of every rank: the first holders get the leading pad, the last the trailing one."""
    points = cuts(extents)
    size = points[-1] + before + after
    ends = {points[-1]: size, 0: 0}
    inner = [ends.get(point, min(max(point + before, 0), size)) for point in points[1:-1]]
    return extents_of((0, *inner, size))


@constant
def pad_plan(layout: Layout, pad: tuple[int, ...], mode: str) -> PadPlan:
    """The plan of `F.pad`, whose `pad` starts with the last dim.

    Raises:
        RuntimeError: where torch raises for the whole tensor, or would read what it has not set.
    """
    F.pad(torch.empty(layout.shape, device="meta"), list(pad), mode)
    mesh = layout.mesh
    changes, steps, pieces, rest = {}, [], [], list(pad)
    # torch's operations refuse empty shards, and their gradients depend on the input only where
    # there is one; all ranks have to build the same graph.
    by_pieces = mode != "constant" and mesh.size(layout.split_axes) > 1
    for index in range(0, len(pad), 2):
        before, after = pad[index : index + 2]
        dim = len(layout.dims) - 1 - index // 2
        if not before and not after:
            continue
        size, axes = layout.shape[dim], layout.axes(dim)
        if mode == "circular" and max(before, after) > size + min(before, after, 0):
            raise RuntimeError(f"pad {pad} wraps dim {dim} of {layout.shape} more than once")
        if not axes:
            changes[dim] = (Factor(size + before + after),)
            if by_pieces:
                rest[index : index + 2] = 0, 0
                crop = (max(0, -before), max(0, -after))
                pieces.append((dim, padded_rows(mode, -before, size + after, size, crop)))
            continue
        have = layout.extents(dim) or even_extents(size, mesh.size(axes))
        extents = padded_extents(have, before, after)
        changes[dim] = (Factor(size + before + after, axes, extents),)
        if mesh.size(axes) == 1:
            continue
        rest[index : index + 2] = 0, 0
        points, crop = cuts(extents), (max(0, -before), max(0, -after))
        wanted = tuple(
            padded_rows(mode, a - before, b - before, size, crop) for a, b in pairwise(points)
        )
        plan = exchange(runs_of(layout.dims[dim]), wanted, mesh.rank(axes))
        steps.append((dim, plan, mesh.group(axes)))
    return PadPlan(layout.replace(changes), tuple(steps), tuple(rest), tuple(pieces))


@register(F.pad, torch.constant_pad_nd, uses=False)
def pad(op, input: ShardTensor, pad, mode="constant", value=None) -> torch.Tensor:
    """Every mode, negative pads (crops) included.

    Layout: the first rank with rows gets the leading pad, the last one the trailing pad.
    Comm: none for constant pads; otherwise one fetch per padded split dim, of the rows that the
        pad repeats.
    """
    if op is torch.constant_pad_nd:
        mode, value = "constant", 0.0 if isinstance(mode, str) else mode
    plan = pad_plan(input._layout, tuple(pad), mode)
    fill: Any = value or 0.0
    local = local_of(input)
    for dim, step, group in plan.steps:
        local = fetch(local, dim, step, group, fill, op.__name__)
    for dim, segments in plan.pieces:
        local = torch.cat([_rows(local, dim, segment) for segment in segments], dim)
    if not (any(plan.rest) or plan.steps or plan.pieces):
        local = local.clone()  # torch pads an empty shard by nothing in some modes only
    elif any(plan.rest):
        local = F.pad(local, list(plan.rest), mode, fill if mode == "constant" else None)
    return result(local, plan.layout)


def _rows(local: torch.Tensor, dim: int, segment: Segment) -> torch.Tensor:
    start, length = segment.start, segment.length
    assert start is not None
    if segment.step == 0:
        shape = list(local.shape)
        shape[dim] = length
        return local.narrow(dim, start, 1).expand(shape)
    if segment.step == -1:
        return local.narrow(dim, start - length + 1, length).flip(dim)
    return local.narrow(dim, start, length)
