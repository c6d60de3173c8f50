"""`parallelize`: an unmodified module on a mesh, its gradients reduced once, in buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardfield.axes import DATA, TENSOR, mesh_axes
from shardfield.comm._torch import resolve_group
from shardfield.errors import LayoutError
from shardfield.parallel.tensor_parallel import same_everywhere
from shardfield.tensor import ShardTensor, manage


def parallelize(
    model: torch.nn.Module, mesh: DeviceMesh, params: str = "replicate", **ddp: Any
) -> torch.nn.Module:
    """Wraps a module so that its parameters train on shards as on one device.

    Args:
        model: any module; its parameters and buffers are the same on every rank afterwards.
        mesh: the root mesh. Gradients are averaged over `data` and summed over the axes that the
            computation was split over, in one bucketed reduction that overlaps the backward.
        params: "replicate", the only kind so far: every rank keeps all parameters.
        ddp: options of `torch.nn.parallel.DistributedDataParallel`.

    Returns:
        A DistributedDataParallel over the joint data x domain group: `.module` is the model,
        `no_sync()` accumulates (`.grad` is not final inside).

    Comm: weights and buffers once, now; per backward one all-reduce per bucket, over all ranks.

    Raises:
        LayoutError: an unknown `params`; a mesh with a `tensor` axis of several ranks over which
            no weight is split (see `tensor_parallel`).
    """
    axes = mesh_axes(mesh)
    if params != "replicate":
        raise LayoutError(
            f"parallelize(params={params!r})",
            "parameters are replicated; other storage is not built yet",
            'params="replicate"',
            "parallelize",
        )
    if (
        TENSOR in axes.names
        and axes.size((TENSOR,)) > 1
        and not any(isinstance(parameter, ShardTensor) for parameter in model.parameters())
    ):
        raise LayoutError(
            f"parallelize on a mesh with tensor={axes.size((TENSOR,))}",
            "no weight is split over tensor: its ranks would all compute the same",
            "shardfield.tensor_parallel(model, mesh, example=...) first, or a mesh without tensor",
            "parallelize",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    joint = tuple(name for name in axes.names if name != TENSOR)
    several = DATA in axes.names and axes.size((DATA,)) > 1
    options = {"forward_sync_buffers": several, "gradient_as_bucket_view": True, **ddp}
    # DDP sends detached parameters with ATen, which is refused of shards: the same, by us.
    options["init_sync"] = False
    same_everywhere(model, axes, joint)
    wrapped = DistributedDataParallel(
        model, process_group=resolve_group(axes.group(joint)), **options
    )
    for parameter in model.parameters():
        manage(parameter)
    return wrapped
