"""Plans of norms: what a statistic covers, and whom its weight, bias and buffers belong to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from shardfield.comm.moments import Members, Scope, accumulation_dtype, counts_over
from shardfield.comm.move import move, whole
from shardfield.constant import constant
from shardfield.layout import Factor, Layout
from shardfield.operands import part_of_plain
from shardfield.plan import runs_of
from shardfield.registry import current_operation, groups_of, unsupported
from shardfield.tensor import SHARDED, ShardTensor, local_of, wrap

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class NormPlan:
    """What a norm's statistics cover on one layout.

    Attributes:
        dims: the statistic's dims.
        scope: ranks to merge statistics with; None where every rank holds its statistic's dims
            whole, so that the plain operation on the local block is exact.
        parameters: layout of weight, bias and buffers; None where every rank needs them whole.
    """

    dims: tuple[int, ...]
    scope: Scope | None
    parameters: Layout | None


@constant
def norm_plan(
    layout: Layout,
    dims: tuple[int, ...],
    channels: tuple[int, ...],
    unit: int = 1,
    alone: bool = False,
    replicas: tuple[str, ...] = (),
) -> NormPlan:
    """Plans statistics over `dims`.

    Args:
        channels: dims that weight and bias have.
        unit: channels that share a statistic.
        alone: plan statistics of this rank alone where no dim is split.
        replicas: process groups of ranks whose samples count too.
    """
    inner = [d for d in channels if layout.is_split(d)]
    parameters = None
    if inner:
        parameters = Layout(layout.mesh, [layout.dims[d] for d in channels])
    axes = tuple(axis for d in dims for axis in layout.axes(d))
    if inner and inner[0] not in dims and _cuts_apart(layout, inner[0], unit):
        axes += layout.axes(inner[0])
        members = _members(layout, inner[0], unit, axes)
        counts = counts_over(layout, dims, axes)
        total = unit * prod(layout.shape[d] for d in dims)
        return NormPlan(dims, Scope(counts, groups_of(layout, axes), total, members), parameters)
    groups = groups_of(layout, axes)
    if not groups and not alone and not replicas:
        return NormPlan(dims, None, parameters)
    counts = tuple(count * unit for count in counts_over(layout, dims, axes))
    scope = Scope(counts, groups, sum(counts), None, replicas)
    return NormPlan(dims, scope, parameters)


def _cuts_apart(layout: Layout, dim: int, unit: int) -> bool:
    """Whether some rank holds a part of a run of `unit` channels."""
    if layout.mesh.size(layout.axes(dim)) == 1:
        return False
    runs = runs_of(layout.dims[dim])
    return any(start % unit or stop % unit for rank in runs for start, stop in rank)


def _members(layout: Layout, dim: int, unit: int, axes: tuple[str, ...]) -> Members:
    """Which channels of which statistic the ranks along `axes` hold, as `counts_over` orders."""
    mesh, own = layout.mesh, layout.axes(dim)
    axes = tuple(axis for axis in axes if mesh.size((axis,)) > 1)
    ids = [
        [channel // unit for start, stop in runs for channel in range(start, stop)]
        for runs in runs_of(layout.dims[dim])
    ]
    counts, rank = [], 0
    for place in product(*(range(mesh.size((axis,))) for axis in reversed(axes))):
        here = dict(zip(reversed(axes), place, strict=True))
        if all(mesh.rank((axis,)) == index for axis, index in here.items()):
            rank = len(counts)
        at = 0
        for axis in own:
            at = at * mesh.size((axis,)) + here.get(axis, 0)
        counts.append(tuple(ids[at].count(s) for s in range(layout.shape[dim] // unit)))
    return Members(layout.local_shape[0], tuple(ids[mesh.rank(own)]), tuple(counts), rank)


def part_of_parameter(parameter: Tensor | None, plan: NormPlan) -> Tensor | None:
    """This rank's part of a weight, bias or buffer."""
    if parameter is None or plan.parameters is None:
        return parameter
    return part_of_plain(parameter, plan.parameters)


@constant
def _layouts(parameters: Layout, rows: int) -> tuple[Layout, Layout]:
    split = Layout(parameters.mesh, [(Factor(rows),), *parameters.dims])
    return split, split.replace({1: whole(split, 1)})


def whole_statistics(parts: Tensor, plan: NormPlan) -> Tensor:
    """Values of every channel (the last dim of two) from those of this rank's channels.

    Comm: where channels are split, one all-to-all of them to every rank.
    """
    if plan.parameters is None:
        return parts
    return move(parts, *_layouts(plan.parameters, parts.shape[0]), current_operation())


def check_operands(op, input, *others) -> None:
    """Refuses split weights, biases and buffers, and a plain input beside them."""
    split = [other for other in others if type(other) in SHARDED]
    if split or type(input) not in SHARDED:
        raise unsupported(op, "its weight, bias or buffers are split", args=(input, others))


def normalised(y: Tensor, input: ShardTensor, wide: bool = False) -> ShardTensor:
    """In the type of the input; in fp32 where CUDA's autocast runs the operation so (`wide`)."""
    local = local_of(input)
    dtype = local.dtype
    if wide and local.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = accumulation_dtype(dtype)
    return wrap(y.to(dtype), input.layout)
