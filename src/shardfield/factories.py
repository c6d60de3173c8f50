"""Sharded tensors made in place: every rank makes its own rows."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardfield.distribute import device_of, distribute_tensor, finished, layout_of


def zeros(*shape, mesh: DeviceMesh, placements, sizes=None, dtype=None) -> torch.Tensor:
    """A sharded `torch.zeros` of this global shape. Comm: none."""
    return full(_shape(shape), 0.0, mesh=mesh, placements=placements, sizes=sizes, dtype=dtype)


def ones(*shape, mesh: DeviceMesh, placements, sizes=None, dtype=None) -> torch.Tensor:
    """A sharded `torch.ones` of this global shape. Comm: none."""
    return full(_shape(shape), 1.0, mesh=mesh, placements=placements, sizes=sizes, dtype=dtype)


def full(shape, value, *, mesh: DeviceMesh, placements, sizes=None, dtype=None) -> torch.Tensor:
    """A sharded `torch.full` of this global shape. Comm: none."""
    layout = layout_of(shape, mesh, placements, sizes)
    local = torch.full(layout.local_shape, value, dtype=dtype, device=device_of(mesh))
    return finished(local, layout, False)


def arange(
    start, end=None, step=1, *, mesh: DeviceMesh, placements, sizes=None, dtype=None
) -> torch.Tensor:
    """A sharded `torch.arange`. Comm: none."""
    if end is None:
        start, end = 0, start
    values = torch.arange(start, end, step, dtype=dtype, device=device_of(mesh))
    return distribute_tensor(values, mesh, placements, None, sizes)


def linspace(start, end, steps, *, mesh: DeviceMesh, placements, sizes=None, dtype=None):
    """A sharded `torch.linspace`. Comm: none."""
    values = torch.linspace(start, end, steps, dtype=dtype, device=device_of(mesh))
    return distribute_tensor(values, mesh, placements, None, sizes)


def _shape(shape: tuple) -> tuple[int, ...]:
    if len(shape) == 1 and not isinstance(shape[0], int):
        return tuple(shape[0])
    return shape


__all__ = ["arange", "full", "linspace", "ones", "zeros"]
