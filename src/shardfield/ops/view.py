"""Views: other shapes of the same elements. Splits stay as factors of the new dims.

A view whose new dims cut a split where no rank's range is cut stays a view of the local tensor.
Otherwise the rows move to the nearest ranges that can be cut; such a result is marked as moved, so
that writing into it is refused: the write would not reach the base.
"""

from __future__ import annotations

from math import prod

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.layout import Dim, Factor, Layout, wrapped
from shardfield.ranges import aligned, divided, moved_to, multiplied
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, local_of, marked, result, wrap
from shardfield.views import ViewPlan, full_shape, sizes_given, view_dims

_T = torch.Tensor
_compiling = torch.compiler.is_dynamo_compiling


@constant
def view_plan(layout: Layout, shape: tuple[int, ...]) -> ViewPlan:
    """The plan of a view as `shape`, which may hold one -1."""
    return view_dims(layout, full_shape(prod(layout.shape), shape))


def reshaped(op, input: ShardTensor, shape: tuple[int, ...], strict: bool = False) -> torch.Tensor:
    """A view of the local tensor where possible.

    Args:
        strict: torch would refuse to copy here; a copy is then marked as moved.
    """
    plan = view_plan(input._layout, shape)
    return _act(op, input, plan, strict)


def _act(op, input: ShardTensor, plan: ViewPlan, strict: bool = False) -> torch.Tensor:
    local, layout, moved = local_of(input), plan.layout, input._moved
    if plan.source is not None:
        assert plan.target is not None
        local = local.reshape(plan.source.local_shape)
        local = move(local, plan.source, plan.target, op.__name__)
        local, moved = local.reshape(layout.local_shape), True
    elif strict and not _compiling():
        try:
            local = local.view(layout.local_shape)
        except RuntimeError:  # a local tensor with gaps where the global one has none
            local, moved = local.reshape(layout.local_shape), True
    else:
        local = local.reshape(layout.local_shape)
    out = result(local, layout)
    return marked(out, moved) if moved else out


@register(_T.view, uses=False)
def view(op, input, *shape, **named):
    """Layout: splits stay as factors. Comm: none where the new dims line up, else one fetch."""
    sizes = sizes_given(shape, named)
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        return _view_dtype(op, input, sizes[0])
    return reshaped(op, input, sizes, strict=True)


@constant
def _dtype_plan(layout: Layout, dtype, other) -> tuple[Layout, Layout]:
    """The layout whose last dim can be read in items of another type, and that of the result."""
    torch.empty(layout.shape, dtype=dtype, device="meta").view(other)  # raises where torch raises
    last, held, wanted = len(layout.dims) - 1, dtype.itemsize, other.itemsize
    if held >= wanted:
        return layout, layout.replace({last: multiplied(layout.dims[last], held // wanted)})
    unit = wanted // held
    source = aligned(layout, ((last, unit),))
    return source, source.replace({last: divided(source.dims[last], unit)})


def _view_dtype(op, input, dtype):
    """A local view. Comm: none, but where a rank's rows end inside one of the wider items."""
    held, wanted = input.element_size(), dtype.itemsize
    if held == wanted or not input._layout.dims:
        return marked(result(local_of(input).view(dtype), input._layout), input._moved)
    source, out = _dtype_plan(input._layout, input.dtype, dtype)
    input = moved_to(input, source)
    local, moved = local_of(input), input._moved
    if not local.numel():  # has strides that fit no wider item
        return wrap(local.new_empty(out.local_shape, dtype=dtype), out)
    if held < wanted and (local.storage_offset() * held % wanted or not local.is_contiguous()):
        local, moved = local.clone(memory_format=torch.contiguous_format), True
    return marked(result(local.view(dtype), out), moved)


@register(_T.reshape, torch.reshape, uses=False)
def reshape(op, input, *shape, **named):
    """As `view`; copies where torch would."""
    return reshaped(op, input, sizes_given(shape, named))


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


@constant
def _unsqueezed(layout: Layout, dim: int) -> Layout:
    at = wrapped(dim, len(layout.dims) + 1)
    return Layout(layout.mesh, (*layout.dims[:at], (), *layout.dims[at:]))


@register(torch.unsqueeze, _T.unsqueeze, uses=False)
def unsqueeze(op, input, dim):
    """A local view. Comm: none."""
    out = _unsqueezed(input._layout, dim)
    return marked(result(local_of(input).unsqueeze(dim), out), input._moved)


@register(*(getattr(torch, f"atleast_{n}d") for n in (1, 2, 3)), uses=False)
def atleast(op, *tensors):
    """Local views. Comm: none."""
    ndim = int(op.__name__[len("atleast_")])
    if len(tensors) == 1:
        return _at_least(tensors[0], ndim)
    return tuple([_at_least(tensor, ndim) for tensor in tensors])


def _at_least(x: torch.Tensor, ndim: int) -> torch.Tensor:
    """As torch does: new dims come first, but for the third, which comes last."""
    if x.dim() == 0:
        return x.reshape((1,) * ndim)
    if x.dim() == 1 and ndim > 1:
        x = x.unsqueeze(0)
    return x.unsqueeze(-1) if x.dim() == 2 and ndim == 3 else x


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
    dims = sizes_given(dim, named) if dim or named else None
    return _act(op, input, _squeeze_plan(input._layout, dims), strict=True)


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
