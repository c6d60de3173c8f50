"""Convolution of the rows a rank has while the rows it lacks are under way.

A convolution is linear: with zeros for the rows of other ranks, the unchanged torch op on the local
block, padded by itself, gives all output rows but for what those rows add to the outermost few.
No copy with halos is made, forward or backward, and none is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from shardfield.comm._torch import results_are_cached
from shardfield.comm.lend import lend
from shardfield.layout import Layout
from shardfield.plan import Exchange, Run
from shardfield.registry import current_operation
from shardfield.tensor import ShardTensor, local_of, wrap
from shardfield.windowed import Step, nothing

Convolution = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor]
"""(block, weight, bias, padding along the split dim) to the result."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What received rows add to the outermost output rows of one side.

    Attributes:
        out: output rows (start, count) that they reach.
        taps: taps (start, count) of the kernel that fall on them.
        rows: received rows (start, count) under those taps.
        zeros: rows to pad before and after those with.
    """

    out: Run
    taps: Run
    rows: Run
    zeros: Run


@dataclass(frozen=True, slots=True)
class Interior:
    """A convolution along one split dim, on the local rows first.

    Attributes:
        padding: of the call on the local rows, on both sides.
        edges: what is added to its result.
    """

    padding: int
    edges: tuple[Edge, ...]


@lru_cache(maxsize=4096)
def interior(plan: Exchange, kernel: int, stride: int, dilation: int) -> Interior | None:
    """How to convolve the local rows first; None where torch's own padding cannot express it.

    Args:
        plan: of a fetch whose rows, convolved without padding, give this rank's output; what it
            fills, it fills with zeros.
    """
    if plan.core is None or not plan.rows:
        return None
    above, below = plan.pieces[: plan.core], plan.pieces[plan.core + 1 :]
    if any(piece.source == "local" or piece.step != 1 for piece in (*above, *below)):
        return None
    padding, after = (sum(piece.length for piece in side) for side in (above, below))
    reach = dilation * (kernel - 1)
    size = (padding + plan.rows + after - reach - 1) // stride + 1
    if (plan.rows + 2 * padding - reach - 1) // stride + 1 != size:
        return None
    edges = []
    at = -padding
    for piece in plan.pieces:
        if piece.source == "received":
            edge = _edge(at, piece.length, padding, size, kernel, stride, dilation)
            if edge is not None:
                start, count = edge.rows
                edges.append(Edge(edge.out, edge.taps, (piece.start + start, count), edge.zeros))
        at += piece.length
    return Interior(padding, tuple(edges))


def _edge(
    at: int, rows: int, padding: int, size: int, kernel: int, stride: int, dilation: int
) -> Edge | None:
    """The edge of rows [at, at + rows), counted from the first local one; None if nothing meets it.

    Output row o reads row `o*stride - padding + tap*dilation` with every tap.
    """
    last = at + rows - 1
    first_out = max(0, -((dilation * (kernel - 1) - padding - at) // stride))
    last_out = min(size - 1, (last + padding) // stride)
    first_tap = max(0, -((last_out * stride - padding - at) // dilation))
    last_tap = min(kernel - 1, (last + padding - first_out * stride) // dilation)
    start = first_out * stride - padding + first_tap * dilation
    stop = last_out * stride - padding + last_tap * dilation + 1
    begin, end = max(start, at), min(stop, at + rows)
    if first_out > last_out or first_tap > last_tap or begin >= end:
        return None
    return Edge(
        (first_out, last_out + 1 - first_out),
        (first_tap, last_tap + 1 - first_tap),
        (begin - at, end - begin),
        (begin - start, stop - end),
    )


_ADDED_EXACTLY = (torch.float32, torch.float64)
_LEAST = 1 << 16  # elements
_forced: dict[str, int | None] = {"from": None}


def interior_pays(local: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this rank convolves its own rows first; ranks may differ, they send the same.

    The calls for the edges have to cost less than copies with halos. In half precision the rows at
    the edges would be rounded twice, so those are convolved with their halos; compiled code is,
    because compilers fuse the copies.
    """
    if torch.compiler.is_dynamo_compiling() or local.dtype not in _ADDED_EXACTLY:
        return False
    if torch.is_autocast_enabled(local.device.type):
        return False
    if _forced["from"] is not None:
        return local.numel() >= _forced["from"]
    enough = local.numel() >= max(_LEAST, weight.numel())
    return enough and not _is_slow_when_padded(local, weight)


def _is_slow_when_padded(local: torch.Tensor, weight: torch.Tensor) -> bool:
    """Of torch's `conv3d` on CPUs, what padding of its first dim costs more than a copy.

    For few channels it takes twice as long, and a block of no more than so many elements in its
    first four dims goes to a kernel that is five times slower, which the halo may spare it.
    """
    if weight.dim() != 5 or local.device.type != "cpu":
        return False
    return min(weight.shape[:2]) < 16 or local[..., 0].numel() <= 20480


@contextmanager
def interior_from(elements: int) -> Iterator[None]:
    """Within it, ranks with so many elements convolve their own rows first. For tests."""
    before, _forced["from"] = _forced["from"], elements
    try:
        yield
    finally:
        _forced["from"] = before


def convolve(
    x: ShardTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    act: Convolution,
    layout: Layout,
    step: Step,
    way: Interior,
) -> ShardTensor:
    """The convolution of `x`, its result in `layout`.

    Args:
        act: the torch op, on blocks.

    Comm: that of a fetch, forward and backward, under way while the local rows are convolved.
    """
    dim, operation = step.dim, current_operation()
    local, arrive = lend(local_of(x), dim, step.plan, step.group, operation)
    y = act(local, weight, bias, way.padding)
    received = arrive()
    if received is None:
        return wrap(y, layout)
    taps = dim - local.dim()
    parts = []
    for edge in way.edges:
        rows = _padded(received.narrow(dim, *edge.rows), dim, edge.zeros)
        parts.append(act(rows, weight.narrow(taps, *edge.taps), None, 0))
    if not parts:
        parts = [nothing((0,), (received,), weight)]
    if results_are_cached():
        y = y.clone()
    starts = tuple(edge.out[0] for edge in way.edges)
    return wrap(_AddRows.apply(y, dim, starts, *parts), layout)


def _padded(rows: torch.Tensor, dim: int, zeros: Run) -> torch.Tensor:
    if zeros == (0, 0):
        return rows
    shape = list(rows.shape)
    parts = []
    for count in zeros:
        shape[dim] = count
        parts.append(rows.new_zeros(shape))
    return torch.cat([parts[0], rows, parts[1]], dim)


class _AddRows(torch.autograd.Function):
    """Adds blocks of rows into `y`, in place; a part beyond the starts is without elements."""

    @staticmethod
    def forward(ctx, y, dim, starts, *parts):
        ctx.dim = dim
        ctx.runs = [(s, part.shape[dim]) for s, part in zip(starts, parts, strict=False)]
        for run, part in zip(ctx.runs, parts, strict=False):
            y.narrow(dim, *run).add_(part)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        parts = [grad.narrow(ctx.dim, *run) for run in ctx.runs]
        return grad, None, None, *(parts or [grad.narrow(ctx.dim, 0, 0).reshape(-1)])
