"""Fractional max pooling: windows at places that random samples shift, other ones per channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch
import torch.nn.functional as F

from shardfield.constant import constant
from shardfield.layout import Factor, Layout, cuts, extents_of
from shardfield.operands import part_of_plain
from shardfield.plan import DimPlan, centre_cuts, clip
from shardfield.registry import register, unsupported
from shardfield.spatial import each, spatial
from shardfield.tensor import ShardTensor, local_of, wrap
from shardfield.windowed import WindowPlan, window_plan, windowed

_DIMS = {
    F.fractional_max_pool2d: 2,
    F.fractional_max_pool3d: 3,
    F.fractional_max_pool2d_with_indices: 2,
    F.fractional_max_pool3d_with_indices: 3,
}
_WITH_INDICES = {2: F.fractional_max_pool2d_with_indices, 3: F.fractional_max_pool3d_with_indices}
_MAX = {2: F.max_pool2d, 3: F.max_pool3d}


@constant
def _dims_of(op) -> tuple[int, bool]:
    """Spatial dims of the function, and whether it returns indices."""
    return _DIMS[op], op in _WITH_INDICES.values()


def fractional_window(extents: tuple[int, ...], kernel: int, out: int, slack: int) -> DimPlan:
    """Plan of one split dim, for any sample: rows that some sample's windows reach.

    With `step = (size - kernel) / (out - 1)`, window `o` starts at `floor((o + sample) * step) -
    floor(sample * step)`, hence at `floor(o * step)` or one row later.

    Args:
        slack: rows by which rounding may shift a start.
    """
    size = sum(extents)
    last = max(out - 1, 1)
    points = cuts(extents)
    if out != size:
        points = centre_cuts(points, out, max(2 * (size - kernel), 1), kernel * last, 2 * last)
    wanted = []
    for a, b in pairwise(points):
        first = max(a * (size - kernel) // last - slack, 0)
        stop = min((b - 1) * (size - kernel) // last + 1 + slack + kernel, size)
        if out == 1:
            first, stop = size - kernel, size
        wanted.append(clip(first, stop, size) if b > a else ())
    return DimPlan(out, extents_of(points), tuple(wanted))


@dataclass(frozen=True, eq=False, slots=True)
class FractionalPlan:
    """A fractional pooling on one layout.

    Attributes:
        window: fetches and output layout.
        samples: layout of the samples: samples, channels, dims.
        ranges: per spatial dim (first output of this rank, outputs, first row of the block).
    """

    window: WindowPlan
    samples: Layout
    ranges: tuple[tuple[int, int, int], ...]


@constant
def _fractional_plan(layout: Layout, lead: int, kernel, out, eps: float) -> FractionalPlan:
    plans = {}
    for i, k in enumerate(kernel):
        size = layout.shape[lead + i]
        if out[i] < 1 or out[i] + k - 1 > size:
            raise RuntimeError(
                f"fractional_max_pool: pool size {k} too large relative to input size {size} "
                f"for {out[i]} outputs"
            )
        extents = layout.extents(lead + i) or (size,)
        plans[lead + i] = fractional_window(extents, k, out[i], 1 + ceil(4 * eps * size))
    window = window_plan(layout, plans)
    ranges = []
    for i in range(len(kernel)):
        dim, start = lead + i, 0
        if dim in window.moved:
            wanted = plans[dim].wanted[layout.mesh.rank(layout.axes(dim))]
            start = (wanted[0].start or 0) if wanted else 0
        ranges.append((window.layout.offset(dim), window.layout.local_shape[dim], start))
    planes = (((),) * (2 - lead)) + layout.dims[:lead]
    samples = Layout(layout.mesh, (*planes, (Factor(len(kernel)),)))
    return FractionalPlan(window, samples, tuple(ranges))


def window_starts(
    samples: torch.Tensor, first: int, count: int, size: int, kernel: int, out: int
) -> torch.Tensor:
    """Starts of windows `first` to `first + count` for each sample, as torch rounds them.

    Args:
        samples: of one spatial dim, any shape.

    Source: ATen/native/FractionalMaxPooling.h.
    """
    places = torch.arange(first, first + count, device=samples.device)
    step = samples.new_tensor(size - kernel) / max(out - 1, 1)
    shifted = (places.to(samples.dtype) + samples.unsqueeze(-1)) * step
    starts = shifted.to(torch.int64) - (samples * step).to(torch.int64).unsqueeze(-1)
    return torch.where(places == out - 1, size - kernel, starts)


@register(
    F.fractional_max_pool2d,
    F.fractional_max_pool3d,
    F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d_with_indices,
    uses=False,
)
def fractional_max_pool(
    op,
    input: ShardTensor,
    kernel_size,
    output_size=None,
    output_ratio=None,
    return_indices=False,
    _random_samples=None,
):
    """Exact for every split; draws what one process draws, the same on all ranks.

    Comm: one fetch per split spatial dim, of what any sample's windows reach.
    """
    dims, named = _dims_of(op)
    input, lead = spatial(op, input, dims)
    kernel, size = each(kernel_size, dims), tuple(input.shape[lead:])
    out = _output_size(op, size, output_size, output_ratio)
    samples = _random_samples
    if samples is None:
        shape = (1 if lead == 1 else input.shape[0], input.shape[lead - 1], dims)
        samples = torch.rand(shape, dtype=input.dtype, device=input.device)
    plan = _fractional_plan(input.layout, lead, kernel, out, torch.finfo(input.dtype).eps)
    if isinstance(samples, ShardTensor):
        raise unsupported(op, "its random samples are split", args=(input, samples))
    samples = part_of_plain(samples, plan.samples)
    indices = None

    def act(block):
        nonlocal indices
        if not plan.window.steps:
            values, indices = _WITH_INDICES[dims](block, kernel, out, None, True, samples)
            return values
        # torch reads the samples of two dims in reverse order, those of three as they are.
        own = samples.flip(-1) if dims == 2 else samples
        starts = [
            window_starts(own[..., i], first, count, size[i], kernel[i], out[i])
            for i, (first, count, _) in enumerate(plan.ranges)
        ]
        planes = block if lead == 2 else block.unsqueeze(0)
        values, indices = _pooled(planes, starts, [at for *_, at in plan.ranges], kernel, size)
        if lead == 1:
            values, indices = values.squeeze(0), indices.squeeze(0)
        return values

    values = windowed(input, plan.window, act, curved=True)
    if not (named or return_indices):
        return values
    if indices is None:
        indices = local_of(values).new_empty(plan.window.layout.local_shape, dtype=torch.int64)
    return values, wrap(indices, plan.window.layout)


def _output_size(op, size: tuple[int, ...], given, ratio) -> tuple[int, ...]:
    if given is not None:
        return each(given, len(size))
    if ratio is None:
        name = op.__name__.removesuffix("_with_indices")
        raise ValueError(f"{name} requires specifying either an output_size or an output_ratio")
    ratios = (ratio,) * len(size) if isinstance(ratio, (int, float)) else tuple(ratio)
    return tuple([int(rows * part) for rows, part in zip(size, ratios, strict=True)])


def _pooled(
    planes: torch.Tensor,
    starts: Sequence[torch.Tensor],
    begins: Sequence[int],
    kernel: tuple[int, ...],
    size: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of windows at given places, and where they are in the whole tensor.

    Args:
        planes: samples, channels, spatial dims of the block.
        starts: per spatial dim, the global row at which each window of a plane starts.
        begins: per spatial dim, the global row at which the block starts.
    """
    dims = len(kernel)
    for i, (start, begin, k) in enumerate(zip(starts, begins, kernel, strict=True)):
        rows = (start - begin).unsqueeze(-1) + torch.arange(k, device=start.device)
        shape = list(planes.shape)
        shape[2 + i] = rows.shape[-2] * k
        rows = rows.reshape(*rows.shape[:2], *_along(i, dims, shape[2 + i])).expand(shape)
        planes = planes.gather(2 + i, rows)
    values, places = _MAX[dims](planes, kernel, kernel, return_indices=True)
    flat, scale = torch.zeros_like(places), 1
    for i in reversed(range(dims)):
        offset = places % planes.shape[2 + i] % kernel[i]
        places = torch.div(places, planes.shape[2 + i], rounding_mode="floor")
        start = starts[i].reshape(*starts[i].shape[:2], *_along(i, dims, starts[i].shape[-1]))
        flat = flat + (start + offset) * scale
        scale *= size[i]
    return values, flat


def _along(place: int, dims: int, rows: int) -> list[int]:
    """A shape that is `rows` at one of `dims` places, else 1."""
    return [rows if i == place else 1 for i in range(dims)]
