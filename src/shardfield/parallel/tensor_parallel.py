"""Splits a module's parameters as a plan says. The operations on them do the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardfield.axes import TENSOR, MeshAxes, mesh_axes
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.operands import part_of_plain
from shardfield.parallel.derive import derive_plan
from shardfield.parallel.synchronise import same_everywhere
from shardfield.parallel.tensor_plan import Split, TensorPlan
from shardfield.tensor import parameter


def tensor_parallel(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    plan: TensorPlan | str = "auto",
    example: Sequence[Any] | Mapping[str, Any] = (),
    rules: Mapping[str, Split | None] | None = None,
    sequence: bool = False,
) -> TensorPlan:
    """Splits a module's weights over the mesh axis `tensor`, in place.

    The module stays as it is otherwise: operations on split weights compute split activations,
    and sum where a split dim is contracted.

    Args:
        model: any module; afterwards its parameters are the same on all ranks, or shards of that.
        mesh: the root mesh, with an axis `tensor`.
        plan: a plan, or "auto": derived from the module, see `derive_plan`.
        example: for "auto", positional or keyword arguments of the model: plain tensors of global
            shapes, values of which are not read.
        rules: changes to the plan, by parameter name or pattern; see `TensorPlan.with_rules`.
        sequence: between the pairs of linear maps, where activations would be the same on all
            tensor ranks (norms, dropout, residual sums), every rank has some of the tokens (the
            last dim but one). A linear map that ends a pair scatters its sum over them, and one
            that begins a pair gathers them; together they send what an all-reduce would. What the
            model returns is then split over `tensor` too.

    Returns:
        The plan; print it.

    Comm: one broadcast per parameter and buffer and mesh axis.

    Raises:
        LayoutError: a plan that does not fit; a model that "auto" cannot run or finds nothing in.
    """
    axes = mesh_axes(mesh)
    ranks = axes.size((TENSOR,)) if TENSOR in axes.names else 1
    if isinstance(plan, str):
        if plan != "auto":
            raise LayoutError(
                f"tensor_parallel={plan!r}",
                'a plan is "auto" or a TensorPlan',
                'tensor_parallel="auto", or TensorPlan.load(path)',
                "tensor-parallel",
            )
        args, kwargs = ((), example) if isinstance(example, Mapping) else (tuple(example), {})
        plan = derive_plan(model, args, kwargs, ranks)
    if rules:
        plan = plan.with_rules(rules)
    if not plan.splits and ranks > 1:
        raise LayoutError(
            f"tensor parallelism of {type(model).__name__} over {ranks} ranks",
            "no weight is split: there is no pair of linear maps with units enough between",
            "fewer tensor ranks (more domain or data), or rules={name: Split(...)}",
            "tensor-parallel",
        )
    same_everywhere(model, axes, axes.names)
    if ranks > 1:
        split_parameters(model, plan, axes, sequence)
    return plan


def split_parameters(
    model: torch.nn.Module, plan: TensorPlan, mesh: MeshAxes, sequence: bool = False
) -> None:
    """Replaces parameters by their shards, in place; tied ones stay tied.

    Args:
        model: its parameters are whole and the same on all ranks (see `same_everywhere`).
        plan: names are those of `model.named_parameters()`.
        sequence: see `tensor_parallel`.

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
        key: parameter(
            part_of_plain(whole.detach(), layouts[key]).clone(),
            layouts[key],
            whole.requires_grad,
            sequence,
        )
        for key, whole in {id(p): p for p in named.values()}.items()
        if key in layouts
    }
    for module in model.modules():
        for name, found in module._parameters.items():
            if found is not None and id(found) in made:
                module._parameters[name] = made[id(found)]


__all__ = ["split_parameters", "tensor_parallel"]
