"""Operands beside each other: plain ones, other layouts, shapes that broadcast.

A plain tensor beside a sharded one is a replicated global value, of which a rank needs its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout, largest_share
from shardfield.plan import Run, runs_of
from shardfield.registry import current_operation, unsupported, used
from shardfield.tensor import ShardTensor, local_of


@constant
def _runs_here(layout: Layout) -> tuple[tuple[int, tuple[Run, ...]], ...]:
    """(dim, this rank's global runs) of every split dim."""
    mesh = layout.mesh
    return tuple(
        (dim, runs_of(layout.dims[dim])[mesh.rank(layout.axes(dim))])
        for dim in range(len(layout.dims))
        if layout.axes(dim) and mesh.size(layout.axes(dim)) > 1
    )


def part_of_plain(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a whole tensor, as `layout` splits it. Comm: none.

    Its gradient is zero outside the part; `registry.used` adds up the ranks' parts.
    """
    for dim, runs in _runs_here(layout):
        if len(runs) == 1:
            value = value.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
        else:
            parts = [value.narrow(dim, start, stop - start) for start, stop in runs]
            value = torch.cat(parts, dim) if parts else value.narrow(dim, 0, 0)
    return value


def block(value: torch.Tensor, target: Layout, computed: Layout) -> torch.Tensor:
    """This rank's part of an operand, laid out as `target`, for a computation split as `computed`.

    A move takes and gives replicated cotangents: the sum of the gradient over axes on which the
    operand is whole and the computation split comes after it.

    Comm: for a ShardTensor in another layout, what moving it takes; backward, one all-reduce per
        axis over which `computed` is split and `target` is not.
    """
    if not isinstance(value, ShardTensor):
        return part_of_plain(used(value, computed.split_axes, computed), target)
    moved = move(local_of(value), value.layout, target, current_operation())
    return used(moved, _missing(target, computed), computed)


def written(op, input: torch.Tensor) -> torch.Tensor:
    """The local shard of a tensor that `op` writes in place.

    Raises:
        UnsupportedOperation: it is plain, or a view whose data had to move.
    """
    if not isinstance(input, ShardTensor):
        raise unsupported(
            op, "it writes a sharded value into a plain tensor", "use the result", "in-place"
        )
    if input._moved:
        raise unsupported(
            op,
            "it writes into a view whose data had to move between ranks",
            "use the operation that returns a new tensor, or clone() first",
            "in-place",
            (input,),
        )
    return local_of(input)


@constant
def _missing(target: Layout, computed: Layout) -> tuple[str, ...]:
    return tuple(axis for axis in computed.split_axes if axis not in target.split_axes)


def blocks(op, args: Sequence, kwargs: dict, writes: bool = False) -> tuple[list, dict, Layout]:
    """Arguments of an elementwise operation, their tensors as local blocks that broadcast.

    Args:
        writes: the result is written into the first argument, whose layout then stands.

    Returns:
        The arguments to call `op` with, and the layout of what it then returns.

    Raises:
        LayoutError: shapes that do not broadcast; a plain operand of a local size.
    """
    names = list(kwargs)
    values = [*args, *kwargs.values()]
    slots = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
    tensors = [values[index] for index in slots]
    described = [t._layout if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors]
    out, targets = broadcast_layouts(op, writes, *described)
    for index, tensor, target in zip(slots, tensors, targets, strict=True):
        values[index] = block(tensor, target, out)
    return values[: len(args)], dict(zip(names, values[len(args) :], strict=True)), out


@constant
def broadcast_layouts(op, writes: bool, *operands) -> tuple[Layout, tuple[Layout, ...]]:
    """The layout of a broadcast result, and the layout every operand takes for it.

    That of the operand with most elements; among equals, the most balanced, then the first.

    Args:
        writes: the result is written into the first operand, whose layout then stands.
        operands: a Layout for a sharded operand, the shape of a plain, replicated one.

    Raises:
        LayoutError: shapes that do not broadcast; a plain operand of a local size.
    """
    shapes = [o.shape if isinstance(o, Layout) else o for o in operands]
    layouts = [o for o in operands if isinstance(o, Layout)]
    mesh = layouts[0].mesh
    if any(layout.mesh is not mesh for layout in layouts):
        raise LayoutError(
            f"{getattr(op, '__name__', op)} of tensors on different root meshes",
            "operands lie on one mesh",
            "call init_mesh once, and use its parts (mesh['domain'])",
            "mesh",
        )
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        listed = ", ".join(
            f"ShardTensor {o}" if isinstance(o, Layout) else f"plain tensor {tuple(o)}"
            for o in operands
        )
        raise LayoutError(
            f"{getattr(op, '__name__', op)} of {listed}",
            "shapes are global and must broadcast; a plain tensor beside a sharded one is a "
            "replicated global value, never this rank's part",
            "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
            "mixing",
        ) from error
    dims: list = [None] * len(shape)
    taken: set[str] = set()
    order = sorted(
        range(len(layouts)), key=lambda i: (-prod(layouts[i].shape), largest_share(layouts[i]))
    )
    if writes:
        order = [0, *(i for i in order if i != 0)]
    for i in order:
        layout = layouts[i]
        shift = len(shape) - len(layout.dims)
        for d, dim in enumerate(layout.dims):
            axes = layout.axes(d)
            if not axes or layout.shape[d] != shape[shift + d] or dims[shift + d] is not None:
                continue
            if taken.isdisjoint(axes):
                dims[shift + d] = dim
                taken |= set(axes)
    out = Layout(mesh, [dim or (Factor(n),) for dim, n in zip(dims, shape, strict=True)])
    if writes and out is not layouts[0]:
        raise unsupported(
            op, f"its result {out} does not fit the written tensor", "use the result", "in-place"
        )
    targets = []
    for operand_shape in shapes:
        shift = len(shape) - len(operand_shape)
        targets.append(
            Layout(
                mesh,
                [
                    out.dims[shift + d] if n == shape[shift + d] else (Factor(n),)
                    for d, n in enumerate(operand_shape)
                ],
            )
        )
    return out, tuple(targets)
