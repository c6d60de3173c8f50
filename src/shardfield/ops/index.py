"""Indexing: rows of split dims stay with their owners, rows of whole dims are taken locally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout, cuts, even_extents, extents_of
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, local_of, result

_T = torch.Tensor

Cut = tuple[int, int, int]
"""Rows `start, start+step, ...` before `stop` of one dim; as `slice.indices` gives them."""


@dataclass(frozen=True, eq=False, slots=True)
class SlicePlan:
    """Slices along the dims of a layout, seen from this rank.

    Attributes:
        layout: of the result.
        source: the layout to move to first; the given one if nothing moves.
        cuts: (dim, local start, stop, step) to take of the local tensor.
    """

    layout: Layout
    source: Layout
    cuts: tuple[tuple[int, int, int, int], ...]


def rows_in(cut: Cut, before: int) -> int:
    """How many rows of a slice lie before a global row."""
    start, stop, step = cut
    return max(0, -((start - min(before, stop)) // step))


@constant
def slice_plan(layout: Layout, wanted: tuple[Cut | None, ...]) -> SlicePlan:
    """The plan of one slice per dim (None: all rows)."""
    source, taken, dims = layout, [], list(layout.dims)
    for dim, cut in enumerate(wanted):
        if cut is None or cut == (0, layout.shape[dim], 1):
            continue
        if not layout.is_split(dim):
            taken.append((dim, *cut))
            dims[dim] = (Factor(rows_in(cut, layout.shape[dim])),)
            continue
        inner = _inner_cut(layout.dims[dim], cut)
        if inner is not None:
            factor, unit = layout.dims[dim][0], layout.local_shape[dim]
            unit //= max(factor.size, 1)
            start, stop, _ = inner
            taken.append((dim, start * unit, stop * unit, 1))
            dims[dim] = (Factor(stop - start), *layout.dims[dim][1:])
            continue
        factor = contiguous_ranges(source, dim)
        source = source.replace({dim: (factor,)})
        points = [rows_in(cut, point) for point in cuts(factor.extents)]
        rank = layout.mesh.rank(factor.axes)
        start, stop, step = cut
        first = start + points[rank] * step - cuts(factor.extents)[rank]
        count = points[rank + 1] - points[rank]
        last = first + (count - 1) * step + 1
        taken.append((dim, first, last, step) if count else (dim, 0, 0, 1))
        dims[dim] = (Factor(points[-1], factor.axes, extents_of(points)),)
    return SlicePlan(Layout(layout.mesh, dims), source, tuple(taken))


def _inner_cut(dim: Dim, cut: Cut) -> Cut | None:
    """A slice in whole steps of a dim's leading whole factor, in units of it; else None."""
    start, stop, step = cut
    unit = prod(factor.size for factor in dim[1:])
    if dim[0].axes or step != 1 or not unit or start % unit or max(start, stop) % unit:
        return None
    return start // unit, max(start, stop) // unit, 1


def contiguous_ranges(layout: Layout, dim: int) -> Factor:
    """The one split factor of a dim, or the one it takes to hold contiguous ranges, evenly cut."""
    factor = layout.contiguous(dim)
    if factor is not None:
        return factor
    size, axes = layout.shape[dim], layout.axes(dim)
    return Factor(size, axes, even_extents(size, layout.mesh.size(axes)))


def cut_of(index: slice, size: int) -> Cut:
    """A slice as (start, stop, step) of a dim.

    Raises:
        ValueError: its step is not positive, as in torch.
    """
    if index.step is not None and index.step <= 0:
        raise ValueError("step must be greater than zero")
    start, stop, step = index.indices(size)
    return start, max(start, stop), step


def sliced(op, local: torch.Tensor, layout: Layout, wanted: tuple[Cut | None, ...]):
    """This rank's rows of a slice: (local, its layout, whether data moved).

    Comm: none, but for a slice of a merged dim, which moves to contiguous ranges first.
    """
    plan = slice_plan(layout, wanted)
    local = move(local, layout, plan.source, op.__name__)
    for dim, start, stop, step in plan.cuts:
        if step == 1:
            local = local.narrow(dim, start, stop - start)
        else:
            local = local[(slice(None),) * dim + (slice(start, stop, step),)]
    return local, plan.layout, plan.source is not layout


def _slice(op, input: ShardTensor, dim: int, cut: Cut) -> torch.Tensor:
    wanted = (*(None,) * dim, cut)
    local, out, moved = sliced(op, local_of(input), input._layout, wanted)
    return _marked(result(local, out), moved or input._moved)


def _marked(x: torch.Tensor, moved: bool) -> torch.Tensor:
    if moved and isinstance(x, ShardTensor):
        x._moved = True
    return x


def _dim(dim: int, layout: Layout) -> int:
    ndim = len(layout.dims)
    if not -ndim <= dim < ndim:
        raise IndexError(
            "Dimension out of range (expected to be in range of "
            f"[{-ndim}, {ndim - 1}], but got {dim})"
        )
    return dim % ndim


@register(torch.narrow, _T.narrow, uses=False)
def narrow(op, input, dim, start, length):
    """Every rank keeps those of its rows that are asked for. Comm: none."""
    layout = input._layout
    dim = _dim(dim, layout)
    size = layout.shape[dim]
    start = int(start)
    if not -size <= start <= size:
        raise IndexError(
            f"start out of range (expected to be in range of [{-size}, {size}], but got {start})"
        )
    start = start + size if start < 0 else start
    if length < 0 or start + length > size:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({size}).")
    return _slice(op, input, dim, (start, start + length, 1))


@register(torch.select, _T.select, uses=False)
def select(op, input, dim, index):
    """One row; of a split dim every rank gets it. Comm: none; its owner's row to all others."""
    dim = _dim(dim, input._layout)
    return _taken(op, input, (slice(None),) * dim + (int(index),))


def _pieces(op, input: ShardTensor, dim: int, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    layout = input._layout
    if not layout.is_split(dim):
        return tuple(
            _marked(result(part, _resized(layout, dim, part.shape[dim])), input._moved)
            for part in local_of(input).split(list(lengths), dim)
        )
    points = cuts(lengths)
    return tuple(_slice(op, input, dim, (a, b, 1)) for a, b in pairwise(points))


@constant
def _resized(layout: Layout, dim: int, size: int) -> Layout:
    return layout.replace({dim: (Factor(size),)})


def _equal(size: int, length: int) -> list[int]:
    """`length` rows each, the last one what is left."""
    if not size:
        return [0]
    return [min(length, size - at) for at in range(0, size, length)]


@register(torch.split, _T.split, uses=False)
def split(op, tensor, split_size_or_sections=None, dim=0, *, split_size=None):
    """Slices; of a split dim every rank keeps its rows. Comm: none."""
    given = split_size_or_sections if split_size is None else split_size
    dim = _dim(dim, tensor._layout)
    size = tensor._layout.shape[dim]
    if isinstance(given, (tuple, list)):
        if sum(given) != size or min(given, default=0) < 0:
            raise RuntimeError(
                "split_with_sizes expects split_sizes to sum exactly to "
                f"{size} (input tensor's size at dimension {dim}), but got "
                f"split_sizes={list(given)}"
            )
        return _pieces(op, tensor, dim, given)
    if given is None or given < 0 or (given == 0 and size):
        raise RuntimeError(f"split expects split_size be non-negative, but got split_size={given}")
    return _pieces(op, tensor, dim, _equal(size, given))


@register(torch.split_with_sizes, _T.split_with_sizes, uses=False)
def split_with_sizes(op, input, split_sizes, dim=0):
    """As `split`."""
    return split(op, input, tuple(split_sizes), dim)


@register(torch.chunk, _T.chunk, uses=False)
def chunk(op, input, chunks, dim=0):
    """As `split`, into equal parts."""
    dim = _dim(dim, input._layout)
    size = input._layout.shape[dim]
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    lengths = _equal(size, -(-size // chunks)) if size else [0] * chunks
    return _pieces(op, input, dim, lengths)


@register(torch.tensor_split, _T.tensor_split, uses=False)
def tensor_split(op, input, indices_or_sections=None, dim=0, *, indices=None, sections=None):
    """As `split`, at given rows or into parts that differ by at most one row."""
    given = indices_or_sections if indices_or_sections is not None else indices or sections
    dim = _dim(dim, input._layout)
    size = input._layout.shape[dim]
    if isinstance(given, int):
        full, more = divmod(size, given)
        return _pieces(op, input, dim, [full + (part < more) for part in range(given)])
    if isinstance(given, torch.Tensor):
        raise unsupported(op, "it is cut at rows given by a tensor", args=(input,))
    if given is None:
        raise unsupported(op, "neither rows nor a number of parts is given", args=(input,))
    points = [slice(0, at).indices(size)[1] for at in given]
    return tuple(
        _slice(op, input, dim, (a, max(a, b), 1))
        for a, b in zip((0, *points), (*points, size), strict=True)
    )


@register(torch.unbind, _T.unbind, uses=False)
def unbind(op, input, dim=0):
    """The rows of a dim that is not split. Comm: none."""
    layout = input._layout
    dim = _dim(dim, layout)
    if layout.is_split(dim):
        raise unsupported(
            op,
            f"every rank would get every row of dim {dim}, which is split",
            "take slices, split another dim, or gather with full_tensor() on purpose",
            "indexing",
            (input,),
        )
    out = _without(layout, dim)
    return tuple(_marked(result(part, out), input._moved) for part in local_of(input).unbind(dim))


@constant
def _without(layout: Layout, dim: int) -> Layout:
    return Layout(layout.mesh, (*layout.dims[:dim], *layout.dims[dim + 1 :]))


@register(torch.index_select, _T.index_select, uses=False)
def index_select(op, input, dim, index):
    """Rows of a dim that is not split, by a plain index. Comm: none."""
    if not isinstance(input, ShardTensor) or isinstance(index, ShardTensor):
        raise unsupported(op, "the index is split", args=((input, index),))
    dim = _dim(dim, input._layout)
    _refuse_split(op, input, dim)
    out = _resized(input._layout, dim, index.numel())
    return result(op(local_of(input), dim, index), out)


def _refuse_split(op, input: ShardTensor, dim: int) -> None:
    if input._layout.is_split(dim):
        raise unsupported(
            op,
            f"dim {dim}, whose rows an index tensor picks, is split",
            "redistribute so that another dim is split, or use slices",
            "indexing",
            (input,),
        )


@dataclass(slots=True)
class Index:
    """An index, item by item, spread over the dims of a tensor.

    Attributes:
        cuts: for every dim of the tensor the slice taken of it; an int takes one row.
        ints: dims of which an int takes a row.
        items: what is left for the local tensor: per dim of it, or for a new one, `slice(None)`,
            None, 0 for a dim of one row to drop, or an index tensor.
        picked: dims indexed by a tensor.
    """

    cuts: tuple[Cut | None, ...]
    ints: tuple[int, ...]
    items: tuple
    picked: tuple[int, ...]


def _parsed(op, input: ShardTensor, index) -> Index:
    items = _items(op, input, index)
    shape = input._layout.shape
    wanted: list[Cut | None] = []
    rest: list = []
    ints, picked = [], []
    for item in items:
        dim = len(wanted)
        if item is None:
            rest.append(None)
        elif isinstance(item, slice):
            wanted.append(None if item == slice(None) else cut_of(item, shape[dim]))
            rest.append(slice(None))
        elif isinstance(item, torch.Tensor):
            count = item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
            picked += range(dim, dim + count)
            wanted += [None] * count
            rest.append(item)
        else:
            at = int(item)
            if not -shape[dim] <= at < shape[dim]:
                raise IndexError(
                    f"index {at} is out of bounds for dimension {dim} with size {shape[dim]}"
                )
            at %= shape[dim]
            wanted.append((at, at + 1, 1))
            rest.append(0)
            ints.append(dim)
    return Index(tuple(wanted), tuple(ints), tuple(rest), tuple(picked))


def _items(op, input: ShardTensor, index) -> list:
    """The items of an index, one per dim or new dim; lists become tensors."""
    items = list(index) if isinstance(index, tuple) else [index]
    device = local_of(input).device
    for place, item in enumerate(items):
        if isinstance(item, (list, range)):
            items[place] = torch.tensor(item, device=device)
        elif isinstance(item, bool) or type(item).__name__ == "ndarray":
            raise unsupported(op, f"an index of type {type(item).__name__}", args=(input,))
        elif isinstance(item, torch.Tensor) and _is_int(item):
            items[place] = int(item)
        if isinstance(item, ShardTensor):
            raise unsupported(
                op,
                "the index is itself split, so how many rows it takes differs between ranks",
                "use torch.where or masked_fill, or index with a plain tensor along whole dims",
                "indexing",
                (input, item),
            )
    used = sum(_dims_used(item) for item in items)
    ndim = len(input._layout.dims)
    if used > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (ndim - used), *items[at + 1 :]]


def _is_int(item: torch.Tensor) -> bool:
    """Whether torch takes an index tensor for an int."""
    whole = not item.is_floating_point() and item.dtype not in (torch.bool, torch.uint8)
    return item.dim() == 0 and whole and not isinstance(item, ShardTensor)


def _dims_used(item) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


@constant
def _dropped(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """`layout` with some split dims of one row whole."""
    return layout.replace(dict.fromkeys(dims, ()))


@constant
def _basic(layout: Layout, items: tuple) -> Layout:
    """The layout after dropping dims (0), adding new ones (None) and keeping the others (1)."""
    dims, at = [], 0
    for item in items:
        if item is None:
            dims.append(())
            continue
        if item:
            dims.append(layout.dims[at])
        at += 1
    return Layout(layout.mesh, dims)


def _taken(op, input: ShardTensor, index) -> torch.Tensor:
    parsed = _parsed(op, input, index)
    for dim in parsed.picked:
        _refuse_split(op, input, dim)
    layout = input._layout
    local, here, moved = sliced(op, local_of(input), layout, parsed.cuts)
    rows = tuple([dim for dim in parsed.ints if layout.is_split(dim)])
    if rows:
        whole = _dropped(here, rows)
        local, here, moved = move(local, here, whole, op.__name__), whole, True
    if parsed.picked:
        return _picked(op, local, here, parsed)
    kept = tuple([None if item is None else 0 if item == 0 else 1 for item in _plain(parsed)])
    out = _basic(here, kept)
    if any(item != 1 for item in kept):
        local = local[parsed.items]
    return _marked(result(local, out), moved or input._moved)


def _plain(parsed: Index) -> list:
    return [1 if isinstance(item, slice) else item for item in parsed.items]


def _picked(op, local: torch.Tensor, here: Layout, parsed: Index) -> torch.Tensor:
    """Index tensors along whole dims; their dims come first where others lie between, as in torch.

    A mask stands for the tensors that `nonzero` gives, one per dim it covers.
    """
    items: list = []
    for item in parsed.items:
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            items += item.to(local.device).nonzero(as_tuple=True)
        else:
            items.append(item)
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    shape = tuple(torch.broadcast_shapes(*[tensor.shape for tensor in tensors]))
    kinds = tuple([_kind(item) for item in items])
    return result(local[tuple(items)], _picked_layout(here, kinds, shape))


def _kind(item) -> str:
    if item is None:
        return "new"
    if isinstance(item, slice):
        return "kept"
    return "picked" if isinstance(item, torch.Tensor) else "dropped"


@constant
def _picked_layout(layout: Layout, kinds: tuple[str, ...], shape: tuple[int, ...]) -> Layout:
    """Dims picked by tensors become those of the tensors' common shape.

    These stand where the picked dims stood if they are neighbours once ints are gone, else first.
    """
    new: list[Dim] = [(Factor(size),) for size in shape]
    dims: list[Dim] = []
    at = 0
    for kind in kinds:
        if kind in ("new", "kept"):
            dims.append(() if kind == "new" else layout.dims[at])
        at += kind != "new"
    left = [kind == "picked" for kind in kinds if kind != "dropped"]
    first = left.index(True)
    place = first if all(left[first : first + sum(left)]) else 0
    return Layout(layout.mesh, [*dims[:place], *new, *dims[place:]])


@register(_T.__getitem__, uses=False)
def getitem(op, input, index):
    """Slices stay with their owners; one row of a split dim goes to every rank.

    Such a row is a copy: writing into it does not reach `input`; `input[index] = value` does.

    Layout: slices of a split dim may come out uneven or empty. Comm: none, but for an int at a
        split dim (its owner's row to all others) and a slice of a merged dim (one fetch).
    """
    if not isinstance(input, ShardTensor):
        raise unsupported(
            op, "a plain tensor is indexed by a split one", "", "indexing", ((input, index),)
        )
    return _taken(op, input, index)


@register(_T.__setitem__, uses=False)
def setitem(op, input, index, value):
    """Writes into slices, every rank its own rows. Comm: none, but to move a split `value`."""
    _refuse_writing(op, input, index, value)
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        _set_masked(op, input, index, value)
        return
    parsed = _parsed(op, input, index)
    if parsed.picked:
        _set_picked(op, input, parsed, value)
        return
    local, here, _ = sliced(op, local_of(input), input._layout, parsed.cuts)
    # A row taken by an int keeps its dim, so that only its owner writes.
    rows = list(parsed.ints)
    target = result(local, here)
    if isinstance(value, torch.Tensor):
        value = _rows_kept(value, parsed, rows)
    if isinstance(target, ShardTensor):
        target.copy_(value) if isinstance(value, torch.Tensor) else target.fill_(value)


def _rows_kept(value: torch.Tensor, parsed: Index, rows: list[int]) -> torch.Tensor:
    """`value` without new dims of the index, with dims of one row where an int drops one."""
    back = len(parsed.items)
    for item in reversed(parsed.items):
        back -= 1
        after = sum(1 for later in parsed.items[back + 1 :] if later is not None)
        if item is None and value.dim() > after:
            value = value.squeeze(value.dim() - 1 - after)
        elif item == 0 and not isinstance(item, slice) and value.dim() >= after:
            value = value.unsqueeze(value.dim() - after)
    return value


def _refuse_writing(op, input, index, value) -> None:
    if not isinstance(input, ShardTensor):
        raise unsupported(
            op,
            "it writes a sharded value, or at a sharded index, into a plain tensor",
            "use torch.where, or full_tensor() on purpose",
            "in-place",
            ((input, index, value),),
        )
    merged = [d for d in range(len(input._layout.dims)) if input._layout.contiguous(d) is None]
    if input._moved or merged:
        raise unsupported(
            op,
            f"it writes into {'a view whose data had to move' if input._moved else 'merged dims'}",
            "write before reshaping, or use torch.where",
            "in-place",
            (input,),
        )


def _set_masked(op, input: ShardTensor, mask, value) -> None:
    if tuple(mask.shape) != tuple(input.shape) or (
        isinstance(value, torch.Tensor) and value.dim() > 0
    ):
        raise unsupported(
            op,
            "how many values a mask takes differs between ranks",
            "x.masked_fill_(mask, number), or torch.where with values of the tensor's shape",
            "indexing",
            ((input, mask),),
        )
    input.masked_fill_(mask, value)


def _set_picked(op, input: ShardTensor, parsed: Index, value) -> None:
    for dim in parsed.picked:
        _refuse_split(op, input, dim)
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        raise unsupported(
            op, "rows picked by a tensor can only be set to one number", "", "indexing", (input,)
        )
    if any(input._layout.is_split(dim) for dim in parsed.ints):
        raise unsupported(op, "one row of a split dim beside an index tensor", args=(input,))
    local, _, _ = sliced(op, local_of(input), input._layout, parsed.cuts)
    local[parsed.items] = value
