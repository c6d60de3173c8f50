"""Losses, but those of classes. A reduced loss is plain and alike on all ranks.

`F.mse_loss` and its like run as torch wrote them (see `shardfield.composite`); registered here are
the builtins in which they end. Each is computed without reduction on local blocks, or composed as
ATen composes it; `mean` and `sum` then know the global counts.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from shardfield.composite import body_of
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout, even_extents
from shardfield.operands import block, blocks
from shardfield.registry import name_of, register
from shardfield.tensor import ShardTensor, result

Tensor = torch.Tensor
_nn = torch._C._nn  # type: ignore[attr-defined]
NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for reductions."""

_REDUCTION_AT = {
    _nn.mse_loss: 2,
    _nn.l1_loss: 2,
    _nn.smooth_l1_loss: 2,
    _nn.huber_loss: 2,
    _nn.soft_margin_loss: 2,
    _nn.binary_cross_entropy: 3,
    torch.binary_cross_entropy_with_logits: 4,
    torch.kl_div: 2,
    torch.poisson_nll_loss: 5,
    torch.hinge_embedding_loss: 3,
    torch.margin_ranking_loss: 4,
}
"""Losses of every element of operands that broadcast, and where their reduction stands."""


@register(*_REDUCTION_AT, uses=False)
def elementwise(op, *args, **kwargs) -> Tensor:
    """A loss of every element, reduced.

    Layout: plain; without reduction that of the operands.
    Comm: one all-reduce of a number per mesh axis that splits; none backward.
    """
    place = _REDUCTION_AT[op]
    args, kwargs, layout = blocks(op, args, kwargs)
    reduction = args[place] if len(args) > place else kwargs.get("reduction", MEAN)
    if not layout.shared and reduction != NONE:
        return op(*args, **kwargs)
    if len(args) > place:
        args[place] = NONE
    else:
        kwargs["reduction"] = NONE
    return _finished(result(op(*args, **kwargs), layout), reduction)


def _finished(losses: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return losses
    return losses.mean() if reduction == MEAN else losses.sum()


@register(F.l1_loss, uses=False)
def l1_loss(op, *args, weight=None, **kwargs) -> Tensor:
    """As torch wrote it, with the weight that torch 2.13 leaves behind on the way here."""
    weight = _lost_weight() if weight is None else weight
    return _L1_LOSS(*args, weight=weight, **kwargs)


_L1_LOSS = body_of(F.l1_loss)


def _lost_weight() -> Tensor | None:
    """The weight of the running `F.l1_loss`; compiled code hands it over."""
    if torch.compiler.is_dynamo_compiling():
        return None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is F.l1_loss.__code__:
            return frame.f_locals.get("weight")
        frame = frame.f_back
    return None


# Losses of rows, by what ATen composes them of: every operation has an exact form of its own.


@register(torch.pairwise_distance, uses=False)
def pairwise_distance(op, x1, x2, p=2.0, eps=1e-6, keepdim=False) -> Tensor:
    """Norms of differences along the last dim. Layout, Comm: as `torch.linalg.vector_norm`."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@register(torch.triplet_margin_loss, uses=False)
def triplet_margin_loss(
    op, anchor, positive, negative, margin=1.0, p=2.0, eps=1e-6, swap=False, reduction=MEAN
) -> Tensor:
    """Comm: that of three `pairwise_distance` (with `swap`), and of `mean` or `sum`."""
    near = torch.pairwise_distance(anchor, positive, p, eps)
    far = torch.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, torch.pairwise_distance(positive, negative, p, eps))
    return _finished(torch.clamp_min(margin + near - far, 0), reduction)


@register(torch.cosine_embedding_loss, uses=False)
def cosine_embedding_loss(op, input1, input2, target, margin=0.0, reduction=MEAN) -> Tensor:
    """Of rows along the last dim. Comm: that of three `sum`s of rows, and of the mean."""
    tiny = 1e-12
    dot, first, second = (
        (a * b).sum(-1) for a, b in ((input1, input2), (input1, input1), (input2, input2))
    )
    cosine = dot / ((first + tiny) * (second + tiny)).sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0)
    return _finished(
        alike + torch.where(target == -1, (cosine - margin).clamp_min(0), 0), reduction
    )


# Losses of whole rows


@constant
def _samples(layout: Layout, at: int | None) -> Layout:
    """The samples of a tensor: split as its dim `at` is, or over the axes that split another."""
    if at is None:
        return Layout(layout.mesh, [])
    axes, size = layout.split_axes, layout.shape[at]
    if not axes or layout.is_split(at):
        return Layout(layout.mesh, [layout.dims[at]])
    return Layout(layout.mesh, [(Factor(size, axes, even_extents(size, layout.mesh.size(axes))),)])


@constant
def _holding(op, samples: Layout, shape: tuple[int, ...], at: int | None) -> Layout:
    """The layout of a tensor whose dim `at` holds the samples and whose others are whole.

    Raises:
        LayoutError: it holds another number of them.
    """
    dims: list = [(Factor(size),) for size in shape]
    if at is not None and samples.dims:
        if shape[at] != samples.shape[0]:
            raise LayoutError(
                f"{name_of(op)} of {samples.shape[0]} samples beside a tensor {shape}",
                "shapes are global; a plain tensor beside a sharded one is a replicated global "
                "value, never this rank's part",
                "pass the whole tensor, or ShardTensor.from_local(part, mesh, placements)",
                "mixing",
            )
        dims[at] = samples.dims[0]
    return Layout(samples.mesh, dims)


def _rows(op, *operands: tuple[Tensor | None, int | None]) -> tuple[list, Layout]:
    """Whole samples of every operand on this rank, and their layout.

    Args:
        operands: tensors, the one that matters most first, and the dim that holds their samples.

    Comm: where a dim of a sample is split, one all-to-all to split samples instead.
    """
    first, at = next((x, at) for x, at in operands if isinstance(x, ShardTensor))
    samples = _samples(first._layout, at)
    return [
        None if x is None else block(x, _holding(op, samples, tuple(x.shape), at), samples)
        for x, at in operands
    ], samples


@register(_nn.multi_margin_loss, uses=False)
def multi_margin_loss(op, input, target, p=1, margin=1.0, weight=None, reduction=MEAN) -> Tensor:
    """Layout: plain; without reduction that of the samples. Comm: see `_rows`; the reduction's."""
    at = 0 if input.dim() > 1 else None
    (x, y, weight), samples = _rows(op, (input, at), (target, at), (weight, None))
    return _finished(result(op(x, y, p, margin, weight, NONE), samples), reduction)


@register(_nn.multilabel_margin_loss, uses=False)
def multilabel_margin_loss(op, input, target, reduction=MEAN) -> Tensor:
    """Layout, Comm: as `multi_margin_loss`."""
    at = 0 if input.dim() > 1 else None
    (x, y), samples = _rows(op, (input, at), (target, at))
    return _finished(result(op(x, y, NONE), samples), reduction)


def _whole(x: Tensor) -> Tensor:
    """All of a small tensor, on every rank."""
    whole = x.full_tensor() if isinstance(x, ShardTensor) else x
    assert whole is not None
    return whole


@register(torch.ctc_loss, uses=False)
def ctc_loss(
    op,
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    blank=0,
    reduction=MEAN,
    zero_infinity=False,
) -> Tensor:
    """A recursion over time, run on whole samples. Layout, Comm: as `multi_margin_loss`."""
    at, batched = (1, 0) if log_probs.dim() > 2 else (None, None)
    inputs, lengths = (
        value if isinstance(value, Tensor) else torch.tensor(value, device=log_probs.device)
        for value in (input_lengths, target_lengths)
    )
    if at is not None and targets.dim() == 1:
        joined, each = _whole(targets), _whole(lengths)
        targets = pad_sequence(list(joined.split(each.tolist())), batch_first=True)
    (x, y, inputs, lengths), samples = _rows(
        op, (log_probs, at), (targets, batched), (inputs, batched), (lengths, batched)
    )
    none = batched is not None and not x.shape[1]  # torch refuses an empty batch
    losses = x.sum((0, 2)) if none else op(x, y, inputs, lengths, blank, NONE, zero_infinity)
    if reduction == MEAN:
        losses = losses / lengths.clamp_min(1)
    return _finished(result(losses, samples), reduction)
