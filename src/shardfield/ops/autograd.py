"""`torch.autograd.grad` and `backward` where outputs or inputs are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from shardfield.comm._torch import DisableTorchFunction
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.operands import part_of_plain
from shardfield.registry import register
from shardfield.tensor import ShardTensor, describe, local_of, wrap

Tensor = torch.Tensor


@register(torch.autograd.grad, uses=False)
def grad(op, outputs, inputs, grad_outputs=None, *args, **kwargs):
    """Gradients of sharded inputs are sharded like them. Comm: that of the operations' backward.

    Returns:
        One entry for each input, in a tuple; in a dict where the inputs are one.
    """
    if type(inputs) is dict:
        found = grad(op, outputs, tuple(inputs.values()), grad_outputs, *args, **kwargs)
        return dict(zip(inputs, found, strict=True))
    outputs, inputs = _several(outputs), _several(inputs)
    given = _several(grad_outputs) if grad_outputs is not None else (None,) * len(outputs)
    cotangents = [_cotangent(y, g) for y, g in zip(outputs, given, strict=True)]
    nodes = [_node_of(x) for x in inputs]
    found = op([_plain(y) for y in outputs], nodes, cotangents, *args, **kwargs)
    return tuple(
        wrap(g, x.layout) if isinstance(x, ShardTensor) and g is not None else g
        for x, g in zip(inputs, found, strict=True)
    )


@register(torch.autograd.backward, uses=False)
def backward(
    op,
    tensors,
    grad_tensors=None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables=None,
    inputs=None,
) -> None:
    """Accumulates gradients into leaves. Comm: that of the operations' backward."""
    tensors = _several(tensors)
    grad_tensors = grad_variables if grad_tensors is None else grad_tensors
    given = _several(grad_tensors) if grad_tensors is not None else (None,) * len(tensors)
    cotangents = [_cotangent(y, g) for y, g in zip(tensors, given, strict=True)]
    leaves = None if inputs is None else [_node_of(x) for x in _several(inputs)]
    op([_plain(y) for y in tensors], cotangents, retain_graph, create_graph, inputs=leaves)


@register(CheckpointFunction, uses=False)
def recompute(op, function, preserve_rng_state: bool, *args):
    """Reentrant checkpointing, of shards: torch then takes and returns gradients of shards.

    It would hand the `grad` of a sharded input, which is sharded too, to nodes of the local graph.
    """
    given = [x.layout if isinstance(x, ShardTensor) else None for x in args]
    made: list[Layout | None] = []

    def on_shards(*shards):
        outputs = function(*_wrapped(shards, given))
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        made[:] = [y.layout if isinstance(y, ShardTensor) else None for y in several]
        plain = tuple(_plain(y) for y in several)
        return plain if isinstance(outputs, tuple) else plain[0]

    outputs = op(on_shards, preserve_rng_state, *[_plain(x) for x in args])
    if isinstance(outputs, tuple):
        return tuple(_wrapped(outputs, made))
    return _wrapped((outputs,), made)[0]


def _wrapped(values: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
    pairs = zip(values, layouts, strict=True)
    return [value if layout is None else wrap(value, layout) for value, layout in pairs]


@register(torch.Tensor._is_view, uses=False)
def is_view(op, input: ShardTensor) -> bool:
    """Of the tensor that operations act on; torch's pipelines detach in place what is no view."""
    with DisableTorchFunction():
        return op(input if input._local is None else input._local)


def _plain(value: Any) -> Any:
    return local_of(value) if isinstance(value, ShardTensor) else value


def _node_of(value: Tensor | GradientEdge) -> Tensor | GradientEdge:
    """What autograd knows an input by: never a ShardTensor, so that torch goes on to its engine.

    The engine must not run while torch functions are off, as torch's own way past an override has
    it: recomputed blocks and hooks would act on shards as if they were whole.
    """
    if not isinstance(value, ShardTensor):
        return value
    if value._local is not None:
        return value._local
    with DisableTorchFunction():
        return get_gradient_edge(value)


def _several(value) -> tuple:
    if isinstance(value, (Tensor, GradientEdge)):
        return (value,)
    return tuple(value.values()) if type(value) is dict else tuple(value)


def _cotangent(output: Tensor, given: Tensor | None) -> Tensor | None:
    """This rank's part of the gradient of an output."""
    if not isinstance(output, ShardTensor):
        if isinstance(given, ShardTensor):
            raise LayoutError(
                f"gradient of a plain tensor with grad_outputs {describe(given)}",
                "the gradient of a replicated tensor is replicated",
                "pass given.full_tensor()",
                "layout",
            )
        return given
    if isinstance(given, ShardTensor) and given.layout is output.layout:
        return local_of(given)
    if given is None or isinstance(given, ShardTensor) or given.shape != output.shape:
        raise LayoutError(
            f"gradient of {describe(output)} with grad_outputs {describe(given)}",
            "a sharded output needs its gradient: sharded like it, or plain and whole",
            "reduce to a scalar first, or pass grad_outputs",
            "layout",
        )
    return part_of_plain(given, output.layout)
