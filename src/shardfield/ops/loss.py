"""Losses. A reduced loss is plain and alike on all ranks."""

from __future__ import annotations

import sys
from math import prod

import torch
import torch.nn.functional as F

from shardfield.comm.moments import accumulation_dtype
from shardfield.comm.move import move
from shardfield.comm.reduce import reduce_sum
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout
from shardfield.operands import part_of_plain
from shardfield.registry import current_operation, groups_of, name_of, register, unsupported, used
from shardfield.tensor import ShardTensor, describe, local_of, wrap

Tensor = torch.Tensor


def _operation() -> str | None:
    return None if torch.compiler.is_compiling() else current_operation()


@constant
def _groups(layout: Layout) -> tuple[str, ...]:
    return groups_of(layout, layout.split_axes)


def _layout(x: Tensor) -> Layout:
    """The layout of an operand that is a ShardTensor."""
    return x.layout  # type: ignore[return-value]


def _part(op, value: Tensor, target: Layout, computed: Layout) -> Tensor:
    """This rank's part of an operand, which has to have the shape of `target`.

    A move takes and gives replicated cotangents: the sum of the gradient over axes on which the
    operand is whole and the loss (`computed`) split comes after it.

    Comm: for a ShardTensor in another layout, what moving it takes.
    """
    if tuple(value.shape) != target.shape:
        raise LayoutError(
            f"{name_of(op)} of {describe(value)} beside one of layout {target}",
            "operands of a loss have one global shape; a plain tensor beside a sharded one is a "
            "replicated global value, never this rank's part",
            "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
            "mixing",
        )
    if not isinstance(value, ShardTensor):
        return part_of_plain(used(value, computed.split_axes, computed), target)
    if value.layout is computed:
        return local_of(value)
    moved = move(local_of(value), value.layout, target, _operation())
    return used(moved, _missing(target, computed), computed)


@constant
def _missing(target: Layout, computed: Layout) -> tuple[str, ...]:
    return tuple(axis for axis in computed.split_axes if axis not in target.split_axes)


def _reduction(reduction: str, size_average, reduce) -> str:
    """The reduction, from torch's present argument or its two former ones."""
    if size_average is not None or reduce is not None:
        if reduce is False:
            return "none"
        return "sum" if size_average is False else "mean"
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


def _result_dtype(local: Tensor) -> torch.dtype:
    """The type torch gives a loss: autocast computes losses in fp32."""
    if torch.is_autocast_enabled(local.device.type):
        return accumulation_dtype(local.dtype)
    return local.dtype


@constant
def _broadcasting(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of an operand of `shape` that broadcasts to `layout`."""
    shift = len(layout.dims) - len(shape)
    fits = shift >= 0 and all(
        n in (1, whole) for n, whole in zip(shape, layout.shape[shift:], strict=True)
    )
    if not fits:
        raise LayoutError(
            f"a loss over {layout} with a weight of shape {shape}",
            "weights broadcast to the global shape of the input",
            "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
            "mixing",
        )
    dims = zip(shape, layout.dims[shift:], strict=True)
    return Layout(layout.mesh, [(Factor(1),) if n == 1 else factors for n, factors in dims])


def _elementwise(
    op,
    input: Tensor,
    target: Tensor,
    reduction: str,
    weight: Tensor | None = None,
    normalise: bool = False,
    **options,
) -> Tensor:
    """A loss of every element, then reduced; in fp32 at least, means divide by global counts.

    Args:
        weight: one of the operation's arguments, broadcast to the input.
        normalise: the mean divides by the sum of the weights, not by the number of elements.
        options: arguments of the operation; tensors among them broadcast to the input.
    """
    layout = _layout(input) if isinstance(input, ShardTensor) else _layout(target)
    local, wanted = _part(op, input, layout, layout), _part(op, target, layout, layout)
    if weight is not None:
        options["weight"] = weight
    for name, value in options.items():
        if isinstance(value, Tensor):
            options[name] = _part(op, value, _broadcasting(layout, tuple(value.shape)), layout)
    if reduction == "none":
        return wrap(op(local, wanted, reduction="none", **options), layout)
    groups = _groups(layout)
    if not groups:
        return op(local, wanted, reduction=reduction, **options)
    dtype = accumulation_dtype(local.dtype)
    partial = op(local.to(dtype), wanted.to(dtype), reduction="sum", **options)
    if reduction == "mean" and normalise and weight is not None:
        # As torch: the loss weighs by `weight`, and so does the mean.
        partial = torch.stack((partial, options["weight"].sum(dtype=dtype)))
        both = reduce_sum(partial, groups, _operation())
        return (both[0] / both[1]).to(_result_dtype(local))
    if reduction == "mean":
        partial = partial / prod(layout.shape)
    elif reduction == "batchmean":
        partial = partial / layout.shape[0]
    return reduce_sum(partial, groups, _operation()).to(_result_dtype(local))


@register(F.mse_loss, uses=False)
def mse_loss(
    op, input, target, size_average=None, reduce=None, reduction="mean", weight=None
) -> Tensor:
    """Squared differences.

    Layout: plain; with reduction "none" the input's (the target's, if only that is sharded).
    Comm: one all-reduce of a number (weighted means: two) per mesh axis that splits; none backward.
    """
    reduction = _reduction(reduction, size_average, reduce)
    return _elementwise(op, input, target, reduction, weight, normalise=True)


@register(F.l1_loss, uses=False)
def l1_loss(
    op, input, target, size_average=None, reduce=None, reduction="mean", weight=None
) -> Tensor:
    """Absolute differences, unweighted. Layout, Comm: as `mse_loss`."""
    if weight is not None or _has_lost_weight():
        raise unsupported(
            op,
            "torch does not hand l1_loss's weight on to tensor subclasses",
            "(weight * (input - target).abs()).sum() / weight.sum()",
            args=(input, target),
        )
    return _elementwise(op, input, target, _reduction(reduction, size_average, reduce))


def _has_lost_weight() -> bool:
    """Whether the running `F.l1_loss` had a weight, which torch 2.13 drops on its way here."""
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is F.l1_loss.__code__:
            return frame.f_locals.get("weight") is not None
        frame = frame.f_back
    return False


@register(F.smooth_l1_loss, uses=False)
def smooth_l1_loss(
    op, input, target, size_average=None, reduce=None, reduction="mean", beta=1.0
) -> Tensor:
    """Squared near zero, absolute elsewhere. Layout, Comm: as `mse_loss`."""
    return _elementwise(op, input, target, _reduction(reduction, size_average, reduce), beta=beta)


@register(F.huber_loss, uses=False)
def huber_loss(op, input, target, reduction="mean", delta=1.0, weight=None) -> Tensor:
    """Squared near zero, absolute elsewhere. Layout, Comm: as `mse_loss`."""
    return _elementwise(op, input, target, reduction, weight, delta=delta)


@register(F.binary_cross_entropy, uses=False)
def binary_cross_entropy(
    op, input, target, weight=None, size_average=None, reduce=None, reduction="mean"
) -> Tensor:
    """Of probabilities. Layout, Comm: as `mse_loss`."""
    return _elementwise(op, input, target, _reduction(reduction, size_average, reduce), weight)


@register(F.binary_cross_entropy_with_logits, uses=False)
def binary_cross_entropy_with_logits(
    op,
    input,
    target,
    weight=None,
    size_average=None,
    reduce=None,
    reduction="mean",
    pos_weight=None,
) -> Tensor:
    """Of logits. Layout, Comm: as `mse_loss`."""
    reduction = _reduction(reduction, size_average, reduce)
    return _elementwise(op, input, target, reduction, weight, pos_weight=pos_weight)


@register(F.kl_div, uses=False)
def kl_div(
    op, input, target, size_average=None, reduce=None, reduction="mean", log_target=False
) -> Tensor:
    """Kullback-Leibler divergence. Layout, Comm: as `mse_loss`."""
    if reduction != "batchmean":
        reduction = _reduction(reduction, size_average, reduce)
    return _elementwise(op, input, target, reduction, log_target=log_target)


@constant
def _class_layouts(op, given: Layout, index: bool, classes: int | None):
    """Layouts of the input and of the result of a classification loss.

    Args:
        given: layout of the input, or of the target where only that is sharded.
        index: the target holds class indices.
        classes: number of classes, where `given` is that of a target of indices.

    Raises:
        UnsupportedOperation: the classes are split.
    """
    if classes is None:
        dim = 1 if len(given.dims) > 1 else 0
        if given.is_split(dim):
            raise unsupported(op, f"the classes (dim {dim}) of {given} are split")
        without = [factors for d, factors in enumerate(given.dims) if d != dim]
        return given, Layout(given.mesh, without)
    dim = 1 if given.dims else 0
    dims = [*given.dims[:dim], (Factor(classes),), *given.dims[dim:]]
    return Layout(given.mesh, dims), given


def _classify(op, input, target, weight, ignore_index, reduction, **options) -> Tensor:
    index = not target.is_floating_point()
    if isinstance(input, ShardTensor):
        given, classes = _layout(input), None
    else:
        given = _layout(target)
        classes = input.shape[1 if input.dim() > 1 else 0] if index else None
    if isinstance(weight, ShardTensor):
        raise unsupported(op, "class weights are a plain tensor", args=(weight,))
    layout, rows = _class_layouts(op, given, index, classes)
    local = _part(op, input, layout, layout)
    wanted = _part(op, target, rows if index else layout, layout)
    options |= {"weight": weight}
    if index:
        options["ignore_index"] = ignore_index
    if reduction == "none":
        return wrap(op(local, wanted, reduction="none", **options), rows)
    groups = _groups(layout)
    if not groups:
        return op(local, wanted, reduction=reduction, **options)
    dtype = accumulation_dtype(local.dtype)
    partial = op(local.to(dtype), wanted if index else wanted.to(dtype), reduction="sum", **options)
    if reduction == "mean" and index:
        counted = wanted != ignore_index
        if weight is None:
            share = counted.sum(dtype=dtype)
        else:
            weights = weight.detach().to(dtype)[wanted.where(counted, 0)]
            share = (weights * counted).sum()
        both = reduce_sum(torch.stack((partial, share)), groups, _operation())
        return (both[0] / both[1]).to(_result_dtype(local))
    if reduction == "mean":
        partial = partial / prod(rows.shape)
    return reduce_sum(partial, groups, _operation()).to(_result_dtype(local))


@register(F.cross_entropy, uses=False)
def cross_entropy(
    op,
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
) -> Tensor:
    """Of logits whose classes are unsplit, with class indices or probabilities as target.

    The mean divides by the global sum of the targets' weights, ignored ones left out.

    Layout: plain; with reduction "none" that of the input without its classes.
    Comm: one all-reduce of two numbers per mesh axis that splits; none backward.
    """
    reduction = _reduction(reduction, size_average, reduce)
    return _classify(
        op, input, target, weight, ignore_index, reduction, label_smoothing=label_smoothing
    )


@register(F.nll_loss, uses=False)
def nll_loss(
    op,
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
) -> Tensor:
    """Of log-probabilities whose classes are unsplit. Layout, Comm: as `cross_entropy`."""
    reduction = _reduction(reduction, size_average, reduce)
    return _classify(op, input, target, weight, ignore_index, reduction)
