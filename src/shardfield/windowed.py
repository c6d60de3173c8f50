"""Windowed operations: fetch the rows a window reaches, run the unchanged torch op on them.

The copy with halos is not kept for backward. It is packed as the local tensor, which the producer
keeps anyway, and the thin slabs around it, and put together again when backward asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from shardfield.comm._torch import saved_tensor_hooks_in_force
from shardfield.comm.fetch import fetch, reassemble, slabs_of
from shardfield.layout import Factor, Layout
from shardfield.plan import DimPlan, Exchange, exchange, runs_of
from shardfield.registry import current_operation
from shardfield.tensor import ShardTensor, local_of, wrap


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One fetch of a windowed operation: along `dim`, over `group`."""

    dim: int
    plan: Exchange
    group: str


@dataclass(frozen=True, eq=False, slots=True)
class WindowPlan:
    """A windowed operation on one layout, seen from this rank.

    Attributes:
        layout: of the output.
        steps: fetches to run, one per dim split over more than one rank.
        empty: this rank holds no output.
        crops: (start, rows) of the local result to keep along each dim of `steps`, or None.
        moved: dims whose padding the fetch supplies.
    """

    layout: Layout
    steps: tuple[Step, ...]
    empty: bool
    crops: tuple[tuple[int, int] | None, ...]
    moved: tuple[int, ...]


def window_plan(
    layout: Layout, plans: dict[int, DimPlan], channels: tuple[int, int] | None = None
) -> WindowPlan:
    """Joins the plans of single dims to the plan of an operation.

    Args:
        plans: for each windowed dim; a dim that is whole has a plan of one rank.
        channels: (dim, size) of an output dim that replaces an input dim and is whole.
    """
    changes: dict[int, Sequence[Factor]] = {}
    steps, crops = [], []
    mesh = layout.mesh
    for dim, plan in plans.items():
        axes = layout.axes(dim)
        changes[dim] = (Factor(plan.size, axes, plan.extents if axes else ()),)
        if not axes or mesh.size(axes) == 1:
            continue
        rank = mesh.rank(axes)
        steps.append(
            Step(dim, exchange(runs_of(layout.dims[dim]), plan.wanted, rank), mesh.group(axes))
        )
        crops.append(None if plan.crop is None else plan.crop[rank])
    if channels is not None:
        changes[channels[0]] = (Factor(channels[1]),)
    out = layout.replace(changes)
    moved = tuple(step.dim for step in steps)
    return WindowPlan(out, tuple(steps), holds_nothing(out), tuple(crops), moved)


def holds_nothing(layout: Layout) -> bool:
    """Whether some split of a tensor, along any dim, leaves this rank without elements."""
    return any(layout.axes(dim) and not rows for dim, rows in enumerate(layout.local_shape))


def windowed(
    x: ShardTensor,
    plan: WindowPlan,
    act: Callable[[torch.Tensor], torch.Tensor],
    fill: float = 0.0,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    curved: bool = False,
) -> ShardTensor:
    """Runs `act` on this rank's block, extended by what its window reaches.

    Args:
        act: the torch operation, unpadded along `plan.moved`.
        fill: value outside the global tensor.
        weight: what `act` multiplies the block by, if anything; with `bias`, so that a rank
            without output joins their backward.
        bias: what `act` adds to that.
        curved: autograd's formula makes the gradient depend on the input, as those of pooling do;
            a rank without output then does so too, or second derivatives part ways.

    Comm: one fetch per split dim, forward and backward.
    """
    local = local_of(x)
    if not plan.steps and not plan.empty:
        return wrap(act(local), plan.layout)
    operation = None if torch.compiler.is_dynamo_compiling() else current_operation()
    block = local
    fresh = weight is not None  # a product's gradient is a new tensor
    for step in plan.steps:
        block = fetch(block, step.dim, step.plan, step.group, fill, operation, fresh)
    if plan.empty:
        empty = nothing(plan.layout.local_shape, (block, bias), weight, curved)
        return wrap(empty, plan.layout)
    if torch.compiler.is_dynamo_compiling() or block is local or not torch.is_grad_enabled():
        keep = nullcontext()
    else:
        keep = rebuilt(local, block, plan.steps, fill)
    with keep:
        y = act(block)
    for step, crop in zip(plan.steps, plan.crops, strict=True):
        if crop is not None and (crop[0] or crop[1] != y.shape[step.dim]):
            # A copy: what is cropped off is not kept, and the result has no gaps.
            y = y.narrow(step.dim, *crop).clone()
    return wrap(y, plan.layout)


def nothing(
    shape: Sequence[int],
    operands: Sequence[torch.Tensor | None],
    weight: torch.Tensor | None = None,
    curved: bool = False,
) -> torch.Tensor:
    """An empty result that still hangs on its operands, so that their backward runs here too.

    Args:
        operands: of a result that is linear in each; the first is not None.
        weight: a factor of the first. Multiplied here too: the gradient of the one then hangs on
            the other, and gradients of gradients reach the same collectives as elsewhere.
        curved: the gradient depends on the operands.
    """
    first = operands[0]
    assert first is not None
    dtype = first.dtype
    if torch.is_autocast_enabled(first.device.type) and first.is_floating_point():
        dtype = torch.get_autocast_dtype(first.device.type)
    zero = _zero_of(first, dtype)
    if weight is not None:
        zero = zero * _zero_of(weight, dtype)
    for operand in operands[1:]:
        if operand is not None:
            zero = zero + _zero_of(operand, dtype)
    if curved:
        zero = zero * zero
    return zero.expand(tuple(shape)).clone()


def _zero_of(operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return operand.narrow(0, 0, 0).sum().to(dtype)


@contextmanager
def rebuilt(
    local: torch.Tensor, block: torch.Tensor, steps: Sequence[Step], fill: float
) -> Iterator[None]:
    """Context in which `block`, if autograd saves it, is kept as `local` and its slabs.

    Composes with the saved-tensor hooks in force (checkpointing, offload): parts go through them.
    """
    outer = saved_tensor_hooks_in_force()
    outer_pack, outer_unpack = outer if outer is not None else (_same, _same)
    storage = block.untyped_storage()._cdata
    shape, version = block.shape, local._version
    plans = [(step.dim, step.plan) for step in steps]
    # autograd holds the pack hook as long as the graph: the parts must not hang on it.
    parts = [local.detach(), slabs_of(block.detach(), plans)]

    def pack(tensor: torch.Tensor):
        if not parts or tensor.untyped_storage()._cdata != storage or tensor.shape != shape:
            return None, outer_pack(tensor)
        base, slabs = parts
        return (outer_pack(base), [[outer_pack(slab) for slab in row] for row in slabs]), None

    def unpack(packed):
        halves, other = packed
        if halves is None:
            return outer_unpack(other)
        inner = outer_unpack(halves[0])
        if outer is None and inner._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a shard of shape {tuple(inner.shape)} is at version "
                f"{inner._version}; expected version {version} instead"
            )
        for (dim, plan), row in zip(plans, halves[1], strict=True):
            inner = reassemble(inner, dim, plan, [outer_unpack(slab) for slab in row], fill)
        return inner

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        parts.clear()


def _same(value):
    return value
