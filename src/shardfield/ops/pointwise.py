"""Every operation torch tags pointwise, with broadcasting; and copies that keep the values."""

from __future__ import annotations

import torch

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout
from shardfield.operands import part_of_plain
from shardfield.registry import current_operation, fallback, register, unsupported, used
from shardfield.tensor import ShardTensor, local_of, result, wrap

Tensor = torch.Tensor

_DUNDER = {
    "__truediv__": "div",
    "__rtruediv__": "div",
    "__itruediv__": "div",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__ifloordiv__": "floor_divide",
    "__mod__": "remainder",
    "__rmod__": "remainder",
    "__imod__": "remainder",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__rand__": "bitwise_and",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__ipow__": "pow",
}


def _aten_name(name: str) -> str:
    if name in _DUNDER:
        return _DUNDER[name]
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        if getattr(torch.ops.aten, bare, None) is None and bare[:1] in "ri":
            bare = bare[1:]
        return bare
    return name


def _tagged(name: str) -> bool:
    """Whether torch tags the operation of this name pointwise and deterministic."""
    packet = getattr(torch.ops.aten, _aten_name(name), None)
    if packet is None or not hasattr(packet, "overloads"):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    random = any(torch.Tag.nondeterministic_seeded in found for found in tags)
    return not random and any(torch.Tag.pointwise in found for found in tags)


@fallback
def pointwise_by_tag(function):
    """The handler of functions whose aten operation carries torch's `pointwise` tag."""
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    if name in ("__get__", "__set__") or module.startswith("torch.linalg"):
        return None
    if name in _PARTLY:
        return partly_pointwise
    # torch tags masked_fill, but not masked_fill_.
    tagged = name != "equal" and (_tagged(name) or _tagged(name.removesuffix("_")))
    return pointwise if tagged else None


_PARTLY = {"max": 2, "min": 2, "where": 3}


def partly_pointwise(op, *args, **kwargs):
    """`max(x, y)`, `min(x, y)`, `where(c, x, y)`; their other forms reduce or count."""
    operands = [*args, *kwargs.values()]
    count = _PARTLY[op.__name__]
    if len(operands) != count or (count == 2 and not isinstance(operands[1], Tensor)):
        raise unsupported(op, "only its elementwise form keeps the split", args=(args, kwargs))
    return pointwise(op, *args, **kwargs)


def pointwise(op, *args, **kwargs):
    """Local blocks in, local blocks out. Comm: none, but for operands in another layout."""
    layout = None
    locals_ = []
    for value in args:
        if isinstance(value, ShardTensor):
            if layout is None:
                layout = value._layout
            elif value._layout is not layout:
                return _broadcast(op, args, kwargs)
            local = value._local
            locals_.append(local if local is not None else local_of(value))
        elif isinstance(value, Tensor):
            return _broadcast(op, args, kwargs)
        else:
            locals_.append(value)
    if layout is None or (kwargs and any(isinstance(v, Tensor) for v in kwargs.values())):
        return _broadcast(op, args, kwargs)
    out = op(*locals_, **kwargs)
    first = args[0]
    if out is locals_[0] and isinstance(first, ShardTensor):
        if first._moved:
            raise _refuse_moved(op, args)
        return first
    return wrap(out, layout) if isinstance(out, Tensor) else _wrapped(out, layout)


def _wrapped(out, layout: Layout):
    return (
        type(out)(*(wrap(part, layout) for part in out))
        if hasattr(out, "_fields")
        else tuple(wrap(part, layout) for part in out)
    )


def _refuse_moved(op, args):
    return unsupported(
        op,
        "it writes into a view whose data had to move between ranks",
        "use the operation that returns a new tensor, or clone() first",
        "in-place",
        args,
    )


def _broadcast(op, args, kwargs):
    """Operands of different shapes or layouts, or plain ones."""
    names = list(kwargs)
    values = [*args, *kwargs.values()]
    operation = None if torch.compiler.is_compiling() else current_operation()
    slots = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
    if "out" in names and kwargs["out"] is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=args)
    tensors = [values[index] for index in slots]
    writes = _writes(op, kwargs)
    first = values[0]
    if writes and (not isinstance(first, ShardTensor) or first._moved):
        if isinstance(first, ShardTensor):
            raise _refuse_moved(op, args)
        raise unsupported(
            op, "it writes a sharded value into a plain tensor", "use the result", "in-place", args
        )
    described = tuple(t._layout if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors)
    out, targets = broadcast_layouts(op, writes, *described)
    for index, t, target in zip(slots, tensors, targets, strict=True):
        if isinstance(t, ShardTensor):
            # Moves take and give replicated cotangents, so the sum comes after them, over the axes
            # on which the moved operand is still whole.
            moved = move(local_of(t), t._layout, target, operation)
            missing = tuple(axis for axis in out.split_axes if axis not in target.split_axes)
            values[index] = used(moved, missing, out)
        else:
            values[index] = part_of_plain(used(t, out.split_axes, out), target)
    y = op(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))
    if writes:
        return first
    return result(y, out) if isinstance(y, Tensor) else _wrapped(y, out)


def _writes(op, kwargs) -> bool:
    return bool(kwargs.get("inplace")) or _named_in_place(op)


@constant
def _named_in_place(op) -> bool:
    name = getattr(op, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_")


@constant
def broadcast_layouts(op, writes: bool, *operands) -> tuple[Layout, tuple[Layout, ...]]:
    """The layout of a broadcast result, and the layout every operand takes for it.

    Args:
        writes: the result is written into the first operand, whose layout then stands.
        operands: a Layout for a sharded operand, the shape of a plain, replicated one.

    Raises:
        LayoutError: shapes that do not broadcast; a plain operand of a local size.
    """
    shapes = [o.shape if isinstance(o, Layout) else o for o in operands]
    layouts = [o for o in operands if isinstance(o, Layout)]
    mesh = layouts[0].mesh
    if any(layout.mesh is not mesh for layout in layouts):
        raise LayoutError(
            f"{getattr(op, '__name__', op)} of tensors on different root meshes",
            "operands lie on one mesh",
            "call init_mesh once, and use its parts (mesh['domain'])",
            "mesh",
        )
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        listed = ", ".join(
            f"ShardTensor {o}" if isinstance(o, Layout) else f"plain tensor {tuple(o)}"
            for o in operands
        )
        raise LayoutError(
            f"{getattr(op, '__name__', op)} of {listed}",
            "shapes are global and must broadcast; a plain tensor beside a sharded one is a "
            "replicated global value, never this rank's part",
            "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
            "mixing",
        ) from error
    dims: list = [None] * len(shape)
    taken: set[str] = set()
    order = sorted(range(len(layouts)), key=lambda i: -_numel(layouts[i].shape))
    if writes:
        order = [0, *(i for i in order if i != 0)]
    for i in order:
        layout = layouts[i]
        shift = len(shape) - len(layout.dims)
        for d, dim in enumerate(layout.dims):
            axes = layout.axes(d)
            if not axes or layout.shape[d] != shape[shift + d] or dims[shift + d] is not None:
                continue
            if taken.isdisjoint(axes):
                dims[shift + d] = dim
                taken |= set(axes)
    out = Layout(mesh, [dim or (Factor(n),) for dim, n in zip(dims, shape, strict=True)])
    if writes and out is not layouts[0]:
        raise unsupported(
            op, f"its result {out} does not fit the written tensor", "use the result", "in-place"
        )
    targets = []
    for operand_shape in shapes:
        shift = len(shape) - len(operand_shape)
        targets.append(
            Layout(
                mesh,
                [
                    out.dims[shift + d] if n == shape[shift + d] else (Factor(n),)
                    for d, n in enumerate(operand_shape)
                ],
            )
        )
    return out, tuple(targets)


def _numel(shape) -> int:
    return torch.Size(shape).numel()


_T = torch.Tensor


@register(
    torch.clone,
    _T.clone,
    torch.detach,
    _T.detach,
    _T.contiguous,
    _T.to,
    _T.type,
    _T.type_as,
    _T.float,
    _T.double,
    _T.half,
    _T.bfloat16,
    _T.int,
    _T.long,
    _T.bool,
    _T.cpu,
    _T.cuda,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.empty_like,
    _T.zero_,
    _T.fill_,
    _T.pin_memory,
    _T.detach_,
    uses=False,
)
def same_values(op, input, *args, **kwargs):
    """A local copy, cast or constant of the same layout. Comm: none."""
    if not isinstance(input, ShardTensor):
        raise unsupported(op, "a plain tensor is written from, or cast like, a sharded one")
    local = local_of(input)
    args = tuple([local_of(a) if isinstance(a, ShardTensor) else a for a in args])
    out = op(local, *args, **kwargs)
    if out is local:
        if input._moved and getattr(op, "__name__", "").endswith("_"):
            raise _refuse_moved(op, (input,))
        return input
    return wrap(out, input._layout) if isinstance(out, Tensor) else out


@register(_T.copy_, uses=False)
def copy_(op, input, source, non_blocking=False):
    """Writes a value of the same or a broadcastable shape into a sharded tensor."""
    return _broadcast(op, (input, source), {"non_blocking": non_blocking})


@register(
    torch.is_floating_point,
    _T.is_floating_point,
    torch.is_complex,
    _T.is_complex,
    _T.element_size,
    _T.get_device,
    torch.is_tensor,
    _T.is_contiguous,
    _T.is_pinned,
    torch.is_inference,
    _T.is_inference,
    uses=False,
)
def ask_local(op, input, *args, **kwargs):
    """Questions that every shard answers alike."""
    return op(local_of(input), *args, **kwargs)


@register(vars(torch._C.TensorBase)["_base"].__get__, uses=False)
def no_base(op, input, *_):
    """The base of a view is a plain tensor, which FSDP2 and the compiler must not meet."""
    return None


@fallback
def metadata(function):
    """Attributes such as dtype and device, which every shard answers alike."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") != "__get__" or owner is None:
        return None
    if getattr(owner, "__name__", "") not in _METADATA:
        return None

    def get(op, input, *_):
        return op(local_of(input))

    return get


_METADATA = {
    "device",
    "dtype",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xla",
    "is_xpu",
    "itemsize",
    "output_nr",
    "retains_grad",
    "_version",
    "names",
    "is_vulkan",
    "is_ipu",
    "is_maia",
    "is_mtia",
}
