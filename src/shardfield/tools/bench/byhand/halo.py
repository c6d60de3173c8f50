"""Neighbour rows, concatenated to the local block; their gradients go back the way they came."""

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Exchange:
    """Slabs of rows under way to and from the two neighbours; they start at once."""

    def __init__(self, block: Tensor, send: tuple[int, int], receive: tuple[int, int]) -> None:
        """Sends the first `send[0]` and last `send[1]` rows (dim 2) of `block`.

        Args:
            block: (B, C, H, ...) local.
            send: Rows for the previous and for the next rank.
            receive: Rows expected from the previous and from the next rank.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        starts = (0, block.shape[2] - send[1])
        self._shapes: list[tuple[int, ...] | None] = [None, None]
        sent, received = [0] * ranks, [0] * ranks
        slabs = []
        for side, peer in enumerate((rank - 1, rank + 1)):
            if not 0 <= peer < ranks:
                continue
            slab = block.narrow(2, starts[side], send[side])
            slabs.append(slab.reshape(-1))
            sent[peer] = slab.numel()
            shape = (*block.shape[:2], receive[side], *block.shape[3:])
            self._shapes[side] = shape
            received[peer] = math.prod(shape)
        # Not isend and irecv: with gloo and computation in between they often wait for a tick of
        # the scheduler (4 ms for 1 MB, this 0.5), and they are never faster over a whole step.
        outgoing = torch.cat(slabs) if slabs else block.new_empty(0)
        self._incoming = block.new_empty(sum(received))
        self._sizes = [received[peer] for peer in (rank - 1, rank + 1) if 0 <= peer < ranks]
        work = dist.all_to_all_single(self._incoming, outgoing, received, sent, async_op=True)
        self._work = cast(dist.Work, work)

    def wait(self) -> list[Tensor | None]:
        """The slabs from the previous and from the next rank; None where there is no neighbour."""
        self._work.wait()
        slabs = iter(self._incoming.split(self._sizes))
        return [None if shape is None else next(slabs).view(shape) for shape in self._shapes]


class WithHalo(torch.autograd.Function):
    """(B, C, H, ...) local to (B, C, before + H + after, ...): zeros beyond the global border."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, before: int, after: int) -> Tensor:
        """Copies the block to its place while the slabs travel."""
        ctx.halo = before, after
        exchange = Exchange(block, send=(after, before), receive=(before, after))
        height = block.shape[2]
        padded = block.new_empty((*block.shape[:2], before + height + after, *block.shape[3:]))
        padded.narrow(2, before, height).copy_(block)
        places = padded.narrow(2, 0, before), padded.narrow(2, before + height, after)
        for place, slab in zip(places, exchange.wait(), strict=True):
            if slab is None:
                place.zero_()
            else:
                place.copy_(slab)
        return padded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Adds what the neighbours return to the block's own border rows, in place."""
        before, after = ctx.halo
        exchange = Exchange(gradient, send=(before, after), receive=(after, before))
        own = gradient.narrow(2, before, gradient.shape[2] - before - after)
        from_previous, from_next = exchange.wait()
        if from_previous is not None:
            own.narrow(2, 0, after).add_(from_previous)
        if from_next is not None:
            own.narrow(2, own.shape[2] - before, before).add_(from_next)
        return own, None, None
