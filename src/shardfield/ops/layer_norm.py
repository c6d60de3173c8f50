"""Layer and RMS norm, with statistics over the last dims, split or not."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from shardfield.comm.moments import accumulation_dtype
from shardfield.comm.reduce import reduce_sum, use
from shardfield.comm.standardise import standardise
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.norms import NormPlan, check_operands, norm_plan, normalised, part_of_parameter
from shardfield.registry import current_operation, name_of, register, used
from shardfield.tensor import ShardTensor, local_of, wrap

Tensor = torch.Tensor


@constant
def _last_dims_plan(op, layout: Layout, shape: tuple[int, ...]) -> NormPlan:
    """Plans statistics over the last dims, of global shape `shape`.

    Raises:
        LayoutError: the last dims have another shape.
    """
    first = len(layout.dims) - len(shape)
    if not shape or first < 0 or layout.shape[first:] != shape:
        raise LayoutError(
            f"{name_of(op)} over {shape} of ShardTensor {layout}",
            "normalized_shape is the global shape of the last dims",
            "pass that shape, not this rank's",
            "operations",
        )
    dims = tuple(range(first, len(layout.dims)))
    return norm_plan(layout, dims, dims)


@register(F.layer_norm, torch.layer_norm, uses=False)
def layer_norm(
    op,
    input: ShardTensor,
    normalized_shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ShardTensor:
    """Statistics over the last dims, split or not.

    Layout: the input's.
    Comm: where a normalised dim is split, per mesh axis, one all-gather of mean and second moment
        per row forward and one all-reduce of as many numbers backward; else none.
    """
    check_operands(op, input, weight, bias)
    layout, local = input._layout, local_of(input)
    plan = _last_dims_plan(op, layout, tuple(normalized_shape))
    if layout.shared:
        weight = weight if weight is None else used(weight, layout.shared, layout)
        bias = bias if bias is None else used(bias, layout.shared, layout)
    if plan.scope is None:
        return wrap(torch.layer_norm(local, normalized_shape, weight, bias, eps), layout)
    dims = plan.dims
    held = prod([local.shape[d] for d in dims])
    rows = prod(local.shape[: dims[0]])
    weight, bias = part_of_parameter(weight, plan), part_of_parameter(bias, plan)
    y, _, _ = standardise(
        local,
        (1, rows, 1, held),
        None if weight is None else weight.reshape(1, 1, 1, held),
        None if bias is None else bias.reshape(1, 1, 1, held),
        plan.scope,
        eps,
        current_operation(),
    )
    return normalised(y, input, wide=True)


@register(F.rms_norm, torch.rms_norm)
def rms_norm(
    op,
    input: ShardTensor,
    normalized_shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> ShardTensor:
    """Root mean square over the last dims, split or not.

    Layout: the input's.
    Comm: where a normalised dim is split, per mesh axis, one all-reduce of a number per row
        forward and one backward; else none.
    """
    check_operands(op, input, weight)
    layout, local = input._layout, local_of(input)
    plan = _last_dims_plan(op, layout, tuple(normalized_shape))
    if plan.scope is None:
        return wrap(torch.rms_norm(local, normalized_shape, weight, eps), layout)
    eps = torch.finfo(local.dtype).eps if eps is None else eps
    x = local.to(accumulation_dtype(local.dtype))
    square = reduce_sum(
        x.square().sum(plan.dims, keepdim=True), plan.scope.groups, current_operation()
    )
    scale = (square / plan.scope.total + eps).rsqrt()
    y = x * use(scale, plan.scope.groups, current_operation())
    weight = part_of_parameter(weight, plan)
    if weight is not None:
        y = y * weight
    return normalised(y, input)
