"""Plans of views: how the factors of a layout spread over the dims of another shape. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardfield.layout import Dim, Factor, Layout, canonical, cuts, extents_of


@dataclass(frozen=True, eq=False, slots=True)
class ViewPlan:
    """How a layout is seen under another shape.

    Attributes:
        layout: of the result.
        source: the layout to view the local tensor in before it is moved; None if nothing moves.
        target: the layout it is moved to, which can be viewed as `layout`.
    """

    layout: Layout
    source: Layout | None = None
    target: Layout | None = None


def view_dims(layout: Layout, shape: tuple[int, ...]) -> ViewPlan:
    """Spreads the factors of a layout over the dims of a new shape of as many elements.

    A whole factor may be cut anywhere it divides, a split one where all its cuts are multiples of
    what is left inside; else its cuts move to the nearest multiples. Factors that do not line up
    with the new dims at all become one contiguous range first, over all their axes together.
    """
    if shape == layout.shape:
        return ViewPlan(layout)
    if not shape:
        return _whole(layout, layout.shape, shape)
    if 0 in shape:  # every rank holds all there is
        return ViewPlan(Layout(layout.mesh, [(Factor(size),) for size in shape]))
    inner = {prod(shape[index:]) for index in range(len(shape) + 1)}
    groups = _lined_up(canonical([f for dim in layout.dims for f in dim]), inner)
    atoms = [_cuttable(group, stride, inner) for group, stride in groups]
    out = Layout(layout.mesh, _spread(atoms, shape))
    if all(group == (atom,) for (group, _), atom in zip(groups, atoms, strict=True)):
        return ViewPlan(out)
    source = Layout(layout.mesh, [group for group, _ in groups])
    return ViewPlan(out, source, Layout(layout.mesh, [(atom,) for atom in atoms]))


def _whole(layout: Layout, seen: Sequence[int], shape: Sequence[int]) -> ViewPlan:
    """The view of what every rank gets whole, for dims of one row that cannot stay split."""
    target = Layout(layout.mesh, [(Factor(size),) for size in seen])
    return ViewPlan(Layout(layout.mesh, [(Factor(size),) for size in shape]), layout, target)


def _lined_up(atoms: Dim, inner: set[int]) -> list[tuple[Dim, int]]:
    """Groups of factors that the new dims' boundaries cut evenly, each with its inner stride.

    A group of several factors has to become one contiguous range.
    """
    strides = [prod(f.size for f in atoms[index + 1 :]) for index in range(len(atoms))]
    groups: list[tuple[Dim, int]] = []
    starts: list[int] = []
    index = 0
    while index < len(atoms):
        first = last = index
        if any(
            stride % strides[index] or atoms[index].size % (stride // strides[index])
            for stride in _between(inner, strides[index], atoms[index].size)
        ):
            while strides[last] not in inner:
                last += 1
            while strides[first] * atoms[first].size not in inner:
                first -= 1
        group = atoms[first : last + 1]
        if len(group) > 1:
            while starts and starts[-1] >= first:  # taken to be fine on their own
                starts.pop()
                groups.pop()
        starts.append(first)
        groups.append((group, strides[last]))
        index = last + 1
    return groups


def _between(inner: set[int], stride: int, size: int) -> list[int]:
    """Boundaries of new dims that lie strictly inside a factor."""
    return [boundary for boundary in inner if stride < boundary < stride * size]


def _cuttable(group: Dim, stride: int, inner: set[int]) -> Factor:
    """The one factor a group becomes, its cuts at multiples of what the new dims need whole."""
    size = prod(f.size for f in group)
    split = [f for f in group if f.axes]
    if not split:
        return Factor(size)
    unit = max(_between(inner, stride, size), default=stride) // stride
    if len(group) == 1 and all(extent % unit == 0 for extent in split[0].extents):
        return split[0]
    rows, extents = split[0].size, split[0].extents
    if len(split) > 1:  # ranges in the order of the ranks: evenly
        rows = prod(len(f.extents) for f in split)
        extents = (1,) * rows
    points = [(point * size // rows + unit // 2) // unit * unit for point in cuts(extents)]
    axes = tuple(axis for f in split for axis in f.axes)
    return Factor(size, axes, extents_of(points))


def _spread(atoms: Sequence[Factor], shape: tuple[int, ...]) -> list[list[Factor]]:
    """Hands factors that line up to the new dims, outermost first."""
    dims: list[list[Factor]] = []
    rest = list(reversed(atoms))
    for size in shape:
        dim: list[Factor] = []
        need = size
        while rest and (need > 1 or (size == 1 and not dim and rest[-1].size == 1)):
            atom = rest.pop()
            if need % atom.size:
                inner = atom.size // need
                extents = tuple(extent // inner for extent in atom.extents)
                rest.append(Factor(inner))
                atom = Factor(need, atom.axes, extents)
            dim.append(atom)
            need //= atom.size
        dims.append(dim)
    dims[-1] += reversed(rest)  # split factors of size 1
    return dims


def full_shape(numel: int, shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` with its -1 replaced.

    Raises:
        RuntimeError: it does not hold `numel` elements, with torch's text.
    """
    known = prod([size for size in shape if size != -1])  # Dynamo folds no generator
    shape = tuple(int(size) for size in shape)
    if shape.count(-1) == 1 and known > 0 and numel % known == 0:
        return tuple(numel // known if size == -1 else size for size in shape)
    if any(size < 0 for size in shape) or known != numel:
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {numel}")
    return shape


def sizes_given(args: tuple, named: dict) -> tuple[int, ...]:
    """Sizes passed one by one, as a sequence, or by keyword."""
    args = args or tuple(named.values())
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    return args
