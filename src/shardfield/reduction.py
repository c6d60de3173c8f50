"""Plans of reductions: which dims, over which ranks, and the layout of what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardfield.comm.moments import counts_over
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout
from shardfield.registry import groups_of, name_of, unsupported
from shardfield.tensor import local_of

Dims = int | Sequence[int] | None


@dataclass(frozen=True, eq=False, slots=True)
class Reduction:
    """A reduction of one layout.

    Attributes:
        dims: reduced dims, non-negative.
        layout: of the result.
        groups: process groups to reduce over; empty where every rank holds the dims whole.
        count: global elements reduced into one.
        counts: elements of every rank of `groups`, as `counts_over` orders them.
        held: elements this rank reduces into one.
        local_shape: of the result.
    """

    dims: tuple[int, ...]
    layout: Layout
    groups: tuple[str, ...]
    count: int
    counts: tuple[int, ...]
    held: int
    local_shape: tuple[int, ...]


@constant
def reduction(op, layout: Layout, dim, keepdim: bool) -> Reduction:
    """Plans a reduction over `dim`: None or () for all dims.

    Raises:
        LayoutError: a dim that does not exist, or is given twice.
    """
    rank = len(layout.dims)
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(rank))
    dims = tuple(d + rank if d < 0 else d for d in given)
    if len(set(dims)) != len(dims) or not all(0 <= d < rank for d in dims):
        raise LayoutError(
            f"{name_of(op)} over dims {list(given)} of ShardTensor {layout}",
            f"dims lie in [-{rank}, {rank - 1}] and differ",
            "name each dim once",
            "operations",
        )
    kept = [
        (Factor(1),) if d in dims else factors
        for d, factors in enumerate(layout.dims)
        if keepdim or d not in dims
    ]
    out = Layout(layout.mesh, kept)
    axes = tuple(axis for d in dims for axis in layout.axes(d))
    return Reduction(
        dims,
        out,
        groups_of(layout, axes),
        prod(layout.shape[d] for d in dims),
        counts_over(layout, dims, axes),
        prod(layout.local_shape[d] for d in dims),
        out.local_shape,
    )


def dims_of(dim, axis=None):
    """`dim`, hashable; `axis` is the name numpy gives to it, and torch takes both."""
    dim = dim if axis is None else axis
    return dim if dim is None or isinstance(dim, int) else tuple(dim)


@constant
def named(op) -> str:
    """`op.__name__`, which Dynamo does not read of a method."""
    return op.__name__


def no_out(op, out, input) -> None:
    """Refuses `out=`."""
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=(input,))


def refuse_complex(op, input) -> None:
    """Refuses complex elements."""
    if local_of(input).is_complex():
        raise unsupported(op, "complex elements along a split dim", args=(input,))
