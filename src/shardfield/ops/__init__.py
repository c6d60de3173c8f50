"""One family of operations a file; importing this package registers them all."""

import importlib
import pkgutil

import torch

from shardfield.registry import resolve_all


def _torch_functions():
    nn = getattr(torch._C, "_nn")  # noqa: B009
    for place in (torch, torch.Tensor, torch.nn.functional, torch.special, nn):
        for name in dir(place):
            found = getattr(place, name, None)
            if hasattr(type(found), "__get__") and not callable(found):
                yield getattr(found, "__get__")  # noqa: B009
            elif callable(found) and not isinstance(found, type):
                yield found


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
resolve_all(_torch_functions())
