"""`parallelize`: an unmodified module on a mesh, its gradients reduced once, in buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from shardfield.axes import DATA, TENSOR, MeshAxes, mesh_axes
from shardfield.comm._torch import resolve_group
from shardfield.errors import LayoutError
from shardfield.managed import manage
from shardfield.parallel.activations import check_activations, keep_less
from shardfield.parallel.blocks import Wrap, blocks_of, outermost
from shardfield.parallel.fully_shard import shard_parameters
from shardfield.parallel.mean_over_tensor import mean_over_tensor_too
from shardfield.parallel.synchronise import same_everywhere
from shardfield.parallel.tensor_parallel import tensor_parallel as split_weights
from shardfield.parallel.tensor_plan import Split, TensorPlan
from shardfield.tensor import ShardTensor

KINDS = ("replicate", "shard", "hybrid")


def parallelize(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    params: str = "replicate",
    *,
    activations: str = "keep",
    wrap: Wrap | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    tensor_parallel: TensorPlan | str | None = None,
    example: Sequence[Any] | Mapping[str, Any] = (),
    rules: Mapping[str, Split | None] | None = None,
    sequence_parallel: bool = False,
    context_fn: Callable[[], Any] | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Wraps a module so that its parameters train on shards as on one device.

    Args:
        model: any module; its parameters and buffers are the same on every rank afterwards.
        mesh: the root mesh. Gradients are averaged over `data` and summed over the axes that the
            computation was split over, in one bucketed reduction that overlaps the backward.
        params: where parameters, their gradients and the optimizer's state live. "replicate": all
            on every rank (DDP). "shard": each rank has 1/(data x domain) of them (FSDP2).
            "hybrid": 1/domain, copies over data (HSDP); without a data axis the same as "shard".
        activations: what a block keeps for its backward. "keep": what torch keeps. "recompute":
            its inputs (non-reentrant checkpointing, random state restored). "offload": copies on
            the host.
        wrap: which submodules are blocks (one unit of FSDP2, or of recomputation): a class,
            several, or a function of a submodule. By default the repeated members of ModuleLists
            and Sequentials.
        mixed_precision: FSDP2's policy, its `output_dtype` that of the model's output. Not for
            "replicate": there `torch.autocast` does it.
        tensor_parallel: "auto" or a plan: splits weights over the mesh axis `tensor` first, as
            `shardfield.tensor_parallel` does with `example` and `rules`, and prints the plan on
            the first rank.
        example: see there.
        rules: see there.
        sequence_parallel: `sequence` there.
        context_fn: with "recompute", the `context_fn` of `torch.utils.checkpoint.checkpoint`,
            such as a selective policy.
        options: of `torch.nn.parallel.DistributedDataParallel`, or of
            `torch.distributed.fsdp.fully_shard`.

    Returns:
        "replicate": a DistributedDataParallel over the joint data x domain group, `.module` is
        the model. "shard" and "hybrid": the model itself, its parameters DTensors.
        `shardfield.no_sync` accumulates gradients with either.

    Comm: weights and buffers once, now. Per backward "replicate": one all-reduce per bucket, over
        all ranks. "shard": per block one all-gather forward, one backward and one reduce-scatter;
        "hybrid": the same inside the domain, and one all-reduce per block over data.

    Raises:
        LayoutError: an unknown choice, choices that exclude each other, or a mesh with a `tensor`
            axis of several ranks over which no weight is split (see `tensor_parallel`).
    """
    axes = mesh_axes(mesh)
    _check(params, mixed_precision)
    blocks = blocks_of(model, wrap)
    check_activations(activations, context_fn, blocks)
    if tensor_parallel is not None:  # the model is changed from here on
        plan = split_weights(model, mesh, tensor_parallel, example, rules, sequence_parallel)
        if dist.get_rank() == 0:
            print(plan)  # noqa: T201 - asked for, and nobody else sees it
    _check_tensor(model, axes)
    if activations != "keep":
        keep_less(outermost(blocks), activations, context_fn)
    if params == "replicate":
        return _replicate(model, axes, options)
    if mixed_precision is not None:
        options["mp_policy"] = mixed_precision
    return shard_parameters(model, axes, params == "hybrid", blocks, **options)


def _check(params: str, mixed_precision: object) -> None:
    if params not in KINDS:
        raise LayoutError(
            f"parallelize(params={params!r})",
            f"params is one of {KINDS}",
            'params="shard" for less memory, or leave it out',
            "parallelize",
        )
    if params == "replicate" and mixed_precision is not None:
        raise LayoutError(
            "parallelize(params='replicate', mixed_precision=...)",
            "the policy is FSDP2's; replicated parameters have one type",
            'torch.autocast around the forward, or params="shard"',
            "parallelize",
        )


def _check_tensor(model: torch.nn.Module, axes: MeshAxes) -> None:
    if (
        TENSOR in axes.names
        and axes.size((TENSOR,)) > 1
        and not any(isinstance(parameter, ShardTensor) for parameter in model.parameters())
    ):
        raise LayoutError(
            f"parallelize on a mesh with tensor={axes.size((TENSOR,))}",
            "no weight is split over tensor: its ranks would all compute the same",
            'tensor_parallel="auto", example=(inputs,), or a mesh without tensor',
            "parallelize",
        )


def _replicate(model: torch.nn.Module, axes: MeshAxes, options: dict[str, Any]) -> torch.nn.Module:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    joint = tuple(name for name in axes.names if name != TENSOR)
    several = DATA in axes.names and axes.size((DATA,)) > 1
    options = {"forward_sync_buffers": several, "gradient_as_bucket_view": True, **options}
    # DDP sends detached parameters with ATen, which is refused of shards: the same, by us.
    if options.pop("init_sync", True):
        same_everywhere(model, axes, joint)
    wrapped = DistributedDataParallel(
        model, process_group=resolve_group(axes.group(joint)), init_sync=False, **options
    )
    tokens = any(getattr(parameter, "_splits_tokens", False) for parameter in model.parameters())
    if tokens:
        groups = axes.group(joint), axes.group((TENSOR,))
        wrapped.register_comm_hook(tuple(map(resolve_group, groups)), mean_over_tensor_too)
    for parameter in model.parameters():
        manage(parameter, tokens and not isinstance(parameter, ShardTensor))
    return wrapped
