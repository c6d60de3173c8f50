"""Functions that torch writes in Python, run with every call inside them dispatched.

torch hands such a function to `__torch_function__` whole. Its source is as good on sharded tensors
as the user's own would be, as long as each operation in it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

_MODULES = {"torch.functional", "torch.nn.functional"}


def is_composite(function: Any) -> bool:
    """Whether torch wrote it in Python and asks there whether to hand it over."""
    return (
        isinstance(function, FunctionType)
        and function.__module__ in _MODULES
        and "handle_torch_function" in function.__code__.co_names
    )


def body_of(function: FunctionType) -> Callable[..., Any]:
    """The function without that question."""
    body = FunctionType(
        function.__code__,
        _unasked(function.__module__),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


@cache
def _unasked(module: str) -> dict[str, Any]:
    """A module's globals, in which nothing overrides torch functions."""
    names = {**vars(import_module(module))}
    for name in names:
        if name.startswith("has_torch_function"):
            names[name] = _no
    # Without its name, for Dynamo would look into the module itself.
    del names["__name__"]
    return names


def _no(*_: Any) -> bool:
    return False
