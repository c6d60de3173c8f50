"""Every private name of torch that shardfield relies on, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.effects import EffectType
from torch.distributed import _broadcast_coalesced as broadcast_coalesced
from torch.distributed.distributed_c10d import GroupName, ProcessGroup, _resolve_process_group
from torch.distributed.distributed_c10d import (
    _get_default_store as default_store,
)
from torch.distributed.distributed_c10d import (
    _set_pg_timeout as set_group_timeout,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.hooks import BackwardHook

BelowAutograd = torch._C._AutoDispatchBelowAutograd
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
DisableTorchDispatch = torch._C._DisableTorchDispatch
functional = torch.ops._c10d_functional
make_subclass = torch.Tensor._make_subclass


def resolve_group(name: str) -> ProcessGroup:
    """The process group of a name, as functional collectives take it."""
    return _resolve_process_group(GroupName(name))


def held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether C++ holds this tensor, or a view of its memory, besides the caller's Python."""
    storage = tensor.untyped_storage()  # one use of the memory beside the tensor's own
    uses = tensor._use_count()  # type: ignore[attr-defined]
    return uses > 1 or torch._C._storage_Use_Count(storage._cdata) > 2


def results_are_cached() -> bool:
    """Whether selective checkpointing keeps results of operations: nobody may write into them."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
        for mode in _get_current_dispatch_mode_stack()
    )


def in_backward() -> bool:
    """Whether this thread runs inside autograd's engine."""
    return torch._C._current_graph_task_id() != -1


def saved_tensor_hooks_in_force():
    """The (pack, unpack) pair of the innermost `saved_tensors_hooks`, or None."""
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    return autograd._top_saved_tensors_default_hooks(False)


def let_dynamo_dispatch(functions) -> None:
    """Has Dynamo pass these functions to `__torch_function__`, as eager torch does.

    Its list leaves out some that do so, `torch.rand_like` among them; traced code would then get
    this rank's local result without an error.
    """
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().update(functions)


def let_dynamo_dispatch_more(kind: type) -> None:
    """Has Dynamo dispatch what eager torch does of a tensor class, and it does not.

    Tensors in a tuple, calls that `kind.__torch_function__` makes itself, `abs(x)`, `len(x)`,
    iteration, and losses of a `CrossEntropyLoss` made on the way: traced code would get this rank's
    local result without an error.
    """
    from torch._dynamo.variables import TupleVariable, torch_function
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    flatten_lists = torch_function._flatten_vts

    def flatten(values):
        found = []
        value: Any
        for value in flatten_lists(values):
            is_tuple = value.is_realized() and isinstance(value, TupleVariable)
            found += flatten(value.items) if is_tuple else [value]
        return found

    torch_function._flatten_vts = flatten

    variable = torch_function.TensorWithTFOverrideVariable

    def call(self, tx, fn, types, args, kwargs):
        entry = torch_function.get_torch_function_fn(tx, self)
        return torch_function.call_torch_function(tx, entry, fn, types, args, kwargs)

    ways = {
        "call_torch_function": call,
        "nb_absolute_impl": lambda self, tx: self.call_method(tx, "abs", [], {}),
        "sq_length": lambda self, tx: self.var_getattr(tx, "shape").unpack_var_sequence(tx)[0],
        "unpack_var_sequence": lambda self, tx, idxes=None: self.call_method(
            tx, "unbind", [], {}
        ).unpack_var_sequence(tx),
    }
    for name, way in ways.items():
        setattr(variable, name, _for_kind(kind, way, getattr(variable, name)))
    UserDefinedClassVariable._call_cross_entropy_loss = _dispatched_loss  # type: ignore[method-assign]


def _dispatched_loss(self, tx, args, kwargs):
    """`CrossEntropyLoss(...)` made in traced code, which Dynamo would call on local rows."""
    from torch._dynamo import variables

    options = "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"
    usual = None, None, -100, None, "mean", 0.0
    given = dict(zip(options, map(variables.ConstantVariable.create, usual), strict=True))
    given |= {**dict(zip(options, args, strict=False)), **kwargs}
    function = variables.TorchInGraphFunctionVariable(torch.nn.functional.cross_entropy)

    def loss(input, target):
        return function.call_function(tx, [input, target, *given.values()], {})

    return variables.LambdaVariable(loss)


def _for_kind(kind: type, way, otherwise):
    def chosen(self, *args, **kwargs):
        act = way if issubclass(self.class_type, kind) else otherwise
        return act(self, *args, **kwargs)

    return chosen


def ordered(name: str):
    """Makes a function an operation that compilers neither drop, merge, move nor reorder."""

    def register(function: Callable[..., torch.Tensor]) -> Any:
        operation = torch.library.custom_op(name, function, mutates_args=())
        operation.register_effect(EffectType.ORDERED)
        return operation

    return register


@torch._dynamo.assume_constant_result
def rank_of(group: str) -> int:
    """This rank's index in a process group."""
    return resolve_group(group).rank()


@torch._dynamo.assume_constant_result
def size_of(group: str) -> int:
    """Ranks of a process group."""
    return resolve_group(group).size()


def around_backward_hooks(around) -> None:
    """Has modules hang their backward hooks by `around(hang, args)`, `hang` being torch's way."""
    original = BackwardHook._apply_on_tensors

    def apply(self, fn, args):
        return around(lambda values: original(self, fn, values), args)

    BackwardHook._apply_on_tensors = apply  # type: ignore[method-assign]


def captures_leaf(node) -> bool:
    """Whether the running backward is `autograd.grad` and returns this leaf's gradient."""
    if node.name() == "AliasBackward0":  # a split parameter is used through an alias
        node = node.next_functions[0][0]
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "autograd.grad()" in str(error):
            return True
        raise
    return False


__all__ = [
    "BelowAutograd",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "RegisterPostBackwardFunction",
    "around_backward_hooks",
    "broadcast_coalesced",
    "captures_leaf",
    "default_store",
    "functional",
    "held_elsewhere",
    "in_backward",
    "let_dynamo_dispatch",
    "let_dynamo_dispatch_more",
    "make_subclass",
    "ordered",
    "rank_of",
    "resolve_group",
    "results_are_cached",
    "saved_tensor_hooks_in_force",
    "set_group_timeout",
    "size_of",
]
