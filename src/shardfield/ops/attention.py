"""Scaled dot-product attention of queries, keys and values that are split in any way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from shardfield.attention.core import attend
from shardfield.attention.layouts import AttentionPlan, attention_plan, cuts_groups
from shardfield.attention.plan import Machine, Rows
from shardfield.comm.fetch import fetch
from shardfield.comm.move import move
from shardfield.comm.transpose import transpose
from shardfield.contracted import operand_of
from shardfield.keyed import draw_key
from shardfield.layout import Layout
from shardfield.operands import part_of_plain
from shardfield.registry import current_operation, register, unsupported, used
from shardfield.tensor import ShardTensor, local_of, result
from shardfield.windowed import nothing

Tensor = torch.Tensor

ALGORITHMS = ("auto", "ring", "zigzag", "heads", "hybrid", "gather")


class _Wish:
    algorithm = "auto"
    machine: Machine | None = None


_wish = _Wish()


@contextmanager
def attention_algorithm(name: str = "auto", machine: Machine | None = None) -> Iterator[None]:
    """Inside, attention over a split sequence takes this algorithm; alike on all ranks.

    Args:
        name: "ring", "zigzag", "heads", "hybrid", "gather", or "auto": the one with the least
            modelled time. One that is not exact for the sizes at hand raises LayoutError.
        machine: what "auto" supposes of the machine.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r} is none of {', '.join(ALGORITHMS)}")
    before = _wish.algorithm, _wish.machine
    _wish.algorithm, _wish.machine = name, machine
    try:
        yield
    finally:
        _wish.algorithm, _wish.machine = before


@register(F.scaled_dot_product_attention, uses=False)
def scaled_dot_product_attention(
    op, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
) -> Tensor:  # fmt: skip
    """Exact for every split of queries, keys and values.

    Layout: that of the queries. Comm: none where keys are whole, or split over samples or heads
        only; else that of the chosen algorithm (`AttentionPlan`); bytes in `docs/attention.md`.
    """
    if not any(isinstance(x, ShardTensor) for x in (query, key, value)):
        raise unsupported(op, "only its mask is sharded", "attn_mask.full_tensor()", "attention",
                          (attn_mask,))  # fmt: skip
    if is_causal and attn_mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return _of_other_dims(
            op, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    query, key, value, attn_mask = _cast(query, key, value, attn_mask)
    if enable_gqa and cuts_groups(operand_of(query), operand_of(key)):
        # Fewer key heads than ranks: each takes those of its query heads, which nobody sends.
        times = query.shape[1] // key.shape[1]
        key, value = (torch.repeat_interleave(x, times, dim=1) for x in (key, value))
    plan = plan_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, op=op)
    q, k, v = (
        _entering(x, layout, plan.axes)
        for x, layout in ((query, plan.q), (key, plan.k), (value, plan.v))
    )
    mask = None
    if attn_mask is not None and plan.mask is not None:
        mask = _entering(attn_mask, plan.mask, plan.axes)
    return result(_act(op, q, k, v, mask, plan), plan.out)


def plan_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *,
    op=F.scaled_dot_product_attention,
) -> AttentionPlan:  # fmt: skip
    """What attention of these operands would do: its algorithm, bytes and modelled times.

    Args:
        query: `(samples, heads, rows, width)`, global; `key` and `value` likewise. Some are
            ShardTensors, others may be plain.

    Comm: none.

    Raises:
        LayoutError: as attention itself would.

    Example:
        >>> print(shardfield.plan_attention(q, k, v, is_causal=True))
    """
    return attention_plan(
        op, operand_of(query), operand_of(key), operand_of(value),
        None if attn_mask is None else operand_of(attn_mask), is_causal, scale, float(dropout_p),
        query.element_size(), query.device.type, _wish.algorithm, _wish.machine,
    )  # fmt: skip


def _of_other_dims(op, query, key, value, mask, *rest):
    """Two or three dims get others of one; of more than four the leading ones are joined."""
    lead = query.shape[:-2]
    if len(lead) > 2:
        if mask is not None and mask.dim() > 2:
            mask = mask.expand(*lead, *mask.shape[-2:]).flatten(0, len(lead) - 2)
        query, key, value = (
            x.expand(*lead[: len(lead) - 1], *x.shape[-3:]).flatten(0, len(lead) - 2)
            for x in (query, key, value)
        )
        out = scaled_dot_product_attention(op, query, key, value, mask, *rest)
        return out.unflatten(0, lead[:-1])
    missing = 4 - query.dim()
    if mask is not None:
        for _ in range(max(0, mask.dim() - 2) and missing):
            mask = mask.unsqueeze(0)
    for _ in range(missing):
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    out = scaled_dot_product_attention(op, query, key, value, mask, *rest)
    for _ in range(missing):
        out = out.squeeze(0)
    return out


def _cast(query, key, value, mask):
    """Operands as autocast passes them to torch's function."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind) or query.dtype == torch.float64:
        return query, key, value, mask
    dtype = torch.get_autocast_dtype(kind)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    return query, key, value, mask


def _entering(value: Tensor, target: Layout, axes: tuple[str, ...]) -> Tensor:
    """The local part of an operand under the layout it enters with.

    Its gradient is summed over the mesh axes on which the computation is split and it is not.
    """
    if not isinstance(value, ShardTensor):
        return part_of_plain(used(value, axes, target), target)
    moved = move(local_of(value), value._layout, target, "attention")
    return used(moved, tuple(axis for axis in axes if axis not in target.split_axes), target)


def _act(op, q, k, v, mask, plan: AttentionPlan) -> Tensor:
    operation = None if torch.compiler.is_dynamo_compiling() else current_operation()
    heads, reorder = plan.heads, plan.reorder
    if heads is not None:
        q = transpose(q, 2, heads.q_rows, 1, heads.q_heads, heads.rank, heads.group, operation)
        k = transpose(k, 2, heads.k_rows, 1, heads.k_heads, heads.rank, heads.group, operation)
        v = transpose(v, 2, heads.k_rows, 1, heads.k_heads, heads.rank, heads.group, operation)
    if reorder is not None:
        q = fetch(q, 2, reorder.queries, reorder.group, 0.0, operation)
        k = fetch(k, 2, reorder.keys, reorder.group, 0.0, operation)
        v = fetch(v, 2, reorder.keys, reorder.group, 0.0, operation)
    if mask is not None:
        mask = _local_mask(mask, plan)
    if plan.direct and not (q.numel() and k.numel()):
        added = mask if mask is not None and mask.is_floating_point() else None
        out = nothing((*q.shape[:3], v.shape[3]), (q, k, v, added))
    elif plan.direct:
        out = op(
            q, k, v, attn_mask=mask, is_causal=plan.causal, scale=plan.attend.scale,
            enable_gqa=plan.grouped != 1,
        )  # fmt: skip
    else:
        key = draw_key(q.device) if plan.attend.dropout else None
        out = attend(q, k, v, mask, plan.attend, key, operation)
    if heads is not None:
        out = transpose(out, 1, heads.q_heads, 2, heads.q_rows, heads.rank, heads.group, operation)
    if reorder is not None:
        out = fetch(out, 2, reorder.back, reorder.group, 0.0, operation)
    return out


def _local_mask(mask: Tensor, plan: AttentionPlan) -> Tensor:
    """4-d; this rank's rows and heads; columns of the local problem where it is one call."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if plan.heads is not None and mask.shape[1] != 1:
        heads = plan.heads.q_heads
        mask = mask.narrow(1, sum(heads[: plan.heads.rank]), heads[plan.heads.rank])
    if not plan.mask_rows and mask.shape[2] != 1:
        mask = _taken(mask, 2, plan.attend.rows)
    if plan.direct and mask.shape[3] != 1:
        mask = _taken(mask, 3, plan.attend.steps[0].columns)
    return mask


def _taken(mask: Tensor, dim: int, runs: Rows) -> Tensor:
    parts = [mask.narrow(dim, a, b - a) for a, b in runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else mask.narrow(dim, 0, 0)


__all__ = ["AttentionPlan", "attention_algorithm", "plan_attention"]
