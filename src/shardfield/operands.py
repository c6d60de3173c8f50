"""Plain tensors beside sharded ones: replicated global values, of which a rank needs its part."""

from __future__ import annotations

import torch

from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.plan import Run, runs_of


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
