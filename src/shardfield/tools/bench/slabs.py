"""Halo bytes by arithmetic alone: an oracle that shares no code with the plans it judges."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from torch import Tensor, nn

from shardfield.tensor import ShardTensor

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def rows_from_others(
    inputs: Sequence[int], outputs: Sequence[int], layer: nn.Module, spatial: int = 0
) -> list[int]:
    """Input rows each rank needs of the others for the output rows it owns.

    Args:
        inputs: Extents of the input's split dim, one a rank.
        outputs: Extents of the output's, one a rank.
        layer: A convolution or transposed convolution (3-wide and so on, zero padding).
        spatial: Which spatial dim is split.

    Returns:
        Rows, one a rank; 0 for a layer that looks at one row only.
    """
    if not isinstance(layer, (*_CONVOLUTIONS, *_TRANSPOSED)):
        return [0] * len(inputs)
    first_rows, first_outputs = _starts(inputs), _starts(outputs)
    total = sum(inputs)
    needed = []
    for have, count, begin, produced in zip(
        first_rows, inputs, first_outputs, outputs, strict=True
    ):
        low, high = _wanted(layer, spatial, begin, begin + produced)
        low, high = max(low, 0), min(high, total)
        shared = max(0, min(high, have + count) - max(low, have))
        needed.append(max(0, high - low) - shared if produced else 0)
    return needed


def _starts(extents: Sequence[int]) -> list[int]:
    return [0, *accumulate(extents)][:-1]


def _wanted(layer: nn.Module, spatial: int, begin: int, end: int) -> tuple[int, int]:
    """Half-open range of input rows that output rows [begin, end) are computed from."""
    kernel, stride, padding, dilation = (
        cast("tuple[int, ...]", getattr(layer, name))[spatial]
        for name in ("kernel_size", "stride", "padding", "dilation")
    )
    reach = dilation * (kernel - 1)
    if isinstance(layer, _TRANSPOSED):
        # Output row o hears of input row i when i * stride - padding + t * dilation = o.
        return -((reach - begin - padding) // stride), (end - 1 + padding) // stride + 1
    return begin * stride - padding, (end - 1) * stride - padding + reach + 1


class SlabCounter:
    """Counts, by forward hooks, the halo bytes of each rank while a sharded network runs.

    Example:
        `with SlabCounter(network, ranks=2, dim=2) as slabs: network(x)`, then `slabs.bytes`.
    """

    def __init__(self, network: nn.Module, ranks: int, dim: int) -> None:
        self.bytes = [0] * ranks
        self._network, self._dim = network, dim

    def __enter__(self) -> "SlabCounter":
        self._handles = [
            module.register_forward_hook(self._count)
            for module in self._network.modules()
            if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED))
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x, y = cast(ShardTensor, inputs[0]), cast(ShardTensor, output)
        taken, made = x.layout.extents(self._dim), y.layout.extents(self._dim)
        if taken is None or made is None:
            raise ValueError(f"dim {self._dim} of the input of {layer} is not simply split")
        row = math.prod(x.shape) // x.shape[self._dim] * x.element_size()
        for rank, count in enumerate(rows_from_others(taken, made, layer, self._dim - 2)):
            self.bytes[rank] += count * row
