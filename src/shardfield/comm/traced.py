"""Collectives as compilers see them: operations with an effect, in one order.

A compiler sees one rank's graph. It would drop a collective of which this rank uses nothing, merge
two of equal arguments, or move one that does not depend on a gradient from the backward to the
forward: on that rank alone, and all others would wait. torch's effect tokens forbid all three.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfield.comm import small
from shardfield.comm._torch import functional, ordered
from shardfield.comm.wait import wait


@ordered("shardfield::all_reduce")
def all_reduce(tensor: torch.Tensor, reduction: str, group: str) -> torch.Tensor:
    """`small.all_reduce`; contiguous whatever order the compiler chose."""
    return small.all_reduce(tensor.contiguous(), reduction, group)


@all_reduce.register_fake
def _(tensor: torch.Tensor, reduction: str, group: str) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


@ordered("shardfield::all_to_all")
def all_to_all(
    tensor: torch.Tensor, receives: Sequence[int], sends: Sequence[int], group: str
) -> torch.Tensor:
    """`_c10d_functional.all_to_all_single`, waited for."""
    return wait(functional.all_to_all_single(tensor, receives, sends, group))


@all_to_all.register_fake
def _(
    tensor: torch.Tensor, receives: Sequence[int], sends: Sequence[int], group: str
) -> torch.Tensor:
    return tensor.new_empty(sum(receives))


@ordered("shardfield::all_gather")
def all_gather(block: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """`_c10d_functional.all_gather_into_tensor`, waited for."""
    return wait(functional.all_gather_into_tensor(block.contiguous(), ranks, group))


@all_gather.register_fake
def _(block: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return block.new_empty(ranks * block.shape[0], *block.shape[1:])
