"""Attention over a split sequence as one would write it by hand: a ring, and all-to-all over heads.

Even shards, no mask, no dropout; torch's flash kernel for every block.

Source: Liu, Zaharia, Abbeel, arXiv:2310.01889; DeepSpeed Ulysses, arXiv:2309.14509.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Passing:
    """A tensor on its way to the next rank, another on its way from the previous one."""

    def __init__(self, tensor: Tensor) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sent, received = [0] * ranks, [0] * ranks
        sent[(rank + 1) % ranks] = received[(rank - 1) % ranks] = tensor.numel()
        self._tensor, self._arriving = tensor, torch.empty_like(tensor)
        work = dist.all_to_all_single(
            self._arriving.view(-1), tensor.view(-1), received, sent, async_op=True
        )
        self._work = cast(dist.Work, work)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._arriving


class Ring(torch.autograd.Function):
    """(B, H, N, D) local queries, keys and values to the local output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Comm: the keys and values of every other rank, one hop at a time."""
        ranks = dist.get_world_size()
        pair = torch.stack([k, v])
        out, total = q, q
        for hop in range(ranks):
            passing = _Passing(pair) if hop + 1 < ranks else None
            part, lse = _FORWARD(q, pair[0], pair[1])
            if hop == 0:
                out, total = part, lse
            else:
                joined = torch.logaddexp(total, lse)
                out.mul_((total - joined).exp_().unsqueeze(-1))
                out.add_(part.mul_((lse - joined).exp_().unsqueeze(-1)))
                total = joined
            if passing is not None:
                pair = passing.wait()
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Comm: keys and values again, their gradients one hop behind, all the way home."""
        q, k, v, out, total = ctx.saved_tensors
        ranks = dist.get_world_size()
        pair = torch.stack([k, v])
        dq, dpair = torch.zeros_like(q), None
        for hop in range(ranks):
            passing = _Passing(pair) if hop + 1 < ranks else None
            gq, gk, gv = _BACKWARD(grad, q, pair[0], pair[1], out, total, 0.0, False)
            dq += gq
            here = torch.stack([gk, gv])
            if dpair is not None:
                here += dpair.wait()
            dpair = _Passing(here) if ranks > 1 else None
            if passing is not None:
                pair = passing.wait()
        home = here if dpair is None else dpair.wait()
        return dq, home[0], home[1]


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, N, D) local to the same."""
    return cast(Tensor, Ring.apply(q, k, v))


class _AllToAll(torch.autograd.Function):
    """(B, H, N, D): all heads of some rows to all rows of some heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathers_rows: bool) -> Tensor:
        ctx.gathers_rows = gathers_rows
        ranks = dist.get_world_size()
        split, joined = (1, 2) if gathers_rows else (2, 1)
        outgoing = torch.stack(x.chunk(ranks, split))
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        return torch.cat(incoming.unbind(0), joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _AllToAll.apply(grad, not ctx.gathers_rows)), None


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, N, D) local to the same; the ranks divide H."""
    q, k, v = (cast(Tensor, _AllToAll.apply(x, True)) for x in (q, k, v))
    return cast(Tensor, _AllToAll.apply(F.scaled_dot_product_attention(q, k, v), False))
