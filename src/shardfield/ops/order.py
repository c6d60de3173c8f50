"""Reorderings of dims: local views whose dims carry their splits along."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.registry import register
from shardfield.tensor import local_of, marked, result

_T = torch.Tensor


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
