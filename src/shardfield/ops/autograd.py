"""`torch.autograd.grad` and `backward` where outputs or inputs are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfield.comm._torch import DisableTorchFunction, in_backward
from shardfield.errors import LayoutError
from shardfield.operands import part_of_plain
from shardfield.registry import register
from shardfield.tensor import ShardTensor, describe, local_of, wrap

Tensor = torch.Tensor


@register(torch.autograd.grad, uses=False)
def grad(op, outputs, inputs, grad_outputs=None, *args, **kwargs) -> tuple[Tensor | None, ...]:
    """Gradients of sharded inputs are sharded like them. Comm: that of the operations' backward."""
    outputs, inputs = _several(outputs), _several(inputs)
    given = _several(grad_outputs) if grad_outputs is not None else (None,) * len(outputs)
    cotangents = [_cotangent(y, g) for y, g in zip(outputs, given, strict=True)]
    with DisableTorchFunction():
        found = op(
            [_plain(y) for y in outputs],
            [_node_of(x) for x in inputs],
            cotangents,
            *args,
            **kwargs,
        )
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
    with DisableTorchFunction():
        op([_plain(y) for y in tensors], cotangents, retain_graph, create_graph, inputs=leaves)


@register(torch.Tensor._is_view, uses=False)
def is_view(op, input: ShardTensor) -> bool:
    """Of the tensor that operations act on; torch's pipelines detach in place what is no view."""
    with DisableTorchFunction():
        return op(input if input._local is None else input._local)


def _plain(value: Tensor) -> Tensor:
    return local_of(value) if isinstance(value, ShardTensor) else value


def _node_of(value: Tensor) -> Tensor:
    """What autograd knows an input by: of a split parameter, the object itself."""
    if isinstance(value, ShardTensor) and value._local is not None:
        return value._local
    return value


def _several(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


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
    if in_backward() and given is not None and given.shape == output.layout.local_shape:
        return given  # the engine's own, handed on by reentrant checkpointing
    if given is None or isinstance(given, ShardTensor) or given.shape != output.shape:
        raise LayoutError(
            f"gradient of {describe(output)} with grad_outputs {describe(given)}",
            "a sharded output needs its gradient: sharded like it, or plain and whole",
            "reduce to a scalar first, or pass grad_outputs",
            "layout",
        )
    return part_of_plain(given, output.layout)
