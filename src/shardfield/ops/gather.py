"""Entries that an index picks along one dim; along the others it keeps its own place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardfield.axes import MeshAxes
from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Factor, Layout, wrapped
from shardfield.operands import block
from shardfield.picked import gathered
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, result

_T = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class GatherPlan:
    """How the operands of a gather lie while it is computed.

    Attributes:
        input: of the input.
        index: of the index.
        layout: of the result, to which it moves at the end.
    """

    input: Layout
    index: Layout
    layout: Layout


@constant
def gather_plan(dim: int, input, index) -> GatherPlan:
    """Other dims than `dim` are split as the input's are, or else as the index's.

    Args:
        dim: counted from the front.
        input: a Layout, or the shape of a plain operand; of the same sizes as the index, but
            along `dim`.
        index: the like.
    """
    mesh = next(operand.mesh for operand in (input, index) if isinstance(operand, Layout))
    x, i = _layout(mesh, input), _layout(mesh, index)
    taken = set(x.axes(dim))
    others = {}
    for d in range(len(x.dims)):
        if d != dim and taken.isdisjoint(x.axes(d) or i.axes(d)):
            others[d] = x.dims[d] if x.axes(d) else i.dims[d]
            taken |= set(x.axes(d) or i.axes(d))
        elif d != dim:
            others[d] = (Factor(i.shape[d]),)
    source = Layout(mesh, [others.get(d, x.dims[dim]) for d in range(len(x.dims))])
    own = i.dims[dim] if taken.isdisjoint(i.axes(dim)) else (Factor(i.shape[dim]),)
    computed = Layout(mesh, [others.get(d, own) for d in range(len(x.dims))])
    free = set(i.axes(dim)).isdisjoint(a for f in others.values() for one in f for a in one.axes)
    return GatherPlan(source, computed, computed.replace({dim: i.dims[dim]}) if free else computed)


def _layout(mesh: MeshAxes, operand) -> Layout:
    if isinstance(operand, Layout):
        return operand
    return Layout(mesh, [(Factor(size),) for size in operand])


@register(torch.gather, _T.gather, uses=False)
def gather(op, input, dim, index, *, sparse_grad=False, out=None):
    """What the index picks of a split dim comes from the ranks that hold it.

    Layout: split as the input's other dims, and along `dim` as the index, where an axis is free.
    Comm: none along a whole dim of equal splits; along a split one, one all-reduce of the result
        per axis, none backward. An index that is split otherwise is moved first.
    """
    if out is not None or sparse_grad:
        raise unsupported(op, "it takes no out= and no sparse_grad=", args=((input, index),))
    dim = wrapped(dim, input.dim())
    if input.dim() != index.dim():
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    for d, size in enumerate(index.shape):
        if d != dim and size > input.shape[d]:
            raise RuntimeError(f"Size does not match at dimension {d}: index {size} > input")
        if d != dim and size < input.shape[d]:
            input = input.narrow(d, 0, size)
    operands = [t._layout if isinstance(t, ShardTensor) else tuple(t.shape) for t in (input, index)]
    plan = gather_plan(dim, *operands)
    rows = block(index, plan.index, plan.index)
    local = gathered(op, block(input, plan.input, plan.index), plan.input, dim, rows)
    return result(move(local, plan.index, plan.layout, op.__name__), plan.layout)


@register(torch.take_along_dim, _T.take_along_dim, uses=False)
def take_along_dim(op, input, indices, dim=None, *, out=None):
    """As `gather`; the other dims broadcast."""
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result")
    if dim is None:
        return torch.gather(input.reshape(-1), 0, indices.reshape(-1))
    dim = wrapped(dim, input.dim())
    sizes = [1 if d == dim else size for d, size in enumerate(input.shape)]
    picks = [1 if d == dim else size for d, size in enumerate(indices.shape)]
    shape = list(torch.broadcast_shapes(sizes, picks))
    shape[dim] = -1
    return torch.gather(input.expand(shape), dim, indices.expand(shape))
