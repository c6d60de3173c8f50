"""Moves a split from one dim to another by one all-to-all."""

from __future__ import annotations

import torch

from shardfield.comm.collectives import all_to_all
from shardfield.comm.fetch import row_size


def transpose(
    local: torch.Tensor,
    source: int,
    source_extents: tuple[int, ...],
    target: int,
    target_extents: tuple[int, ...],
    rank: int,
    group: str,
    operation: str | None = None,
) -> torch.Tensor:
    """Split over dim `source` -> split over dim `target`, on one group.

    Args:
        local: this rank's block: its rows of `source`, all of `target`.

    Returns:
        Its rows of `target`, all of `source`.

    Comm: one ragged all-to-all forward and one backward.
    """
    return _Transpose.apply(
        local, source, source_extents, target, target_extents, rank, group, operation
    )


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, source, have, target, want, rank, group, operation):
        ctx.saved = target, want, source, have, rank, group, operation
        rest = row_size(local.shape, (source, target))
        sends = [rest * have[rank] * rows for rows in want]
        receives = [rest * rows * want[rank] for rows in have]
        flat = torch.cat([part.reshape(-1) for part in local.split(list(want), target)])
        arrived = all_to_all(flat, receives, sends, group, operation).split(receives)
        blocks = []
        for rows, block in zip(have, arrived, strict=True):
            shape = list(local.shape)
            shape[source], shape[target] = rows, want[rank]
            blocks.append(block.view(shape))
        ctx.save_for_backward(local.new_empty(0))  # see fetch._Fetch.forward
        return torch.cat(blocks, source)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return _Transpose.apply(grad, *ctx.saved), *(None,) * 7
