"""Layouts, blocks and exchanges of an attention of operands that are split in any way. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardfield.attention.core import Attend
from shardfield.attention.plan import (
    MACHINES,
    Choice,
    Rows,
    Sizes,
    after_heads,
    choices,
    joined,
    key_steps,
    length,
    split_heads,
    zigzag,
)
from shardfield.constant import constant
from shardfield.contraction import Operand
from shardfield.errors import LayoutError
from shardfield.layout import Dim, Factor, Layout, canonical
from shardfield.plan import Exchange, Segment, exchange, runs_of


@dataclass(frozen=True, eq=False, slots=True)
class OverHeads:
    """Rows of all ranks for some heads, instead of some rows of all heads.

    Attributes:
        q_heads: query heads of every rank of the group.
        k_heads: key heads likewise.
        q_rows: query rows.
        k_rows: key rows.
        rank: this rank's place.
        group: the process group.
    """

    q_heads: tuple[int, ...]
    k_heads: tuple[int, ...]
    q_rows: tuple[int, ...]
    k_rows: tuple[int, ...]
    rank: int
    group: str


@dataclass(frozen=True, eq=False, slots=True)
class Reorder:
    """Exchanges that bring queries and keys into zigzag order, and the output back."""

    queries: Exchange
    keys: Exchange
    back: Exchange
    group: str


@dataclass(frozen=True, eq=False, slots=True)
class AttentionPlan:
    """One attention on this rank.

    Attributes:
        q: layout in which the queries enter; `k`, `v` and `out` likewise.
        mask: layout in which a mask enters, before rows and heads are cut from it; or None.
        mask_rows: whether it comes with this rank's rows only.
        algorithm: the chosen one; "local" where no keys travel.
        choices: what it was chosen from.
        attend: blocks and exchanges.
        direct: the local problem is one call of torch's own function.
        heads: exchange of rows against heads before, or None.
        reorder: exchange of rows before, or None.
        grouped: query heads per key head.
        axes: mesh axes over which the computation is split.
    """

    q: Layout
    k: Layout
    v: Layout
    out: Layout
    mask: Layout | None
    mask_rows: bool
    algorithm: str
    choices: tuple[Choice, ...]
    attend: Attend
    direct: bool
    causal: bool
    heads: OverHeads | None
    reorder: Reorder | None
    grouped: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"attention of {self.q} with keys {self.k}: {self.algorithm}"]
        for choice in self.choices:
            mark = "->" if choice.name == self.algorithm else "  "
            lines.append(
                f"{mark} {choice.name:7} {choice.bytes / 1e6:10.3f} MB received forward"
                f" {choice.seconds * 1e3:10.3f} ms modelled, forward and backward"
            )
        return "\n".join(lines)


def _dims(operand: Operand) -> tuple[Dim, ...]:
    if isinstance(operand, Layout):
        return operand.dims
    return tuple(canonical((Factor(size),)) for size in operand)


def _size(dim: Dim) -> int:
    return prod(factor.size for factor in dim)


def _axes(dim: Dim) -> tuple[str, ...]:
    return tuple(axis for factor in dim for axis in factor.axes)


def _whole(size: int) -> Dim:
    return canonical((Factor(size),))


@constant
def attention_plan(
    op, q: Operand, k: Operand, v: Operand, mask, causal: bool, scale, dropout: float,
    itemsize: int, kind: str, algorithm: str, machine,
) -> AttentionPlan:  # fmt: skip
    """Plans one attention.

    Args:
        mask: operand, or None.
        kind: device type.

    Raises:
        LayoutError: shapes that torch would refuse; an algorithm that does not fit them.
    """
    mesh = next(o for o in (q, k, v) if isinstance(o, Layout)).mesh
    dims_q, dims_k, dims_v = _dims(q), _dims(k), _dims(v)
    _check(q, k, v, dims_q, dims_k, dims_v)
    batch = dims_q[0] if _axes(dims_q[0]) or not _axes(dims_k[0]) else dims_k[0]
    heads_q, heads_k = _heads(dims_q[1], dims_k[1])
    taken = {*_axes(batch), *_axes(heads_q)}
    rows_q, rows_k = (
        dims[2] if taken.isdisjoint(_axes(dims[2])) else _whole(_size(dims[2]))
        for dims in (dims_q, dims_k)
    )
    enter_q = Layout(mesh, (batch, heads_q, rows_q, _whole(_size(dims_q[3]))))
    enter_k = Layout(mesh, (batch, heads_k, rows_k, _whole(_size(dims_k[3]))))
    enter_v = Layout(mesh, (batch, heads_k, rows_k, _whole(_size(dims_v[3]))))
    out = Layout(mesh, (batch, heads_q, rows_q, _whole(_size(dims_v[3]))))
    mask_layout, mask_rows = (
        _mask_layout(op, mask, out, rows_k) if mask is not None else (None, False)
    )

    live = [axis for axis in _axes(rows_k) if mesh.size((axis,)) > 1]
    shared = tuple(axis for axis in live if axis in _axes(rows_q))
    merged = tuple(mesh.group((axis,)) for axis in live if axis not in shared)
    width, value_width = _size(dims_q[3]), _size(dims_v[3])
    sizes = Sizes(
        _rows_of(mesh, rows_q, shared), _rows_of(mesh, rows_k, shared), enter_q.local_shape[0],
        enter_q.local_shape[1], enter_k.local_shape[1], width, value_width, itemsize, causal,
        mask_rows, tuple(mesh.size((axis,)) for axis in shared),
    )  # fmt: skip
    factor = scale if scale is not None else width**-0.5
    grouped = _size(heads_q) // max(1, _size(heads_k))
    found: tuple[Choice, ...] = ()
    name = "local"
    if shared:
        found = _exact(choices(sizes, machine or MACHINES.get(kind, MACHINES["cuda"])), sizes,
                       bool(merged), _axes(rows_q), _axes(rows_k), shared)  # fmt: skip
        name = _chosen(op, found, algorithm, q, k)
    place = mesh.rank(shared) if shared else 0
    group = mesh.group(shared) if shared else ""
    heads = reorder = None
    if name == "heads":
        heads = OverHeads(*split_heads(sizes, len(sizes.keys)), *_lengths(sizes), place, group)
        rows, columns = joined(sizes.queries), joined(sizes.keys)
        steps, group = key_steps([rows], [columns], 0, causal, False), ""
    elif name == "hybrid":
        inner, outer = shared[-1:], shared[:-1]
        at = mesh.rank(inner)
        count = mesh.size(inner)
        own = slice(place - at, place - at + count)
        q_rows, k_rows = (n[own] for n in _lengths(sizes))
        heads = OverHeads(*split_heads(sizes, count), q_rows, k_rows, at, mesh.group(inner))
        sizes = after_heads(sizes, at)
        place, group = mesh.rank(outer), mesh.group(outer)
        rows = sizes.queries[place]
        steps = key_steps(sizes.queries, sizes.keys, place, causal, False)
    elif name == "zigzag":
        queries, keys = (
            zigzag(sum(map(length, owned)), len(owned)) for owned in (sizes.queries, sizes.keys)
        )
        reorder = Reorder(
            exchange(sizes.queries, _wanted(queries), place),
            exchange(sizes.keys, _wanted(keys), place),
            exchange(queries, _wanted(sizes.queries), place),
            group,
        )
        rows = queries[place]
        steps = key_steps(queries, keys, place, causal, False)
    else:
        rows = sizes.queries[place]
        steps = key_steps(sizes.queries, sizes.keys, place, causal, name == "gather")
    first = steps[0]
    direct = (
        len(steps) == 1 and first.silent and not merged and not dropout and not first.by_position
        and (not first.pieces or (len(first.pieces) == 1 and _all(first.pieces[0], rows, first)))
    )  # fmt: skip
    is_causal = bool(first.pieces) and first.pieces[0].causal
    attended = Attend(
        steps, group, merged, rows, factor, dropout,
        Layout(mesh, (batch, heads_q, _whole(_size(dims_q[2])), _whole(_size(dims_k[2])))),
        _head_span(enter_q, heads),
    )  # fmt: skip
    return AttentionPlan(
        enter_q, enter_k, enter_v, out, mask_layout, mask_rows, name, found,
        attended, direct, is_causal, heads, reorder,
        grouped, tuple(a for a in mesh.names if a in {*out.split_axes, *_axes(rows_k)}),
    )  # fmt: skip


def _head_span(queries: Layout, heads: OverHeads | None) -> tuple[int, int]:
    """(first, count) of the global query heads that this rank computes."""
    first = queries.offset(1)
    if heads is None:
        return first, queries.local_shape[1]
    return first + sum(heads.q_heads[: heads.rank]), heads.q_heads[heads.rank]


def _all(piece, rows: Rows, step) -> bool:
    return piece.q_rows == length(rows) and piece.k_rows == length(step.columns)


def _lengths(sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(length, sizes.queries)), tuple(map(length, sizes.keys))


def _wanted(rows: tuple[Rows, ...]):
    return tuple(tuple(Segment(a, b - a) for a, b in runs) for runs in rows)


def _check(q, k, v, dims_q, dims_k, dims_v) -> None:
    sizes = [tuple(_size(dim) for dim in dims) for dims in (dims_q, dims_k, dims_v)]
    (b, h, _, d), (bk, hk, lk, dk), (bv, hv, lv, _) = sizes
    if (b, b, d, hk, lk) == (bk, bv, dk, hv, lv) and hk and h % hk == 0:
        return
    raise LayoutError(
        f"attention of queries {q}, keys {k} and values {v}",
        "samples agree, queries and keys have one width, keys and values one number of heads and "
        "rows, and key heads divide query heads; shapes are global",
        "pass whole plain tensors, or ShardTensor.from_local(part, mesh, placements)",
        "attention",
    )


def _heads(q: Dim, k: Dim) -> tuple[Dim, Dim]:
    """How heads are split: as the queries' are, groups of query heads being whole."""
    group = _size(q) // _size(k)
    source, times = (q, 1) if _axes(q) else (k, group)
    if not _axes(source):
        return q, k
    if len(source) != 1:
        return _whole(_size(q)), _whole(_size(k))
    factor = source[0]
    extents = tuple(extent * times for extent in factor.extents)
    if any(extent % group for extent in extents):
        return _whole(_size(q)), _whole(_size(k))
    return (
        (Factor(_size(q), factor.axes, extents),),
        (Factor(_size(k), factor.axes, tuple(extent // group for extent in extents)),),
    )


@constant
def cuts_groups(query: Operand, key: Operand) -> bool:
    """Whether query heads are split inside groups of a shared key head, and key heads whole."""
    q, k = _dims(query)[1], _dims(key)[1]
    return bool(_axes(q)) and not _axes(k) and _size(k) > 0 and not _axes(_heads(q, k)[0])


def _rows_of(mesh, dim: Dim, shared: tuple[str, ...]) -> tuple[Rows, ...]:
    """Runs of every rank of the group over `shared`, which agrees with this one on other axes."""
    every, axes = runs_of(dim), _axes(dim)
    place = dict(zip(mesh.names, mesh.coordinate, strict=True))
    found = []
    for index in range(mesh.size(shared) if shared else 1):
        left = index
        for axis in reversed(shared):
            left, place[axis] = divmod(left, mesh.size((axis,)))
        at = 0
        for axis in axes:
            at = at * mesh.size((axis,)) + place[axis]
        found.append(every[at])
    return tuple(found)


def _mask_layout(op, mask: Operand, out: Layout, keys: Dim) -> tuple[Layout, bool]:
    """Dims of a mask that broadcasts to `(B, H, Lq, Lk)`; its columns are whole."""
    dims = _dims(mask)
    dims = ((),) * (4 - len(dims)) + dims
    full = (*out.dims[:3], _whole(_size(keys)))
    if len(dims) != 4 or any(
        _size(d) not in (1, _size(f)) for d, f in zip(dims, full, strict=True)
    ):
        raise LayoutError(
            f"attention with a mask {mask}",
            f"it broadcasts to {tuple(_size(f) for f in full)}; shapes are global",
            "pass the whole mask, or ShardTensor.from_local(part, mesh, placements)",
            "attention",
        )
    split = isinstance(mask, Layout) and bool(_axes(dims[2]))
    taken = [() if _size(d) == 1 else f for d, f in zip(dims, full, strict=True)]
    if not split and _size(dims[2]) != 1:
        taken[2] = _whole(_size(dims[2]))
    return Layout(out.mesh, taken), split


def _exact(found, sizes: Sizes, merged: bool, axes_q, axes_k, shared) -> tuple[Choice, ...]:
    """Drops what needs both sides to be split alike where they are not."""
    alike = not merged and axes_q == axes_k and len(axes_q) == len(shared)
    return tuple(c for c in found if alike or c.name in ("ring", "gather"))


def _chosen(op, found: tuple[Choice, ...], algorithm: str, q, k) -> str:
    if algorithm == "auto":
        return found[0].name
    for choice in found:
        if choice.name == algorithm:
            return algorithm
    raise LayoutError(
        f"attention by {algorithm!r} of queries {q} and keys {k}",
        "heads need several key heads, queries and keys that are split alike, and no mask that is "
        "split over rows; zigzag needs is_causal; hybrid needs two mesh axes",
        f"choose one of {', '.join(c.name for c in found)}, or 'auto'",
        "attention",
    )


__all__ = ["AttentionPlan", "OverHeads", "Reorder", "attention_plan", "cuts_groups"]
