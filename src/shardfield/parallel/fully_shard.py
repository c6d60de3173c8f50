"""Parameters, gradients and optimizer state split over ranks: FSDP2 on the data x domain mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from shardfield.axes import DATA, TENSOR, MeshAxes
from shardfield.comm._torch import (
    RegisterPostBackwardFunction,
    resolve_group,
)
from shardfield.errors import LayoutError
from shardfield.managed import manage
from shardfield.parallel.activations import replace_inside
from shardfield.parallel.blocks import self_contained
from shardfield.parallel.envelope import Opened, enclose
from shardfield.parallel.gathered import remember
from shardfield.parallel.synchronise import same_everywhere, send_first
from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of, wrap

_meshes: dict[tuple, DeviceMesh] = {}


def shard_parameters(
    model: nn.Module, axes: MeshAxes, hybrid: bool, blocks: Sequence[nn.Module], **options: Any
) -> nn.Module:
    """Applies `fully_shard` to the blocks and to the model, in place.

    FSDP2 averages gradients over all ranks; a parameter that a split computation uses is flagged,
    so that its gradient is multiplied there by the ranks of the split (see `registry.used`).

    Args:
        axes: of the root mesh.
        hybrid: shard over the domain axes and replicate over data, instead of shard over both.
        blocks: units of their own; the model is the last unit and holds the rest.
        options: those of `torch.distributed.fsdp.fully_shard`; the `output_dtype` of its policy is
            the model's, between blocks values keep their type.

    Comm: weights and buffers are broadcast once, now, and gathered once, unit by unit.
    """
    _check(model)
    same_everywhere(model, axes, tuple(name for name in axes.names if name != TENSOR))
    mesh, split = parameter_mesh(axes, hybrid), _is_split(axes)
    units: list[Any] = [*reversed(self_contained(model, list(blocks))), model]
    layouts = {}
    if split:
        layouts = enclose(model, mesh)
        dims = [name for name in mesh.mesh_dim_names or () if name != TENSOR]
        replicate = dims[0] if len(dims) > 1 else None
        options["dp_mesh_dims"] = DataParallelMeshDims(shard=dims[-1], replicate=replicate)
    inner = dict(options)
    if (policy := options.get("mp_policy")) is not None:
        inner["mp_policy"] = replace(policy, output_dtype=None)
    for unit in units:
        fully_shard(unit, mesh=mesh, **(options if unit is model else inner))
        if not _averages(mesh):
            unit.set_force_sum_reduction_for_comms(True)
    taken: set[int] = set()
    for unit in units:
        own = [module for module in unit.modules() if id(module) not in taken]
        taken |= {id(module) for module in own}
        if split:
            replace_inside(unit, partial(Opened, own=own, layouts=layouts))
        else:
            _flag_unsharded(unit, own)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (held := layouts.get((id(module), name))) is not None:
                remember(parameter, held.layout)
    _share_buffers(model, axes)
    return model


def parameter_mesh(axes: MeshAxes, hybrid: bool) -> DeviceMesh:
    """The mesh of parameters: data x domain as one axis, or (data, domain); then tensor, if any.

    Equal ones are the same object, as torch asks of the parameters of a model.

    Comm: the first call of a root mesh makes the joint process groups.
    """
    root = axes.device_mesh
    assert root is not None
    domain = tuple(name for name in axes.names if name not in (DATA, TENSOR))
    joint = tuple(name for name in axes.names if name != TENSOR)
    parts = {"data_domain": joint}
    if hybrid and DATA in joint and domain:
        parts = {DATA: (DATA,), "domain": domain}
    if _is_split(axes):
        parts[TENSOR] = (TENSOR,)
    names = tuple(parts)
    order = [axes.names.index(name) for part in parts.values() for name in part]
    order += sorted({*range(root.ndim)} - {*order})  # a tensor axis of one rank
    ranks = root.mesh.permute(order).reshape([axes.size(part) for part in parts.values()])
    key = root.device_type, names, tuple(ranks.shape), tuple(ranks.flatten().tolist())
    if key not in _meshes:
        groups = [resolve_group(axes.group(part)) for part in parts.values()]
        one = len(groups) == 1
        _meshes[key] = DeviceMesh.from_group(
            groups[0] if one else groups,
            root.device_type,
            mesh=None if one else ranks,
            mesh_dim_names=names,
        )
    return _meshes[key]


def _is_split(axes: MeshAxes) -> bool:
    return TENSOR in axes.names and axes.size((TENSOR,)) > 1


def _averages(mesh: DeviceMesh) -> bool:
    """Whether the backend can average; gloo can only add."""
    wanted = f"{mesh.device_type}:nccl"
    return all(wanted in dist.get_backend_config(group) for group in mesh.get_all_groups())


@register(RegisterPostBackwardFunction, uses=False)
def _reduce_after_backward(op, group, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """FSDP2's identity on a unit's inputs, whose backward reduces the unit's gradients."""
    shards = [value.layout if isinstance(value, ShardTensor) else None for value in inputs]
    outputs = op(group, *(local_of(x) if isinstance(x, ShardTensor) else x for x in inputs))
    return tuple(
        value if layout is None else wrap(value, layout)
        for value, layout in zip(outputs, shards, strict=True)
    )


def _flag_unsharded(unit: nn.Module, own: list[nn.Module]) -> None:
    """Marks a unit's parameters as managed whenever they are whole.

    Args:
        own: the modules whose parameters this unit gathers.
    """

    def flag(*_: object) -> None:
        for module in own:
            for parameter in module._parameters.values():
                if parameter is not None and not isinstance(parameter, DTensor):
                    manage(parameter)

    unit.register_forward_pre_hook(flag)
    # At once too: methods other than forward (`register_fsdp_forward_method`) run no such hook.
    assert isinstance(unit, FSDPModule)
    unit.unshard()
    flag()
    unit.reshard()


def _share_buffers(model: nn.Module, axes: MeshAxes) -> None:
    """Gives all replicas the first one's buffers before each training step, as DDP does."""
    if DATA not in axes.names or axes.size((DATA,)) == 1 or not any(True for _ in model.buffers()):
        return

    def share(module: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled() and module.training:
            buffers = [buffer.detach() for buffer in module.buffers()]
            send_first(axes.group((DATA,)), buffers)

    model.register_forward_pre_hook(share)


def _check(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise LayoutError(
            f"parallelize(params='shard') of the 0-d parameter {scalars[0]!r}",
            "FSDP2 splits the first dim of a parameter, and this one has none",
            "give it one element in one dim: nn.Parameter(value.reshape(1))",
            "parallelize",
        )


__all__ = ["parameter_mesh", "shard_parameters"]
