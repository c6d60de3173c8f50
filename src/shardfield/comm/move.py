"""Moves a local block from one layout to another: the engine of `redistribute`."""

from __future__ import annotations

import torch

from shardfield.comm.fetch import fetch
from shardfield.comm.reduce import gather, shard
from shardfield.comm.transpose import transpose
from shardfield.constant import constant
from shardfield.layout import Factor, Layout
from shardfield.plan import exchange, runs_of, wanted_runs, wanted_whole


def move(
    local: torch.Tensor, source: Layout, target: Layout, operation: str | None = None
) -> torch.Tensor:
    """This rank's block under `target`, from its block under `source`. Differentiable twice.

    Comm, per dim that differs: same axes, one all-to-all of what changes owner; an axis that moves
        between contiguous dims, one all-to-all; split to whole, one gather; whole to split, none
        (its gradient is gathered).
    """
    if source is target:
        return local
    for kind, arguments in _steps(source, target):
        local = _ACTS[kind](local, *arguments, operation)
    return local


@constant
def _steps(source: Layout, target: Layout) -> tuple[tuple[str, tuple], ...]:
    """Cheapest-first (kind, this rank's arguments of the act)."""
    steps, here = [], source
    changed = [d for d in range(len(source.dims)) if source.dims[d] != target.dims[d]]
    for d in changed:
        if here.axes(d) and here.axes(d) == target.axes(d):
            steps.append(("resize", _resize(here, d, target.dims[d])))
            here = here.replace({d: target.dims[d]})
    for d in changed:
        for other in changed:
            if _can_transpose(here, target, d, other):
                steps.append(("transpose", _transpose(here, d, other, target.dims[other])))
                here = here.replace({d: target.dims[d], other: target.dims[other]})
    for d in changed:
        if here.dims[d] != target.dims[d] and here.axes(d):
            steps.append(("gather", _gather(here, d)))
            here = here.replace({d: whole(here, d)})
    for d in changed:
        if here.dims[d] != target.dims[d]:
            steps.append(("shard", _shard(here, d, target.dims[d])))
            here = here.replace({d: target.dims[d]})
    return tuple(steps)


def whole(layout: Layout, dim: int):
    """The factors of an unsplit dim of the same size."""
    return (Factor(layout.shape[dim]),)


def _can_transpose(here: Layout, target: Layout, d: int, other: int) -> bool:
    return (
        d != other
        and bool(here.extents(d))
        and not here.axes(other)
        and not target.axes(d)
        and target.axes(other) == here.axes(d)
        and target.extents(other) is not None
    )


def _place(layout: Layout, axes: tuple[str, ...]) -> tuple[int, str]:
    return layout.mesh.rank(axes), layout.mesh.group(axes)


def _resize(here: Layout, d: int, factors):
    rank, group = _place(here, here.axes(d))
    plan = exchange(runs_of(here.dims[d]), wanted_runs(factors), rank)
    return d, plan, group, 0.0


def _transpose(here: Layout, d: int, other: int, factors):
    rank, group = _place(here, here.axes(d))
    return d, here.extents(d), other, factors[0].extents, rank, group


def _gather(here: Layout, d: int):
    rank, group = _place(here, here.axes(d))
    owned = runs_of(here.dims[d])
    plan = exchange(owned, wanted_whole(here.shape[d], len(owned)), rank)
    return d, owned[rank], plan, group


def _shard(here: Layout, d: int, factors):
    axes = tuple(axis for factor in factors for axis in factor.axes)
    rank, group = _place(here, axes)
    owned = runs_of(factors)
    plan = exchange(owned, wanted_whole(here.shape[d], len(owned)), rank)
    return d, owned[rank], plan, group


_ACTS = {"resize": fetch, "transpose": transpose, "gather": gather, "shard": shard}
