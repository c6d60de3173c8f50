"""Hypothesis strategies for what the plans depend on: splits and windows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st

Extents = tuple[int, ...]


def examples(count: int) -> settings:
    """`count` examples in the suite; 300 or more in a conformance run.

    Compiling a function makes its ranks import its test module, where no profile is registered.
    """
    return settings(max_examples=max(count, 300) if os.environ.get("CONFORMANCE") else count)


@dataclass(frozen=True)
class Window:
    """Arguments of one spatial dim of a convolution or pooling.

    Attributes:
        size: Input extent.
        kernel: Kernel extent.
        stride: Step.
        padding: Rows of padding at either end.
        dilation: Distance of the kernel's taps.
    """

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def out(self) -> int:
        """Output extent of the convolution."""
        reach = self.dilation * (self.kernel - 1) + 1
        return (self.size + 2 * self.padding - reach) // self.stride + 1


@st.composite
def splits(draw: st.DrawFn, size: int, ranks: int) -> Extents:
    """Any ragged split of `size` rows over `ranks` ranks, empty shards included."""
    points = draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1))
    cuts = [0, *sorted(points), size]
    return tuple(b - a for a, b in pairwise(cuts))


@st.composite
def placed(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: dict[str, int]
) -> dict[str, tuple[int, Extents]]:
    """For some axes of a mesh the dim that each splits, no two the same, and its extents."""
    dims = draw(st.permutations([*range(len(shape)), *[None] * len(mesh)]))
    return {
        axis: (dim, draw(splits(shape[dim], ranks)))
        for (axis, ranks), dim in zip(mesh.items(), dims, strict=False)
        if dim is not None
    }


@st.composite
def sized_splits(
    draw: st.DrawFn, ranks: st.SearchStrategy[int] | None = None, max_size: int = 24
) -> Extents:
    """A split of a drawn size over a drawn number of ranks (1 to 4)."""
    count = draw(ranks or st.integers(1, 4))
    return draw(splits(draw(st.integers(0, max_size)), count))


@st.composite
def windows(
    draw: st.DrawFn,
    max_size: int = 20,
    max_kernel: int = 5,
    max_stride: int = 4,
    max_dilation: int = 3,
    pooling: bool = False,
) -> Window:
    """A window with at least one output; for pooling, padding is at most half the kernel."""
    kernel = draw(st.integers(1, max_kernel))
    stride = draw(st.integers(1, max_stride))
    dilation = draw(st.integers(1, max_dilation))
    reach = dilation * (kernel - 1) + 1
    padding = draw(st.integers(0, kernel // 2 if pooling else reach))
    size = draw(st.integers(max(1, reach - 2 * padding), max(max_size, reach)))
    return Window(size, kernel, stride, padding, dilation)


@st.composite
def transposed_windows(draw: st.DrawFn, max_size: int = 10) -> tuple[Window, int]:
    """A window for a transposed convolution with at least one output, and its output padding."""
    kernel = draw(st.integers(1, 5))
    stride = draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 3))
    size = draw(st.integers(1, max_size))
    full = (size - 1) * stride + dilation * (kernel - 1) + 1
    padding = draw(st.integers(0, min(kernel, (full - 1) // 2)))
    extra = draw(st.integers(0, max(stride, dilation) - 1))
    return Window(size, kernel, stride, padding, dilation), extra


@st.composite
def grouped_channels(draw: st.DrawFn) -> tuple[int, int, int]:
    """Channels in, channels out and groups, depthwise included."""
    groups = draw(st.integers(1, 3))
    return groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), groups


def padding_modes() -> st.SearchStrategy[str]:
    """What `nn.Conv*d(padding_mode=)` takes."""
    return st.sampled_from(["zeros", "circular", "reflect", "replicate"])
