"""`torch.autograd.grad` and `backward` with sharded outputs and inputs: they act on local parts."""

from __future__ import annotations

import torch

from shardfield.errors import LayoutError
from shardfield.registry import name_of, register
from shardfield.tensor import ShardTensor, describe, local_of, wrap

Tensor = torch.Tensor


def _several(values) -> tuple:
    return (values,) if isinstance(values, Tensor) else tuple(values)


def _opened(values):
    """Plain tensors in place of sharded ones."""
    return tuple(local_of(v) if isinstance(v, ShardTensor) else v for v in values)


def _cotangents(op, outputs: tuple, gradients) -> tuple | None:
    """Local parts of the gradients of the outputs, which have the outputs' layouts."""
    if gradients is None:
        gradients = (None,) * len(outputs)
    gradients = _several(gradients)
    for output, gradient in zip(outputs, gradients, strict=True):
        sharded = isinstance(output, ShardTensor)
        fits = isinstance(gradient, ShardTensor) and gradient.layout is output.layout
        if (sharded and not fits) or (not sharded and isinstance(gradient, ShardTensor)):
            raise LayoutError(
                f"{name_of(op)} of {describe(output)} with gradient {describe(gradient)}",
                "the gradient of a sharded tensor is a ShardTensor of the same layout",
                "reduce to a scalar loss first, or pass a gradient of the output's layout",
                "layout",
            )
    return _opened(gradients)


@register(torch.autograd.grad, uses=False)
def grad(op, outputs, inputs, grad_outputs=None, *args, **kwargs) -> tuple:
    """Gradients in the layouts of the inputs. Comm: that of the operations between."""
    outputs, inputs = _several(outputs), _several(inputs)
    cotangents = _cotangents(op, outputs, grad_outputs)
    found = op(_opened(outputs), _opened(inputs), cotangents, *args, **kwargs)
    return tuple(
        wrap(gradient, leaf.layout)
        if isinstance(leaf, ShardTensor) and gradient is not None
        else gradient
        for leaf, gradient in zip(inputs, found, strict=True)
    )


@register(torch.autograd.backward, uses=False)
def backward(op, tensors, grad_tensors=None, *args, inputs=None, **kwargs) -> None:
    """Accumulates into `.grad` of the leaves. Comm: that of the operations between."""
    tensors = _several(tensors)
    cotangents = _cotangents(op, tensors, grad_tensors)
    opened = None if inputs is None else _opened(_several(inputs))
    op(_opened(tensors), cotangents, *args, inputs=opened, **kwargs)
