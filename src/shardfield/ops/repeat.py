"""Repetition: dims that broadcast, and copies of rows."""

from __future__ import annotations

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout, cuts, extents_of, wrapped
from shardfield.operands import broadcast_layouts
from shardfield.ranges import in_ranges, multiplied
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, local_of, marked, result
from shardfield.views import ViewPlan, sizes_given

_T = torch.Tensor
_compiling = torch.compiler.is_dynamo_compiling


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


@register(torch.broadcast_tensors, uses=False)
def broadcast_tensors(op, *tensors):
    """As `expand`, of each tensor to the common shape."""
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        (tensors,) = tensors
    described = [t._layout if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors]
    out, _ = broadcast_layouts(op, False, *described)
    return tuple([t if t.shape == out.shape else t.expand(out.shape) for t in tensors])


@register(torch.meshgrid, uses=False)
def meshgrid(op, *tensors, indexing=None):
    """As `expand`: each grid is split as the tensor it repeats."""
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        (tensors,) = tensors
    order = list(range(len(tensors)))
    if indexing == "xy" and len(order) > 1:
        order[:2] = 1, 0
    sizes = [tensors[place].numel() for place in order]
    grids = []
    for place, tensor in zip(order, tensors, strict=True):
        shape = [1] * len(sizes)
        shape[place] = sizes[place]
        grids.append(tensor.reshape(shape).expand(sizes))
    return tuple(grids)


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


@constant
def _interleaved(layout: Layout, dim: int, counts: int | tuple[int, ...]) -> tuple[Layout, int]:
    """The layout after repeating rows, and where this rank's counts start if there are several."""
    if isinstance(counts, int):
        return layout.replace({dim: multiplied(layout.dims[dim], counts)}), 0
    factor = layout.contiguous(dim)
    assert factor is not None
    extents = ()
    if factor.axes:
        points = [sum(counts[:point]) for point in cuts(factor.extents)]
        extents = extents_of(points)
    return layout.replace({dim: (Factor(sum(counts), factor.axes, extents),)}), layout.offset(dim)


def _counted(repeats: torch.Tensor, rows: int) -> int | tuple[int, ...]:
    """The counts of a tensor, one where it holds one; raises where torch raises."""
    if repeats.dim() > 1 or repeats.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            "repeats must be a 0-dim or 1-dim tensor of int32 or int64, but got "
            f"{repeats.dim()} dims of {repeats.dtype}"
        )
    counts = repeats.reshape(-1).tolist()
    if len(counts) == 1:
        return counts[0]
    if len(counts) != rows:
        raise RuntimeError(
            "repeats must have the same size as input along dim, but got repeats.size(0) = "
            f"{len(counts)} and input.size(dim) = {rows}"
        )
    if counts and min(counts) < 0:
        raise RuntimeError("repeats can not be negative")
    return tuple(counts)


@register(torch.repeat_interleave, _T.repeat_interleave, uses=False)
def repeat_interleave(op, input, repeats=None, dim=None, *, output_size=None):
    """Copies beside each row. `repeats` is a number, or a plain tensor, alike on all ranks.

    Layout: every rank repeats its own rows. Comm: none.
    """
    if not isinstance(input, ShardTensor) or isinstance(repeats, ShardTensor) or repeats is None:
        raise unsupported(op, "the counts of repeats are split", args=((input, repeats),))
    if dim is None:
        return op(input.reshape(-1), repeats, 0, output_size=output_size)
    dim = wrapped(dim, len(input._layout.dims))
    if isinstance(repeats, torch.Tensor):
        if _compiling():
            raise unsupported(op, "compiled code does not know the result's shape", args=(input,))
        repeats = _counted(repeats, input._layout.shape[dim])
    if not isinstance(repeats, int):
        input = in_ranges(input, dim)
    elif repeats < 0:
        raise RuntimeError("Repeats must be non-negative")
    out, start = _interleaved(input._layout, dim, repeats)
    if output_size is not None and output_size != out.shape[dim]:
        raise RuntimeError(f"output_size {output_size} is not the number of rows {out.shape[dim]}")
    local = local_of(input)
    if not isinstance(repeats, int):
        mine = repeats[start : start + local.shape[dim]]
        repeats = torch.tensor(mine, dtype=torch.int64, device=local.device)
    return result(op(local, repeats, dim), out)
