"""`lend`: rows travel to the ranks that lack them while their owners compute with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from shardfield.comm.collectives import Pending, start_all_to_all
from shardfield.comm.fetch import (
    add_returned,
    blocks_of,
    counts_of,
    fetch_adjoint,
    send_slabs,
    slabs_to_send,
)
from shardfield.plan import Exchange, Piece


def lend(
    local: torch.Tensor, dim: int, plan: Exchange, group: str, operation: str | None
) -> tuple[torch.Tensor, Callable[[], torch.Tensor | None]]:
    """Starts the exchange of a fetch, whose rows are handed out as they came.

    Args:
        local: float32 or float64.

    Returns:
        `local` again, to be read by one operation only, whose backward makes a new tensor: rows
        that come back are added into it. And a function, to be called once on every rank: it waits
        and returns the received rows along `dim`, in the order of their owners; None where no rank
        needs another's rows.

    Comm: one ragged all-to-all over `group`. In the backward one too: it starts when the gradient
        of the received rows is there, and is waited for when that of `local` is. In a backward that
        is differentiated itself it is a `fetch_adjoint`, which waits at once.
    """
    if plan.silent:
        return local, _nothing
    travel = _Travel(dim, plan, group, operation)
    local = _Start.apply(local, travel)
    return local, lambda: _Wait.apply(local, travel)


def _nothing() -> None:
    return None


class _Travel:
    """Rows of one exchange on their way, there or back."""

    def __init__(self, dim: int, plan: Exchange, group: str, operation: str | None) -> None:
        self.dim, self.plan, self.group, self.operation = dim, plan, group, operation
        self.grad: torch.Tensor | None = None  # of received rows, in a backward to differentiate
        self._pending: Pending | None = None

    def send(self, local: torch.Tensor) -> None:
        """Rows of `local` leave for the ranks that lack them."""
        slabs = slabs_to_send(local, self.dim, self.plan)
        self._start(slabs, local, counts_of(self.plan.sends), self.plan.receives, self.operation)

    def received(self, like: torch.Tensor) -> torch.Tensor:
        """The rows that this rank lacked, joined."""
        blocks = [block for block in self._wait(self.plan.receives) if block is not None]
        if blocks:
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks, self.dim)
        return like.new_empty([*self._shape[: self.dim], 0, *self._shape[self.dim + 1 :]])

    def send_back(self, grad: torch.Tensor) -> None:
        """Gradients of the received rows leave for the owners."""
        receives = self.plan.receives
        slabs = [part for part in grad.split(receives, self.dim) if part.shape[self.dim]]
        self._start(slabs, grad, receives, counts_of(self.plan.sends), self._backward())

    def with_returned(self, total: torch.Tensor) -> torch.Tensor:
        """`total` and what comes back, added in place where nobody differentiates that.

        Nothing comes back in a pass that reached no rank's received rows.
        """
        if self._pending is not None:
            returned = self._wait(counts_of(self.plan.sends))
            add_returned(total, self.dim, self.plan, returned)
        if self.grad is not None:
            grad, self.grad = self.grad, None
            plan = _received_only(self.plan)
            back = fetch_adjoint(grad, self.dim, plan, self.group, self._backward())
            total = total + back
        return total

    def _backward(self) -> str | None:
        return None if self.operation is None else f"backward of {self.operation}"

    def _start(self, slabs, like, sends, receives, operation) -> None:
        self._pending = send_slabs(
            slabs, like, self.dim, sends, receives, self.group, operation, start_all_to_all
        )
        self._shape = like.shape

    def _wait(self, receives: Sequence[int]) -> list[torch.Tensor | None]:
        assert self._pending is not None
        arrived, self._pending = self._pending.wait(), None
        return blocks_of(arrived, self._shape, self.dim, receives)


@lru_cache(maxsize=4096)
def _received_only(plan: Exchange) -> Exchange:
    """The exchange of a fetch that returns the received rows in the order of their owners."""
    pieces, at = [], 0
    for rows in plan.receives:
        if rows:
            pieces.append(Piece("received", at, rows, 1, rows))
            at += rows
    returns = tuple((index,) for index in range(len(pieces)))
    return replace(plan, pieces=tuple(pieces), out_rows=at, core=None, returns=returns)


class _Start(torch.autograd.Function):
    """The local tensor again."""

    @staticmethod
    def forward(ctx, local, travel):
        ctx.travel = travel
        travel.send(local)
        return local.detach()  # not a view, but of the same version: writing into it is noticed

    @staticmethod
    def backward(ctx, grad):
        return ctx.travel.with_returned(grad), None


class _Wait(torch.autograd.Function):
    """The received rows. Takes what `_Start` returned, whose backward then comes after this one."""

    @staticmethod
    def forward(ctx, local, travel):
        ctx.travel = travel
        rows = travel.received(local)
        # A saved token, packed after the communication: a recomputation that stops at its last
        # saved tensor has then entered every collective the forward entered, on every rank.
        ctx.save_for_backward(local.new_empty(0))
        return rows

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            ctx.travel.grad = grad
        else:
            ctx.travel.send_back(grad)
        return None, None
