"""Split parameters of compiled modules, which Dynamo does not take: they enter as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from shardfield.managed import is_managed, manage
from shardfield.tensor import ShardTensor, local_of, wrap


class SplitWeights:
    """The split parameters of a module; inside `with`, plain tensors stand in for them.

    Args:
        module: None has none.
        run: its forward, by which traced code calls it with the parameters themselves.
    """

    def __init__(self, module: nn.Module | None, run: Callable[..., Any]) -> None:
        self._caller = _Caller(module, run)
        # FSDP2's are there while their module runs, and other objects each time.
        self._come_and_go = any(isinstance(p, DTensor) for p in self._caller.parameters())
        self._find()

    def _find(self) -> None:
        self._parameters: list[Any] = []
        self._spots: list[tuple[dict[str, Any], str, int]] = []
        self._names: list[tuple[str, int]] = []
        places: dict[int, int] = {}  # by identity: tied ones are one
        for path, owner in self._caller.named_modules(remove_duplicate=False):
            for name, parameter in owner._parameters.items():
                if isinstance(parameter, ShardTensor):
                    place = places.setdefault(id(parameter), len(places))
                    if place == len(self._parameters):
                        self._parameters.append(parameter)
                    self._spots.append((owner._parameters, name, place))
                    self._names.append((f"{path}.{name}", place))
        self._said = [(p._layout, p._splits_tokens) for p in self._parameters]

    def __enter__(self) -> list[torch.Tensor]:
        if self._come_and_go:
            self._find()
        held = [_stand_in(parameter) for parameter in self._parameters]
        for parameters, name, place in self._spots:
            parameters[name] = held[place]
        return held

    def __exit__(self, *_: object) -> None:
        for parameters, name, place in self._spots:
            parameters[name] = self._parameters[place]

    def call(self, held: Sequence[torch.Tensor], args: Sequence, kwargs: Mapping) -> Any:
        """The forward, in traced code: `held` is what `with` returned."""
        values = []
        for local, (layout, splits_tokens) in zip(held, self._said, strict=True):
            value = wrap(local, layout)
            value._splits_tokens = splits_tokens
            values.append(value)
        named = {name: values[place] for name, place in self._names}
        return functional_call(self._caller, named, tuple(args), dict(kwargs))


class _Caller(nn.Module):
    """Has the parameters of a module and calls its forward: that of the module may be replaced."""

    def __init__(self, module: nn.Module | None, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._run = [run]  # a list: as a module it would be there twice

    def forward(self, *args, **kwargs):
        return self._run[0](*args, **kwargs)


def _stand_in(parameter: Any) -> torch.Tensor:
    local = local_of(parameter)
    plain = _NoView.apply(local)
    if is_managed(local):
        manage(plain)
    return plain


class _NoView(torch.autograd.Function):
    """The same memory, no view of a ShardTensor, which Dynamo would ask for its own base."""

    @staticmethod
    def forward(ctx, local):
        return local.data

    @staticmethod
    def backward(ctx, grad):
        return grad


__all__ = ["SplitWeights"]
