"""Which handler answers which torch function, and how one is added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from shardfield.axes import TENSOR
from shardfield.comm._torch import let_dynamo_dispatch, let_dynamo_dispatch_more
from shardfield.comm.reduce import scale_gradient, use
from shardfield.composite import body_of, is_composite
from shardfield.constant import constant
from shardfield.errors import UnsupportedOperation
from shardfield.layout import Layout
from shardfield.managed import is_managed, is_managed_over_tensor
from shardfield.tensor import SHARDED, EagerShardTensor, ShardTensor, local_of, wrap

log = logging.getLogger("shardfield")
Handler = Callable[..., Any]

_handlers: dict[Any, Handler] = {}
_python_methods: dict[str, Handler] = {}
_fallbacks: list[Callable[[Any], Handler | None]] = []
_compiling = torch.compiler.is_dynamo_compiling


class _State:
    function: Any = None
    gathering: int = 0


_state = _State()


def current_operation() -> str | None:
    """Name of the torch function the user called, for messages; None outside, and traced."""
    if _compiling() or _state.function is None:
        return None
    return getattr(_state.function, "__name__", None)


def register(*functions: Any, uses: bool = True) -> Callable[[Handler], Handler]:
    """Registers the handler of torch functions, custom ops or methods.

    The handler is called as `handler(op, *args, **kwargs)` with `op` the function that was called
    and the caller's arguments, so its signature is that of the functions it serves. It computes
    local blocks with `op` on plain tensors (`x.to_local()`) and wraps what comes out.

    Args:
        functions: what the user calls: `F.conv2d`, `torch.Tensor.sum`, `torch.ops.my.op`, or an
            `autograd.Function` class; `op` is then its `apply`.
        uses: pass operands that are replicated where others are split through `Use`, so that
            their gradients are summed over those mesh axes. False for handlers of one tensor.

    Raises:
        ValueError: one of the functions has a handler already.
    """

    def decorate(handler: Handler) -> Handler:
        entry = summing(handler) if uses else handler
        for function in functions:
            if function in _handlers:
                raise ValueError(f"{name_of(function)} has a handler already")
            _enter(function, entry)
            if isinstance(function, type) and issubclass(function, torch.autograd.Function):
                _dispatch_apply(function)
        let_dynamo_dispatch(functions)
        return handler

    return decorate


def _dispatch_apply(function: type[torch.autograd.Function]) -> None:
    """Sends `apply` through the registry, as torch does its functions but not this one."""
    original = function.apply

    def apply(*args, **kwargs):
        if not _shard_tensors(args) and not _shard_tensors(kwargs):
            return original(*args, **kwargs)
        outer = _state.function
        if outer is None:
            _state.function = function
        try:
            return _handlers[function](original, *args, **kwargs)
        finally:
            _state.function = outer

    function.apply = staticmethod(apply)  # type: ignore[method-assign]


def fallback(find: Callable[[Any], Handler | None]) -> Callable[[Any], Handler | None]:
    """Registers a rule that finds handlers for whole classes of functions, tried in turn."""
    _fallbacks.append(find)
    return find


def _enter(function: Any, handler: Handler) -> None:
    _handlers[function] = handler
    if not isinstance(function, FunctionType):
        return
    for name in [name for name, found in vars(torch.Tensor).items() if found is function]:
        _enter_method(name, function, handler)


def _enter_method(name: str, function: FunctionType, handler: Handler) -> None:
    """Registers a method of torch.Tensor that is written in Python."""
    _python_methods[function.__name__] = handler
    if name in ShardTensor.__dict__:
        return

    # Dynamo takes a method of torch.Tensor that is written in Python for an attribute, unless the
    # class overrides it.
    @wraps(function)
    def method(self, *args, **kwargs):
        if _compiling():
            return handler(function, self, *args, **kwargs)
        return function(self, *args, **kwargs)

    setattr(ShardTensor, name, method)


def resolve_all(functions: Iterable[Any]) -> None:
    """Looks up handlers ahead of time, so that code being traced only reads the table."""
    for function in functions:
        if function not in _handlers:
            found = _find(function)
            if found is not None:
                _enter(function, found)


def is_registered(function: Any) -> bool:
    """Whether a function has a handler of its own."""
    return function in _handlers


def handler_of(function: Any) -> Handler:
    """The handler of a torch function; one that refuses if there is none."""
    found = _handlers.get(function)
    if found is None:
        found = _handlers[function] = _find(function) or _refuse
    return found


def _find(function: Any) -> Handler | None:
    """The handler that a fallback gives; failing that, torch's own source."""
    for find in _fallbacks:
        found = find(function)
        if found is not None:
            return found
    return _composed(function) if is_composite(function) else None


def _composed(function: FunctionType) -> Handler:
    body = body_of(function)
    return lambda op, *args, **kwargs: body(*args, **kwargs)


def _refuse(op, *args, **kwargs):
    raise unsupported(op, "no handler is registered for it", args=(args, kwargs))


def unsupported(op: Any, rule: str, fix: str = "", docs: str = "operations", args: Any = ()):
    """The error of an operation that has no exact sharded form here.

    Args:
        args: what was asked for: arguments of any nesting, or the layouts of its operands.
    """
    asked = [x.layout for x in _shard_tensors(args)] or [x for x in args if isinstance(x, Layout)]
    if _compiling():
        _raise_unsupported(op, rule, fix, docs, *asked)
    return _unsupported(op, rule, fix, docs, *asked)


def _unsupported(op, rule, fix, docs, *asked) -> UnsupportedOperation:
    layouts = "; ".join(f"ShardTensor {layout}" for layout in asked)
    inside = "" if _state.function in (None, op) else f", inside {name_of(_state.function)},"
    fix = fix or "x.redistribute(...) or x.full_tensor() first, or `with allow_gather():`"
    asked_for = f"{name_of(op)}{inside} on {layouts or 'a ShardTensor'}"
    return UnsupportedOperation(asked_for, rule, fix, docs)


@constant
def _raise_unsupported(op, rule, fix, docs, *asked):
    """Raises where Dynamo calls and does not trace, so that compiling shows this error."""
    raise _unsupported(op, rule, fix, docs, *asked)


def name_of(function: Any) -> str:
    """A function's name as the user wrote it: `conv2d`, `Tensor.view`."""
    name = getattr(function, "__name__", None) or str(function)
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        return f"Tensor.{getattr(owner, '__name__', owner)}"
    return name


def _torch_function(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    """Entry of every torch function that meets a ShardTensor."""
    if _compiling():
        kwargs = kwargs or {}
        # Dynamo has two kinds of variables for functions in Python, and finds them unequal.
        if isinstance(func, FunctionType) and func.__name__ in _python_methods:
            return _python_methods[func.__name__](func, *args, **kwargs)
        return _handlers.get(func, _refuse)(func, *args, **kwargs)
    handler = _handlers.get(func) or handler_of(func)
    outer = _state.function
    if outer is None:
        _state.function = func
    try:
        # Passing on no keywords would cost two dicts.
        return handler(func, *args, **kwargs) if kwargs else handler(func, *args)
    except UnsupportedOperation:
        if not _state.gathering:
            raise
        return _gather_and_compute(func, args, kwargs or {})
    finally:
        _state.function = outer


# Set on both: torch disables it on a class that defines __torch_dispatch__ and not this one.
for _kind in (ShardTensor, EagerShardTensor):
    _kind.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
let_dynamo_dispatch_more(ShardTensor)


def used(value: torch.Tensor, axes: tuple[str, ...], layout: Layout) -> torch.Tensor:
    """A plain operand, replicated over `axes`, on its way into a computation split over them.

    Its gradient is summed over those axes; that of a parameter which `parallelize` manages is
    multiplied, so that the wrapper's average over data and domain is exact.
    """
    if isinstance(value, DTensor):
        raise unsupported(
            current_operation() or "an operation",
            "a DTensor beside a ShardTensor: its shards and these say nothing of each other",
            "pass value.full_tensor(), or a ShardTensor",
            "mixing",
        )
    if not axes or not value.requires_grad:
        return value
    operation = current_operation()
    if is_managed(value):
        # Unless asked to, the wrapper averages over data and domain only: over tensor we sum.
        whole = is_managed_over_tensor(value)
        averaged = tuple(axis for axis in axes if whole or axis != TENSOR)
        groups = groups_of(layout, averaged)
        value = scale_gradient(value, _ranks(layout, averaged), groups, operation)
        axes = tuple(axis for axis in axes if axis not in averaged)
    return use(value, groups_of(layout, axes), operation)


@constant
def groups_of(layout: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Process groups of mesh axes; axes of one rank need none."""
    mesh = layout.mesh
    return tuple(mesh.group((axis,)) for axis in axes if mesh.size((axis,)) > 1)


@constant
def _ranks(layout: Layout, axes: tuple[str, ...]) -> int:
    return layout.mesh.size(axes)


def split_axes(tensors: list) -> tuple[str, ...]:
    """Mesh axes of several ranks over which a computation on these ShardTensors is split."""
    first = tensors[0]._layout
    axes = first.shared
    for x in tensors:
        layout = x._layout
        if layout is not first and layout.shared != axes:
            union = {*axes, *layout.shared}
            axes = tuple(axis for axis in first.mesh.names if axis in union)
    return axes


def _shard_tensors(values: Any) -> list:
    found = []
    if isinstance(values, dict):
        values = values.values()
    for value in values:
        if isinstance(value, ShardTensor):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            found += _shard_tensors(value)
    return found


_SIZES = {int}


def _may_hold_tensors(values: Any) -> bool:
    return isinstance(values, dict) or not _SIZES.issuperset(map(type, values))


def summing(handler: Handler) -> Handler:
    """A handler whose replicated operands are passed through `used` first, as `register` does."""

    def call(op, *args, **kwargs):
        layout = None
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) in SHARDED:
                if layout is None:
                    layout = value._layout
                elif value._layout is not layout:
                    break
            elif isinstance(value, (list, tuple, dict)) and _may_hold_tensors(value):
                break
        else:
            if layout is not None and not layout.shared:
                return handler(op, *args, **kwargs) if kwargs else handler(op, *args)
        tensors = _shard_tensors(args)
        if kwargs:
            tensors += _shard_tensors(kwargs)
        if not tensors:
            return handler(op, *args, **kwargs)
        axes = split_axes(tensors)
        if not axes:
            return handler(op, *args, **kwargs)
        layout = tensors[0]._layout
        args = tuple([_used_in(value, axes, layout) for value in args])
        if kwargs:
            kwargs = {key: _used_in(value, axes, layout) for key, value in kwargs.items()}
        return handler(op, *args, **kwargs)

    call.__name__ = getattr(handler, "__name__", "handler")
    return call


def _used_in(value: Any, axes: tuple[str, ...], layout: Layout) -> Any:
    if isinstance(value, ShardTensor):
        own = value._layout.shared
        if own == axes:
            return value
        missing = tuple(axis for axis in axes if axis not in own)
        return wrap(used(local_of(value), missing, layout), value._layout)
    if isinstance(value, torch.Tensor):
        return used(value, axes, layout)
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)([_used_in(v, axes, layout) for v in value])
    return value


@contextmanager
def allow_gather() -> Iterator[None]:
    """Inside, an unsupported operation gathers its operands whole and computes on every rank.

    The result is a plain, replicated tensor; each such call is logged with its bytes. Memory and
    time are those of one process: meant for small tensors and first experiments.
    """
    _state.gathering += 1
    try:
        yield
    finally:
        _state.gathering -= 1


def _gather_and_compute(func, args, kwargs):
    name = name_of(func)
    if name.endswith("_") and not name.endswith("__"):
        raise unsupported(func, "an in-place result cannot be gathered", args=(args, kwargs))
    total = 0

    def whole(value):
        nonlocal total
        if isinstance(value, ShardTensor):
            total += value.numel() * value.element_size()
            return value.full_tensor()
        return value

    args, kwargs = tree_map(whole, args), tree_map(whole, kwargs)
    log.warning("%s: gathered %d bytes on every rank (allow_gather)", name, total)
    return func(*args, **kwargs)
