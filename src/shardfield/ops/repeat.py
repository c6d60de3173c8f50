"""Repetition: broadcast dims, and copies of rows."""

from __future__ import annotations

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout
from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of, marked, result
from shardfield.views import ViewPlan, sizes_given

_T = torch.Tensor


@constant
def _expand_plan(layout: Layout, sizes: tuple[int, ...]) -> ViewPlan:
    torch.empty(layout.shape, device="meta").expand(sizes)  # raises where torch raises
    new = len(sizes) - len(layout.dims)
    dims: list[Dim] = [(Factor(size),) for size in sizes]
    gathered = {}
    for dim, factors in enumerate(layout.dims):
        if sizes[new + dim] in (-1, layout.shape[dim]):
            dims[new + dim] = factors
        elif layout.is_split(dim):
            gathered[dim] = ()
    out = Layout(layout.mesh, dims)
    return ViewPlan(out, layout, layout.replace(gathered)) if gathered else ViewPlan(out)


def _expanded(op, input: ShardTensor, sizes: tuple[int, ...]) -> torch.Tensor:
    plan = _expand_plan(input._layout, sizes)
    local = local_of(input)
    if plan.source is not None:
        assert plan.target is not None
        local = move(local, plan.source, plan.target, op.__name__)
    moved = input._moved or plan.source is not None
    return marked(result(local.expand(plan.layout.local_shape), plan.layout), moved)


@register(_T.expand, torch.broadcast_to, _T.broadcast_to, uses=False)
def expand(op, input, *size, implicit=False, **named):
    """A local view. Comm: none, but for a split dim of one row, which every rank then gets."""
    return _expanded(op, input, sizes_given(size, named))


@register(_T.expand_as, uses=False)
def expand_as(op, input, other):
    """As `expand`; the layout of `other` plays no part."""
    if not isinstance(input, ShardTensor):
        return input.expand(tuple(other.shape))
    return _expanded(op, input, tuple(other.shape))


@constant
def _repeated(layout: Layout, repeats: tuple[int, ...]) -> Layout:
    lead: tuple[Dim, ...] = ((),) * (len(repeats) - len(layout.dims))
    dims = (*lead, *layout.dims)
    return Layout(layout.mesh, [(Factor(n), *dim) for n, dim in zip(repeats, dims, strict=True)])


@register(_T.repeat, torch.tile, _T.tile, uses=False)
def repeat(op, input, *repeats, **named):
    """Copies of the local rows, a whole factor before the split one. Comm: none."""
    counts = sizes_given(repeats, named)
    missing = len(input._layout.dims) - len(counts)
    if missing > 0 and op is not _T.repeat:
        counts = (1,) * missing + counts
    elif missing > 0:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of "
            "tensor"
        )
    return result(local_of(input).repeat(counts), _repeated(input._layout, counts))
