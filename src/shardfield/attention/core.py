"""The autograd node of attention over a split sequence: blocks of keys come, blocks of scores go.

Kept for backward: this rank's queries, keys, values, output and log-sum-exp. Keys and values travel
again in the backward, their gradients travel back to the owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from shardfield.attention import kernels
from shardfield.attention.plan import Piece, Rows, Step
from shardfield.comm.collectives import Pending, all_gather, all_reduce, start_all_to_all
from shardfield.keyed import above
from shardfield.layout import Layout
from shardfield.plan import Run

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Attend:
    """What this rank does.

    Attributes:
        steps: see `plan.key_steps`.
        group: in which keys travel; empty where none do.
        merged: groups over which the keys are split and the queries are not: the ranks' results
            are joined.
        rows: global runs of this rank's queries.
        scale: factor of the scores.
        dropout: probability of dropping a weight.
        weights: layout of the weights `(B, H, Lq, Lk)`, rows and columns whole; with dropout.
        heads: (first, count) of the global heads this rank computes; likewise.
    """

    steps: tuple[Step, ...]
    group: str
    merged: tuple[str, ...]
    rows: Rows
    scale: float
    dropout: float = 0.0
    weights: Layout | None = None
    heads: tuple[int, int] = (0, 0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plan: Attend,
    key: Tensor | None = None,
    operation: str | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks of `plan.group`.

    Args:
        q: local `(B, H, Lq, D)`.
        k: local `(B, Hk, Lk, D)`; `H` is a multiple of `Hk`.
        v: local `(B, Hk, Lk, Dv)`.
        mask: local `(B|1, H|1, Lq|1, keys|1)`, bool (True: meets) or added to the scores; its
            columns are all global keys.
        key: of what dropout keeps (`keyed.draw_key`); None without dropout.

    Returns:
        `(B, H, Lq, Dv)`, of this rank's queries. Once differentiable.

    Comm: per step one all-to-all of the key and value blocks forward; backward the same and one
        that returns their gradients. Per merged group one gather of the log-sum-exp and one
        all-reduce of the output, forward.
    """
    return _Attention.apply(q, k, v, mask, key, plan, operation)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, key, plan: Attend, operation):
        with _as_it_is(q):
            out, lse = _forward(q, k, v, mask, plan, key, operation)
        for group in plan.merged:
            out, lse = _merge(out, lse, group, operation)
        out, lse = out.to(q.dtype), lse.masked_fill(lse == float("-inf"), 0)
        ctx.saved = plan, operation
        ctx.save_for_backward(q, k, v, mask, key, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, key, out, lse = ctx.saved_tensors
        plan, operation = ctx.saved
        name = None if operation is None else f"backward of {operation}"
        wants = ctx.needs_input_grad[3], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        with _as_it_is(q):
            grads = _backward(grad, q, k, v, mask, out, lse, plan, key, name, wants)
        return *grads, None, None, None


def _as_it_is(q: Tensor):
    """Inside, autocast does not touch the products: the operands are cast already."""
    kind = q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _forward(q, k, v, mask, plan: Attend, key, operation) -> tuple[Tensor, Tensor]:
    total = _Total(q, v)
    coming = _start(k, v, plan, 0, operation)
    for index, step in enumerate(plan.steps):
        arrived, coming = coming, _start(k, v, plan, index + 1, operation)
        if not _pieces(q, step):
            _finish(arrived)
            continue
        keys, values = _block(k, v, step, arrived)
        for piece in step.pieces:
            total.add(piece, *kernels.forward(*_operands(q, keys, values, piece), _made(
                q, mask, plan, step, piece, key
            )))  # fmt: skip
    return total.finished()


def _pieces(q: Tensor, step: Step) -> tuple[Piece, ...]:
    """What there is to compute; nothing without samples or heads, which kernels do not take."""
    return step.pieces if q.shape[0] and q.shape[1] else ()


class _Total:
    """Joins the results of blocks: weights them by their share of the log-sum-exp."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.shape = (*q.shape[:3], v.shape[3])
        self.out: Tensor | None = None
        self.lse: Tensor | None = None
        self.like = q

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        out = out.to(self.dtype)
        if self.out is None or self.lse is None:
            if piece.q_rows == self.shape[2]:
                self.out, self.lse = out, lse
                return
            self._start()
            assert self.out is not None and self.lse is not None
        here, sums = (t.narrow(2, piece.q, piece.q_rows) for t in (self.out, self.lse))
        joined = torch.logaddexp(sums, lse)
        known = joined.masked_fill(joined == float("-inf"), 0)
        here.mul_((sums - known).exp().unsqueeze(-1))
        here.add_(out * (lse - known).exp().unsqueeze(-1))
        sums.copy_(joined)

    def _start(self) -> None:
        self.out = self.like.new_zeros(self.shape, dtype=self.dtype)
        self.lse = self.like.new_full(self.shape[:3], float("-inf"), dtype=self.dtype)

    def finished(self) -> tuple[Tensor, Tensor]:
        if self.out is None:
            self._start()
        assert self.out is not None and self.lse is not None
        return self.out, self.lse


def _merge(out: Tensor, lse: Tensor, group: str, operation) -> tuple[Tensor, Tensor]:
    """Joins results for the same queries and other keys, which lie on other ranks."""
    every = all_gather(lse, group, operation)
    total = every.logsumexp(0)
    share = (lse - total.masked_fill(total == float("-inf"), 0)).exp()
    return all_reduce(out * share.unsqueeze(-1), group, operation), total


def _backward(grad, q, k, v, mask, out, lse, plan: Attend, key, operation, wants):
    wants_mask, wants_keys = wants
    precise = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq = torch.zeros_like(q, dtype=precise)
    dk, dv = torch.zeros_like(k, dtype=precise), torch.zeros_like(v, dtype=precise)
    dmask = torch.zeros_like(mask, dtype=precise) if wants_mask else None
    coming = _start(k, v, plan, 0, operation)
    returning: list[tuple[Step, Pending]] = []
    for index, step in enumerate(plan.steps):
        arrived, coming = coming, _start(k, v, plan, index + 1, operation)
        pieces = _pieces(q, step)
        if pieces:
            keys, values = _block(k, v, step, arrived)
            gk, gv = torch.zeros_like(keys, dtype=precise), torch.zeros_like(values, dtype=precise)
        else:
            _finish(arrived)
            gk, gv = k.new_zeros(0), v.new_zeros(0)
        for piece in pieces:
            rows = slice(piece.q, piece.q + piece.q_rows)
            made = _made(q, mask, plan, step, piece, key)
            operands = _operands(q, keys, values, piece)
            pq, pk, pv, pb = kernels.backward(
                grad[:, :, rows], *operands, out[:, :, rows], lse[:, :, rows], made, wants_mask
            )
            dq[:, :, rows] += pq
            gk.narrow(2, piece.k, piece.k_rows).add_(_ungrouped(pk, keys))
            gv.narrow(2, piece.k, piece.k_rows).add_(_ungrouped(pv, values))
            if dmask is not None and pb is not None:
                _add_bias(dmask, pb, plan, step, piece)
        if wants_keys:
            sent = _return(gk, gv, k, v, plan, step, dk, dv, operation)
            if returning:
                _accept(*returning.pop(), dk, dv)
            if sent is not None:
                returning.append((step, sent))
    if returning:
        _accept(*returning.pop(), dk, dv)
    dmask = None if dmask is None else dmask.to(mask.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask


def _row(k: Tensor, v: Tensor) -> int:
    """Elements of one row of keys and values."""
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def _start(k, v, plan: Attend, index: int, operation) -> Pending | None:
    """Starts the exchange of a step, if there is one."""
    if index >= len(plan.steps) or plan.steps[index].silent:
        return None
    step, row = plan.steps[index], _row(k, v)
    copies = sum(1 for rows in step.sends if rows)
    payload = torch.cat([k.reshape(-1), v.reshape(-1)] * copies) if copies else k.new_empty(0)
    receives, sends = [n * row for n in step.receives], [n * row for n in step.sends]
    return start_all_to_all(payload, receives, sends, plan.group, operation)


def _finish(arrived: Pending | None) -> None:
    if arrived is not None:
        arrived.wait()


def _unpacked(flat: Tensor, rows: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one rank's message of `rows` rows."""
    heads = k.shape[:2]
    cut = heads[0] * heads[1] * rows * k.shape[3]
    return (
        flat[:cut].view(*heads, rows, k.shape[3]),
        flat[cut:].view(*heads, rows, v.shape[3]),
    )


def _block(k, v, step: Step, arrived: Pending | None) -> tuple[Tensor, Tensor]:
    """Keys and values of a step, in the order of its sources."""
    if arrived is None:
        return k, v
    row = _row(k, v)
    messages = arrived.wait().split([n * row for n in step.receives])
    keys, values = [], []
    for source in step.sources:
        rows = step.receives[source]
        pair = _unpacked(messages[source], rows, k, v) if rows else (k, v)
        keys.append(pair[0])
        values.append(pair[1])
    if len(keys) == 1:
        return keys[0], values[0]
    return torch.cat(keys, 2), torch.cat(values, 2)


def _return(gk, gv, k, v, plan: Attend, step: Step, dk, dv, operation) -> Pending | None:
    """Adds the gradient of this rank's own block, starts to send back that of others' blocks."""
    at, parts = 0, []
    for source in step.sources:
        rows = step.receives[source]
        if not rows:
            if gk.numel():
                dk += gk.narrow(2, at, k.shape[2])
                dv += gv.narrow(2, at, k.shape[2])
            at += k.shape[2]
        else:
            if gk.numel():
                parts += [gk.narrow(2, at, rows), gv.narrow(2, at, rows)]
            else:
                parts += [k.new_zeros(rows * _row(k, v))]
            at += rows
    if step.silent:
        return None
    row = _row(k, v)
    flat = [part.to(k.dtype).reshape(-1) for part in parts]
    payload = torch.cat(flat) if flat else k.new_empty(0)
    receives, sends = [n * row for n in step.sends], [n * row for n in step.receives]
    return start_all_to_all(payload, receives, sends, plan.group, operation)


def _accept(step: Step, sent: Pending, dk: Tensor, dv: Tensor) -> None:
    """Adds what other ranks computed for this rank's keys and values."""
    row = _row(dk, dv)
    for rows, message in zip(
        step.sends, sent.wait().split([n * row for n in step.sends]), strict=True
    ):
        if rows:
            gk, gv = _unpacked(message, rows, dk, dv)
            dk += gk
            dv += gv


def _operands(q, keys, values, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    q = q.narrow(2, piece.q, piece.q_rows)
    keys, values = (t.narrow(2, piece.k, piece.k_rows) for t in (keys, values))
    group = q.shape[1] // max(1, keys.shape[1])
    if group != 1:
        keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
    return q, keys, values


def _ungrouped(grad: Tensor, keys: Tensor) -> Tensor:
    """The gradient of key heads that several query heads share."""
    heads = keys.shape[1]
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _made(q, mask, plan: Attend, step: Step, piece: Piece, key) -> kernels.Block:
    def keep(rows: slice) -> Tensor:
        queries = _cut(plan.rows, piece.q + rows.start, rows.stop - rows.start)
        return _kept(plan, key, queries, _cut(step.columns, piece.k, piece.k_rows))

    bias = _bias(q, mask, plan, step, piece)
    return kernels.Block(
        plan.scale, piece.causal, bias, plan.dropout, keep if plan.dropout else None
    )


def _kept(plan: Attend, key: Tensor, queries: list[Run], keys: list[Run]) -> Tensor:
    """Bool, which weights of these queries and keys dropout keeps."""
    assert plan.weights is not None
    bands = []
    for a, b in queries:
        blocks = []
        for c, d in keys:
            spans = ((1, *plan.heads), (2, a, b - a), (3, c, d - c))
            blocks.append(above(plan.weights, key, plan.dropout, spans))
        bands.append(torch.cat(blocks, 3))
    return torch.cat(bands, 2)


def _cut(runs: Rows, start: int, rows: int) -> list[Run]:
    """Rows [start, start+rows) of what has these runs, as global (start, stop)."""
    found, at = [], 0
    for a, b in runs:
        first, last = max(start, at), min(start + rows, at + b - a)
        if first < last:
            found.append((a + first - at, a + last - at))
        at += b - a
    return found


def _columns(mask: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    if mask.shape[-1] == 1:
        return mask
    parts = [mask.narrow(-1, a, b - a) for a, b in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _bias(q, mask, plan: Attend, step: Step, piece: Piece) -> Tensor | None:
    """What is added to the scores of a piece, in the dtype of the queries."""
    if mask is None and not step.by_position:
        return None
    columns = _cut(step.columns, piece.k, piece.k_rows)
    part = None
    if mask is not None:
        part = mask if mask.shape[2] == 1 else mask.narrow(2, piece.q, piece.q_rows)
        part = _columns(part, columns)
    if step.by_position:
        positions = _positions(_cut(plan.rows, piece.q, piece.q_rows), q.device)
        meets = positions.unsqueeze(1) >= _positions(columns, q.device)
        if part is None or part.dtype == torch.bool:
            part = meets[None, None] if part is None else part & meets
        else:
            part = part.masked_fill(~meets, float("-inf"))
    assert part is not None
    if part.dtype == torch.bool:
        zero = torch.zeros(part.shape, dtype=q.dtype, device=q.device)
        return zero.masked_fill(~part, float("-inf"))
    return part.to(q.dtype)


def _positions(runs: Sequence[tuple[int, int]], device) -> Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in runs])


def _add_bias(dmask: Tensor, grad: Tensor, plan: Attend, step: Step, piece: Piece) -> None:
    """Adds the gradient of a piece's scores to that of the mask."""
    here = dmask if dmask.shape[2] == 1 else dmask.narrow(2, piece.q, piece.q_rows)
    at = 0
    for a, b in _cut(step.columns, piece.k, piece.k_rows):
        part = here if here.shape[3] == 1 else here.narrow(3, a, b - a)
        part.add_(grad.narrow(3, at, b - a).sum_to_size(part.shape))
        at += b - a


__all__ = ["Attend", "attend"]
