"""Pipeline stages of `torch.distributed.pipelining` between which sharded activations travel.

Ranks with the same data and domain coordinates hold the same part of every activation, so a shard
crosses to the next stage as the plain local tensor that torch's schedules send; its layout is
agreed once, when the stages are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from shardfield.axes import PIPE, mesh_axes
from shardfield.errors import LayoutError, ShardfieldError
from shardfield.layout import Dim, Layout
from shardfield.tensor import ShardTensor, describe, local_of, wrap

Tensor = torch.Tensor


def pipeline_stages(
    modules: Sequence[torch.nn.Module],
    mesh: DeviceMesh,
    example: Tensor | tuple[Tensor, ...] | None = None,
) -> list[PipelineStage]:
    """This rank's stages of a pipeline, for the schedules of `torch.distributed.pipelining`.

    Args:
        modules: the parts of the model that this rank holds, unmodified or wrapped by
            `parallelize`. With P ranks along `pipe`, rank p holds parts p, p + P, p + 2P, ... (one
            for `ScheduleGPipe` and `Schedule1F1B`, several for `ScheduleInterleaved1F1B`). Every
            part but the last returns a tensor or a tuple of tensors, which the next one takes.
        mesh: a root mesh with an axis `pipe`.
        example: what the first part is called with for one micro-batch; read on the ranks that hold
            it. All micro-batches have its shapes, layouts and dtypes.

    Returns:
        One `PipelineStage` for each module. A schedule's `step` takes the batch of this data
        replica, a ShardTensor whose dim 0 is whole, and cuts it along this dim. The loss function
        sees what the last part returns, with global shapes.

    Comm: each part runs once on its micro-batch of zeros, without gradients; what it returns is
        described to the other stages (one broadcast over `pipe` a part). Then, for each micro-batch
        and boundary, this rank's shard forward and its gradient backward; parameters that
        `parallelize` manages are reduced once a step.

    Raises:
        LayoutError: a mesh without `pipe`; ranks with different numbers of parts; a part that
            returns something else than tensors; later, a micro-batch unlike the example.

    Example:
        >>> mesh = shardfield.init_mesh(pipe=1, domain=1)
        >>> x = shardfield.zeros(2, 8, mesh=mesh["domain"], placements=[Shard(1)])
        >>> [stage] = shardfield.pipeline_stages([torch.nn.ReLU()], mesh, x)
        >>> ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)

    Source: torch.distributed.pipelining; Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B,
        interleaved).
    """
    axes = mesh_axes(mesh)
    if PIPE not in (mesh.mesh_dim_names or ()):
        raise LayoutError(
            f"pipeline_stages on a mesh with the axes {mesh.mesh_dim_names}",
            "the axis 'pipe' says which ranks hold which stages",
            "shardfield.init_mesh(pipe=..., data=..., domain=...), and pass the whole mesh",
            "pipeline",
        )
    group = mesh.get_group(PIPE)
    rank, ranks = group.rank(), group.size()
    counts: list = [None] * ranks
    dist.all_gather_object(counts, len(modules), group=group)
    if len(set(counts)) > 1 or not modules:
        raise LayoutError(
            f"pipeline_stages with {counts} modules on the ranks along 'pipe'",
            "every rank along 'pipe' holds the same number of parts, one at least",
            "cut the model into a multiple of that many parts (torch.nn.Identity() fills up)",
            "pipeline",
        )
    device = _device(mesh)
    stages: list[PipelineStage] = []
    entering: tuple[Carried, ...] = ()
    for index in range(ranks * len(modules)):
        box: list = [None]
        if index % ranks == rank:
            module = modules[index // ranks]
            try:
                if index == 0:
                    entering = _described(example, "the example of the first stage")
                leaving = _dry_run(module, entering, f"stage {index}", axes, device)
                box = [leaving]
            # Whatever it is, the ranks of the other stages wait for this one's description.
            except Exception as error:
                dist.broadcast_object_list([str(error)], group=group, group_src=rank)
                raise
            count = ranks * len(modules)
            stages.append(_Stage(module, index, count, device, group, axes, entering, leaving))
        dist.broadcast_object_list(box, group=group, group_src=index % ranks)
        if isinstance(box[0], str):
            raise LayoutError(
                f"stage {index} failed when it was tried on one micro-batch: {box[0]}",
                "every stage runs on the shapes and layouts that the one before it returns",
                "see the traceback of the ranks of that stage",
                "pipeline",
            )
        entering = box[0]
    return stages


@dataclass(frozen=True)
class Carried:
    """One tensor at a stage's boundary; `dims` are those of its layout, None for a plain one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[Dim, ...] | None
    requires_grad: bool = False

    @classmethod
    def of(cls, value: Tensor) -> Carried:
        """Describes a tensor."""
        dims = value.layout.dims if isinstance(value, ShardTensor) else None
        return cls(tuple(value.shape), value.dtype, dims, value.requires_grad)

    def layout(self, axes) -> Layout | None:
        """The layout on this rank's mesh."""
        return None if self.dims is None else Layout(axes, self.dims)

    def local(self, axes, device: torch.device | str) -> Tensor:
        """Zeros in place of this rank's part."""
        layout = self.layout(axes)
        shape = self.shape if layout is None else layout.local_shape
        return torch.zeros(shape, dtype=self.dtype, device=device)


class _Stage(PipelineStage):
    """torch's stage, whose module sees ShardTensors and whose neighbours see their local parts."""

    def __init__(self, module, index, count, device, group, axes, entering, leaving) -> None:
        def on_meta(values: tuple[Carried, ...]) -> tuple[Tensor, ...]:
            return tuple(
                value.local(axes, "meta").requires_grad_(value.requires_grad) for value in values
            )

        args = on_meta(entering), on_meta(leaving)
        super().__init__(module, index, count, device, args[0], args[1], group=group)
        self._entering, self._leaving = entering, leaving
        # Held, because layouts are interned weakly.
        self._layouts = [value.layout(axes) for value in entering]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """torch's; an error of ours is not hidden behind its own."""
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, ShardfieldError):
                raise error.__cause__ from None
            raise

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on ShardTensors; what leaves for another stage is local again."""
        if self.is_first:
            _check(args, self._entering, "stage 0 takes")
        else:
            args = _closed(args, self._layouts)
        out = super().forward_maybe_with_nosync(*args, **kwargs)
        if self.is_last:
            return out
        values = _tuple_of(out)
        _check(values, self._leaving, f"stage {self.stage_index} returns")
        return tuple(map(_opened, values))

    def backward_maybe_with_nosync(self, backward_type, *args: Any, **kwargs: Any):
        """torch's, whole backwards only."""
        if backward_type != "full":
            raise LayoutError(
                f"a schedule that runs the backward of stage {self.stage_index} in two parts",
                "gradients of parameters are summed over ranks in the order of one whole backward",
                "ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B",
                "pipeline",
            )
        return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)


def _closed(values: Sequence[Tensor], layouts: Sequence[Layout | None]) -> tuple[Tensor, ...]:
    return tuple(
        value if layout is None else wrap(value, layout)
        for value, layout in zip(values, layouts, strict=True)
    )


def _opened(value: Tensor) -> Tensor:
    """This rank's part, as it is sent."""
    return (local_of(value) if isinstance(value, ShardTensor) else value).contiguous()


def _tuple_of(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _described(value: Any, what: str) -> tuple[Carried, ...]:
    values = _tuple_of(value)
    if not all(isinstance(item, Tensor) for item in values):
        raise LayoutError(
            f"{what} is {', '.join(type(item).__name__ for item in values)}",
            "tensors cross from stage to stage",
            "pass and return a tensor or a tuple of tensors; keyword arguments reach every stage",
            "pipeline",
        )
    return tuple(map(Carried.of, values))


def _check(values: tuple, expected: tuple[Carried, ...], what: str) -> None:
    found = _described(values, what)
    if [replace(value, requires_grad=False) for value in found] != [
        replace(value, requires_grad=False) for value in expected
    ]:
        shapes = ", ".join(str(value.shape) for value in expected)
        raise LayoutError(
            f"{what} {', '.join(map(describe, values))}",
            f"every micro-batch has the shapes ({shapes}), layouts and dtypes of the example",
            "a batch that the number of micro-batches divides, laid out as the example; or make "
            "the stages again",
            "pipeline",
        )


def _dry_run(module, entering, what, axes, device) -> tuple[Carried, ...]:
    """What a module returns for tensors so described; it changes nothing."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    layouts = [value.layout(axes) for value in entering]
    with torch.no_grad(), _unchanged(inner, device):
        zeros = [value.local(axes, device) for value in entering]
        out = inner(*_closed(zeros, layouts))
    trained = any(parameter.requires_grad for parameter in inner.parameters())
    trained = trained or any(value.requires_grad for value in entering)
    return tuple(
        replace(value, requires_grad=trained and value.dtype.is_floating_point)
        for value in _described(out, f"the output of {what}")
    )


@contextmanager
def _unchanged(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, what running a module does to its buffers and the random state is undone."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, value in kept:
        buffer.copy_(value)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


__all__ = ["pipeline_stages"]
