"""Whole parameters of a model, however its ranks hold them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from shardfield.axes import TENSOR
from shardfield.errors import UnsupportedOperation
from shardfield.layout import Layout
from shardfield.parallel.compile import CompiledModule
from shardfield.tensor import ShardTensor, wrap


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, whole, detached, on every rank, by the name it has in the plain model.

    Of a parameter that is split over `tensor` and held by FSDP2, this is the one way to the whole:
    DTensor's own `full_tensor` assumes even parts in order.

    Args:
        model: what `tensor_parallel` and `parallelize` made of a module, or a plain one.

    Comm: one gather per parameter and axis that it is split over; all ranks call this together.
    """
    inner = model
    while isinstance(inner, (DistributedDataParallel, CompiledModule)):
        inner = inner.module
    with torch.no_grad():
        return {name: _whole(parameter) for name, parameter in inner.named_parameters()}


def remember(parameter: torch.Tensor, layout: Layout) -> None:
    """Notes the layout of what a DTensor of FSDP2 is a part of; that itself gives no whole."""
    parameter._shardfield_layout = layout  # type: ignore[attr-defined]
    parameter.full_tensor = _refuse  # type: ignore[attr-defined]


def _refuse(*_: object, **__: object) -> None:
    raise UnsupportedOperation(
        "full_tensor() of a parameter that is split over tensor and held by FSDP2",
        "DTensor would join its parts as if they were even and in order",
        "shardfield.full_parameters(model), on all ranks together",
        "parallelize",
    )


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    found = parameter.detach()
    if isinstance(found, DTensor):
        layout = getattr(parameter, "_shardfield_layout", None)
        if layout is None:
            whole = found.full_tensor()
            assert isinstance(whole, torch.Tensor)
            return whole
        found = wrap(_over_tensor(found, layout), layout)
    if isinstance(found, ShardTensor):
        whole = found.full_tensor()
        assert whole is not None
        return whole
    return found.clone()


def _over_tensor(envelope: DTensor, layout: Layout) -> torch.Tensor:
    """This tensor rank's part, of which FSDP2 gave every rank some rows."""
    mesh = envelope.device_mesh
    pairs = zip(mesh.mesh_dim_names or (), envelope.placements, strict=True)
    # Beside a split over tensor torch says "strided"; the rows are those of its chunks here too.
    held = {n: Replicate() if p.is_replicate() else Shard(0) for n, p in pairs if n != TENSOR}
    shape = torch.Size(layout.local_shape)
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        envelope.to_local(),
        mesh[tuple(held)],
        list(held.values()),
        run_check=False,
        shape=shape,
        stride=stride,
    ).full_tensor()
    assert isinstance(whole, torch.Tensor)
    return whole


__all__ = ["full_parameters", "remember"]
