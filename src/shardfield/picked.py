"""Rows that index tensors pick of split dims: every rank gives those it holds, and they add up."""

from __future__ import annotations

import torch

from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.plan import Run, runs_of
from shardfield.registry import groups_of


@constant
def runs_here(layout: Layout, dim: int) -> tuple[Run, ...] | None:
    """Global rows of `dim` that this rank holds; None if it holds them all for certain."""
    axes = layout.axes(dim)
    if layout.mesh.size(axes) == 1:
        return None
    return runs_of(layout.dims[dim])[layout.mesh.rank(axes)]


def _places(layout: Layout, dim: int, device: torch.device) -> torch.Tensor:
    """For every global row this rank's row, -1 for those of other ranks."""
    table = torch.full((layout.shape[dim],), -1, device=device)
    at = 0
    for start, stop in runs_here(layout, dim) or ():
        table[start:stop] = torch.arange(at, at + stop - start, device=device)
        at += stop - start
    return table


def picked(op, local: torch.Tensor, layout: Layout, items: list, place: int) -> torch.Tensor:
    """`local[items]` of the global rows that the tensors among the items name.

    Args:
        items: one per dim of `local` or new dim, as a local index takes them, but for the tensors.
        place: where the dims of the tensors' common shape stand in the result.

    Comm: where a picked dim is split, one all-reduce of the result per axis, none backward.
    """
    own, held, dims, dim = list(items), None, [], -1
    for slot, item in enumerate(items):
        dim += item is not None
        if not isinstance(item, torch.Tensor) or runs_here(layout, dim) is None:
            continue
        dims.append(dim)
        rows = _places(layout, dim, item.device)[item]
        own[slot] = rows.clamp(min=0)
        held = rows >= 0 if held is None else held & (rows >= 0)
    if held is None:
        return local[tuple(items)]
    part = _never_empty(local, layout, dims)[tuple(own)]
    shape = torch.broadcast_shapes(*[i.shape for i in items if isinstance(i, torch.Tensor)])
    held = held.expand(shape)
    held = held.reshape(*shape, *(1,) * (part.dim() - place - len(shape)))
    return _summed(op, part, held, layout, tuple(dims))


def gathered(
    op, local: torch.Tensor, layout: Layout, dim: int, index: torch.Tensor
) -> torch.Tensor:
    """`local.gather(dim, index)` of the global rows that `index` names.

    Comm: as `picked`.
    """
    if runs_here(layout, dim) is None:
        return torch.gather(local, dim, index)
    rows = _places(layout, dim, index.device).gather(0, index.reshape(-1)).reshape(index.shape)
    part = torch.gather(_never_empty(local, layout, [dim]), dim, rows.clamp(min=0))
    return _summed(op, part, rows >= 0, layout, (dim,))


def _never_empty(local: torch.Tensor, layout: Layout, dims: list[int]) -> torch.Tensor:
    """With a row that counts for nothing where there is none: results then hang on the shard."""
    empty = [dim for dim in dims if not local.shape[dim] and layout.shape[dim]]
    if not empty:
        return local
    shape = [1 if dim in empty else size for dim, size in enumerate(local.shape)]
    return local.sum(empty, keepdim=True, dtype=local.dtype).expand(shape)


def _summed(
    op, part: torch.Tensor, held: torch.Tensor, layout: Layout, dims: tuple[int, ...]
) -> torch.Tensor:
    part = part.masked_fill(~held, 0)
    groups = groups_of(layout, _axes(layout, dims))
    if part.dtype == torch.bool:
        return reduce_sum(part.to(torch.uint8), groups, op.__name__).to(torch.bool)
    return reduce_sum(part, groups, op.__name__)


@constant
def _axes(layout: Layout, dims: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(axis for dim in dims for axis in layout.axes(dim))
