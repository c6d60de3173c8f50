"""Layouts: which part of a global tensor each rank holds. Pure arithmetic, no communication."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count
from math import prod

from shardfield.axes import DATA, MeshAxes
from shardfield.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a dim: whole, or split in contiguous ranges over a product of mesh axes.

    Attributes:
        size: global size.
        axes: mesh axes it is split over, slowest first; empty when every rank holds it whole.
        extents: size held at each row-major coordinate of `axes`; empty when whole.
    """

    size: int
    axes: tuple[str, ...] = ()
    extents: tuple[int, ...] = ()


Dim = tuple[Factor, ...]


def even_extents(size: int, parts: int) -> tuple[int, ...]:
    """Sizes as `torch.chunk` (hence DTensor) cuts: full chunks first, then a short one, then 0."""
    chunk = -(-size // parts)
    return tuple(max(0, min(chunk, size - index * chunk)) for index in range(parts))


def balanced(units: int, ranks: int) -> tuple[int, ...]:
    """`units` over `ranks`, the first ones holding one more where they do not divide.

    >>> balanced(5, 4)
    (2, 1, 1, 1)
    """
    share, rest = divmod(units, ranks)
    return tuple(share + (rank < rest) for rank in range(ranks))


def cuts(extents: Sequence[int]) -> tuple[int, ...]:
    """Cut points of consecutive ranges: 0, e0, e0+e1, ..., size."""
    return (0, *accumulate(extents))


def extents_of(points: Sequence[int]) -> tuple[int, ...]:
    """Inverse of `cuts`."""
    return tuple(b - a for a, b in zip(points, points[1:], strict=False))


def wrapped(dim: int, ndim: int) -> int:
    """A dim counted from the front, as torch counts.

    Raises:
        IndexError: there is no such dim, with torch's text.
    """
    count = max(ndim, 1)
    if not -count <= dim < count:
        raise IndexError(
            "Dimension out of range (expected to be in range of "
            f"[{-count}, {count - 1}], but got {dim})"
        )
    return dim % count


def canonical(factors: Sequence[Factor]) -> Dim:
    """Merges neighbours that together are still one whole or one contiguously split factor."""
    merged: list[Factor] = []
    for factor in factors:
        if factor.size == 1 and not factor.axes:
            continue
        if merged and not factor.axes:
            last = merged[-1]
            extents = tuple(extent * factor.size for extent in last.extents)
            merged[-1] = Factor(last.size * factor.size, last.axes, extents)
        else:
            merged.append(factor)
    return tuple(merged)


class Layout:
    """Immutable description of a global tensor spread over a mesh. Equal layouts are one object.

    A dim is an ordered product of factors, so that merging `(B, H split)` into one dim keeps the
    split. Axes over which no dim is split hold replicas (on `data`, other samples).

    Attributes:
        mesh: axes of the root mesh.
        dims: factors of every dim, in canonical form.
        shape: global shape.
        local_shape: shape of this rank's shard.
        split_axes: mesh axes over which some dim is split, in mesh order.
        shared: those of `split_axes` that have more than one rank.
        key: a number of this layout alone, in this process.
    """

    __slots__ = (
        "__weakref__",
        "dims",
        "key",
        "local_shape",
        "mesh",
        "shape",
        "shared",
        "split_axes",
    )

    key: int
    mesh: MeshAxes
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    split_axes: tuple[str, ...]
    shared: tuple[str, ...]

    def __new__(cls, mesh: MeshAxes, dims: Sequence[Sequence[Factor]]) -> Layout:
        """The one layout of these dims; raises LayoutError if sizes or axes do not fit."""
        return _intern(mesh, tuple(canonical(dim) for dim in dims))

    def local_shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape of the shard at a mesh coordinate (one index per mesh axis)."""
        place = dict(zip(self.mesh.names, coordinate, strict=True))
        return tuple(prod(self._held(factor, place) for factor in dim) for dim in self.dims)

    def _held(self, factor: Factor, place: dict[str, int]) -> int:
        if not factor.axes:
            return factor.size
        index = 0
        for axis in factor.axes:
            index = index * self.mesh.size((axis,)) + place[axis]
        return factor.extents[index]

    def is_split(self, dim: int) -> bool:
        """Whether any factor of `dim` is split."""
        return any(factor.axes for factor in self.dims[dim])

    def axes(self, dim: int) -> tuple[str, ...]:
        """Mesh axes over which `dim` is split, in the order of its factors."""
        return tuple(axis for factor in self.dims[dim] for axis in factor.axes)

    def contiguous(self, dim: int) -> Factor | None:
        """The one factor of a dim held in contiguous ranges (split or whole), else None."""
        factors = self.dims[dim]
        if not factors:
            return Factor(1)
        return factors[0] if len(factors) == 1 else None

    def extents(self, dim: int) -> tuple[int, ...] | None:
        """Sizes held along the axes of a contiguously split dim; None for any other dim."""
        factor = self.contiguous(dim)
        return factor.extents if factor is not None and factor.axes else None

    def offset(self, dim: int) -> int:
        """Global index at which this rank's range of a contiguous dim starts."""
        factor = self.contiguous(dim)
        assert factor is not None
        if not factor.axes:
            return 0
        return sum(factor.extents[: self.mesh.rank(factor.axes)])

    def replace(self, changes: Mapping[int, Sequence[Factor]]) -> Layout:
        """The layout with some dims exchanged."""
        return Layout(
            self.mesh, tuple(changes.get(index, dim) for index, dim in enumerate(self.dims))
        )

    def __reduce__(self):
        return Layout, (self.mesh, self.dims)

    def __deepcopy__(self, memo):
        return self

    def __copy__(self):
        return self

    def __str__(self) -> str:
        parts = []
        for index, dim in enumerate(self.dims):
            for factor in dim:
                if factor.axes:
                    rows = "+".join(map(str, factor.extents[:8]))
                    more = "+..." if len(factor.extents) > 8 else ""
                    inner = "" if len(dim) == 1 else " (a factor)"
                    parts.append(f"dim {index}{inner} over {'*'.join(factor.axes)} as {rows}{more}")
        return f"{tuple(self.shape)} split: {'; '.join(parts) or 'nowhere'}"

    __repr__ = __str__


_interned: weakref.WeakValueDictionary[tuple, Layout] = weakref.WeakValueDictionary()

_by_key: weakref.WeakValueDictionary[int, Layout] = weakref.WeakValueDictionary()
_keys = count()


def layout_by_key(key: int) -> Layout:
    """The living layout with this `key`."""
    return _by_key[key]


def _intern(mesh: MeshAxes, dims: tuple[Dim, ...]) -> Layout:
    found = _interned.get((mesh, dims))
    if found is not None:
        return found
    used = [axis for dim in dims for factor in dim for axis in factor.axes]
    if len(set(used)) != len(used) or not set(used) <= set(mesh.names):
        raise LayoutError(
            f"a layout that splits over axes {used} of mesh {mesh.names}",
            "every mesh axis splits at most one dim, and belongs to the mesh",
            "use one axis per split dim",
            "layout",
        )
    for dim in dims:
        for factor in dim:
            if factor.axes and (
                len(factor.extents) != mesh.size(factor.axes)
                or sum(factor.extents) != factor.size
                or min(factor.extents) < 0
            ):
                raise LayoutError(
                    f"sizes {list(factor.extents)} for {factor.size} rows over {factor.axes}",
                    f"one non-negative size per rank ({mesh.size(factor.axes)}), which sum up",
                    "pass the sizes of all ranks along the axis",
                    "layout",
                )
    layout = object.__new__(Layout)
    layout.mesh, layout.dims = mesh, dims
    layout.shape = tuple(prod(factor.size for factor in dim) for dim in dims)
    layout.split_axes = tuple(axis for axis in mesh.names if axis in used)
    layout.shared = tuple(axis for axis in layout.split_axes if mesh.size((axis,)) > 1)
    layout.local_shape = layout.local_shape_at(mesh.coordinate)
    layout.key = next(_keys)
    _interned[(mesh, dims)] = _by_key[layout.key] = layout
    return layout


def largest_share(layout: Layout) -> Fraction:
    """The part of the tensor that the rank with most of it holds."""
    share = Fraction(1)
    for dim in layout.dims:
        for factor in dim:
            if factor.axes and factor.size:
                share *= Fraction(max(factor.extents), factor.size)
    return share


def replica_axes(mesh: MeshAxes) -> tuple[str, ...]:
    """Axes along which ranks hold parts or copies of the same sample: all but `data`."""
    return tuple(axis for axis in mesh.names if axis != DATA)
