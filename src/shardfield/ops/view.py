"""Views: reshapes that keep splits as factors of the new dims, and reorderings of dims.

A view whose new dims cut a split where no rank's range is cut stays a view of the local tensor.
Otherwise the rows move to the nearest ranges that can be cut; such a result is marked as moved, so
that writing into it is refused: the write would not reach the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.errors import UnsupportedOperation
from shardfield.layout import Dim, Factor, Layout, canonical, cuts, extents_of
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, local_of, result

_T = torch.Tensor
_compiling = torch.compiler.is_compiling


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
    with the new dims at all become one contiguous range first.

    Raises:
        UnsupportedOperation: factors that do not line up are split over more than one axis.
    """
    if shape == layout.shape:
        return ViewPlan(layout)
    if not shape:
        return _whole(layout, layout.shape, shape)
    if 0 in shape:  # every rank holds all there is
        return ViewPlan(Layout(layout.mesh, [(Factor(size),) for size in shape]))
    inner = {prod(shape[index:]) for index in range(len(shape) + 1)}
    groups = _lined_up(canonical([f for dim in layout.dims for f in dim]), inner, layout, shape)
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


def _lined_up(
    atoms: Dim, inner: set[int], layout: Layout, shape: tuple[int, ...]
) -> list[tuple[Dim, int]]:
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
            if sum(len(f.axes) > 0 for f in group) > 1:
                raise UnsupportedOperation(
                    f"a view of {layout} as {shape}",
                    "dims that do not line up with the new ones are split over more than one axis",
                    "x.redistribute(...) so that one of them is split, or reshape in two steps",
                    "views",
                )
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
    split = next((f for f in group if f.axes), None)
    if split is None:
        return Factor(size)
    unit = max(_between(inner, stride, size), default=stride) // stride
    scale = size // split.size
    if len(group) == 1 and all(extent % unit == 0 for extent in split.extents):
        return split
    points = [(point * scale + unit // 2) // unit * unit for point in cuts(split.extents)]
    return Factor(size, split.axes, extents_of(points))


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


@constant
def view_plan(layout: Layout, shape: tuple[int, ...]) -> ViewPlan:
    """The plan of a view as `shape`, which may hold one -1."""
    return view_dims(layout, full_shape(prod(layout.shape), shape))


def _sizes(args: tuple, named: dict) -> tuple[int, ...]:
    """Sizes passed one by one, as a sequence, or by keyword."""
    args = args or tuple(named.values())
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    return tuple(args)


def reshaped(op, input: ShardTensor, shape: tuple[int, ...], strict: bool = False) -> torch.Tensor:
    """A view of the local tensor where possible.

    Args:
        strict: torch would refuse to copy here; a copy is then marked as moved.
    """
    plan = view_plan(input._layout, shape)
    return _act(op, input, plan, strict)


def _act(op, input: ShardTensor, plan: ViewPlan, strict: bool = False) -> torch.Tensor:
    local = local_of(input)
    moved = input._moved
    if plan.source is not None:
        assert plan.target is not None
        local = local.reshape(plan.source.local_shape)
        local = move(local, plan.source, plan.target, op.__name__)
        local, moved = local.reshape(plan.layout.local_shape), True
    elif strict and not _compiling():
        try:
            local = local.view(plan.layout.local_shape)
        except RuntimeError:  # a local tensor with gaps where the global one has none
            local, moved = local.reshape(plan.layout.local_shape), True
    else:
        local = local.reshape(plan.layout.local_shape)
    return marked(result(local, plan.layout), moved)


def marked(x: torch.Tensor, moved: bool) -> torch.Tensor:
    """Remembers that writing into `x` would not reach its base."""
    if moved and isinstance(x, ShardTensor):
        x._moved = True
    return x


@register(_T.view, uses=False)
def view(op, input, *shape, **named):
    """Layout: splits stay as factors. Comm: none where the new dims line up, else one fetch."""
    sizes = _sizes(shape, named)
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        return _view_dtype(op, input, sizes[0])
    return reshaped(op, input, sizes, strict=True)


def _view_dtype(op, input, dtype):
    if dtype.itemsize != input.element_size():
        raise unsupported(op, f"a view as {dtype} changes the last dim", args=(input,))
    return marked(result(local_of(input).view(dtype), input._layout), input._moved)


@register(_T.reshape, torch.reshape, uses=False)
def reshape(op, input, *shape, **named):
    """As `view`; copies where torch would."""
    return reshaped(op, input, _sizes(shape, named))


@register(_T.view_as, uses=False)
def view_as(op, input, other):
    """As `view`; the layout of `other` plays no part.

    `autograd.Function` views inputs that it returns as themselves.
    """
    if not isinstance(input, ShardTensor):
        return input.view(tuple(other.shape))
    if tuple(other.shape) == input._layout.shape:
        local = local_of(input)
        return marked(result(op(local, local), input._layout), input._moved)
    return reshaped(op, input, tuple(other.shape), strict=True)


@register(_T.reshape_as, uses=False)
def reshape_as(op, input, other):
    """As `reshape`; the layout of `other` plays no part."""
    if not isinstance(input, ShardTensor):
        return input.reshape(tuple(other.shape))
    return reshaped(op, input, tuple(other.shape))


@register(torch.ravel, _T.ravel, uses=False)
def ravel(op, input):
    """As `reshape`."""
    return reshaped(op, input, (-1,))


@register(torch.flatten, _T.flatten, uses=False)
def flatten(op, input, start_dim=0, end_dim=-1):
    """As `reshape`."""
    shape = input._layout.shape
    start, end = wrapped(start_dim, len(shape)), wrapped(end_dim, len(shape))
    if start > end:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    merged = prod(shape[start : end + 1])
    return reshaped(op, input, (*shape[:start], merged, *shape[end + 1 :]))


@register(torch.unflatten, _T.unflatten, uses=False)
def unflatten(op, input, dim, sizes):
    """As `view`."""
    shape = input._layout.shape
    dim = wrapped(dim, len(shape))
    inner = full_shape(shape[dim], tuple(sizes))
    return reshaped(op, input, (*shape[:dim], *inner, *shape[dim + 1 :]))


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


@constant
def _unsqueezed(layout: Layout, dim: int) -> Layout:
    at = wrapped(dim, len(layout.dims) + 1)
    return Layout(layout.mesh, (*layout.dims[:at], (), *layout.dims[at:]))


@register(torch.unsqueeze, _T.unsqueeze, uses=False)
def unsqueeze(op, input, dim):
    """A local view. Comm: none."""
    out = _unsqueezed(input._layout, dim)
    return marked(result(local_of(input).unsqueeze(dim), out), input._moved)


@constant
def _squeeze_plan(layout: Layout, dims: tuple[int, ...] | None) -> ViewPlan:
    ndim = len(layout.dims)
    asked = range(ndim) if dims is None else {wrapped(dim, ndim) for dim in dims}
    gone = {dim for dim in asked if dim < ndim and layout.shape[dim] == 1}
    target = layout.replace(dict.fromkeys(gone, ()))
    out = Layout(layout.mesh, [d for index, d in enumerate(layout.dims) if index not in gone])
    if target is layout:
        return ViewPlan(out)
    return ViewPlan(out, layout, target)


@register(torch.squeeze, _T.squeeze, uses=False)
def squeeze(op, input, *dim, **named):
    """A local view. Comm: none, but for a split dim of one row, which every rank then gets."""
    dims = _sizes(dim, named) if dim or named else None
    return _act(op, input, _squeeze_plan(input._layout, dims), strict=True)


@constant
def _reordered(op, layout: Layout, args: tuple, names: tuple, values: tuple) -> Layout:
    # torch itself says where every dim goes: each has its own size here.
    marks = torch.empty(tuple(range(2, 2 + len(layout.dims))), device="meta")
    args = tuple(list(arg) if isinstance(arg, tuple) else arg for arg in args)
    return _in_order(layout, op(marks, *args, **dict(zip(names, values, strict=True))).shape)


@constant
def _reordered_by_property(name: str, layout: Layout) -> Layout:
    marks = torch.empty(tuple(range(2, 2 + len(layout.dims))), device="meta")
    return _in_order(layout, getattr(marks, name).shape)


def _in_order(layout: Layout, marks: Sequence[int]) -> Layout:
    return Layout(layout.mesh, [layout.dims[mark - 2] for mark in marks])


def _constant(value):
    return tuple(value) if isinstance(value, (list, tuple)) else value


@register(
    torch.permute,
    _T.permute,
    torch.transpose,
    _T.transpose,
    torch.swapaxes,
    _T.swapaxes,
    torch.swapdims,
    _T.swapdims,
    torch.movedim,
    _T.movedim,
    torch.moveaxis,
    _T.moveaxis,
    torch.t,
    _T.t,
    torch.adjoint,
    _T.adjoint,
    uses=False,
)
def reorder(op, input, *args, **kwargs):
    """A local view whose dims carry their splits along. Comm: none."""
    constants = tuple([_constant(arg) for arg in args])
    values = tuple([_constant(value) for value in kwargs.values()])
    out = _reordered(op, input._layout, constants, tuple(kwargs), values)
    return marked(result(op(local_of(input), *args, **kwargs), out), input._moved)


def _register_property(name: str, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def transposed(op, input, *_):
        out = _reordered_by_property(name, input._layout)
        return marked(result(act(local_of(input)), out), input._moved)

    register(getattr(_T, name).__get__, uses=False)(transposed)


# By methods, because Dynamo takes a property of an input for another input.
_register_property("T", lambda local: local.permute(tuple(range(local.dim() - 1, -1, -1))))
_register_property("mT", lambda local: local.transpose(-2, -1))
_register_property("H", _T.adjoint)
_register_property("mH", _T.adjoint)


@constant
def _expand_plan(layout: Layout, sizes: tuple[int, ...]) -> ViewPlan:
    torch.empty(layout.shape, device="meta").expand(sizes)  # raises where torch raises
    new = len(sizes) - len(layout.dims)
    dims: list[Dim] = [(Factor(size),) for size in sizes]
    gathered = {}
    for dim, factors in enumerate(layout.dims):
        if sizes[new + dim] in (-1, layout.shape[dim]):
            dims[new + dim] = factors
        elif layout.is_split(dim):
            gathered[dim] = ()
    out = Layout(layout.mesh, dims)
    return ViewPlan(out, layout, layout.replace(gathered)) if gathered else ViewPlan(out)


def _expanded(op, input: ShardTensor, sizes: tuple[int, ...]) -> torch.Tensor:
    plan = _expand_plan(input._layout, sizes)
    local = local_of(input)
    if plan.source is not None:
        assert plan.target is not None
        local = move(local, plan.source, plan.target, op.__name__)
    moved = input._moved or plan.source is not None
    return marked(result(local.expand(plan.layout.local_shape), plan.layout), moved)


@register(_T.expand, torch.broadcast_to, _T.broadcast_to, uses=False)
def expand(op, input, *size, implicit=False, **named):
    """A local view. Comm: none, but for a split dim of one row, which every rank then gets."""
    return _expanded(op, input, _sizes(size, named))


@register(_T.expand_as, uses=False)
def expand_as(op, input, other):
    """As `expand`; the layout of `other` plays no part."""
    if not isinstance(input, ShardTensor):
        return input.expand(tuple(other.shape))
    return _expanded(op, input, tuple(other.shape))


@constant
def _with_last(layout: Layout, dim: Dim | None) -> Layout:
    return Layout(layout.mesh, layout.dims[:-1] if dim is None else (*layout.dims, dim))


@register(torch.view_as_real, uses=False)
def view_as_real(op, input):
    """A local view. Comm: none."""
    out = _with_last(input._layout, (Factor(2),))
    return marked(result(op(local_of(input)), out), input._moved)


@register(torch.view_as_complex, uses=False)
def view_as_complex(op, input):
    """A local view. Comm: none."""
    if input._layout.is_split(len(input._layout.dims) - 1):
        raise unsupported(op, "real and imaginary part lie on different ranks", args=(input,))
    return marked(result(op(local_of(input)), _with_last(input._layout, None)), input._moved)


@constant
def _repeated(layout: Layout, repeats: tuple[int, ...]) -> Layout:
    lead: tuple[Dim, ...] = ((),) * (len(repeats) - len(layout.dims))
    dims = (*lead, *layout.dims)
    return Layout(layout.mesh, [(Factor(n), *dim) for n, dim in zip(repeats, dims, strict=True)])


@register(_T.repeat, torch.tile, _T.tile, uses=False)
def repeat(op, input, *repeats, **named):
    """Copies of the local rows, a whole factor before the split one. Comm: none."""
    counts = _sizes(repeats, named)
    missing = len(input._layout.dims) - len(counts)
    if missing > 0 and op is not _T.repeat:
        counts = (1,) * missing + counts
    elif missing > 0:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of "
            "tensor"
        )
    return result(local_of(input).repeat(counts), _repeated(input._layout, counts))
