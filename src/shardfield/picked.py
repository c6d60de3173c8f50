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


def rows_here(index: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
    """This rank's row for every global one that `index` names; -1 for those of other ranks.

    Raises:
        IndexError: no rank has such a row.
    """
    runs = runs_here(layout, dim)
    if runs is None:
        return index
    table = torch.full((layout.shape[dim],), -1, device=index.device)
    at = 0
    for start, stop in runs:
        table[start:stop] = torch.arange(at, at + stop - start, device=index.device)
        at += stop - start
    return table[index]


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
        rows = rows_here(item, layout, dim)
        own[slot] = rows.clamp(min=0)
        held = rows >= 0 if held is None else held & (rows >= 0)
    if held is None:
        return local[tuple(items)]
    empty = tuple([dim for dim in dims if not local.shape[dim] and layout.shape[dim]])
    if empty:
        # A row that counts for nothing, so that this rank's result hangs on its shard too.
        shape = [1 if dim in empty else size for dim, size in enumerate(local.shape)]
        local = local.sum(empty, keepdim=True, dtype=local.dtype).expand(shape)
    part = local[tuple(own)]
    shape = torch.broadcast_shapes(*[i.shape for i in items if isinstance(i, torch.Tensor)])
    held = held.expand(shape)
    part = part.masked_fill(~held.reshape(*shape, *(1,) * (part.dim() - place - len(shape))), 0)
    groups = groups_of(layout, _axes(layout, tuple(dims)))
    if part.dtype == torch.bool:
        return reduce_sum(part.to(torch.uint8), groups, op.__name__).to(torch.bool)
    return reduce_sum(part, groups, op.__name__)


@constant
def _axes(layout: Layout, dims: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(axis for dim in dims for axis in layout.axes(dim))
