"""What optimizers, gradient clipping and GradScaler call on lists of tensors, some sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardfield.comm.collectives import all_reduce
from shardfield.constant import constant
from shardfield.layout import Layout
from shardfield.registry import current_operation, fallback, groups_of, register, unsupported
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor


@fallback
def of_lists(function) -> Callable | None:
    """The handler of `torch._foreach_*` and of fused optimizer steps."""
    name = getattr(function, "__name__", "")
    if name.startswith(("_foreach_", "_fused_")):
        return elementwise_of_lists
    return None


def elementwise_of_lists(op, *args, **kwargs) -> Any:
    """One elementwise operation for each position of the lists. Comm: none.

    Raises:
        UnsupportedOperation: tensors at one position have different layouts.
    """
    layouts: dict[int, Layout] = {}

    def local(value: Any, place: int | None = None) -> Any:
        if isinstance(value, (list, tuple)):
            return [local(item, index) for index, item in enumerate(value)]
        if not isinstance(value, ShardTensor):
            return value
        if place is None or layouts.setdefault(place, value.layout) is not value.layout:
            raise unsupported(
                op,
                "tensors that meet have one layout",
                "redistribute, or foreach=False",
                args=(args, kwargs),
            )
        return local_of(value)

    found = op(*[local(value) for value in args], **{k: local(v) for k, v in kwargs.items()})
    if found is None:
        return None
    if op.__name__.endswith("_"):
        return args[0]
    return [wrap(y, layouts[i]) if i in layouts else y for i, y in enumerate(found)]


@register(torch._foreach_norm, uses=False)
def norms(op, self, ord=2, dtype=None) -> list[Tensor]:
    """Norm of every tensor, plain. Comm: one all-gather of a number per split tensor and axis."""
    return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in self]


@register(torch._amp_foreach_non_finite_check_and_unscale_, uses=False)
def unscale(op, self, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscales gradients; what one rank finds, all of its mesh hear of, and skip the step alike.

    Comm: one all-reduce of a number per mesh axis.
    """
    op([local_of(x) if isinstance(x, ShardTensor) else x for x in self], found_inf, inv_scale)
    mesh = next(x.layout for x in self if isinstance(x, ShardTensor))
    heard = found_inf
    for group in _all_groups(mesh):
        heard = all_reduce(heard, group, current_operation(), "max")
    found_inf.copy_(heard)


@constant
def _all_groups(layout: Layout) -> tuple[str, ...]:
    return groups_of(layout, layout.mesh.names)
