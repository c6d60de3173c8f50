"""Matrix products whose contracted dim every rank holds whole; PReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Dim, Factor, Layout
from shardfield.operands import part_of_plain
from shardfield.registry import register, unsupported, used
from shardfield.tensor import ShardTensor, describe, local_of, result, wrap

Tensor = torch.Tensor
_T = torch.Tensor
Operand = Layout | tuple[int, ...]
"""A sharded operand's layout, or the shape of a plain, replicated one."""


@constant
def _linear_layout(op, layout: Layout, features: tuple[int, ...]) -> tuple[Layout, tuple[str, ...]]:
    """Layout of the result, and the axes of more than one rank over which its rows are split."""
    last = len(layout.dims) - 1
    if layout.is_split(last):
        raise _contraction(op, layout)
    if layout.shape[last] != features[-1]:
        raise LayoutError(
            f"linear of {layout} with a weight of shape {features}",
            f"the last dim of the input ({layout.shape[last]}) is contracted with the last of the "
            f"weight ({features[-1]}); shapes are global",
            "check the layer's in_features",
            "matmul",
        )
    axes = tuple(axis for axis in layout.split_axes if layout.mesh.size((axis,)) > 1)
    if len(features) == 1:
        return Layout(layout.mesh, layout.dims[:-1]), axes
    return layout.replace({last: (Factor(features[0]),)}), axes


def _contraction(op, *operands):
    shown = " with ".join(
        f"ShardTensor {o}" if isinstance(o, Layout) else f"tensor {tuple(o)}" for o in operands
    )
    return unsupported(
        op,
        f"the contracted dim is split in {shown}: every rank would hold a part of each sum",
        "x.redistribute(...) so that another dim is split",
        "matmul",
    )


@register(F.linear, uses=False)
def linear(op, input, weight, bias=None) -> Tensor:
    """Rows stay where they are, split in any way. Comm: none forward.

    The gradients of a plain weight and bias are summed over the mesh axes of the input.
    """
    if not isinstance(input, ShardTensor) or isinstance(weight, ShardTensor):
        return _linear_with_split_weight(op, input, weight, bias)
    if isinstance(bias, ShardTensor):
        raise unsupported(
            op, "its bias is split and its weight is not", "", "matmul", (input, bias)
        )
    source = input._layout
    layout, axes = _linear_layout(op, source, weight.shape)
    if axes:
        weight = used(weight, axes, source)
        bias = bias if bias is None else used(bias, axes, source)
    return wrap(op(local_of(input), weight, bias), layout)


def _linear_with_split_weight(op, input, weight, bias):
    """Output features stay split as the weight's rows are; a plain input is a whole one."""
    described = _describe(input), _describe(weight)
    out, left, right, features = linear_layouts(op, *described)
    if bias is not None:
        bias = _entering(bias, features, out)
    return result(op(_entering(input, left, out), _entering(weight, right, out), bias), out)


def _describe(value: Tensor) -> Operand:
    return value._layout if isinstance(value, ShardTensor) else tuple(value.shape)


def _entering(value: Tensor, target: Layout, out: Layout) -> Tensor:
    """The local part of an operand of a product `out`, under the layout it takes for it.

    A move takes and gives replicated cotangents: the sum over the axes on which the operand is
    whole and the product split comes after it.
    """
    if not isinstance(value, ShardTensor):
        return part_of_plain(used(value, out.split_axes, out), target)
    moved = move(local_of(value), value._layout, target, "matmul")
    missing = tuple(axis for axis in out.split_axes if axis not in target.split_axes)
    return used(moved, missing, out)


def _dims(operand: Operand) -> tuple[Dim, ...]:
    if isinstance(operand, Layout):
        return operand.dims
    return tuple((Factor(size),) if size != 1 else () for size in operand)


def _size(dim: Dim) -> int:
    size = 1
    for factor in dim:
        size *= factor.size
    return size


def _split(dim: Dim) -> bool:
    return any(factor.axes for factor in dim)


def _mesh(*operands: Operand):
    return next(o for o in operands if isinstance(o, Layout)).mesh


@constant
def linear_layouts(op, input: Operand, weight: Operand) -> tuple[Layout, Layout, Layout, Layout]:
    """Layouts of the result, of input and weight as they enter, and of the output features."""
    dims, rows = _dims(input), _dims(weight)
    out, left, right = _product_dims(op, dims, rows[::-1], (input, weight))
    mesh = _mesh(input, weight)
    features = Layout(mesh, out[-1:] if len(right) > 1 else ())
    return Layout(mesh, out), Layout(mesh, left), Layout(mesh, right[::-1]), features


@constant
def matmul_layouts(op, left: Operand, right: Operand) -> tuple[Layout, Layout, Layout]:
    """Layouts of a product, and of its operands as they enter.

    Rows of the left and columns of the right operand stay split as they are. Batch dims follow the
    operand in which they are split; the other takes its part.

    Raises:
        UnsupportedOperation: the contracted dim is split, or one mesh axis would split two dims.
        LayoutError: shapes that torch would refuse.
    """
    mesh = _mesh(left, right)
    out, first, second = _product_dims(op, _dims(left), _dims(right), (left, right))
    return Layout(mesh, out), Layout(mesh, first), Layout(mesh, second)


def _product_dims(op, a: tuple[Dim, ...], b: tuple[Dim, ...], operands):
    """Dims of the result and of both operands; 1-d operands as `torch.matmul` takes them."""
    if not a or not b:
        raise LayoutError(
            _shown(op, operands), "both operands of a matrix product have a dim", "use *", "matmul"
        )
    inner = -2 if len(b) > 1 else -1
    if _size(a[-1]) != _size(b[inner]):
        raise LayoutError(
            _shown(op, operands),
            f"the last dim of the left operand ({_size(a[-1])}) is contracted with dim {inner} of "
            f"the right one ({_size(b[inner])}); shapes are global, plain tensors are whole",
            "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
            "matmul",
        )
    if _split(a[-1]) or _split(b[inner]):
        raise _contraction(op, *operands)
    batch_a, batch_b = a[:-2], b[:-2]
    count = max(len(batch_a), len(batch_b))
    padded_a = ((),) * (count - len(batch_a)) + batch_a
    padded_b = ((),) * (count - len(batch_b)) + batch_b
    batch = []
    for x, y in zip(padded_a, padded_b, strict=True):
        if _size(x) != _size(y) and 1 not in (_size(x), _size(y)):
            raise LayoutError(
                _shown(op, operands),
                f"batch dims of {_size(x)} and {_size(y)} do not broadcast; shapes are global",
                "pass whole tensors, or ShardTensor.from_local(part, mesh, placements)",
                "matmul",
            )
        if _size(x) != _size(y):
            batch.append(x if _size(y) == 1 else y)
        else:
            batch.append(x if _split(x) or not _split(y) else y)
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    out = (*batch, *rows, *columns)
    axes = [axis for dim in out for factor in dim for axis in factor.axes]
    if len(set(axes)) != len(axes):
        raise unsupported(
            op,
            f"{_shown(op, operands)}: one mesh axis would split two dims of the result, of which "
            "every rank would then hold a diagonal block only",
            "x.redistribute(...) of one operand to Replicate() on that axis, or to a batch dim",
            "matmul",
        )

    def entering(padded, own, rest):
        taken = [w if _size(x) == _size(w) else x for x, w in zip(padded, batch, strict=True)]
        return (*taken[count - own :], *rest)

    return (
        out,
        entering(padded_a, len(batch_a), a[-2:]),
        entering(padded_b, len(batch_b), b[-2:]),
    )


def _shown(op, operands) -> str:
    shown = [
        f"ShardTensor {o}" if isinstance(o, Layout) else f"tensor {tuple(o)}" for o in operands
    ]
    return f"{getattr(op, '__name__', op)} of {' with '.join(shown)}"


@register(
    torch.matmul,
    _T.matmul,
    torch.mm,
    _T.mm,
    torch.bmm,
    _T.bmm,
    torch.mv,
    _T.mv,
    _T.__matmul__,
    _T.__rmatmul__,
    uses=False,
)
def matmul(op, input, other) -> Tensor:
    """Rows, columns and batch dims stay split. Comm: none, but to re-align a split batch dim."""
    first, second = (other, input) if op is _T.__rmatmul__ else (input, other)
    out, left, right = matmul_layouts(op, _describe(first), _describe(second))
    first, second = _entering(first, left, out), _entering(second, right, out)
    call = torch.matmul if op is _T.__rmatmul__ else op
    return result(call(first, second), out)


@constant
def _added(op, added: Operand, out: Layout) -> Layout:
    """Layout in which a summand broadcasts to a result."""
    dims = _dims(added)
    shift = len(out.dims) - len(dims)
    sizes = [_size(dim) for dim in dims]
    if shift < 0 or any(n not in (1, out.shape[shift + d]) for d, n in enumerate(sizes)):
        raise LayoutError(
            f"{op.__name__} that adds {_shown(op, (added,))} to {out}",
            "the summand broadcasts to the product; shapes are global, plain tensors are whole",
            "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
            "matmul",
        )
    taken = [out.dims[shift + d] if n == out.shape[shift + d] else () for d, n in enumerate(sizes)]
    return Layout(out.mesh, taken)


@register(torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm, torch.addmv, _T.addmv, uses=False)
def matmul_added(op, input, first, second, *, beta=1, alpha=1, out=None) -> Tensor:
    """`beta*input + alpha*(first @ second)`. Comm: only to re-align operands."""
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result")
    if not isinstance(first, ShardTensor) and not isinstance(second, ShardTensor):
        return beta * input + alpha * torch.matmul(first, second)
    layout, left, right = matmul_layouts(op, _describe(first), _describe(second))
    added = _entering(input, _added(op, _describe(input), layout), layout)
    first, second = _entering(first, left, layout), _entering(second, right, layout)
    local = op(added, first, second, beta=beta, alpha=alpha)
    return result(local, layout)


@constant
def _slope_layout(op, layout: Layout, slopes: int) -> Layout:
    """How one slope per channel is split: as the channels (dim 1) are."""
    dims = layout.dims
    channels = dims[1] if len(dims) > 1 else ()
    if slopes != _size(channels):
        raise LayoutError(
            f"prelu of {layout} with {slopes} slopes",
            f"one slope, or one per channel ({_size(channels)})",
            "check num_parameters",
            "matmul",
        )
    return Layout(layout.mesh, [channels])


@register(F.prelu, _T.prelu)
def prelu(op, input, weight) -> Tensor:
    """One slope, or one per channel, split or not. Comm: none forward."""
    if not isinstance(input, ShardTensor) or isinstance(weight, ShardTensor):
        shown = f"{describe(input)} with slopes {describe(weight)}"
        raise unsupported(op, f"slopes are a plain tensor beside a sharded input, not {shown}")
    layout = input._layout
    if weight.numel() > 1:
        weight = part_of_plain(weight, _slope_layout(op, layout, weight.numel()))
    return wrap(op(local_of(input), weight), layout)
