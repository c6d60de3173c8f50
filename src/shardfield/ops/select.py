"""Parts of a dim: slices, rows, pieces. Rows of split dims stay with their owners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Factor, Layout, cuts, wrapped
from shardfield.ranges import Cut, sliced
from shardfield.registry import current_operation, log, register, unsupported
from shardfield.tensor import ShardTensor, local_of, marked, result

_T = torch.Tensor


def _slice(op, input: ShardTensor, dim: int, cut: Cut) -> torch.Tensor:
    wanted = (*(None,) * dim, cut)
    local, out, moved = sliced(op, local_of(input), input._layout, wanted)
    return marked(result(local, out), moved or input._moved)


@register(torch.narrow, _T.narrow, uses=False)
def narrow(op, input, dim, start, length):
    """Every rank keeps those of its rows that are asked for. Comm: none."""
    layout = input._layout
    dim = wrapped(dim, len(layout.dims))
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


@register(torch.narrow_copy, _T.narrow_copy, uses=False)
def narrow_copy(op, input, dim, start, length):
    """A copy of `narrow`. Comm: none."""
    return input.narrow(dim, start, length).clone()


@register(torch.select, _T.select, uses=False)
def select(op, input, dim, index):
    """One row; of a split dim every rank gets it. Comm: none; its owner's row to all others."""
    dim = wrapped(dim, len(input._layout.dims))
    return input[(slice(None),) * dim + (int(index),)]


def _pieces(op, input: ShardTensor, dim: int, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    layout = input._layout
    if not layout.is_split(dim):
        return tuple(
            marked(result(part, _resized(layout, dim, part.shape[dim])), input._moved)
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


@register(torch.split, _T.split, torch.unsafe_split, _T.unsafe_split, uses=False)
def split(op, tensor, split_size_or_sections=None, dim=0, *, split_size=None):
    """Slices; of a split dim every rank keeps its rows. Comm: none."""
    given = split_size_or_sections if split_size is None else split_size
    dim = wrapped(dim, len(tensor._layout.dims))
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


@register(
    torch.split_with_sizes,
    _T.split_with_sizes,
    torch.unsafe_split_with_sizes,
    _T.unsafe_split_with_sizes,
    uses=False,
)
def split_with_sizes(op, input, split_sizes, dim=0):
    """As `split`."""
    return split(op, input, tuple(split_sizes), dim)


@register(torch.chunk, _T.chunk, torch.unsafe_chunk, _T.unsafe_chunk, uses=False)
def chunk(op, input, chunks, dim=0):
    """As `split`, into equal parts."""
    dim = wrapped(dim, len(input._layout.dims))
    size = input._layout.shape[dim]
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    lengths = _equal(size, -(-size // chunks)) if size else [0] * chunks
    return _pieces(op, input, dim, lengths)


@register(torch.tensor_split, _T.tensor_split, uses=False)
def tensor_split(op, input, indices_or_sections=None, dim=0, *, indices=None, sections=None):
    """As `split`, at given rows or into parts that differ by at most one row."""
    given = indices_or_sections if indices_or_sections is not None else indices or sections
    dim = wrapped(dim, len(input._layout.dims))
    size = input._layout.shape[dim]
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    if isinstance(given, int):
        full, more = divmod(size, given)
        return _pieces(op, input, dim, [full + (part < more) for part in range(given)])
    if given is None:
        raise unsupported(op, "neither rows nor a number of parts is given", args=(input,))
    points = [slice(0, at).indices(size)[1] for at in given]
    return tuple(
        _slice(op, input, dim, (a, max(a, b), 1))
        for a, b in zip((0, *points), (*points, size), strict=True)
    )


@constant
def _named_split(op, layout: Layout, given) -> int:
    """The dim that hsplit, vsplit and dsplit cut."""
    op(torch.empty(layout.shape, device="meta"), given)  # raises where torch raises
    return {"hsplit": min(1, len(layout.dims) - 1), "vsplit": 0, "dsplit": 2}[op.__name__]


@register(torch.hsplit, _T.hsplit, torch.vsplit, _T.vsplit, torch.dsplit, _T.dsplit, uses=False)
def named_split(op, input, indices_or_sections=None, *, indices=None, sections=None):
    """As `tensor_split`, along the dim that the name says."""
    given = indices_or_sections if indices_or_sections is not None else indices or sections
    given = tuple(given) if isinstance(given, (tuple, list)) else given
    return input.tensor_split(given, _named_split(op, input._layout, given))


@register(torch.unbind, _T.unbind, uses=False)
def unbind(op, input, dim=0):
    """All rows; of a split dim every rank gets all, which is logged with its bytes.

    Comm: none; of a split dim one ragged all-to-all of its rows.
    """
    layout, local, moved = input._layout, local_of(input), input._moved
    dim = wrapped(dim, len(layout.dims))
    if layout.is_split(dim):
        whole = _resized(layout, dim, layout.shape[dim])
        local, layout, moved = move(local, layout, whole, current_operation()), whole, True
        if not torch.compiler.is_dynamo_compiling():
            log.warning("unbind: gathered %d bytes on every rank, all of dim %d", local.nbytes, dim)
    out = _without(layout, dim)
    return tuple(marked(result(part, out), moved) for part in local.unbind(dim))


@constant
def _without(layout: Layout, dim: int) -> Layout:
    return Layout(layout.mesh, (*layout.dims[:dim], *layout.dims[dim + 1 :]))
