"""The first rank's parameters and buffers for all: where training starts, whatever wraps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardfield.axes import MeshAxes
from shardfield.comm._torch import broadcast_coalesced, resolve_group
from shardfield.errors import LayoutError
from shardfield.tensor import ShardTensor, local_of

_BUCKET = 250 << 20  # bytes that one broadcast carries, as in DDP


def same_everywhere(model: torch.nn.Module, mesh: MeshAxes, over: tuple[str, ...]) -> None:
    """Gives the ranks along some mesh axes the parameters and buffers of their first one.

    Args:
        over: the axes; split parameters are whole over them.

    Comm: per axis of several ranks, one gather of names and shapes, then the values in buckets.

    Raises:
        LayoutError: on all ranks, before any value is sent, where their models differ.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        values = [local_of(x) if isinstance(x, ShardTensor) else x.detach() for _, x in named]
    described = [
        f"{name} {tuple(value.shape)} {value.dtype}"
        for (name, _), value in zip(named, values, strict=True)
    ]
    axes = [axis for axis in over if mesh.size((axis,)) > 1]
    _verify(described, mesh, axes)
    for axis in axes:
        send_first(mesh.group((axis,)), values)


def send_first(group: str, values: Sequence[torch.Tensor]) -> None:
    """Overwrites plain tensors by those of the first rank of a group. Comm: a few broadcasts."""
    with torch.no_grad():
        broadcast_coalesced(resolve_group(group), list(values), _BUCKET, 0)


def _verify(described: list[str], mesh: MeshAxes, axes: Sequence[str]) -> None:
    """Raises on all ranks if two of them have other tensors."""
    trouble = ""
    for axis in axes:  # a difference along one axis is known along the next ones
        group = resolve_group(mesh.group((axis,)))
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, (described, trouble), group=group)
        told = [text for _, text in found if text]
        first = found[0][0]
        differing = {text for other, _ in found for text in {*other} ^ {*first}}
        if told:
            trouble = told[0]
        elif any(other != first for other, _ in found):
            shown = ", ".join(sorted(differing)[:4]) or "the same ones in another order"
            trouble = f"models that differ along the mesh axis {axis!r}: {shown}"
    if trouble:
        raise LayoutError(
            trouble,
            "every rank makes the same model, of the same shapes and types",
            "do not build layers from the rank or from the size of a shard",
            "parallelize",
        )


__all__ = ["same_everywhere", "send_first"]
