"""Attention of one block of queries and keys: output and log-sum-exp, and the gradients of both.

Every kernel takes 4-d tensors `(B, H, L, D)` of as many key heads as query heads. Its backward gets
the output and log-sum-exp of *all* keys, so that the gradients of blocks add up.

Source: FlashAttention-2 (Dao, arXiv:2307.08691) for the backward from the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
_ATEN = torch.ops.aten
Keep = Callable[[slice], Tensor]
"""Bool mask of what dropout keeps in some query rows of a block."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one block of scores is made with.

    Attributes:
        scale: factor of the products.
        causal: query `i` meets keys `0..i` only.
        bias: added to the scores, broadcast to `(B, H, Lq, Lk)`, of the queries' dtype; or None.
        dropout: probability of dropping a weight.
        keep: where it is not dropped; None without dropout.
    """

    scale: float
    causal: bool = False
    bias: Tensor | None = None
    dropout: float = 0.0
    keep: Keep | None = None


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of queries, keys, values and bias."""


def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Output `(B, H, Lq, Dv)` in the operands' dtype, log-sum-exp `(B, H, Lq)`.

    A query whose keys are all masked has output 0 and log-sum-exp -inf.
    """
    if not _fused(q, v, block):
        return _tiled(q, k, v, block)
    q, k, v = map(_dense, (q, k, v))
    if q.device.type == "cpu":
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.causal, attn_mask=block.bias, scale=block.scale
        )
    elif _flash(q, block):
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
            q, k, v, 0.0, block.causal, False, scale=block.scale
        )
    else:
        bias = _aligned(block.bias, q, k)
        out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, block.causal, scale=block.scale
        )
        lse = lse[..., : q.shape[2]]
    if block.bias is not None:
        # The kernels say 0 for a query that sees no key.
        blind = (block.bias == float("-inf")).all(-1)
        lse = lse.masked_fill(blind, float("-inf"))
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    wants_bias: bool,
) -> Gradients:
    """Gradients of one block.

    Args:
        grad: of the output.
        out: output over all keys, not over this block's alone.
        lse: likewise, 0 where all keys are masked.
    """
    if wants_bias or not _fused(q, v, block):
        return _tiled_backward(grad, q, k, v, out, lse, block, wants_bias)
    grad, q, k, v, out = map(_dense, (grad, q, k, v, out))
    if q.device.type == "cpu":
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.causal, attn_mask=block.bias, scale=block.scale
        )
        return dq, dk, dv, None
    # Philox seed and offset: read by dropout only.
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    if _flash(q, block):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, block.causal,
            seed, none, scale=block.scale,
        )  # fmt: skip
        return dq, dk, dv, None
    padding = -q.shape[2] % 32  # the kernel aligns the rows of its log-sum-exp
    padded = torch.nn.functional.pad(lse, (0, padding)) if padding else lse
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(block.bias, q, k), out, padded.contiguous(), none, none, 0.0,
        [True, True, True, False], block.causal, scale=block.scale,
    )  # fmt: skip
    return dq, dk, dv, None


def _fused(q: Tensor, v: Tensor, block: Block) -> bool:
    """Whether one of torch's kernels computes this block."""
    if block.keep is not None or q.shape[-1] != v.shape[-1] or not q.is_floating_point():
        return False
    if q.device.type == "cpu":
        return True
    if q.device.type != "cuda" or q.dtype == torch.float64:
        return False
    return q.shape[-1] % 8 == 0


def _dense(x: Tensor) -> Tensor:
    """Features next to each other, as the kernels read them without asking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _flash(q: Tensor, block: Block) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and block.bias is None and q.shape[-1] <= 256


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A bias as the memory-efficient kernel takes it: of all scores, its rows 16 bytes apart.

    Samples and heads that share one share its memory.
    """
    if bias is None:
        return None
    keys = k.shape[2]
    bias, padding = bias.expand(*bias.shape[:3], keys), -keys % 8
    if padding:
        bias = torch.nn.functional.pad(bias, (0, padding))[..., :keys]
    return bias.expand(*q.shape[:3], keys)


_TILE = 1 << 24
"""Scores held at a time by the kernel in plain torch."""


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_slices(q: Tensor, k: Tensor) -> list[slice]:
    width = max(1, q.shape[0] * q.shape[1] * k.shape[2])
    step = max(1, _TILE // width)
    return [slice(at, min(at + step, q.shape[2])) for at in range(0, q.shape[2], step)]


def _rows(value: Tensor | None, rows: slice) -> Tensor | None:
    return value if value is None or value.shape[-2] == 1 else value[..., rows, :]


def _scores(q: Tensor, k: Tensor, block: Block, rows: slice) -> Tensor:
    dtype = _precise(q.dtype)
    scores = (q[:, :, rows].to(dtype) @ k.to(dtype).transpose(-1, -2)) * block.scale
    bias = _rows(block.bias, rows)
    if bias is not None:
        scores = scores + bias
    if block.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(ahead.triu(1 + rows.start), float("-inf"))
    return scores


def _tiled(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    value = v.to(_precise(q.dtype))
    for rows in _row_slices(q, k):
        scores = _scores(q, k, block, rows)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1))
        if block.keep is not None:
            weights = weights * block.keep(rows) / (1 - block.dropout)
        outs.append((weights @ value).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _tiled_backward(grad, q, k, v, out, lse, block: Block, wants_bias: bool) -> Gradients:
    dtype = _precise(q.dtype)
    key, value = k.to(dtype), v.to(dtype)
    dk, dv, dqs, biases = torch.zeros_like(key), torch.zeros_like(value), [], []
    for rows in _row_slices(q, k):
        above = grad[:, :, rows].to(dtype)
        weights = torch.exp(_scores(q, k, block, rows) - lse[:, :, rows].unsqueeze(-1))
        dweights = above @ value.transpose(-1, -2)
        kept = weights
        if block.keep is not None:
            factor = block.keep(rows) / (1 - block.dropout)
            kept, dweights = weights * factor, dweights * factor
        dv += kept.transpose(-1, -2) @ above
        inner = (above * out[:, :, rows]).sum(-1, keepdim=True)
        dscores = weights * (dweights - inner)
        if wants_bias:
            biases.append(dscores)
        dscores = dscores * block.scale
        dqs.append((dscores @ key).to(q.dtype))
        dk += dscores.transpose(-1, -2) @ q[:, :, rows].to(dtype)
    dbias = torch.cat(biases, 2) if wants_bias else None
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype), dbias
