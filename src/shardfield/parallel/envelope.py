"""Parameters that FSDP2 can hold although they are split: DTensors on one mesh, opened at use.

FSDP2 takes plain tensors and DTensors, and neither knows our layouts. So the DTensor is an envelope
around the local part; what the layout says stays here (see docs/adr/0002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardfield.axes import TENSOR
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.managed import manage
from shardfield.parallel.activations import Enclosing
from shardfield.tensor import ShardTensor, local_of, wrap


class Held(NamedTuple):
    """What an envelope does not say of a split parameter: see `shardfield.tensor.parameter`."""

    layout: Layout
    splits_tokens: bool


Layouts = dict[tuple[int, str], Held]


def enclose(model: nn.Module, mesh: DeviceMesh) -> Layouts:
    """Puts every parameter into a DTensor on `mesh`, whose last axis is `tensor`; in place.

    Returns:
        The layouts of the split ones, by (identity of the module, name).

    Comm: none.

    Raises:
        LayoutError: a parameter that is split over other axes than `tensor`.
    """
    layouts: Layouts = {}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if isinstance(parameter, ShardTensor):
                layouts[id(module), name] = Held(parameter.layout, parameter._splits_tokens)
            if id(parameter) not in made:
                made[id(parameter)] = _envelope(parameter, mesh, name)
            module._parameters[name] = made[id(parameter)]
    return layouts


def _envelope(parameter: torch.Tensor, mesh: DeviceMesh, name: str) -> nn.Parameter:
    placements: list[Placement] = [Replicate()] * mesh.ndim
    local = parameter.detach()
    if isinstance(parameter, ShardTensor):
        layout = parameter.layout
        split = [dim for dim in range(len(layout.dims)) if layout.axes(dim)]
        if layout.split_axes != (TENSOR,) or len(split) != 1:
            raise LayoutError(
                f"parallelize(params='shard') of {name!r}, split over {layout.split_axes}",
                "a parameter whose gradients FSDP2 averages is split over tensor alone",
                'params="replicate"',
                "parallelize",
            )
        placements[-1] = Shard(split[0])
        with torch.no_grad():
            local = local_of(parameter).detach()
    shape = parameter.shape
    stride = torch.empty(shape, device="meta").stride()
    held = DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return nn.Parameter(held, parameter.requires_grad)


class Opened(Enclosing):
    """A forward that finds tensors and ShardTensors where FSDP2 put gathered envelopes.

    Args:
        run: the forward.
        own: the modules whose parameters are gathered for it.
    """

    def __init__(self, run: Callable, own: Sequence[nn.Module], layouts: Layouts) -> None:
        super().__init__(run)
        self._own, self._layouts = own, layouts

    def __call__(self, *args, **kwargs):
        """Calls the forward."""
        held = [
            (module._parameters, name, parameter, self._layouts.get((id(module), name)))
            for module in self._own
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        values: dict[int, torch.Tensor] = {}
        for parameters, name, parameter, said in held:
            if id(parameter) not in values:  # tied ones stay one
                values[id(parameter)] = _open(parameter, said)
            parameters[name] = values[id(parameter)]  # type: ignore[assignment]
        try:
            return self.run(*args, **kwargs)
        finally:
            for parameters, name, parameter, _ in held:
                parameters[name] = parameter


def _open(parameter: DTensor, held: Held | None) -> torch.Tensor:
    local = _Open.apply(parameter)
    manage(local)
    if held is None:
        return local
    opened = wrap(local, held.layout)
    opened._splits_tokens = held.splits_tokens
    return opened


class _Open(torch.autograd.Function):
    """DTensor -> its local part. Unlike `to_local`, its backward assumes no even chunks."""

    @staticmethod
    def forward(ctx, x: DTensor):
        ctx.like = x.device_mesh, x.placements, x.shape, x.stride()
        return x.to_local()

    @staticmethod
    def backward(ctx, grad):
        mesh, placements, shape, stride = ctx.like
        return DTensor.from_local(
            grad.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )


__all__ = ["Layouts", "Opened", "enclose"]
