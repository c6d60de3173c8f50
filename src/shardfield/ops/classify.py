"""Cross entropy and negative log-likelihood, whatever dim is split, the classes too."""

from __future__ import annotations

import torch

from shardfield.comm.collectives import all_reduce
from shardfield.comm.moments import accumulation_dtype
from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout, even_extents
from shardfield.operands import block, part_of_plain
from shardfield.registry import current_operation, groups_of, name_of, register, unsupported
from shardfield.tensor import ShardTensor, describe, result

Tensor = torch.Tensor
_nn = torch._C._nn  # type: ignore[attr-defined]
NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for reductions."""


def _layout(x: Tensor) -> Layout:
    """The layout of an operand that is a ShardTensor."""
    return x.layout  # type: ignore[return-value]


@constant
def _class_layouts(given: Layout, dim: int, classes: int | None) -> tuple[Layout, Layout]:
    """Layouts of the logits and of the losses of a classification.

    Args:
        given: of the logits; or, where only the targets are split, of these.
        classes: their number, where `given` lacks them.
    """
    if classes is not None:
        dims = [*given.dims[:dim], (Factor(classes),), *given.dims[dim:]]
        return Layout(given.mesh, dims), given
    if given.contiguous(dim) is None:
        axes, size = given.axes(dim), given.shape[dim]
        given = given.replace(
            {dim: (Factor(size, axes, even_extents(size, given.mesh.size(axes))),)}
        )
    return given, Layout(given.mesh, [f for d, f in enumerate(given.dims) if d != dim])


@constant
def _class_axes(layout: Layout, dim: int) -> tuple[tuple[str, ...], Layout, Layout, int]:
    """Groups that split the classes, layouts of a vector of them, split and whole, the first."""
    vector = Layout(layout.mesh, [layout.dims[dim]])
    whole = Layout(layout.mesh, [(Factor(layout.shape[dim]),)])
    return groups_of(layout, layout.axes(dim)), vector, whole, layout.offset(dim)


def _classified(op, input, target, weight, reduction, ignore_index, smoothing=None) -> Tensor:
    """Cross entropy of logits, or (without `smoothing`) of log-probabilities."""
    dim = 1 if input.dim() > 1 else 0
    index = not target.is_floating_point()
    if isinstance(input, ShardTensor):
        logits, rows = _class_layouts(_layout(input), dim, None)
    elif isinstance(target, ShardTensor):
        classes = input.shape[dim] if index else None
        logits, rows = _class_layouts(_layout(target), dim, classes)
    else:
        raise unsupported(op, "only the class weights are sharded", "weight.full_tensor()")
    wanted = rows if index else logits
    groups, vector, whole, _ = _class_axes(logits, dim)
    _checked(op, (input, logits), (target, wanted), (weight, whole))
    if index and weight is not None and weight.requires_grad:
        raise NotImplementedError("the derivative for 'weight' is not implemented")  # as in torch
    if not index and ignore_index >= 0:
        raise RuntimeError("ignore_index is not supported for floating point target")  # as in torch
    local = block(input, logits, logits)
    target = block(target, wanted, logits)
    if weight is not None:
        # A row of indices may name any class; one of probabilities meets the classes of its rank.
        weight = block(weight, whole if index else vector, logits)
    if groups:
        act = _of_indices if index else _of_probabilities
        losses = act(local, target, weight, ignore_index, smoothing, logits, dim)
    else:
        options = {} if smoothing is None else {"label_smoothing": smoothing}
        if not rows.shared and reduction != NONE:
            return op(local, target, weight, reduction, ignore_index, **options)
        losses = op(local, target, weight, NONE, ignore_index, **options)
    each = result(losses, rows)
    if reduction == NONE:
        return each
    if reduction == SUM:
        return each.sum()
    if not index:
        return each.mean()
    wide, counted = accumulation_dtype(losses.dtype), target != ignore_index
    share = counted if weight is None else weight[target.where(counted, 0)] * counted
    both = torch.stack((losses.sum(dtype=wide), share.sum(dtype=wide)))
    both = reduce_sum(both, groups_of(rows, rows.split_axes), current_operation())
    return (both[0] / both[1]).to(losses.dtype)


def _checked(op, *operands: tuple[Tensor | None, Layout]) -> None:
    for value, layout in operands:
        if value is not None and tuple(value.shape) != layout.shape:
            raise LayoutError(
                f"{name_of(op)} of {describe(value)} where {layout} is wanted",
                "shapes are global; a plain tensor beside a sharded one is a replicated global "
                "value, never this rank's part",
                "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
                "mixing",
            )


def _exponentials(x: Tensor, dim: int, groups: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Logits less the largest of all ranks, and the sum of this rank's exponentials."""
    x = x.to(accumulation_dtype(x.dtype))
    if x.shape[dim]:
        largest = x.detach().amax(dim, keepdim=True)
    else:
        largest = x.detach().sum(dim, keepdim=True) - float("inf")
    for group in groups:
        largest = all_reduce(largest, group, current_operation(), "max")
    x = x - largest
    return x, x.exp().sum(dim)


def _of_indices(x, target, weight, ignore_index, smoothing, logits: Layout, dim: int) -> Tensor:
    """Losses where the classes are split. Comm: two all-reduces of rows, for `nll_loss` one."""
    groups, vector, _, first = _class_axes(logits, dim)
    dtype = _result_dtype(x)
    counted = target != ignore_index
    weight = x.new_ones(vector.shape) if weight is None else weight
    share = weight[target.where(counted, 0)]  # an index out of bounds is an error here
    total = None
    if smoothing is not None:
        x, total = _exponentials(x, dim, groups)
    terms = _picked(x, dim, target - first) * share
    mass = share
    if smoothing:
        even = smoothing / vector.shape[0]
        mine = _along(part_of_plain(weight, vector), dim, x.dim())
        terms = (1 - smoothing) * terms + even * (x * mine).sum(dim)
        mass = (1 - smoothing) * share + even * weight.sum()
    if total is None:
        losses = -reduce_sum(terms, groups, current_operation())
    else:
        total, terms = reduce_sum(torch.stack((total, terms)), groups, current_operation()).unbind()
        losses = total.log() * mass - terms
    return losses.where(counted, 0).to(dtype)


def _picked(x: Tensor, dim: int, place: Tensor) -> Tensor:
    """Of every row the element at `place`, where this rank holds it, else zero."""
    if not x.shape[dim]:
        return x.sum(dim)
    here = (place >= 0) & (place < x.shape[dim])
    return x.gather(dim, place.where(here, 0).unsqueeze(dim)).squeeze(dim).where(here, 0)


def _of_probabilities(x, target, weight, _, smoothing, logits: Layout, dim: int) -> Tensor:
    """Losses where the classes are split. Comm: two all-reduces of rows."""
    groups, vector, _, _ = _class_axes(logits, dim)
    dtype = _result_dtype(x)
    x, total = _exponentials(x, dim, groups)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / vector.shape[0]
    if weight is not None:
        target = target * _along(weight, dim, x.dim())
    sums = torch.stack((total, (target * x).sum(dim), target.sum(dim).to(total.dtype)))
    total, terms, mass = reduce_sum(sums, groups, current_operation()).unbind()
    return (total.log() * mass - terms).to(dtype)


def _along(vector: Tensor, dim: int, dims: int) -> Tensor:
    return vector.view(-1, *(1,) * (dims - dim - 1))


def _result_dtype(local: Tensor) -> torch.dtype:
    """The type torch gives a loss: autocast computes losses in fp32."""
    if torch.is_autocast_enabled(local.device.type):
        return accumulation_dtype(local.dtype)
    return local.dtype


@register(_nn.cross_entropy_loss, uses=False)
def cross_entropy(
    op, input, target, weight=None, reduction=MEAN, ignore_index=-100, label_smoothing=0.0
) -> Tensor:
    """Of logits, with class indices or probabilities as target.

    The mean divides by the global sum of the targets' weights, ignored ones left out.

    Layout: plain; without reduction that of the input without its classes.
    Comm: one all-reduce of two numbers per mesh axis that splits rows; none backward. With split
        classes, also one of the largest logit of every row and one of two or three sums.
    """
    return _classified(op, input, target, weight, reduction, ignore_index, label_smoothing)


@register(_nn.nll_loss_nd, _nn.nll_loss, _nn.nll_loss2d, uses=False)
def nll_loss(op, input, target, weight=None, reduction=MEAN, ignore_index=-100) -> Tensor:
    """Of log-probabilities. Layout, Comm: as `cross_entropy`; with split classes a sum."""
    return _classified(op, input, target, weight, reduction, ignore_index)
