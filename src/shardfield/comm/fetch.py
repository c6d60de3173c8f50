"""`fetch`: every rank gets the global rows it wants of a split dim. Twice differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfield.comm.collectives import all_to_all
from shardfield.plan import Exchange, Piece, Run


def fetch(
    local: torch.Tensor,
    dim: int,
    plan: Exchange,
    group: str,
    fill: float = 0.0,
    operation: str | None = None,
    fresh: bool = False,
) -> torch.Tensor:
    """Assembles the rows of `dim` that `plan` says this rank wants.

    Args:
        local: this rank's block, `plan.rows` rows along `dim`.
        fill: value of rows outside the global tensor.
        fresh: the result is read by one operation only, whose backward makes a new tensor: rows
            that come back may be added into it.

    Returns:
        A tensor of `plan.out_rows` rows along `dim`; the other dims as in `local`.

    Comm: one ragged all-to-all over `group` in the forward and one in the backward; none where no
        rank needs another's rows. Bytes: `plan.sent_rows` rows forward; backward what it received.
    """
    if plan.core == 0 and len(plan.pieces) == 1 and plan.silent:
        return local
    return _Fetch.apply(local, dim, plan, group, fill, operation, fresh)


def fetch_adjoint(
    grad: torch.Tensor, dim: int, plan: Exchange, group: str, operation: str | None = None
) -> torch.Tensor:
    """Hands every row that `fetch` assembled back to its owner, who adds. The backward of `fetch`.

    Comm: one ragged all-to-all over `group`, forward and backward; none where no rank needs
        another's rows.
    """
    if plan.core == 0 and len(plan.pieces) == 1 and plan.silent:
        return grad
    return _FetchAdjoint.apply(grad, dim, plan, group, operation)


def row_size(shape: Sequence[int], dims: tuple[int, ...]) -> int:
    """Elements of one index of `dims`: the product of the other sizes."""
    size = 1  # a loop: Dynamo does not trace math.prod of a generator
    for index, extent in enumerate(shape):
        if index not in dims:
            size *= extent
    return size


def _shaped(like: torch.Tensor, dim: int, rows: int) -> list[int]:
    shape = list(like.shape)
    shape[dim] = rows
    return shape


def format_of(x: torch.Tensor) -> torch.memory_format:
    """Channels-last, where torch's operations on `x` would keep that, else contiguous."""
    if x.dim() in _CHANNELS_LAST and not x.is_contiguous():
        last = _CHANNELS_LAST[x.dim()]
        if x.is_contiguous(memory_format=last):
            return last
    return torch.contiguous_format


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _filled(like: torch.Tensor, dim: int, rows: int, fill: float) -> torch.Tensor:
    return like.new_full(_shaped(like, dim, rows), fill).contiguous(memory_format=format_of(like))


def send_slabs(
    slabs: Sequence[torch.Tensor],
    like: torch.Tensor,
    dim: int,
    sends: Sequence[int],
    receives: Sequence[int],
    group: str,
    operation: str | None,
    transfer: Callable[..., Any] | None = None,
) -> Any:
    """Sends slabs, in rank order, `sends` rows to each rank.

    Returns:
        What `transfer` does, by default `all_to_all`: the numbers that arrived.
    """
    row = row_size(like.shape, (dim,))
    parts = [part.reshape(-1) for part in _joined(slabs, dim, sends)]
    counts, given = [rows * row for rows in receives], [rows * row for rows in sends]
    if not parts:
        flat = like.new_empty(0)
    else:
        flat = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
    return (transfer or all_to_all)(flat, counts, given, group, operation)


def blocks_of(
    arrived: torch.Tensor, shape: Sequence[int], dim: int, receives: Sequence[int]
) -> list[torch.Tensor | None]:
    """What an all-to-all brought: the rows that came from each rank, of `shape` but for `dim`."""
    row = row_size(shape, (dim,))
    blocks = arrived.split([rows * row for rows in receives])
    before, after = list(shape[:dim]), list(shape[dim + 1 :])
    return [
        block.view([*before, rows, *after]) if rows else None
        for block, rows in zip(blocks, receives, strict=True)
    ]


def _joined(slabs: Sequence[torch.Tensor], dim: int, rows: Sequence[int]) -> list[torch.Tensor]:
    """One tensor for every rank that gets rows: its slabs, joined along `dim`."""
    rest, joined = list(slabs), []
    for count in rows:
        mine = []
        while count:
            mine.append(rest.pop(0))
            count -= mine[-1].shape[dim]
        if mine:
            joined.append(mine[0] if len(mine) == 1 else torch.cat(mine, dim))
    return joined


def _take(source: torch.Tensor, dim: int, piece: Piece) -> torch.Tensor:
    part = source.narrow(dim, piece.start, piece.rows)
    if piece.step == -1:
        return part.flip(dim)
    if piece.step == 0:
        return part.expand(_shaped(part, dim, piece.length))
    return part


def _put(grad: torch.Tensor, dim: int, piece: Piece) -> torch.Tensor:
    """The adjoint of `_take`, for the rows it took."""
    if piece.step == -1:
        return grad.flip(dim)
    if piece.step == 0:
        return grad.sum(dim, keepdim=True)
    return grad


def counts_of(slabs: Sequence[Sequence[Run]]) -> list[int]:
    """Rows that every rank gets of these."""
    return [sum(length for _, length in part) for part in slabs]


def slabs_to_send(local: torch.Tensor, dim: int, plan: Exchange) -> list[torch.Tensor]:
    """The rows that every rank gets that gets some, joined along `dim`, as it will read them."""
    slabs = []
    for ranges in plan.sends:
        parts = [local.narrow(dim, at, length) for at, length in ranges]
        if parts:
            slabs.append(torch.cat(parts, dim) if len(parts) > 1 else parts[0])
    return slabs


def add_returned(
    total: torch.Tensor, dim: int, plan: Exchange, returned: Sequence[torch.Tensor | None]
) -> None:
    """Adds what came back from each rank to the rows that went there."""
    for slabs, block in zip(plan.sends, returned, strict=False):
        at = 0
        for start, length in slabs:
            assert block is not None
            total.narrow(dim, start, length).add_(block.narrow(dim, at, length))
            at += length


def _assemble(local, dim, plan: Exchange, group, fill, operation) -> torch.Tensor:
    arrived: list[torch.Tensor | None] = []
    if not plan.silent:
        sends = counts_of(plan.sends)
        slabs = slabs_to_send(local, dim, plan)
        came = send_slabs(slabs, local, dim, sends, plan.receives, group, operation)
        arrived = blocks_of(came, local.shape, dim, plan.receives)
    memory_format = format_of(local)
    # torch.cat keeps a format that all its operands have.
    present = [b.contiguous(memory_format=memory_format) for b in arrived if b is not None]
    received = None
    if present:
        received = present[0] if len(present) == 1 else torch.cat(present, dim)
    parts = []
    for piece in plan.pieces:
        if piece.source == "fill":
            parts.append(_filled(local, dim, piece.length, fill))
        else:
            source = local if piece.source == "local" else received
            assert source is not None
            parts.append(_take(source, dim, piece))
    if not parts:
        return local.new_empty(_shaped(local, dim, 0))
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(parts, dim)


def slabs_of(
    block: torch.Tensor, steps: Sequence[tuple[int, Exchange]]
) -> list[list[torch.Tensor]]:
    """Copies of the pieces of an assembled block that came from other ranks.

    Args:
        block: what fetches along the dims of `steps`, one after the other, returned.

    Returns:
        For every step, its slabs in order, as wide as the block was after that step.
    """
    found: list[list[torch.Tensor]] = []
    for dim, plan in reversed(steps):
        at, row = 0, []
        for piece in plan.pieces:
            if piece.source == "received":
                row.append(block.narrow(dim, at, piece.length).clone())
            at += piece.length
        found.append(row)
        # Earlier steps see the block without this step's slabs: its local pieces only.
        block = _inner(block, dim, plan)
    return found[::-1]


def _inner(block: torch.Tensor, dim: int, plan: Exchange) -> torch.Tensor:
    """A block of the rows before a step; rows the step dropped are taken as uninitialised."""
    if plan.core is not None:
        at = sum(piece.length for piece in plan.pieces[: plan.core])
        return block.narrow(dim, at, plan.rows)
    shape = _shaped(block, dim, plan.rows)
    inner = block.new_empty(shape)
    at = 0
    for piece in plan.pieces:
        if piece.source == "local":
            part = block.narrow(dim, at, piece.length)
            part = part.narrow(dim, 0, 1) if piece.step == 0 else part
            part = part.flip(dim) if piece.step == -1 else part
            inner.narrow(dim, piece.start, piece.rows).copy_(part)
        at += piece.length
    return inner


def reassemble(
    local: torch.Tensor,
    dim: int,
    plan: Exchange,
    slabs: Sequence[torch.Tensor],
    fill: float = 0.0,
) -> torch.Tensor:
    """The assembled block from the local one and the slabs of one step."""
    left = list(slabs)
    parts = []
    for piece in plan.pieces:
        if piece.source == "fill":
            parts.append(_filled(local, dim, piece.length, fill))
        else:
            parts.append(_take(local, dim, piece) if piece.source == "local" else left.pop(0))
    return torch.cat(parts, dim)


def _scatter_add(grad, dim, plan: Exchange, group, operation, fresh: bool = False) -> torch.Tensor:
    """The adjoint of `_assemble`: hands every row's gradient back to its owner, who adds.

    Args:
        fresh: nothing else holds `grad`: the result may be a part of it.
    """
    at, pieces = 0, []
    for piece in plan.pieces:
        pieces.append((piece, grad.narrow(dim, at, piece.length)))
        at += piece.length
    returned: list[torch.Tensor | None] = []
    if not plan.silent:
        slabs = []
        for order in plan.returns:
            parts = [_put(pieces[index][1], dim, pieces[index][0]) for index in order]
            slabs.append(torch.cat(parts, dim) if len(parts) > 1 else parts[0])
        sends = counts_of(plan.sends)
        came = send_slabs(slabs, grad, dim, plan.receives, sends, group, operation)
        returned = blocks_of(came, grad.shape, dim, sends)
    if plan.core is not None:
        total = pieces[plan.core][1]
        if not fresh:
            total = total.clone(memory_format=format_of(grad))
    else:
        total = grad.new_zeros(_shaped(grad, dim, plan.rows))
    for index, (piece, part) in enumerate(pieces):
        if piece.source == "local" and index != plan.core:
            total.narrow(dim, piece.start, piece.rows).add_(_put(part, dim, piece))
    add_returned(total, dim, plan, returned)
    return total


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, dim, plan, group, fill, operation, fresh):
        ctx.dim, ctx.plan, ctx.group, ctx.operation = dim, plan, group, operation
        ctx.fresh = fresh
        out = _assemble(local, dim, plan, group, fill, operation)
        # A saved token, packed after the communication: a recomputation that stops at its last
        # saved tensor has then entered every collective the forward entered, on every rank.
        ctx.save_for_backward(local.new_empty(0))
        return out

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        name = None if ctx.operation is None else f"backward of {ctx.operation}"
        if ctx.fresh and not (torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling()):
            out = _scatter_add(grad, ctx.dim, ctx.plan, ctx.group, name, fresh=True)
        else:
            out = _FetchAdjoint.apply(grad, ctx.dim, ctx.plan, ctx.group, name)
        return out, None, None, None, None, None, None


class _FetchAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, dim, plan, group, operation):
        ctx.dim, ctx.plan, ctx.group, ctx.operation = dim, plan, group, operation
        out = _scatter_add(grad, dim, plan, group, operation)
        ctx.save_for_backward(out.new_empty(0))  # see _Fetch.forward
        return out

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        name = None if ctx.operation is None else f"backward of {ctx.operation}"
        out = _Fetch.apply(grad, ctx.dim, ctx.plan, ctx.group, 0.0, name, False)
        return out, None, None, None, None
