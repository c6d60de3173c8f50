"""Neighborhood attention: every query meets the keys around it, on tensors split in any way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardfield.attention.neighbors import Window, wanted_keys
from shardfield.attention.tiles import Span, neighborhood
from shardfield.comm.fetch import fetch
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Dim, Factor, Layout, even_extents
from shardfield.operands import block
from shardfield.plan import exchange, runs_of
from shardfield.registry import current_operation, register
from shardfield.tensor import ShardTensor, result
from shardfield.windowed import Step, rebuilt

Tensor = torch.Tensor


def neighborhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of every query to the keys around it, along one to three dims.

    Along each dim a query meets `kernel_size` keys: itself in the middle (for an even number one
    more before it than behind), and at the edges the window moved inwards. Those are keys of the
    same residue modulo `dilation`. Where a dim is causal they are the last `kernel_size` up to the
    query, and fewer at the start. `stride` queries in a row share the window of the middle one (of
    the last one where causal).

    Args:
        query: `(B, *rows, H, D)` with one to three dims of rows; shapes are global.
        key: `(B, *rows, Hk, D)`; `H` is a multiple of `Hk`.
        value: `(B, *rows, Hk, Dv)`.
        kernel_size: one number for all dims or one for each, as the three that follow.
        stride: at most `kernel_size`.
        dilation: `kernel_size * dilation` is at most the rows.
        is_causal: whether keys behind the query are left out.
        scale: factor of the scores; `D ** -0.5` by default.

    Returns:
        `(B, *rows, H, Dv)`. Differentiable once.

    Layout: that of the query; rows are moved to contiguous ranges, features are whole.

    Comm: one fetch of the keys and one of the values per split dim of rows, forward and backward:
        the halo only.

    Raises:
        LayoutError: sizes that do not fit.

    Source: NATTEN (https://natten.org), whose `na1d`, `na2d` and `na3d` this equals.

    Example:
        >>> import torch
        >>> from shardfield.nn.functional import neighborhood_attention
        >>> q, k, v = torch.randn(3, 1, 8, 8, 2, 16)
        >>> neighborhood_attention(q, k, v, kernel_size=3, dilation=(1, 2)).shape
        torch.Size([1, 8, 8, 2, 16])
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            neighborhood_attention, (query, key, value), query, key, value, kernel_size, stride,
            dilation, is_causal, scale,
        )  # fmt: skip
    query, key, value = _cast(query, key, value)
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    windows = _windows(*shapes, *_given(kernel_size, stride, dilation, is_causal))
    spans = tuple(Span(window, 0, window.size, 0) for window in windows)
    return neighborhood(query, key, value, spans, _scale(query, scale))


@dataclass(frozen=True, eq=False, slots=True)
class NeighborhoodPlan:
    """Neighborhood attention on this rank.

    Attributes:
        q: layout in which the queries enter; `k`, `v` and `out` likewise.
        steps: fetches of keys and values, one per dim of rows split over more than one rank.
        spans: the local problem.
    """

    q: Layout
    k: Layout
    v: Layout
    out: Layout
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]


@constant
def neighborhood_plan(
    q: Layout, k: Layout, v: Layout, kernel, stride, dilation, causal
) -> NeighborhoodPlan:
    """Plans for operands of these layouts; a plain operand has one that is whole.

    Raises:
        LayoutError: sizes that do not fit.
    """
    windows = _windows(q.shape, k.shape, v.shape, kernel, stride, dilation, causal)
    mesh, dims = q.mesh, _dims(q, k, v)
    heads, key_heads = _heads(mesh, dims[-1], q.shape[-2], k.shape[-2])
    steps, spans = [], []
    for dim, window in enumerate(windows, 1):
        axes = tuple(axis for factor in dims[dim] for axis in factor.axes)
        if not axes:
            spans.append(Span(window, 0, window.size, 0))
            continue
        rank, extents = mesh.rank(axes), dims[dim][0].extents
        wanted = wanted_keys(window, extents)
        start = sum(extents[:rank])
        first_key = wanted[rank][0].start if wanted[rank] else start
        assert first_key is not None
        spans.append(Span(window, start, extents[rank], first_key))
        if len(extents) > 1:
            plan = exchange(runs_of(dims[dim]), wanted, rank)
            steps.append(Step(dim, plan, mesh.group(axes)))
    enter_q, enter_k, enter_v, out = (
        Layout(mesh, (*dims[:-1], here, (Factor(size),)))
        for here, size in (
            (heads, q.shape[-1]), (key_heads, k.shape[-1]), (key_heads, v.shape[-1]),
            (heads, v.shape[-1]),
        )
    )  # fmt: skip
    return NeighborhoodPlan(enter_q, enter_k, enter_v, out, tuple(steps), tuple(spans))


def _dims(*layouts: Layout) -> list[Dim]:
    """Samples, rows and heads as the first operand that is split there has them."""
    found: list[Dim] = [(Factor(size),) for size in layouts[0].shape[:-1]]
    taken: set[str] = set()
    for layout in layouts:
        for dim, before in enumerate(found):
            axes = layout.axes(dim)
            if axes and not any(factor.axes for factor in before) and taken.isdisjoint(axes):
                found[dim] = layout.dims[dim]
                taken |= set(axes)
                if 0 < dim < len(found) - 1 and not layout.contiguous(dim):
                    size, ranks = layout.shape[dim], layout.mesh.size(axes)
                    found[dim] = (Factor(size, axes, even_extents(size, ranks)),)
    return found


def _heads(mesh, dim: Dim, heads: int, key_heads: int) -> tuple[Dim, Dim]:
    """How both kinds of heads are split: every rank holds the key heads of its query heads."""
    axes = tuple(axis for factor in dim for axis in factor.axes)
    if not axes or heads == key_heads:
        return (dim, dim) if axes else ((Factor(heads),), (Factor(key_heads),))
    extents, group = even_extents(key_heads, mesh.size(axes)), heads // key_heads
    return (
        (Factor(heads, axes, tuple(group * n for n in extents)),),
        (Factor(key_heads, axes, extents),),
    )


def _windows(q, k, v, kernel, stride, dilation, causal) -> tuple[Window, ...]:
    """The windows of every dim of rows, for operands of these global shapes."""
    asked = (
        f"neighborhood attention of queries {tuple(q)}, keys {tuple(k)} and values {tuple(v)} with "
        f"kernel {kernel}, stride {stride}, dilation {dilation}, causal {causal}"
    )
    rows = tuple(q[1:-2])
    fits = 1 <= len(rows) <= 3 and tuple(k[:-2]) == tuple(v[:-2]) == tuple(q[:-2])
    if not fits or q[-1] != k[-1] or k[-2] != v[-2] or not k[-2] or q[-2] % k[-2]:
        raise LayoutError(
            asked,
            "(B, *rows, heads, features) with one to three dims of rows, samples and rows alike; "
            "key heads divide query heads; shapes are global",
            "pass whole plain tensors, or ShardTensor.from_local(part, mesh, placements)",
            "neighborhood",
        )
    values = [
        (given,) * len(rows) if isinstance(given, int) else given
        for given in (kernel, stride, dilation, causal)
    ]
    if any(len(given) != len(rows) for given in values) or any(
        not (1 <= s <= n and d >= 1 and n * d <= size)
        for size, n, s, d, _ in zip(rows, *values, strict=True)
    ):
        raise LayoutError(
            asked,
            "one number for all dims of rows or one for each; 1 <= stride <= kernel_size, and "
            "kernel_size * dilation is at most the rows",
            "take a smaller kernel or dilation",
            "neighborhood",
        )
    return tuple(
        Window(size, n, s, d, bool(c)) for size, n, s, d, c in zip(rows, *values, strict=True)
    )


def _given(*values):
    """Arguments that are one number or one per dim, hashable."""
    return tuple(given if isinstance(given, int) else tuple(given) for given in values)


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Operands as autocast passes them to torch's attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


@constant
def _whole(beside: Layout, shape: tuple[int, ...]) -> Layout:
    return Layout(beside.mesh, [(Factor(size),) for size in shape])


@register(neighborhood_attention, uses=False)
def sharded(
    op, query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None
) -> Tensor:
    """Exact for every split of samples, rows and heads. Comm: one fetch per split dim of rows."""
    query, key, value = _cast(query, key, value)
    split = [x._layout for x in (query, key, value) if isinstance(x, ShardTensor)]
    layouts = [
        x._layout if isinstance(x, ShardTensor) else _whole(split[0], tuple(x.shape))
        for x in (query, key, value)
    ]
    plan = neighborhood_plan(*layouts, *_given(kernel_size, stride, dilation, is_causal))
    q, k, v = (
        block(x, layout, plan.out)
        for x, layout in ((query, plan.q), (key, plan.k), (value, plan.v))
    )
    operation = current_operation()
    keys, values = k, v
    for step in plan.steps:
        keys = fetch(keys, step.dim, step.plan, step.group, 0.0, operation, True)
        values = fetch(values, step.dim, step.plan, step.group, 0.0, operation, True)
    with _kept(k, keys, plan.steps), _kept(v, values, plan.steps):
        out = neighborhood(q, keys, values, plan.spans, _scale(query, scale))
    return result(out, plan.out)


def _kept(local: Tensor, block: Tensor, steps: Sequence[Step]) -> AbstractContextManager[None]:
    """Context in which a block with halos is kept as its parts; compilers do so themselves."""
    if torch.compiler.is_dynamo_compiling() or block is local or not block.numel():
        return nullcontext()
    return rebuilt(local, block, steps, 0.0) if torch.is_grad_enabled() else nullcontext()


__all__ = ["neighborhood_attention", "neighborhood_plan"]
