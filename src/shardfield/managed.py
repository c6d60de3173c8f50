"""Marks of parameters whose gradients a wrapper reduces, so that operations only scale them."""

from __future__ import annotations

import torch


class _Managed:
    """A mark that names its object.

    Of an object, Dynamo guards the type; of a number it would guard the value, and compile each of
    a model's equal blocks anew.
    """

    def __init__(self, of: torch.Tensor, tensor: bool) -> None:
        self.of, self.tensor = id(of), tensor


def manage(parameter: torch.Tensor, tensor: bool = False) -> None:
    """Marks a parameter whose gradient a wrapper averages over data and domain, or tensor too."""
    parameter._shardfield_managed = _Managed(parameter, tensor)  # type: ignore[attr-defined]


def is_managed(value: torch.Tensor) -> bool:
    """Whether `manage` marked this very object: a pickled or copied one is no longer managed."""
    mark = getattr(value, "_shardfield_managed", None)
    return mark is not None and (torch.compiler.is_dynamo_compiling() or mark.of == id(value))


def is_managed_over_tensor(value: torch.Tensor) -> bool:
    """Of a managed parameter: whether its gradient is averaged over tensor ranks too."""
    return value._shardfield_managed.tensor  # type: ignore[attr-defined]


__all__ = ["is_managed", "is_managed_over_tensor", "manage"]
