"""`interpolate`: every mode, by any factor or to any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
import torch.nn.functional as F

from shardfield.comm.fetch import format_of
from shardfield.constant import constant
from shardfield.layout import Layout, cuts, extents_of
from shardfield.plan import DimPlan, Segment, centre_cuts
from shardfield.ranges import in_ranges
from shardfield.registry import register
from shardfield.taps import Taps, taps
from shardfield.tensor import ShardTensor
from shardfield.windowed import WindowPlan, window_plan, windowed

_AREA = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
_MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
    "bilinear antialias": (2,),
    "bicubic antialias": (2,),
}
_ATEN = {
    ("nearest", 1): torch.ops.aten.upsample_nearest1d.default,
    ("nearest", 2): torch.ops.aten.upsample_nearest2d.default,
    ("nearest", 3): torch.ops.aten.upsample_nearest3d.default,
    ("nearest-exact", 1): torch.ops.aten._upsample_nearest_exact1d.default,
    ("nearest-exact", 2): torch.ops.aten._upsample_nearest_exact2d.default,
    ("nearest-exact", 3): torch.ops.aten._upsample_nearest_exact3d.default,
    ("linear", 1): torch.ops.aten.upsample_linear1d.default,
    ("bilinear", 2): torch.ops.aten.upsample_bilinear2d.default,
    ("trilinear", 3): torch.ops.aten.upsample_trilinear3d.default,
    ("bicubic", 2): torch.ops.aten.upsample_bicubic2d.default,
    ("bilinear antialias", 2): torch.ops.aten._upsample_bilinear2d_aa.default,
    ("bicubic antialias", 2): torch.ops.aten._upsample_bicubic2d_aa.default,
}


def resize_cuts(extents: Sequence[int], out: int) -> tuple[int, ...]:
    """Output cuts: an output goes to the rank whose stretch of the dim its centre lies in."""
    size = sum(extents)
    points = cuts(extents)
    return points if out == size else centre_cuts(points, out, 2 * size, size, 2 * out)


@dataclass(frozen=True, eq=False, slots=True)
class ResizedDim:
    """One dim of a resize, on this rank.

    Attributes:
        local: (output rows of a local torch call, its rows to drop before and those to keep), for
            a block that lies on the grid of a whole-number factor; else None.
        rows: per tap, the rows of the block to read.
        weights: per tap, their weights.
    """

    dim: int
    local: tuple[int, int, int] | None
    rows: tuple[tuple[int, ...], ...] = ()
    weights: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class ResizePlan:
    """A resize on one layout.

    Attributes:
        window: fetches and output layout.
        dims: the dims that are fetched, or resized by taps.
        call: output sizes of the local torch call for all spatial dims; None where it has nothing
            to do.
        scales: scale factors of that call, where torch uses them.
    """

    window: WindowPlan
    dims: tuple[ResizedDim, ...]
    call: tuple[int, ...] | None
    scales: tuple[float | None, ...]


def _on_grid(mode: str, size: int, out: int, align_corners: bool, found: Taps) -> bool:
    """Whether a block cut at whole numbers of the factor gives the same positions locally."""
    if align_corners or (out % size and size % out) or mode.endswith("antialias"):
        return False
    if not mode.startswith("nearest"):
        return True
    ratio = Fraction(size, out)
    shift = Fraction(0) if mode == "nearest" else ratio / 2
    return found.rows[0] == tuple(int(ratio * o + shift) for o in range(out))


def resize_dim(
    extents: tuple[int, ...],
    out: int,
    mode: str,
    align_corners: bool,
    scale: float | None,
    double: bool,
) -> tuple[DimPlan, tuple[tuple[int, int, int] | None, ...]]:
    """Plan of one split dim, and per rank what `ResizedDim.local` says (None: by taps).

    The wanted rows are those the taps reach; on the grid of a whole-number factor they are
    extended to its lines, where torch's own call on the block sees the same positions.
    """
    size = sum(extents)
    found = taps(mode, size, out, align_corners, scale, double)
    points = resize_cuts(extents, out)
    exact = scale is None or Fraction(scale) == Fraction(out, size)
    grid = exact and _on_grid(mode, size, out, align_corners, found)
    up, down = max(1, out // size), max(1, size // out)
    wanted, calls = [], []
    for a, b in pairwise(points):
        if b <= a:
            wanted.append(())
            calls.append(None)
            continue
        reached = [row for tap in found.rows for row in tap[a:b]]
        first, last = min(reached), max(reached) + 1
        if grid:
            # A halo row beside the outputs keeps torch's clamping at the block's ends away.
            first = min(first, a * down // up) // down * down
            last = min(size, -(-max(last, -(-b * down // up)) // down) * down)
            start = first * up // down
            calls.append(((last - first) * up // down, a - start, b - a))
        wanted.append((Segment(first, last - first),))
    if not grid:
        calls = [None] * len(wanted)
    return DimPlan(out, extents_of(points), tuple(wanted)), tuple(calls)


@constant
def _resize_plan(layout: Layout, mode, sizes, scales, align_corners, double):
    rank_dims = len(layout.dims) - 2
    if rank_dims not in _MODES.get(mode, ()):
        raise NotImplementedError(
            f"interpolate: mode {mode!r} does not resize an input with {rank_dims} spatial dims"
        )
    plans, local = {}, {}
    call, given = [], []
    mesh = layout.mesh
    for i, out in enumerate(sizes):
        dim = i + 2
        size = layout.shape[dim]
        axes, extents = layout.axes(dim), layout.extents(dim)
        if size < 1 or out < 1:
            raise RuntimeError(
                f"interpolate of {layout.shape} to {tuple(sizes)}: sizes must be > 0"
            )
        scale = None if align_corners and not mode.startswith("nearest") else scales[i]
        plans[dim], calls = DimPlan(out, (), ()), ()
        if extents is not None:
            plans[dim], calls = resize_dim(extents, out, mode, align_corners, scale, double)
        if mesh.size(axes) == 1:
            call.append(out)
            given.append(scale)
            if mode.endswith("antialias"):
                # On a block of one column torch's own antialiasing goes wrong.
                found = taps(mode, size, out, align_corners, scale, double)
                local[dim] = _by_taps_of(dim, found, 0, out, 0)
            continue
        rank = mesh.rank(axes)
        segments, local_call = plans[dim].wanted[rank], calls[rank]
        if not segments:
            local[dim] = ResizedDim(dim, None)
            call.append(0)
        elif local_call is not None:
            local[dim] = ResizedDim(dim, local_call)
            call.append(local_call[0])
        else:
            found = taps(mode, size, out, align_corners, scale, double)
            a = sum(plans[dim].extents[:rank])
            b = a + plans[dim].extents[rank]
            local[dim] = _by_taps_of(dim, found, a, b, segments[0].start or 0)
            call.append(b - a)
        given.append(None)
    window = window_plan(layout, plans)
    dims = tuple(local.values())
    by_taps = {d.dim for d in dims if d.local is None}
    idle = all(
        i + 2 in by_taps or (i + 2 not in local and layout.shape[i + 2] == out)
        for i, out in enumerate(sizes)
    )
    return ResizePlan(window, dims, None if idle else tuple(call), tuple(given))


def _by_taps_of(dim: int, found: Taps, start: int, stop: int, base: int) -> ResizedDim:
    """Output rows [start, stop) of a block whose first row is the global row `base`."""
    rows = tuple(tuple(row - base for row in tap[start:stop]) for tap in found.rows)
    return ResizedDim(dim, None, rows, tuple(weight[start:stop] for weight in found.weights))


def _sizes(input, size, scale_factor, recompute) -> tuple[tuple[int, ...], tuple]:
    """Output sizes and the scale factors that torch still uses, as F.interpolate finds them."""
    spatial = input.shape[2:]
    if (size is None) == (scale_factor is None):
        raise ValueError("only one of size or scale_factor should be defined")
    if size is not None:
        sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,) * len(spatial)
        scales = (None,) * len(sizes)
    else:
        many = isinstance(scale_factor, (tuple, list))
        scales = tuple(scale_factor) if many else (scale_factor,) * len(spatial)
        sizes = tuple([int(n * s) for n, s in zip(spatial, scales, strict=False)])
    if len(sizes) != len(spatial):
        raise ValueError(
            "Input and output must have the same number of spatial dimensions, but got input "
            f"{tuple(spatial)} and size {size}, scale_factor {scale_factor}"
        )
    if recompute:
        scales = (None,) * len(sizes)
    return tuple([int(n) for n in sizes]), tuple([None if s is None else float(s) for s in scales])


@register(F.interpolate, uses=False)
def interpolate(
    op,
    input: ShardTensor,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
) -> ShardTensor:
    """Exact for every size and split. Comm: one fetch of the rows read per split spatial dim."""
    sizes, scales = _sizes(input, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return _AREA[len(sizes)](input, sizes)
    if align_corners is not None and mode.startswith("nearest"):
        raise ValueError(
            "align_corners option can only be set with the interpolating modes: "
            "linear | bilinear | bicubic | trilinear"
        )
    if antialias and (mode not in ("bilinear", "bicubic") or input.dim() != 4):
        raise ValueError(
            "Anti-alias option is restricted to bilinear and bicubic modes and requires a 4-D "
            "tensor as input"
        )
    corners = bool(align_corners)
    double = input.dtype == torch.float64
    kind = f"{mode} antialias" if antialias else mode
    input = in_ranges(input, *range(2, 2 + len(sizes)))
    plan = _resize_plan(input.layout, kind, sizes, scales, corners, double)
    if not plan.window.steps:
        given = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        return windowed(input, plan.window, lambda block: op(block, *given))
    middle = () if mode.startswith("nearest") else (corners,)
    aten = _ATEN[kind, len(sizes)]

    def act(block):
        dtype, memory_format = block.dtype, format_of(block)
        for part in plan.dims:
            if part.local is None:
                block = _by_taps(block, part)
        block = block.to(dtype)
        if plan.call is not None:
            block = aten(block, plan.call, *middle, *plan.scales)
        for part in plan.dims:
            if part.local is not None and part.local[1:] != (0, block.shape[part.dim]):
                block = block.narrow(part.dim, part.local[1], part.local[2])
        return block.contiguous(memory_format=memory_format)

    return windowed(input, plan.window, act)


def _by_taps(block: torch.Tensor, part: ResizedDim) -> torch.Tensor:
    """Resizes one dim of a block by reading rows and weighing them, in float32 at least."""
    parts = []
    shape = (-1, *(1,) * (block.dim() - 1 - part.dim))
    precision = torch.float64 if block.dtype == torch.float64 else torch.float32
    for tap, rows in enumerate(part.rows):
        at = torch.tensor(list(rows), dtype=torch.int64, device=block.device)
        read = block.index_select(part.dim, at)
        if part.weights:
            weight = torch.tensor(list(part.weights[tap]), dtype=precision, device=block.device)
            read = read * weight.view(shape)
        parts.append(read)
    return sum(parts[1:], parts[0])
