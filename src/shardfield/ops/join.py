"""Joining tensors: cat along whole dims is local, along a split dim rows move to their ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from shardfield.comm.fetch import fetch
from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout, cuts, extents_of, largest_share, wrapped
from shardfield.operands import part_of_plain
from shardfield.plan import Exchange, Run, Segment, exchange, runs_of
from shardfield.registry import register, unsupported, used
from shardfield.tensor import ShardTensor, local_of, result

_T = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class JoinPlan:
    """How operands are joined, seen from this rank.

    Attributes:
        layout: of the result.
        targets: the layout every operand takes first.
        plan: what moves after the local join; None where no rows move.
        group: process group of that fetch.
    """

    layout: Layout
    targets: tuple[Layout, ...]
    plan: Exchange | None = None
    group: str = ""


@constant
def cat_plan(dim: int, *operands) -> JoinPlan:
    """The plan of a cat; dims that are not joined take the most balanced split of an operand's.

    Args:
        dim: counted from the front.
        operands: a Layout for a sharded operand, the shape of a plain, replicated one.
    """
    layouts = [operand for operand in operands if isinstance(operand, Layout)]
    shapes = [operand.shape if isinstance(operand, Layout) else operand for operand in operands]
    mesh = layouts[0].mesh
    lead = min(layouts, key=lambda layout: (largest_share(layout), -prod(layout.shape)))
    other = [(Factor(n),) if d == dim else lead.dims[d] for d, n in enumerate(lead.shape)]
    taken = {axis for d in range(len(lead.dims)) if d != dim for axis in lead.axes(d)}
    along = next((x for x in layouts if x.axes(dim) and taken.isdisjoint(x.axes(dim))), None)
    sizes = [shape[dim] for shape in shapes]
    if along is None:
        targets = [_with(mesh, other, dim, (Factor(size),)) for size in sizes]
        return JoinPlan(_with(mesh, other, dim, (Factor(sum(sizes)),)), tuple(targets))
    axes = along.axes(dim)
    split = [
        operand.dims[dim] if isinstance(operand, Layout) and operand.axes(dim) == axes else None
        for operand in operands
    ]
    extents = _result_extents(split, sizes, mesh.size(axes))
    dims = _operand_dims(split, sizes, axes, extents)
    targets = [_with(mesh, other, dim, factors) for factors in dims]
    out = _with(mesh, other, dim, (Factor(sum(sizes), axes, extents),))
    if mesh.size(axes) == 1:
        return JoinPlan(out, tuple(targets))
    points = cuts(extents)
    wanted = tuple((Segment(a, b - a),) for a, b in pairwise(points))
    plan = exchange(_joined_runs(dims, sizes), wanted, mesh.rank(axes))
    return JoinPlan(out, tuple(targets), plan, mesh.group(axes))


def _with(mesh, other: Sequence[Dim], dim: int, factors: Dim) -> Layout:
    return Layout(mesh, [factors if d == dim else f for d, f in enumerate(other)])


def _result_extents(
    split: Sequence[Dim | None], sizes: Sequence[int], ranks: int
) -> tuple[int, ...]:
    """Rows of every rank: those it holds of the split operands, and what is replicated at the ends.

    So one split operand between replicated ones (a class token before the patches) moves nothing.
    """
    extents = [0] * ranks
    last = max(index for index, dim in enumerate(split) if dim is not None)
    for index, (dim, size) in enumerate(zip(split, sizes, strict=True)):
        if dim is None:
            extents[-1 if index > last else 0] += size
            continue
        for rank, runs in enumerate(runs_of(dim)):
            extents[rank] += sum(stop - start for start, stop in runs)
    return tuple(extents)


def _operand_dims(
    split: Sequence[Dim | None], sizes: Sequence[int], axes: tuple[str, ...], extents
) -> list[Dim]:
    """How every operand is split; one that is whole is cut where the result is."""
    dims, at = [], 0
    for dim, size in zip(split, sizes, strict=True):
        if dim is None:
            points = [min(max(point - at, 0), size) for point in cuts(extents)]
            dim = (Factor(size, axes, extents_of(points)),)
        dims.append(dim)
        at += size
    return dims


def _joined_runs(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    """Rows of the result that every rank holds once it has joined its own blocks, in order."""
    owned: list[list[Run]] = []
    at = 0
    for dim, size in zip(dims, sizes, strict=True):
        for rank, runs in enumerate(runs_of(dim)):
            if len(owned) <= rank:
                owned.append([])
            owned[rank] += [(at + start, at + stop) for start, stop in runs]
        at += size
    return tuple(tuple(runs) for runs in owned)


def _shapes_fit(op, tensors: Sequence[torch.Tensor], dim: int | None) -> None:
    """Raises where torch does, from global shapes; `dim` None: all dims are equal."""
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        same = tensor.dim() == first.dim() and all(
            a == b or d == dim
            for d, (a, b) in enumerate(zip(tensor.shape, first.shape, strict=True))
        )
        if not same:
            raise RuntimeError(
                f"{op.__name__}: sizes of tensors must match"
                f"{f' except in dimension {dim}' if dim is not None else ''}; tensor 0 has the "
                f"global shape {tuple(first.shape)}, tensor {index} {tuple(tensor.shape)}"
            )


def _blocks(op, tensors, plan: JoinPlan) -> list[torch.Tensor]:
    """Every operand as its target splits it; `move` and `used` complete the gradients."""
    axes = plan.layout.split_axes
    return [
        move(local_of(tensor), tensor._layout, target, op.__name__)
        if isinstance(tensor, ShardTensor)
        else part_of_plain(used(tensor, axes, plan.layout), target)
        for tensor, target in zip(tensors, plan.targets, strict=True)
    ]


def _described(tensors) -> tuple:
    return tuple([t._layout if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors])


@register(torch.cat, torch.concat, torch.concatenate, uses=False)
def cat(op, tensors, dim=0, *, axis=None, out=None):
    """Operands take the split of the largest; plain ones are replicated values.

    Layout: along a split dim, every rank as many rows as it held of the operands, in global order.
    Comm: none for equal splits along another dim; else what is split differently is moved. Along a
        split dim one fetch of the rows that change owner.
    """
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=tensors)
    dim = dim if axis is None else axis
    # torch skips empty one-dimensional tensors of any kind.
    present = [t for t in tensors if tuple(t.shape) != (0,)]
    if not any(isinstance(t, ShardTensor) for t in present):
        return op([t.full_tensor() if isinstance(t, ShardTensor) else t for t in tensors], dim)
    dim = wrapped(dim, present[0].dim())
    _shapes_fit(op, present, dim)
    plan = cat_plan(dim, *_described(present))
    local = op(_blocks(op, present, plan), dim)
    if plan.plan is not None:
        local = fetch(local, dim, plan.plan, plan.group, 0.0, op.__name__)
    return result(local, plan.layout)


@constant
def _stack_plan(dim: int, *operands) -> JoinPlan:
    layouts = [operand for operand in operands if isinstance(operand, Layout)]
    lead = max(layouts, key=lambda layout: len(layout.split_axes))
    dims = (*lead.dims[:dim], (Factor(len(operands)),), *lead.dims[dim:])
    return JoinPlan(Layout(lead.mesh, dims), (lead,) * len(operands))


@register(torch.stack, uses=False)
def stack(op, tensors, dim=0, *, out=None):
    """As `cat` along a new dim, which is whole. Comm: none for equal splits."""
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=tensors)
    _shapes_fit(op, tensors, None)
    dim = wrapped(dim, tensors[0].dim() + 1)
    plan = _stack_plan(dim, *_described(tensors))
    return result(op(_blocks(op, tensors, plan), dim), plan.layout)


@register(torch.hstack, torch.vstack, torch.row_stack, torch.column_stack, torch.dstack, uses=False)
def stack_along(op, tensors, *, out=None):
    """As `cat`, of tensors that get new dims first. Comm: as `cat`."""
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=tensors)
    name = op.__name__
    if name in ("vstack", "row_stack"):
        return torch.cat([torch.atleast_2d(t) for t in tensors], 0)
    if name == "dstack":
        return torch.cat([torch.atleast_3d(t) for t in tensors], 2)
    if name == "column_stack":
        return torch.cat([t.reshape(-1, 1) if t.dim() < 2 else t for t in tensors], 1)
    rows = [torch.atleast_1d(t) for t in tensors]
    return torch.cat(rows, 0 if rows[0].dim() == 1 else 1)
