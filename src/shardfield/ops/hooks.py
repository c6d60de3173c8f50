"""Full backward hooks of modules: they see global gradients, as everything else does.

torch hangs these hooks on a node of the local graph, which hands them local, plain gradients.
Between two identities, of which the outer backward retypes the gradient and the inner one opens
it again, the node sees ShardTensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardfield.comm._torch import DisableTorchFunction, around_backward_hooks
from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of, wrap

_compiling = torch.compiler.is_dynamo_compiling


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local):
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        return local_of(grad) if isinstance(grad, ShardTensor) else grad


class _Retype(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, layout):
        ctx.layout = layout
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        return wrap(grad, ctx.layout), None


def _retyped(hang: Callable, args: tuple):
    """What torch does to hang a hook on `args`, done on their local shards."""
    if _compiling() or not any(isinstance(value, ShardTensor) for value in args):
        return hang(args)
    layouts = [value.layout if isinstance(value, ShardTensor) else None for value in args]
    opened = [
        value if layout is None else _Open.apply(local_of(value))
        for value, layout in zip(args, layouts, strict=True)
    ]
    hooked, indices = hang(tuple(opened))
    closed = [
        value if layout is None else wrap(_Retype.apply(value, layout), layout)
        for value, layout in zip(hooked, layouts, strict=True)
    ]
    return (tuple(closed) if type(args) is tuple else type(args)(*closed)), indices


around_backward_hooks(_retyped)


@register(torch.Tensor._backward_hooks.__set__, uses=False)  # type: ignore[attr-defined]
def set_backward_hooks(op, input: ShardTensor, hooks) -> None:
    """Straight to this object, nothing of it read.

    C++ calls this, holding the lock of a view, where it finds that the view was written in place:
    when DDP looks for unused parameters, for instance.
    """
    with DisableTorchFunction():
        op(input, hooks)
