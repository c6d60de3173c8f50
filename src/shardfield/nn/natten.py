"""`natten`'s functions on sharded tensors, if that package is in use. It is not needed here.

They are Python functions that know nothing of `__torch_function__`: natten's modules get ones that
ask for it first. Plain tensors go on to natten's own kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from inspect import signature
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function

from shardfield.ops.neighborhood import neighborhood_attention
from shardfield.registry import register, unsupported

SERVED = ("na1d", "na2d", "na3d", "neighborhood_attention_generic")
TAKEN = ("kernel_size", "stride", "dilation", "is_causal", "scale")
CHANGES = ("additional_keys", "additional_values", "return_lse", "rpb")
"""Arguments that ask for another result; the rest choose kernels and tiles."""


def serve() -> None:
    """Has natten's functions take ShardTensors, now or as soon as it is imported."""
    if "natten" in sys.modules:
        replace_functions()
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Finds natten as the other finders do, and looks after it once it is loaded."""

    searching = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "natten" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            _then_replace(spec.loader)
        return spec


def _then_replace(loader: Loader) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        replace_functions()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def replace_functions() -> None:
    """Replaces the served functions wherever natten's own modules name them."""
    import natten  # type: ignore[import-not-found]

    places = [natten, *(m for name, m in sys.modules.items() if name.startswith("natten."))]
    for name in SERVED:
        found = next((vars(m)[name] for m in places if name in vars(m)), None)
        if found is None:
            continue
        asking = _asking(found)
        for module in places:
            for alias, value in list(vars(module).items()):
                if value is found:
                    setattr(module, alias, asking)


def _asking(function: Callable) -> Callable:
    """A function of natten that hands sharded tensors over."""
    names = tuple(signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        operands = tuple(given.get(name) for name in ("query", "key", "value"))
        if not has_torch_function(operands):
            return function(*args, **kwargs)
        return handle_torch_function(call, operands, **given)

    register(call, uses=False)(_sharded)
    return call


def _sharded(op, query, key, value, **given):
    """Exact where `neighborhood_attention` is. Comm: as there."""
    asked = [name for name in CHANGES if given.get(name) not in (None, False)]
    if asked:
        raise unsupported(
            op, f"it has no {', '.join(asked)} for sharded tensors",
            "leave that out, or gather with full_tensor()", "neighborhood", (query, key, value),
        )  # fmt: skip
    options = {name: given[name] for name in TAKEN if given.get(name) is not None}
    return neighborhood_attention(query, key, value, **options)


__all__ = ["replace_functions", "serve"]
