"""Matrix products: linear, matmul and its kin, sums with products; PReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardfield.comm.move import move
from shardfield.constant import constant
from shardfield.contracted import check_shapes, contracted, operand_of
from shardfield.contraction import Contraction, Operand, contraction
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout
from shardfield.operands import part_of_plain
from shardfield.registry import register, unsupported, used
from shardfield.tensor import SHARDED, ShardTensor, describe, local_of, wrap

Tensor = torch.Tensor
_T = torch.Tensor
_BATCH = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@constant
def _rows_layout(op, layout: Layout, features: tuple[int, ...]) -> Layout | None:
    """Layout of a linear map of rows; None if the contracted dim is split."""
    last = len(layout.dims) - 1
    if layout.shape[last] != features[-1]:
        raise LayoutError(
            f"linear of {layout} with a weight of shape {features}",
            f"the last dim of the input ({layout.shape[last]}) is contracted with the last of the "
            f"weight ({features[-1]}); shapes are global",
            "check the layer's in_features",
            "matmul",
        )
    if layout.is_split(last):
        return None
    if len(features) == 1:
        return Layout(layout.mesh, layout.dims[:-1])
    return layout.replace({last: (Factor(features[0]),)})


@register(F.linear, uses=False)
def linear(op, input, weight, bias=None) -> Tensor:
    """Rows stay where they are, split in any way; output features as the weight's rows are.

    Comm: none forward where the weight is plain and the features are whole; else as `contracted`.
        With sequence parallelism (see `tensor_parallel`) rows that are split over the weight's axes
        are gathered for split output features, and sums over split input features are scattered.
        The gradients of a plain weight and bias are summed over the mesh axes of the input.
    """
    if type(input) in SHARDED and type(weight) not in SHARDED:
        source = input._layout
        layout = _rows_layout(op, source, weight.shape)
        if layout is not None and type(bias) not in SHARDED:
            if source.shared:
                weight = used(weight, source.shared, source)
                bias = bias if bias is None else used(bias, source.shared, source)
            return wrap(op(local_of(input), weight, bias), layout)
    if not isinstance(input, ShardTensor) and not isinstance(weight, ShardTensor):
        return op(input, weight) + bias
    tokens = isinstance(weight, ShardTensor) and weight._splits_tokens
    plan = _linear_plan(op, operand_of(input), operand_of(weight), tokens)
    y = contracted(plan, (input, weight), op, lowered=True)
    return y if bias is None else y + bias


@constant
def _linear_plan(op, input: Operand, weight: Operand, tokens: bool) -> Contraction:
    check_shapes(op, op, input, weight)
    rows = _BATCH[: len(_shape(input)) - 1]
    n = "n" if len(_shape(weight)) == 2 else ""
    last = rows[-1:] if tokens else ""
    return contraction(f"{rows}k,{n}k->{rows}{n}", "", last, input, weight)


def _shape(operand: Operand) -> tuple[int, ...]:
    return operand.shape if isinstance(operand, Layout) else operand


@constant
def matmul_plan(op, left: Operand, right: Operand) -> Contraction:
    """Plans a product of matrices, vectors, or batches of matrices that broadcast.

    Raises:
        LayoutError: shapes that torch would refuse.
    """
    check_shapes(op, op, left, right)
    m, n = len(_shape(left)), len(_shape(right))
    batch = _BATCH[: max(m, n, 2) - 2]
    first = batch[len(batch) - max(m - 2, 0) :] + "mk"[2 - min(m, 2) :]
    second = batch[len(batch) - max(n - 2, 0) :] + "kn"[: min(n, 2)]
    out = batch + "m" * (m > 1) + "n" * (n > 1)
    return contraction(f"{first},{second}->{out}", "", "", left, right)


@register(
    torch.matmul,
    _T.matmul,
    torch.linalg.matmul,
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
def matmul(op, input, *others, out=None, **named) -> Tensor:
    """Rows, columns and batch dims stay split; a split contraction ends in a sum over its axes.

    Comm: none where each mesh axis splits one index, and equally in both operands; else as
        `contracted`.
    """
    (other,) = _operands(op, 1, others, named, out)
    if op is _T.__rmatmul__:
        op, input, other = torch.matmul, other, input
    plan = matmul_plan(op, operand_of(input), operand_of(other))
    return contracted(plan, (input, other), op, lowered=True)


@register(torch.linalg.multi_dot, uses=False)
def multi_dot(op, tensors, *, out=None) -> Tensor:
    """Products from left to right. Comm: as `matmul`, for each."""
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result")
    product = tensors[0]
    for matrix in tensors[1:]:
        product = torch.matmul(product, matrix)
    return product


def _operands(op, count: int, given: tuple, named: dict, out) -> list[Tensor]:
    """The operands after the first; torch's names for them are in alphabetical order."""
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result")
    found = [*given, *[named[name] for name in sorted(named)]]
    if len(found) != count or not all(isinstance(x, Tensor) for x in found):
        raise unsupported(op, "its operands are tensors, and it takes no out_dtype", args=found)
    return found


_PRODUCTS = {
    "addmm": ("mk,kn->mn", torch.mm),
    "addmv": ("mk,k->m", torch.mv),
    "addr": ("m,n->mn", torch.outer),
    "baddbmm": ("Amk,Akn->Amn", torch.bmm),
    "addbmm": ("Amk,Akn->mn", lambda a, b: torch.einsum("Amk,Akn->mn", a, b)),
}


@constant
def _added_plan(
    op, added: Operand, left: Operand, right: Operand
) -> tuple[Contraction, Layout | None]:
    """The product, and the layout in which the summand joins it at once; None: it comes after."""
    check_shapes(op, op, added, left, right)
    plan = contraction(_PRODUCTS[op.__name__][0], "", "", left, right)
    if plan.moves or plan.sums:
        return plan, None
    shape, out = _shape(added), plan.layout
    shift = len(out.dims) - len(shape)
    return plan, Layout(
        out.mesh,
        [
            out.dims[shift + d] if n == out.shape[shift + d] else (Factor(n),)
            for d, n in enumerate(shape)
        ],
    )


@register(
    torch.addmm,
    _T.addmm,
    torch.addmv,
    _T.addmv,
    torch.addr,
    _T.addr,
    torch.baddbmm,
    _T.baddbmm,
    torch.addbmm,
    _T.addbmm,
    uses=False,
)
def matmul_added(op, input, *factors, beta=1, alpha=1, out=None, **named) -> Tensor:
    """`beta*input + alpha*(first @ second)`. Comm: as `contracted`, and to re-align the summand."""
    first, second = _operands(op, 2, factors, named, out)
    act = _PRODUCTS[_name(op)][1]
    if not isinstance(first, ShardTensor) and not isinstance(second, ShardTensor):
        return _sum(input, act(first, second), beta, alpha)
    operands = operand_of(input), operand_of(first), operand_of(second)
    plan, layout = _added_plan(op, *operands)
    if layout is None:
        return _sum(input, contracted(plan, (first, second), act, lowered=True), beta, alpha)
    added = _entering(input, layout, plan.axes)

    def fused(a, b):
        return op(added, a, b, beta=beta, alpha=alpha)

    return contracted(plan, (first, second), fused, lowered=True)


@constant
def _name(op) -> str:
    return op.__name__


def _sum(input, product, beta, alpha) -> Tensor:
    if beta == 0:  # torch: not even its NaNs are added; its gradient is zero
        input, beta = torch.nan_to_num(input, 0.0, 0.0, 0.0), 0
    return torch.add(input if beta == 1 else input * beta, product, alpha=alpha)


def _entering(value: Tensor, target: Layout, axes: tuple[str, ...]) -> Tensor:
    """The local part of a summand of a computation split over `axes`.

    A move takes and gives replicated cotangents: the sum over the axes on which the summand is
    whole comes after it.
    """
    if not isinstance(value, ShardTensor):
        return part_of_plain(used(value, axes, target), target)
    local = move(local_of(value), value._layout, target, "matmul")
    return used(local, tuple(axis for axis in axes if axis not in target.split_axes), target)


@constant
def _slope_layout(op, layout: Layout, slopes: int) -> Layout:
    """How one slope per channel is split: as the channels (dim 1) are."""
    channels = layout.dims[1] if len(layout.dims) > 1 else ()
    count = layout.shape[1] if len(layout.dims) > 1 else 1
    if slopes != count:
        raise LayoutError(
            f"prelu of {layout} with {slopes} slopes",
            f"one slope, or one per channel ({count})",
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
