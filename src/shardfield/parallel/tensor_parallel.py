"""Splits a module's parameters as a plan says. The operations on them do the rest."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardfield.axes import MeshAxes
from shardfield.comm._torch import make_subclass, resolve_group
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.operands import part_of_plain
from shardfield.parallel.tensor_plan import TensorPlan
from shardfield.tensor import ShardTensor


def split_parameters(model: torch.nn.Module, plan: TensorPlan, mesh: MeshAxes) -> None:
    """Replaces parameters by their shards, in place; tied ones stay tied.

    Args:
        model: its parameters are whole and the same on all ranks (see `same_everywhere`).
        plan: names are those of `model.named_parameters()`.

    Comm: none.

    Raises:
        LayoutError: the plan names a parameter that the model does not have, or does not fit it.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in plan.splits if name not in named]
    if missing:
        raise LayoutError(
            f"a tensor-parallel plan for {missing[0]!r}",
            "the model has no parameter of that name",
            "derive the plan from this model, or correct the name",
            "tensor-parallel",
        )
    layouts: dict[int, Layout] = {}
    for name, split in plan.splits.items():
        whole = named[name]
        layout = split.layout(tuple(whole.shape), mesh, name)
        if layouts.setdefault(id(whole), layout) is not layout:
            raise LayoutError(
                f"two splits of the tied parameter {name!r}",
                "a parameter that several modules share has one layout",
                "give all its names the same rule",
                "tensor-parallel",
            )
    made = {
        key: parameter_of(part_of_plain(whole.detach(), layouts[key]).clone(), layouts[key], whole)
        for key, whole in {id(p): p for p in named.values()}.items()
        if key in layouts
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]


def parameter_of(local: torch.Tensor, layout: Layout, like: torch.Tensor) -> torch.nn.Parameter:
    """A split parameter: the object itself is autograd's leaf, as wrappers and optimizers expect.

    Args:
        local: this rank's shard.
        like: the parameter it replaces.
    """
    # Not of the class with the tripwire: DDP and fused optimizers call ATen on parameters.
    parameter = make_subclass(ShardTensor, local, like.requires_grad)
    parameter._layout = layout
    parameter._is_param = True
    return parameter


def same_everywhere(model: torch.nn.Module, mesh: MeshAxes) -> None:
    """Gives every rank of the mesh the parameters and buffers of its first one.

    Comm: one broadcast per tensor and mesh axis of several ranks.
    """
    for axis, ranks in zip(mesh.names, mesh.sizes, strict=True):
        if ranks > 1:
            group = resolve_group(mesh.group((axis,)))
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), group=group, group_src=0)


__all__ = ["parameter_of", "same_everywhere", "split_parameters"]
