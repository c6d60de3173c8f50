"""Rolls and flips: the splits stay, the rows move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardfield.comm.fetch import fetch
from shardfield.constant import constant
from shardfield.layout import Layout, wrapped
from shardfield.plan import Exchange, Run, Segment, exchange, runs_of
from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of, result

_T = torch.Tensor


def rolled_rows(runs: Sequence[Run], shift: int, size: int) -> tuple[Segment, ...]:
    """The rows that come to stand at `runs` when a dim of `size` rows is rolled by `shift`."""
    found = []
    for start, stop in runs:
        first = (start - shift) % size
        length = min(stop - start, size - first)
        found.append(Segment(first, length))
        if length < stop - start:
            found.append(Segment(0, stop - start - length))
    return tuple(found)


def flipped_rows(runs: Sequence[Run], size: int) -> tuple[Segment, ...]:
    """The rows that come to stand at `runs` when a dim of `size` rows is flipped."""
    return tuple(Segment(size - 1 - start, stop - start, -1) for start, stop in runs)


@dataclass(frozen=True, eq=False, slots=True)
class ShiftPlan:
    """Rows that move along split dims, and the dims left to the local operation.

    Attributes:
        steps: (dim, fetch, group) of every dim split over more than one rank.
        dims: the other dims; with the shift of each, for a roll.
    """

    steps: tuple[tuple[int, Exchange, str], ...]
    dims: tuple[int, ...]
    shifts: tuple[int, ...] = ()


def _plan(layout: Layout, dims: Sequence[int], shifts: Sequence[int | None]) -> ShiftPlan:
    mesh = layout.mesh
    steps, rest, left = [], [], []
    for dim, shift in zip(dims, shifts, strict=True):
        axes, size = layout.axes(dim), layout.shape[dim]
        if not axes or mesh.size(axes) == 1 or not size:
            rest.append(dim)
            left.append(shift)
            continue
        owned = runs_of(layout.dims[dim])
        rows = partial(flipped_rows, size=size)
        if shift is not None:
            rows = partial(rolled_rows, shift=shift, size=size)
        plan = exchange(owned, tuple(rows(runs) for runs in owned), mesh.rank(axes))
        steps.append((dim, plan, mesh.group(axes)))
    return ShiftPlan(tuple(steps), tuple(rest), tuple(left))


def _all(value) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@constant
def roll_plan(layout: Layout, shifts: tuple[int, ...], dims: tuple[int, ...]) -> ShiftPlan:
    """The plan of `torch.roll`; several shifts of one dim follow each other."""
    return _plan(layout, [wrapped(dim, len(layout.dims)) for dim in dims], shifts)


@constant
def flip_plan(layout: Layout, dims: tuple[int, ...]) -> ShiftPlan:
    """The plan of `torch.flip`."""
    front = [wrapped(dim, len(layout.dims)) for dim in dims]
    if len(set(front)) < len(front):
        raise RuntimeError(f"dims {dims} appear more than once in the list of dims")
    return _plan(layout, front, (None,) * len(front))


def _fetched(op, input: ShardTensor, plan: ShiftPlan) -> torch.Tensor:
    local = local_of(input)
    for dim, step, group in plan.steps:
        local = fetch(local, dim, step, group, 0.0, op.__name__)
    return local


@register(torch.roll, _T.roll, uses=False)
def roll(op, input, shifts, dims=()):
    """Layout: unchanged. Comm: one fetch per split dim, of the rows that change owner."""
    shifts, dims = _all(shifts), _all(dims)
    if not dims:
        return input.reshape(-1).roll(shifts, 0).reshape(input._layout.shape)
    if len(shifts) != len(dims):
        raise RuntimeError(
            f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}"
        )
    plan = roll_plan(input._layout, shifts, dims)
    local = _fetched(op, input, plan)
    if plan.dims or not plan.steps:
        local = torch.roll(local, plan.shifts, plan.dims)
    return result(local, input._layout)


@register(torch.flip, _T.flip, torch.fliplr, _T.fliplr, torch.flipud, _T.flipud, uses=False)
def flip(op, input, *dims, **named):
    """Layout: unchanged. Comm: one fetch per split dim, of the rows that change owner."""
    if op.__name__ in ("fliplr", "flipud"):
        asked = (1,) if op.__name__ == "fliplr" else (0,)
    else:
        dims = dims or tuple(named.values())
        asked = _all(dims[0]) if len(dims) == 1 else dims
    plan = flip_plan(input._layout, asked)
    local = _fetched(op, input, plan)
    if plan.dims or not plan.steps:
        local = torch.flip(local, plan.dims)
    return result(local, input._layout)


@constant
def _quarter_turns(layout: Layout, k: int, dims: tuple[int, ...]) -> int:
    torch.rot90(torch.empty(layout.shape, device="meta"), k, dims)  # raises where torch raises
    return k % 4


@register(torch.rot90, _T.rot90, uses=False)
def rot90(op, input, k=1, dims=(0, 1)):
    """Layout: an odd number of turns swaps the splits of the two dims. Comm: that of the flips."""
    turns = _quarter_turns(input._layout, k, tuple(dims))
    first, second = dims
    if turns == 0:
        return input.clone()
    if turns == 2:
        return input.flip((first, second))
    return input.flip((second if turns == 1 else first,)).transpose(first, second)
