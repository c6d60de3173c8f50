"""How much a rank computes: what tells a distributed result from one that every rank made whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that move values and compute none: a halo makes a rank move more than its share.
_MOVES = frozenset(
    """
    _to_copy alias arange cat clone constant_pad_nd contiguous copy copy_ detach empty empty_like
    empty_strided fill_ full full_like gather index index_put index_put_ index_select lift_fresh
    new_empty new_empty_strided new_full new_ones new_zeros ones ones_like pad resize_ scalar_tensor
    scatter slice_scatter split_with_sizes_copy stack zero_ zeros zeros_like
    """.split()
)


@dataclass
class Work:
    """Elements that the operations of a forward pass read and write.

    Attributes:
        computed: Elements in and out of computing operations.
        largest: Elements of the largest tensor among those.
        moved: Elements out of every operation that is no view, collectives included.
        largest_moved: Elements of the largest tensor among those.
    """

    computed: int = 0
    largest: int = 0
    moved: int = 0
    largest_moved: int = 0


class CountWork(TorchDispatchMode):
    """Counts the work done while it is active; tensors of `ignored` storages do not count.

    Parameters are the same on every rank whatever the split, so they are ignored.
    """

    def __init__(self, ignored: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.work = Work()
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace in ("prim", "profiler"):
            return out
        made = self._sizes(out)
        self.work.moved += sum(made)
        self.work.largest_moved = max((self.work.largest_moved, *made))
        if func.namespace != "aten" or func._schema.name.removeprefix("aten::") in _MOVES:
            return out
        sizes = [*made, *self._sizes((args, kwargs))]
        self.work.computed += sum(sizes)
        self.work.largest = max((self.work.largest, *sizes))
        return out

    def _sizes(self, tree: Any) -> list[int]:
        return [
            leaf.numel()
            for leaf in tree_leaves(tree)
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._ignored
        ]


def is_vacuous(ranks: Sequence[Work], alone: Work) -> bool:
    """Whether every rank did at least the work of one rank alone, on tensors as large.

    Both have to hold: a fused operation may become several smaller ones, and a halo may be wider
    than the tensor.
    """
    if all(work.computed == 0 for work in ranks):
        return all(
            work.moved >= alone.moved and work.largest_moved >= alone.largest_moved > 0
            for work in ranks
        ) and any(work.moved > 0 for work in ranks)
    return all(work.computed >= alone.computed and work.largest >= alone.largest for work in ranks)
