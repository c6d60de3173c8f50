"""`ShardTensor`: the local shard of a global tensor, retyped, plus its layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from shardfield.axes import find_axes
from shardfield.comm._torch import (
    DisableTorchDispatch,
    DisableTorchFunction,
    make_subclass,
)
from shardfield.errors import LayoutError, UnsupportedOperation
from shardfield.layout import Factor, Layout
from shardfield.managed import is_managed, manage

Tensor = torch.Tensor
_as_subclass = torch.Tensor.as_subclass
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling


class ShardTensor(torch.Tensor):
    """A global tensor of which every rank holds one shard.

    Operations mean what they mean on the whole tensor; see docs. Made by `distribute_tensor`,
    `from_local`, the factories, and operations on other ShardTensors.

    Attributes:
        shape: global shape.
        layout: which rank holds what (`shardfield.Layout`, not torch's memory layout).

    Example:
        >>> mesh = shardfield.init_mesh(domain=1)
        >>> x = shardfield.distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        >>> x.sum().item()
        24.0
    """

    # In grad mode `_local` is the plain tensor this object is a view of; operations use it. Under
    # no_grad it is None and operations take a fresh alias: keeping an alias of the object on the
    # object would be a reference cycle that the collector cannot free.
    _local: Tensor | None = None
    _layout: Layout
    _moved: bool = False
    _splits_tokens: bool = False

    # __torch_function__ is set by the registry, which knows the handlers.

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Which rank holds what."""
        return self._layout

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return torch.Size(self._layout.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self._layout.dims)

    def dim(self) -> int:
        """Number of dims."""
        return len(self._layout.dims)

    def ndimension(self) -> int:
        """Number of dims."""
        return len(self._layout.dims)

    def size(self, dim: int | None = None):  # type: ignore[override]
        """Global shape, or the global size of one dim."""
        return self.shape if dim is None else self._layout.shape[dim]

    def numel(self) -> int:
        """Global number of elements."""
        return self.shape.numel()

    def nelement(self) -> int:
        """Global number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Global number of bytes."""
        return self.numel() * self.element_size()

    def __len__(self) -> int:
        if not self._layout.dims:
            raise LayoutError(
                "len() of a 0-d tensor", "a 0-d tensor has no length", "use numel()", "layout"
            )
        return self._layout.shape[0]

    def __iter__(self):
        return iter(self.unbind(0))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One torch placement per axis of the root mesh; the sizes are in `layout`."""
        found: dict[str, Placement] = {}
        for index in range(len(self._layout.dims)):
            found |= dict.fromkeys(self._layout.axes(index), Shard(index))
        return tuple(found.get(axis, Replicate()) for axis in self._layout.mesh.names)

    @property
    def device_mesh(self):
        """The root DeviceMesh whose axes the layout names."""
        return self._layout.mesh.device_mesh

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow to this tensor."""
        if self._local is not None:
            return self._local.requires_grad
        # Not of an alias, which under no_grad says False of a leaf that requires grad.
        with DisableTorchFunction():
            return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:
        """In place, as in torch."""
        if self._local is None:
            with DisableTorchFunction():
                super().requires_grad_(requires_grad)
            return self
        self._local.requires_grad_(requires_grad)
        if requires_grad and not _compiling():
            # Link this view to its base, so that C++ callers that see only this object (FSDP2's
            # hooks, autograd.Function) find the way to the plain tensor.
            torch.autograd.graph.increment_version(self._local)
            with DisableTorchFunction():
                _ = super().grad_fn
        return self

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, a ShardTensor of the same layout."""
        if self._local is not None:
            grad = self._local.grad
        else:
            with DisableTorchFunction():
                grad = super().grad
        if grad is None or isinstance(grad, ShardTensor):
            return grad
        return wrap(grad, self._layout)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            if not isinstance(value, ShardTensor) or value._layout is not self._layout:
                raise LayoutError(
                    f"setting .grad of {describe(self)} to {describe(value)}",
                    "a gradient has the layout of its tensor",
                    "use grad.redistribute(...) or None",
                    "layout",
                )
            value = local_of(value)
        if self._local is not None:
            self._local.grad = value
        else:
            with DisableTorchFunction():
                torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def grad_fn(self):  # type: ignore[override]
        """Node that made the plain tensor."""
        if self._local is not None:
            return self._local.grad_fn
        with DisableTorchFunction():
            return super().grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the user made this tensor."""
        if self._local is not None:
            return self._local.is_leaf
        with DisableTorchFunction():
            return super().is_leaf

    def retain_grad(self) -> None:
        """Keeps `.grad` of a tensor that is not a leaf."""
        with DisableTorchFunction():
            torch.Tensor.retain_grad(self if self._local is None else self._local)

    def register_hook(self, hook):
        """Calls `hook` with the gradient, a ShardTensor; what it returns replaces the gradient."""
        layout = self._layout

        def on_local(grad):
            replaced = hook(wrap(grad, layout))
            return None if replaced is None else local_of(replaced)

        with DisableTorchFunction():
            return torch.Tensor.register_hook(
                self if self._local is None else self._local, on_local
            )

    def register_post_accumulate_grad_hook(self, hook):
        """Calls `hook` with this tensor once its `.grad` has been accumulated."""
        with DisableTorchFunction():
            return torch.Tensor.register_post_accumulate_grad_hook(
                self if self._local is None else self._local, lambda _: hook(self)
            )

    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        """As `torch.Tensor.backward`; a sharded tensor needs a `gradient` of its layout."""
        if not isinstance(gradient, ShardTensor) or gradient._layout is not self._layout:
            raise LayoutError(
                f"backward() of {describe(self)} with gradient {describe(gradient)}",
                "the gradient of a sharded tensor is a ShardTensor of the same layout",
                "reduce to a scalar loss first, or pass gradient=shardfield.ones(...)",
                "layout",
            )
        if inputs is not None:
            inputs = [local_of(i) if isinstance(i, ShardTensor) else i for i in inputs]
        local_of(self).backward(local_of(gradient), retain_graph, create_graph, inputs)

    def to_local(self) -> Tensor:
        """This rank's shard, a plain tensor connected to this one in autograd."""
        return local_of(self)

    def full_tensor(self, dst: int | None = None) -> Tensor | None:
        """The whole tensor, plain: on every rank, or only on rank `dst` of its replica group.

        Args:
            dst: rank along the axes the tensor is split over (row-major); the others get None.
                The result for one rank only is detached.

        Comm: one all-to-all per split dim; bytes per rank, its shard to every rank that wants it.
        """
        from shardfield.distribute import full_tensor

        return full_tensor(self, dst)

    def redistribute(self, placements=None, sizes=None) -> Tensor:
        """The same global tensor in another layout; plain if nothing is split any more.

        Args:
            placements: one per axis of the root mesh (or per axis other than `data`); default,
                the present ones.
            sizes: rows of every rank along the axis, or a dict of them by axis name; default, as
                `torch.chunk` cuts.

        Comm: see `shardfield.comm.move`.
        """
        from shardfield.distribute import redistribute

        return redistribute(self, placements, sizes)

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        with torch.no_grad():
            local = local_of(self).detach()
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"ShardTensor({self._layout}, dtype={local.dtype}, device={local.device}{grad},\n"
            f"  local={local})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else object.__format__(self, spec)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only ShardTensors created by the user (leaves) can be deep-copied")
        local = local_of(self).detach().clone()
        if getattr(self, "_is_param", False):
            copied = parameter(local, self._layout, self.requires_grad, self._splits_tokens)
        else:
            copied = leaf(local, self._layout, self.requires_grad)
        if self.grad is not None:
            copied.grad = self.grad.clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        # The clone keeps a shard that is a view from dragging its base's storage along.
        local = local_of(self).detach()
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone()
        made = local, self._layout, self.requires_grad
        if getattr(self, "_is_param", False):
            return parameter, (*made, self._splits_tokens)
        return leaf, made

    def as_subclass(self, cls):
        """Refused: retyping keeps the local shard and drops its layout."""
        raise UnsupportedOperation(
            f"as_subclass({cls.__name__}) of {describe(self)}",
            "another type would hold this rank's rows without their layout",
            "x.to_local() for the shard, x.full_tensor() for the whole",
            "tripwire",
        )

    @property
    def data(self) -> ShardTensor:  # type: ignore[override]
        """The same values, detached."""
        return wrap(local_of(self).detach(), self._layout)

    @data.setter
    def data(self, value) -> None:
        same = isinstance(value, ShardTensor) and value._layout is self._layout
        if same and getattr(self, "_is_param", False):  # its module changes dtype or device
            with DisableTorchFunction(), DisableTorchDispatch():
                torch.Tensor.data.__set__(self, local_of(value))  # type: ignore[attr-defined]
            return
        raise UnsupportedOperation(
            f"assigning .data of {describe(self)}",
            "a shard and its layout change together",
            "use copy_ under torch.no_grad()",
            "in-place",
        )


class EagerShardTensor(ShardTensor):
    """What ShardTensors are outside compiled code: whatever no handler caught is an error."""

    @staticmethod  # a class method would be bound anew for every tensor that is made
    def __torch_dispatch__(func, types, args=(), kwargs=None):
        if func in _HARMLESS:
            with DisableTorchFunction(), DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled():
            # Composites come whole here, elsewhere in parts (none for `torch.as_tensor(x)`).
            with DisableTorchFunction():
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        raise UnsupportedOperation(
            f"{func} reached a local shard without passing a shardfield handler",
            "code that bypasses torch's Python functions would compute a local result",
            "register a handler (shardfield.register), or call x.to_local() on purpose",
            "tripwire",
        )


_HARMLESS = {torch.ops.aten.alias.default, torch.ops.aten.detach.default}
EagerShardTensor.__name__ = EagerShardTensor.__qualname__ = "ShardTensor"
EagerShardTensor.__module__ = ShardTensor.__module__

SHARDED = frozenset({ShardTensor, EagerShardTensor})
"""`type(x) in SHARDED` says what isinstance does, which asks torch's metaclass and takes longer."""

# Stands in as the C++ side of a ShardTensor whose local part is itself a subclass that cannot be
# retyped (FakeTensor): simulation only, nothing reads it.
_CARRIER = torch.empty(0)


def wrap(local: Tensor, layout: Layout) -> ShardTensor:
    """Retypes this rank's shard. No copy, no communication, autograd flows through `local`."""
    if _compiling():
        x = _as_subclass(local, ShardTensor)
        x._local = local
        x._moved = False  # Dynamo does not find the attribute of the class
    elif type(local) is not Tensor and type(local) is not torch.nn.Parameter:
        with DisableTorchDispatch():
            x = make_subclass(EagerShardTensor, _CARRIER)
        x._local = local
    elif _grad_enabled():
        x = _as_subclass(local, EagerShardTensor)
        x._local = local
    else:
        x = make_subclass(EagerShardTensor, local)
    x._layout = layout
    return x


def leaf(local: Tensor, layout: Layout, requires_grad: bool = False) -> ShardTensor:
    """A ShardTensor that holds its plain tensor whatever the grad mode."""
    if local._is_view() and not local.requires_grad:
        # Of a view, the retyped object would be a second view of the same base, which autograd in
        # C++ (reentrant checkpointing, FSDP2) does not find connected to the first.
        local = local.data
    with torch.enable_grad():
        x = wrap(local, layout)
    return x.requires_grad_() if requires_grad else x


def parameter(
    local: Tensor, layout: Layout, requires_grad: bool = True, splits_tokens: bool = False
) -> Any:
    """A split parameter: the object itself is autograd's leaf, as wrappers and optimizers expect.

    Args:
        local: this rank's shard.
        splits_tokens: what it contracts is scattered over tokens (sequence parallelism).
    """
    # Not of the class with the tripwire: DDP and fused optimizers call ATen on parameters.
    x = make_subclass(ShardTensor, local.detach(), requires_grad)
    x._layout = layout
    x._is_param = True
    x._splits_tokens = splits_tokens
    return x


def serialized_globals() -> list:
    """Functions and classes that a pickled ShardTensor names."""
    return [leaf, parameter, Layout, Factor, find_axes]


def result(local: Tensor, layout: Layout) -> Tensor:
    """`wrap`, or the plain tensor itself when nothing is split any more."""
    return wrap(local, layout) if layout.split_axes else local


def marked(x: Tensor, moved: bool) -> Tensor:
    """Remembers that writing into `x` would not reach its base."""
    if moved and isinstance(x, ShardTensor):
        x._moved = True
    return x


def local_of(x: Tensor) -> Tensor:
    """The plain tensor that operations on `x` act on."""
    local = x._local  # type: ignore[attr-defined]
    if local is not None:
        return local
    with DisableTorchFunction(), DisableTorchDispatch():
        if _grad_enabled() and x.grad_fn is not None:
            _refuse_foreign(x)
        local = _as_subclass(x, Tensor)
    if is_managed(x):  # a split parameter: what meets the activations is this alias
        manage(local)
    return local


def _refuse_foreign(x: Tensor) -> None:
    """Refuses what an `autograd.Function` returned that worked on shards unregistered.

    Its forward ran under no_grad on ShardTensors, so the value is right; its backward would get and
    give local gradients. torch's own (FSDP2, checkpointing) hand gradients through.
    """
    function = getattr(x.grad_fn, "_forward_cls", None)
    if function is None or function.__module__.partition(".")[0] == "torch":
        return
    raise UnsupportedOperation(
        f"{function.__module__}.{function.__qualname__}.apply on {describe(x)}",
        "an autograd.Function bypasses shardfield: its backward would mix local and global",
        f"shardfield.register({function.__name__}) a handler that calls it on local blocks",
        "tripwire",
    )


def describe(value: Any) -> str:
    """A value as error messages show it."""
    if isinstance(value, ShardTensor):
        return f"ShardTensor {value._layout}"
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    return repr(value)
