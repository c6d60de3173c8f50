"""Contractions written with indices: einsum, tensordot, dot, inner, outer, bilinear; distances."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.contracted import check_shapes, contracted, operand_of
from shardfield.contraction import Contraction, Operand, contraction
from shardfield.layout import Layout
from shardfield.plan import runs_of
from shardfield.registry import groups_of, register, unsupported
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor
_T = torch.Tensor
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _no_out(op, out) -> None:
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result")


@constant
def subscripts(equation: str, *dims: int) -> tuple[tuple[str, ...], str]:
    """Indices of operands of `dims` dims and of the result, an ellipsis written out as letters.

    Without an arrow, the result has those that occur once, in alphabetical order.
    """
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [letter for letter in _LETTERS if letter not in equation]
    counts = [n - len(term.replace("...", "")) for term, n in zip(terms, dims, strict=True)]
    longest = max([0, *(n for term, n in zip(terms, counts, strict=True) if "..." in term)])
    batch = "".join(free[:longest])
    inputs = tuple(
        term.replace("...", batch[longest - n :] if n else "")
        for term, n in zip(terms, counts, strict=True)
    )
    if not arrow:
        seen = Counter(left.replace("...", "").replace(",", ""))
        output = "..." + "".join(sorted(letter for letter, n in seen.items() if n == 1))
    return inputs, output.replace("...", batch)


@constant
def _terms(op, equation: str, *operands: Operand) -> tuple[tuple[str, ...], str]:
    check_shapes(op, lambda *shapes: torch.einsum(equation, *shapes), *operands)
    dims = [len(o.dims) if isinstance(o, Layout) else len(o) for o in operands]
    return subscripts(equation, *dims)


@register(torch.einsum, uses=False)
def einsum(op, equation, *operands) -> Tensor:
    """Every index may be split, in any operand, also one that is summed or repeated.

    More than two operands are contracted at once where none has to move, else from left to right.

    Comm: as `contracted`, for each pair; that of a repeated index split twice, one all-reduce of
        the diagonal.
    """
    if not isinstance(equation, str):
        equation, operands = _from_lists(equation, *operands)
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    inputs, output = _terms(op, equation, *[operand_of(x) for x in operands])
    return _contract(inputs, output, list(operands))


def _from_lists(*arguments):
    """An equation from operands that alternate with lists of numbers."""

    def term(numbers):
        return "".join("..." if n is Ellipsis else _LETTERS[n] for n in numbers)

    pairs = len(arguments) // 2 * 2
    equation = ",".join([term(numbers) for numbers in arguments[1:pairs:2]])
    if len(arguments) > pairs:
        equation += "->" + term(arguments[-1])
    return equation, arguments[:pairs:2]


def _contract(inputs: tuple[str, ...], output: str, operands: list[Tensor]) -> Tensor:
    for i, letters in enumerate(inputs):
        if len(set(letters)) < len(letters):
            letters, operands[i] = _diagonal(letters, operands[i])
            return _contract((*inputs[:i], letters, *inputs[i + 1 :]), output, operands)
    equation = f"{','.join(inputs)}->{output}"
    if not any(isinstance(x, ShardTensor) for x in operands):
        return torch.einsum(equation, *operands)
    plan = contraction(equation, "", "", *[operand_of(x) for x in operands])
    if len(operands) > 2 and plan.moves:
        rest = output + "".join(inputs[2:])
        middle = "".join(sorted({x for x in inputs[0] + inputs[1] if x in rest}))
        pair = _contract(inputs[:2], middle, operands[:2])
        return _contract((middle, *inputs[2:]), output, [pair, *operands[2:]])

    def act(*blocks):
        return torch.einsum(equation, *blocks)

    return contracted(plan, operands, act, len(operands) == 2, lowered=True)


@constant
def _diagonal_parts(
    layout: Layout, first: int, second: int
) -> tuple[tuple[tuple[int, int, int], ...], Layout, tuple[str, ...]]:
    """Rows of `first` here, in order, as (local row, local column or -1, length).

    Also the layout of the diagonal, which replaces `first`, and the axes over which the columns of
    its rows lie elsewhere.
    """
    mesh = layout.mesh
    rows = runs_of(layout.dims[first])[mesh.rank(layout.axes(first))]
    columns = runs_of(layout.dims[second])[mesh.rank(layout.axes(second))]
    parts: list[tuple[int, int, int]] = []
    at = 0
    for start, stop in rows:
        place, here = start, 0
        for a, b in columns:
            low, high = max(a, start), min(b, stop)
            if low < high:
                if place < low:
                    parts.append((at + place - start, -1, low - place))
                parts.append((at + low - start, here + low - a, high - low))
                place = high
            here += b - a
        if place < stop:
            parts.append((at + place - start, -1, stop - place))
        at += stop - start
    out = Layout(mesh, [dim for d, dim in enumerate(layout.dims) if d != second])
    return tuple(parts), out, layout.axes(second)


def _diagonal(letters: str, x: Tensor) -> tuple[str, Tensor]:
    """Takes the diagonal of the first index that occurs twice; it stays in its first place."""
    first = next(d for d, letter in enumerate(letters) if letters.count(letter) > 1)
    second = letters.index(letters[first], first + 1)
    left = letters[:second] + letters[second + 1 :]
    if not isinstance(x, ShardTensor):
        return left, x.diagonal(0, first, second).movedim(-1, first)
    if not x._layout.is_split(first):
        x = _swapped(x, first, second)
    parts, layout, axes = _diagonal_parts(x._layout, first, second)
    local = local_of(x)
    found = []
    for row, column, length in parts or ((0, -1, 0),):
        block = local.narrow(first, row, length)
        if column < 0:  # zeros, of which also a rank without rows has some that hang on its shard
            found.append(block.narrow(second, 0, 0).sum(second))
        else:
            block = block.narrow(second, column, length)
            found.append(block.diagonal(0, first, second).movedim(-1, first))
    diagonal = torch.cat(found, first) if len(found) > 1 else found[0]
    groups = groups_of(layout, axes)
    return left, wrap(reduce_sum(diagonal, groups, "einsum"), layout)


@constant
def _swapped_layout(layout: Layout, first: int, second: int) -> Layout:
    return layout.replace({first: layout.dims[second], second: layout.dims[first]})


def _swapped(x: ShardTensor, first: int, second: int) -> ShardTensor:
    layout = _swapped_layout(x._layout, first, second)
    return wrap(local_of(x).transpose(first, second), layout)


@constant
def _tensordot_plan(op, dims, left: Operand, right: Operand) -> Contraction:
    check_shapes(op, lambda a, b: op(a, b, dims), left, right)
    m, n = (len(o.dims) if isinstance(o, Layout) else len(o) for o in (left, right))
    pairs = (range(m - dims, m), range(dims)) if isinstance(dims, int) else dims
    first, second = list(_LETTERS[:m]), list(_LETTERS[m : m + n])
    summed = set()
    for a, b in zip(*pairs, strict=True):
        second[b] = first[a]
        summed.add(first[a])
    out = [letter for letter in first + second if letter not in summed]
    return contraction(f"{''.join(first)},{''.join(second)}->{''.join(out)}", "", "", left, right)


@register(torch.tensordot, uses=False)
def tensordot(op, a, b, dims=2, out=None) -> Tensor:
    """Sums over any dims, split or not. Comm: as `contracted`."""
    _no_out(op, out)
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    pairs = dims if isinstance(dims, int) else tuple([tuple(part) for part in dims])
    plan = _tensordot_plan(op, pairs, operand_of(a), operand_of(b))
    return contracted(plan, (a, b), lambda x, y: op(x, y, pairs))


@constant
def _vectors_plan(op, equation: str, left: Operand, right: Operand) -> Contraction:
    check_shapes(op, op, left, right)
    return contraction(equation, "", "", left, right)


@register(torch.dot, _T.dot, uses=False)
def dot(op, input, tensor, *, out=None) -> Tensor:
    """Comm: one all-reduce of a number; a fetch where the cuts differ."""
    _no_out(op, out)
    plan = _vectors_plan(op, "k,k->", operand_of(input), operand_of(tensor))
    return contracted(plan, (input, tensor), op)


@register(torch.vdot, _T.vdot, uses=False)
def vdot(op, input, other, *, out=None) -> Tensor:
    """`dot` of the first operand's conjugate."""
    _no_out(op, out)
    return torch.dot(torch.conj_physical(input), other)


@register(torch.outer, _T.outer, torch.ger, _T.ger, uses=False)
def outer(op, input, vec2, *, out=None) -> Tensor:
    """Rows or columns stay split. Comm: where one axis splits both, the shorter is gathered."""
    _no_out(op, out)
    plan = _vectors_plan(op, "m,n->mn", operand_of(input), operand_of(vec2))
    return contracted(plan, (input, vec2), op)


@register(torch.inner, _T.inner, uses=False)
def inner(op, input, other, *, out=None) -> Tensor:
    """Sums over the last dims. Comm: as `contracted`."""
    _no_out(op, out)
    if not input.dim() or not other.dim():
        return input * other
    rows, columns = _LETTERS[: input.dim() - 1], _LETTERS[26 : 25 + other.dim()]
    equation = f"{rows}Z,{columns}Z->{rows}{columns}"
    plan = _vectors_plan(op, equation, operand_of(input), operand_of(other))
    return contracted(plan, (input, other), op)


@constant
def _bilinear_plan(op, equation: str, first: Operand, second: Operand, weight: Operand):
    check_shapes(op, op, first, second, weight)
    return contraction(equation, "", "", first, second, weight)


@register(F.bilinear, uses=False)
def bilinear(op, input1, input2, weight, bias=None) -> Tensor:
    """Rows, features and outputs may be split. Comm: as `einsum` of the three."""
    rows = _LETTERS[: input1.dim() - 1]
    equation = f"{rows}i,{rows}j,oij->{rows}o"
    operands = operand_of(input1), operand_of(input2), operand_of(weight)
    if not any(isinstance(x, Layout) for x in operands):
        return op(input1, input2, weight) + bias
    plan = _bilinear_plan(op, equation, *operands)

    def pairs(x, y, factors):
        return torch.einsum(f"{rows}i,oij,{rows}j->{rows}o", x, factors, y)

    def act(x, y, factors):  # torch's own does not take a rank without features
        return (op if x.shape[-1] and y.shape[-1] else pairs)(x, y, factors)

    if plan.moves:
        y = pairs(input1, input2, weight)
    else:
        y = contracted(plan, (input1, input2, weight), act)
    return y if bias is None else y + bias


@constant
def _distance_plan(op, left: Operand, right: Operand) -> tuple[Contraction, bool]:
    """The plan, and whether torch would take the way over a matrix product."""
    check_shapes(op, torch.cdist, left, right)
    m, n = (o.shape if isinstance(o, Layout) else o for o in (left, right))
    batch = _LETTERS[: max(len(m), len(n)) - 2]
    first, second = batch[len(batch) - len(m) + 2 :], batch[len(batch) - len(n) + 2 :]
    plan = contraction(f"{first}mz,{second}nz->{batch}mn", "z", "", left, right)
    return plan, m[-2] > 25 or n[-2] > 25


_IF_NECESSARY = "use_mm_for_euclid_dist_if_necessary"


@register(torch.cdist, uses=False)
def cdist(op, x1, x2, p=2.0, compute_mode=_IF_NECESSARY) -> Tensor:
    """Rows and batches stay split; split coordinates move to the rows first.

    Comm: where one axis splits the rows of both, the fewer are gathered.
    """
    plan, many = _distance_plan(op, operand_of(x1), operand_of(x2))
    if compute_mode == _IF_NECESSARY:  # by the global numbers of rows
        compute_mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"

    def act(a, b):
        return torch.cdist(a, b, p, compute_mode)

    return contracted(plan, (x1, x2), act, bilinear=False)
