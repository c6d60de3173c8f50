"""How much a rank computes: what tells a distributed result from one that every rank made whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardfield.comm.small import is_adding

# Operations that move values and compute none: a halo makes a rank move more than its share.
# fmt: off
_MOVES = frozenset(
    {
        "_to_copy", "_unsafe_view", "alias", "arange", "cat", "clone", "constant_pad_nd",
        "contiguous", "copy",
        "copy_", "detach", "empty", "empty_like", "empty_strided", "fill_", "full", "full_like",
        "gather", "index", "index_put", "index_put_", "index_select", "lift_fresh", "new_empty",
        "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "pad",
        "resize_", "scalar_tensor", "scatter", "slice_scatter", "split_with_sizes_copy",
        "stack", "zero_", "zeros", "zeros_like",
    }
)
# fmt: on


@dataclass
class Work:
    """Elements that the operations of a forward pass read and write.

    Attributes:
        computed: Elements in and out of computing operations.
        made: Elements out of them.
        largest: Elements of the largest tensor among those.
        moved: Elements of the largest tensor out of any operation that is no view, collectives
            included.
    """

    computed: int = 0
    made: int = 0
    largest: int = 0
    moved: int = 0


class CountWork(TorchDispatchMode):
    """Counts the work done while it is active; tensors of `ignored` storages do not count.

    Parameters are the same on every rank whatever the split, so they are ignored. So are scalars,
    which hold no rows (the zeros among them that tie a rank without rows into the graph), and
    tensors without memory.
    """

    def __init__(self, ignored: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.work = Work()
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace in ("prim", "profiler") or is_adding():
            return out
        made = self._sizes(out)
        self.work.moved = max((self.work.moved, *made))
        if func.namespace != "aten" or func._schema.name.removeprefix("aten::") in _MOVES:
            return out
        sizes = [*made, *self._sizes(args), *self._sizes([*(kwargs or {}).values()])]
        self.work.computed += sum(sizes)
        self.work.made += sum(made)
        self.work.largest = max((self.work.largest, *sizes))
        return out

    def _sizes(self, tree: Any) -> list[int]:
        return [
            leaf.numel()
            for leaf in _tensors(tree)
            if leaf.dim()
            and not leaf.is_meta
            and leaf.untyped_storage()._cdata not in self._ignored
        ]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Those among the arguments or results of an operator, which nests lists at most."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def share(ranks: Sequence[Work], alone: Work) -> float:
    """The part of one process's computing work that the idlest rank did."""
    if alone.computed == 0:
        return 0.0
    shares = [work.computed / alone.computed for work in ranks]
    if alone.made:
        shares += [work.made / alone.made for work in ranks]
    return min(shares)


def is_vacuous(ranks: Sequence[Work], alone: Work, whole: int) -> bool:
    """Whether every rank read and made at least as much as one rank alone, in tensors as large.

    All have to hold. An honest reduction makes as much as one process but reads less; with a halo
    wider than the tensor a rank reads more but makes less; a fused operation that becomes several
    reads and makes more, but in smaller tensors. Where one rank alone computes nothing, no rank
    needs a tensor of `whole` elements, the size of the largest split input.
    """
    if alone.computed == 0:
        return all(work.moved >= whole > 0 for work in ranks)
    return all(
        work.computed >= alone.computed
        and work.made >= alone.made
        and work.largest >= alone.largest
        for work in ranks
    )
