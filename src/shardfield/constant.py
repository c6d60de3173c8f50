"""Functions of layouts and integers: computed once, and constants to torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch

from shardfield.layout import Layout, layout_by_key

T = TypeVar("T")
_compiling = torch.compiler.is_dynamo_compiling


def constant(function: Callable[..., T]) -> Callable[..., T]:
    """Caches a pure function of hashable positional arguments, and lets Dynamo call, not trace, it.

    Dynamo cannot pass an object that one constant function returned to another, so that layouts
    travel by number. The cache is bounded, because point clouds change size at every sample.
    """
    cached = lru_cache(maxsize=4096)(function)

    @torch._dynamo.assume_constant_result
    def by_key(places, *args):
        values = list(args)
        for place in places:
            values[place] = layout_by_key(values[place])
        return cached(*values)

    @wraps(function)
    def call(*args):
        if not _compiling():
            return cached(*args)
        places, values = [], []
        for place, value in enumerate(args):
            if isinstance(value, Layout):
                places.append(place)
                values.append(value.key)
            else:
                values.append(value)
        return by_key(tuple(places), *values)

    return call
