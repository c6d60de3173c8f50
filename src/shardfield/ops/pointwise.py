"""Every operation torch tags pointwise, with broadcasting; and copies that keep the values."""

from __future__ import annotations

from typing import Any

import torch

from shardfield.constant import constant
from shardfield.layout import Factor, Layout
from shardfield.operands import blocks, written
from shardfield.registry import fallback, register, unsupported
from shardfield.tensor import SHARDED, ShardTensor, local_of, result, wrap

Tensor = torch.Tensor
_T: Any = torch.Tensor
_nn = torch._C._nn  # type: ignore[attr-defined]

_DUNDER = {
    "truediv": "div",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "floordiv": "floor_divide",
}
"""What Python calls otherwise than aten."""

# fmt: off
_UNTAGGED = {
    "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh",
    "clip", "complex", "conj", "divide", "expit", "fake_quantize_per_tensor_affine", "fix",
    "floor_divide", "gammainc", "gammaincc", "gammaln", "greater", "greater_equal",
    "hardsigmoid", "hardswish", "imag", "isclose", "isreal", "less", "less_equal",
    "log_sigmoid", "multigammaln", "multiply", "ndtr", "negative", "not_equal", "polar", "psi",
    "real", "resolve_conj", "resolve_neg", "subtract",
}
# fmt: on
"""Elementwise operations that lack the tag, most of them other names of those that have it."""


def _aten_name(name: str) -> str:
    if not (name.startswith("__") and name.endswith("__")):
        return name
    bare = name.strip("_")
    for known in (bare, bare[1:] if bare[:1] in "ri" else bare):
        if known in _DUNDER:
            return _DUNDER[known]
        if getattr(torch.ops.aten, known, None) is not None:
            return known
    return bare


def _tagged(name: str) -> bool:
    """Whether torch tags the operation of this name pointwise and deterministic."""
    if name in _UNTAGGED:
        return True
    packet = getattr(torch.ops.aten, name, None)
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
    if name in ("__set__", "equal") or module.startswith("torch.linalg"):
        return None
    if name == "__get__":
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return pointwise if attribute in ("real", "imag") else None
    name = _aten_name(name)
    # torch tags masked_fill, but not masked_fill_; polygamma, but not special_polygamma.
    others = name.removesuffix("_"), name.removeprefix("special_")
    return pointwise if any(_tagged(known) for known in (name, *others)) else None


@register(torch.where, _T.where, uses=False)
def where(op, condition, input=None, other=None, *, out=None):
    """Elementwise choice. Layout, Comm: as `pointwise`; `where(condition)` alone is refused."""
    if input is None or other is None or out is not None:
        raise unsupported(op, "only its elementwise form keeps the split", args=(condition,))
    return pointwise(op, condition, input, other)


_SAME = {"conj", "positive", "__pos__", "real", "resolve_conj", "resolve_neg"}
"""What may return its input without having written to it."""


def pointwise(op, *args, **kwargs):
    """Local blocks in, local blocks out. Comm: none, but for operands in another layout."""
    layout = None
    locals_ = []
    for value in args:
        if type(value) in SHARDED:
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
    out = op(*locals_, **kwargs) if kwargs else op(*locals_)
    first = args[0]
    if out is locals_[0] and type(first) in SHARDED:
        if first._moved and getattr(op, "__name__", "") not in _SAME:
            written(op, first)
        return first
    return wrap(out, layout) if isinstance(out, Tensor) else _wrapped(out, layout)


def _wrapped(out, layout: Layout):
    return (
        type(out)(*(wrap(part, layout) for part in out))
        if hasattr(out, "_fields")
        else tuple(wrap(part, layout) for part in out)
    )


def _broadcast(op, args, kwargs):
    """Operands of different shapes or layouts, or plain ones."""
    out = kwargs.get("out")
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    writes = _writes(op, kwargs)
    first: Any = args[0] if args else None
    if writes:
        written(op, first)
    args, kwargs, layout = blocks(op, args, kwargs, writes)
    if out is not None:
        target = written(op, out)
        if out._layout is not layout:
            raise unsupported(op, f"its result {layout} does not fit {out._layout}", "assign it")
        op(*args, **kwargs, out=target)
        return out
    y = op(*args, **kwargs)
    if writes:
        return first
    return result(y, layout) if isinstance(y, Tensor) else _wrapped(y, layout)


@constant
def _halved(layout: Layout, dim: int) -> Layout:
    return layout.replace({dim: (Factor(layout.shape[dim] // 2),)})


@register(_nn.glu, uses=False)
def glu(op, input: ShardTensor, dim=-1) -> Tensor:
    """One half times the sigmoid of the other. Comm: along a split dim, that of `chunk`."""
    layout = input.layout
    dim = dim + len(layout.dims) if dim < 0 else dim
    if not layout.is_split(dim):
        return wrap(op(local_of(input), dim), _halved(layout, dim))
    first, second = input.chunk(2, dim)
    return first * second.sigmoid()


def _writes(op, kwargs) -> bool:
    return bool(kwargs.get("inplace")) or _named_in_place(op)


@constant
def _named_in_place(op) -> bool:
    name = getattr(op, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_")


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
    _T.short,
    _T.char,
    _T.byte,
    _T.cfloat,
    _T.cdouble,
    _T.chalf,
    _T.bool,
    _T.cpu,
    _T.cuda,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.empty_like,
    torch.zero_,
    _T.zero_,
    torch.fill,
    torch.fill_,
    _T.fill_,
    torch.as_tensor,
    torch.asarray,
    _T.pin_memory,
    _T.detach_,
    uses=False,
)
def same_values(op, input, *args, **kwargs):
    """A local copy, cast or constant of the same layout. Comm: none."""
    if not isinstance(input, ShardTensor):
        if op in (_T.to, _T.type_as):
            return op(input, *[local_of(a) if isinstance(a, ShardTensor) else a for a in args])
        raise unsupported(op, "a plain tensor is written from a sharded one")
    local = local_of(input)
    args = tuple([local_of(a) if isinstance(a, ShardTensor) else a for a in args])
    out = op(local, *args, **kwargs)
    if out is local:
        if input._moved and getattr(op, "__name__", "").endswith("_"):
            written(op, input)
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
    torch.is_signed,
    _T.is_signed,
    torch.is_conj,
    _T.is_conj,
    torch.is_neg,
    _T.is_neg,
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
