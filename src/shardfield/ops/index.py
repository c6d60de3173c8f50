"""Indexing by ints, slices and tensors.

What a slice takes of a split dim stays with its owners; rows that ints and index tensors pick of it
go to every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout, wrapped
from shardfield.operands import block, broadcast_layouts
from shardfield.picked import picked
from shardfield.ranges import Cut, cut_of, slice_plan, sliced
from shardfield.registry import register, unsupported, used
from shardfield.tensor import ShardTensor, local_of, marked, result, wrap

_T = torch.Tensor


@register(torch.index_select, _T.index_select, uses=False)
def index_select(op, input, dim, index):
    """As an index tensor in brackets."""
    if index.dim() > 1 or index.dtype not in (torch.int32, torch.int64):
        raise IndexError("index_select(): the index is a vector of int32 or int64")
    dim = wrapped(dim, input.dim())
    return _T.__getitem__(input, (slice(None),) * dim + (index.reshape(-1),))


def _refuse_split(op, input: ShardTensor, dim: int) -> None:
    if input._layout.is_split(dim):
        raise unsupported(
            op,
            f"it writes where an index tensor says along dim {dim}, which is split",
            "use torch.where, masked_fill or slices, or redistribute so that another dim is split",
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
            count = item.dim() if _is_mask(item) else 1
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
        if isinstance(item, ShardTensor) and _is_mask(item):
            raise unsupported(
                op,
                "the mask is itself split, so how many rows it takes differs between ranks",
                "use torch.where or masked_fill, or index with a plain mask",
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


def _is_mask(item: torch.Tensor) -> bool:
    return item.dtype in (torch.bool, torch.uint8)


def _dims_used(item) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor) and _is_mask(item):
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
    return marked(result(local, out), moved or input._moved)


def _plain(parsed: Index) -> list:
    return [1 if isinstance(item, slice) else item for item in parsed.items]


def _picked(op, local: torch.Tensor, here: Layout, parsed: Index) -> torch.Tensor:
    """Rows that index tensors pick; a mask stands for the tensors that its `nonzero` gives."""
    items: list = []
    for item in parsed.items:
        if isinstance(item, torch.Tensor) and _is_mask(item):
            items += item.to(local.device).nonzero(as_tuple=True)
        else:
            items.append(item)
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    kinds = tuple([_kind(item) for item in items])
    if not any(isinstance(tensor, ShardTensor) for tensor in tensors):
        shape = tuple(torch.broadcast_shapes(*[tensor.shape for tensor in tensors]))
        out, place = _picked_layout(here, kinds, shape)
        return result(picked(op, local, here, items, place), out)
    operands = [t._layout if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors]
    index, parts = broadcast_layouts(op, False, *operands)
    asked = index
    if _meet(here, index):
        index, parts = _whole(index, index.shape), [_whole(part, part.shape) for part in parts]
    else:
        local = used(local, index.split_axes, index)
    blocks = iter([block(t, part, index) for t, part in zip(tensors, parts, strict=True)])
    items = [next(blocks) if isinstance(item, torch.Tensor) else item for item in items]
    out, place = _picked_layout(here, kinds, index)
    local = picked(op, local, here, items, place)
    if index is not asked and not _meet(out, asked):
        split, _ = _picked_layout(here, kinds, asked)
        local, out = move(local, out, split, op.__name__), split
    return result(local, out)


@constant
def _meet(layout: Layout, index: Layout) -> bool:
    return not set(layout.split_axes).isdisjoint(index.split_axes)


def _kind(item) -> str:
    if item is None:
        return "new"
    if isinstance(item, slice):
        return "kept"
    return "picked" if isinstance(item, torch.Tensor) else "dropped"


@constant
def _picked_layout(layout: Layout, kinds: tuple[str, ...], index) -> tuple[Layout, int]:
    """Dims picked by tensors become those of the tensors' common shape, or common layout.

    These stand where the picked dims stood if they are neighbours once ints are gone, else first.

    Returns:
        The layout, and where the first of these dims stands.
    """
    split = isinstance(index, Layout)
    new: list[Dim] = list(index.dims) if split else [(Factor(size),) for size in index]
    dims: list[Dim] = []
    at = 0
    for kind in kinds:
        if kind in ("new", "kept"):
            dims.append(() if kind == "new" else layout.dims[at])
        at += kind != "new"
    left = [kind == "picked" for kind in kinds if kind != "dropped"]
    first = left.index(True)
    place = first if all(left[first : first + sum(left)]) else 0
    return Layout(layout.mesh, [*dims[:place], *new, *dims[place:]]), place


@register(_T.__getitem__, uses=False)
def getitem(op, input, index):
    """Slices stay with their owners; rows picked of a split dim go to every rank.

    Such a row is a copy: writing into it does not reach `input`; `input[index] = value` does.

    Layout: slices of a split dim may come out uneven or empty. What an index tensor picks is split
        as that tensor is, but where the two are split over the same mesh axis.
    Comm: none, but for an int at a split dim (its owner's row to all others), index tensors at one
        (one all-reduce of the result per axis; before, they are gathered if split over an axis of
        `input`), and a slice of a merged dim (one fetch).
    """
    if not isinstance(input, ShardTensor):
        layout = next(x._layout for x in _listed(index) if isinstance(x, ShardTensor))
        input = wrap(input, _whole(layout, tuple(input.shape)))
    return _taken(op, input, index)


def _listed(index) -> tuple | list:
    return index if isinstance(index, (tuple, list)) else (index,)


@constant
def _whole(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """A plain tensor of this shape as a layout beside another."""
    return Layout(layout.mesh, [(Factor(size),) for size in shape])


@register(_T.__setitem__, uses=False)
def setitem(op, input, index, value):
    """Writes into slices, every rank its own rows. Comm: none, but to move a split `value`.

    A slice of a merged dim that would first have to move is refused.
    """
    _refuse_writing(op, input, index, value)
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        _set_masked(op, input, index, value)
        return
    parsed = _parsed(op, input, index)
    if slice_plan(input._layout, parsed.cuts).source is not input._layout:
        raise _unwritable(op, input, "rows of merged dims")
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
    if input._moved:
        raise _unwritable(op, input, "a view whose data had to move")


def _unwritable(op, input: ShardTensor, what: str):
    fix = "write before reshaping, or use torch.where"
    return unsupported(op, f"it writes into {what}", fix, "in-place", (input,))


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
    if any(isinstance(item, ShardTensor) for item in parsed.items):
        raise unsupported(op, "it writes where a split index says", "", "indexing", (input,))
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        raise unsupported(
            op, "rows picked by a tensor can only be set to one number", "", "indexing", (input,)
        )
    if any(input._layout.is_split(dim) for dim in parsed.ints):
        raise unsupported(op, "one row of a split dim beside an index tensor", args=(input,))
    local, _, _ = sliced(op, local_of(input), input._layout, parsed.cuts)
    local[parsed.items] = value
