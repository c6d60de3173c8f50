"""One family of operations a file; importing this package registers them all."""

import torch

from shardfield.ops import autograd, conv, loss, norm, pointwise, reduce
from shardfield.registry import resolve_all


def _torch_functions():
    for place in (torch, torch.Tensor, torch.nn.functional, torch.special, torch._C._nn):
        for name in dir(place):
            found = getattr(place, name, None)
            if hasattr(type(found), "__get__") and not callable(found):
                yield found.__get__
            elif callable(found) and not isinstance(found, type):
                yield found


resolve_all(_torch_functions())

__all__ = ["autograd", "conv", "loss", "norm", "pointwise", "reduce"]
