"""Pooling: windows of every kind on every split, and adaptive sizes (CASE 9)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import examples, sized_splits, splits, windows
from torch import nn

from shardfield.ops.adaptive import adaptive_range, adaptive_window
from shardfield.ops.fractional import fractional_window, window_starts
from shardfield.testing import RankError, parity, refused

X = torch.randn(2, 3, 16, 9, generator=torch.Generator().manual_seed(0))
SIZES = [(9, 7), (16, 0), (1, 15), (5, 0, 11), (1, 14, 1), (4, 4, 4, 4), (1, 9, 0, 6)]


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(3, 1),
        nn.MaxPool2d((2, 2), 2),
        nn.MaxPool2d(3, 1, 1, dilation=2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(3, 2, 1, divisor_override=5),
        nn.AvgPool2d(2, 3, ceil_mode=True),
    ],
    ids=repr,
)
def test_case_9_windows(pool):
    parity(pool, [X], [2], sizes=SIZES, output="sharded", dtype=torch.float64)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=True)])
def test_case_9_compiled_and_in_low_precision(pool):
    parity(pool, [X], [2], sizes=[(9, 7)], ranks=(2,), compiled=True, output="sharded")


@pytest.mark.parametrize("size", [1, 5, (1, 4), (5, 1), (None, 3), (3, 7), (16, 2)], ids=str)
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_case_9_adaptive(pool, size):
    sizes = [(9, 7), (1, 15), (5, 0, 11), (1, 9, 0, 6)]
    parity(lambda x: pool(x, size), [X], [2], sizes=sizes, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 5, (1, 4), (5, 1), (3, 4)], ids=str)
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_adaptive_on_a_grid_of_ranks(pool, size):
    sizes = [{"h": (9, 7), "w": (1, 8)}, {"h": (16, 0), "w": (5, 4)}]
    parity(lambda x: pool(x, size), [X], [{2: "h", 3: "w"}], (4,), sizes=sizes, dtype=torch.float64)


def test_global_mean_is_plain():
    parity(nn.AdaptiveAvgPool2d(1), [X], [2], output="plain", dtype=torch.float64)


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dims(dims):
    x = torch.randn(2, 2, *(9, 4, 5)[:dims])
    names = {1: (F.max_pool1d, F.avg_pool1d), 3: (F.max_pool3d, F.avg_pool3d)}
    adaptive = {1: F.adaptive_avg_pool1d, 3: F.adaptive_avg_pool3d}[dims]

    def pools(x):
        larger, mean = (pool(x, 3, 2, 1, ceil_mode=True) for pool in names[dims])
        return larger + mean, adaptive(x, 1), adaptive(x, 2)

    parity(pools, [x], [2], ranks=(2, 3), dtype=torch.float64)


def test_indices_are_global():
    def pool(x):
        a, i = F.max_pool2d(x, 3, 2, 1, return_indices=True)
        b, j = F.max_pool2d(x, 2, 2, ceil_mode=True, return_indices=True)
        return a, i, b, j

    parity(pool, [X], [2], sizes=SIZES, dtype=torch.float64)
    parity(pool, [X], [{2: "h", 3: "w"}], (4,), dtype=torch.float64)
    parity(pool, [X], [2], (2,), [(9, 7)], compiled=True, dtype=torch.float64)


def test_channels_may_be_split():
    parity(lambda x: F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1), [X], [1], (2, 3))


def test_unbatched_and_double_backward():
    parity(nn.AvgPool2d(3, 2, 1), [X[0]], [1], (2, 3), double=True, dtype=torch.float64)


TIES = torch.randint(0, 2, (2, 3, 9, 6), generator=torch.Generator().manual_seed(0)) * 1.0


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_indices_of_adaptive_maxima_and_the_first_of_equal_ones(dim):
    def pool(x):
        sizes = 1, (1, 4), (5, 1), (3, 4)
        return [F.adaptive_max_pool2d(x, size, return_indices=True) for size in sizes]

    sizes = [(1, 2), (5, 4), (0, 6), (1, 0, 2), (2, 3, 4), (0, 1, 5)]
    parity(pool, [TIES], [dim], sizes=sizes, dtype=torch.float64)


def test_adaptive_maxima_of_nans_and_on_a_grid_of_ranks():
    def pool(x):
        y = x.masked_fill(x > 0.5, float("nan")).detach()
        return F.adaptive_max_pool2d(y, 1, return_indices=True), F.adaptive_max_pool2d(x, (1, 2))

    parity(pool, [TIES], [3], (2, 3), [(5, 1), (2, 0, 4)], dtype=torch.float64)
    parity(pool, [TIES], [{2: "h", 3: "w"}], (4,), dtype=torch.float64)
    parity(pool, [TIES], [3], (2,), [(5, 1)], compiled=True, dtype=torch.float64)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_powers(dim):
    def pool(x):
        big = F.lp_pool2d(x, float("inf"), 2), F.lp_pool2d(x, -float("inf"), 2, 1)
        return F.lp_pool2d(x, 2, 3, 2), F.lp_pool2d(x.abs(), 3, (3, 2), ceil_mode=True), *big

    parity(pool, [X], [dim], sizes=[(1, 1), (9, 7), (1, 0, 2), (5, 0, 11)], dtype=torch.float64)


def test_powers_of_other_numbers_of_dims():
    def pool(x):
        return F.lp_pool1d(x[:, 0, 0], 2, 3, 2), F.lp_pool3d(x, 2, 2, ceil_mode=True)

    parity(pool, [torch.randn(2, 2, 5, 4, 9)], [4], (2, 3), dtype=torch.float64)


UNPOOLED = {
    "pairs": ((2, 2), {}),
    "overlap": ((3, 2, 1), {}),
    "gaps": ((2, 3), {}),
    "borders": ((2, 2), {"ceil_mode": True}),
    "every row": ((3, 1, 1), {}),
}


@pytest.mark.parametrize("name", UNPOOLED)
def test_unpooling(name):
    args, more = UNPOOLED[name]

    def pool(x):
        small, indices = F.max_pool2d(x, *args, return_indices=True, **more)
        return F.max_unpool2d(small * small, indices, *args, output_size=x.shape)

    x = torch.randn(2, 2, 9, 7, generator=torch.Generator().manual_seed(0))
    sizes = [(5, 4), (1, 8), (9, 0), (2, 0, 7), (1, 1, 7), (3, 0, 4, 2)]
    parity(pool, [x], [2], sizes=sizes, dtype=torch.float64, double=name == "pairs")
    parity(pool, [x], [{2: "h", 3: "w"}], (4,), [{"h": (5, 4), "w": (1, 6)}], dtype=torch.float64)


def test_unpooling_other_dims_and_compiled():
    def pool(x):
        flat = F.max_unpool1d(*F.max_pool1d(x[:, 0, 0], 2, 2, return_indices=True), 2, 2)
        return flat, F.max_unpool3d(*F.max_pool3d(x, 2, 2, return_indices=True), 2, 2)

    x = torch.randn(2, 2, 4, 4, 8)
    for dim in (0, 1, 4):
        parity(pool, [x], [dim], (2, 3), dtype=torch.float64)
    parity(pool, [x], [4], (2,), [(5, 3)], compiled=True, dtype=torch.float64)


def test_unpooling_from_elsewhere_is_an_error():
    def pool(x):
        small, indices = F.max_pool2d(x, 2, 2, return_indices=True)
        return F.max_unpool2d(small, indices.flip(2), 2, 2)

    with pytest.raises(RankError, match="invalid max index"):
        parity(pool, [X[..., :8]], [2], (2,), [(8, 8)], dtype=torch.float64, timeout=20)
    bad = lambda x: F.max_unpool2d(x, torch.zeros(x.shape).long(), 2, 2, 0, (3, 3))  # noqa: E731
    refused(bad, [X], [2], error=ValueError, match="invalid output_size", ranks=(2,))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_fractional(dim):
    def pool(x):
        y, indices = F.fractional_max_pool2d(x, (3, 2), (7, 5), return_indices=True)
        samples = torch.linspace(0, 0.99, 12, dtype=x.dtype).view(2, 3, 2)
        given = F.fractional_max_pool2d(x, 2, output_ratio=(0.7, 0.6), _random_samples=samples)
        return y, indices, given, F.fractional_max_pool2d(x[0], 2, (1, 4))

    sizes = [(1, 1), (1, 2), (9, 7), (0, 9), (1, 0, 2), (5, 0, 11), (1, 9, 0, 6)]
    parity(pool, [X], [dim], sizes=sizes, dtype=torch.float64)


def test_fractional_on_grids_and_compiled():
    def pool(x):
        return F.fractional_max_pool3d(x, (2, 1, 2), output_ratio=(0.6, 0.7, 0.5))

    x = torch.randn(2, 2, 7, 8, 9)
    parity(pool, [x], [{2: "h", 4: "w"}], (2, 4), dtype=torch.float64)
    parity(pool, [x], [3], (2,), [(7, 1)], compiled=True)


@examples(12)
@given(st.data())
def test_any_window(data):
    ranks = data.draw(st.integers(2, 4))
    window = data.draw(windows(pooling=True, max_size=14))
    ceil = data.draw(st.booleans())
    extents = data.draw(splits(window.size, ranks))
    x = torch.randn(1, 2, window.size, 4, generator=torch.Generator().manual_seed(1))
    args = (window.kernel, 1), (window.stride, 1), (window.padding, 0)

    # torch writes out of bounds where all that a dilated window touches is padding.
    assume(window.dilation * (window.kernel - 1) < window.size or not window.padding)

    def pools(x):
        top = F.max_pool2d(x, *args, (window.dilation, 1), ceil)
        if window.dilation > 1:
            return top
        return top, F.avg_pool2d(x, *args, ceil), F.avg_pool2d(x, *args, ceil, False)

    parity(pools, [x], [2], (ranks,), [extents], dtype=torch.float64, subgroup=False)


@examples(12)
@given(st.data())
def test_any_unpooling(data):
    ranks, ceil = data.draw(st.integers(2, 4)), data.draw(st.booleans())
    window = data.draw(windows(pooling=True, max_size=14, max_dilation=1))
    extents = data.draw(splits(window.size, ranks))
    x = torch.randn(1, 2, window.size, 4, generator=torch.Generator().manual_seed(1))
    args = (window.kernel, 1), (window.stride, 1), (window.padding, 0)
    rows = F.max_pool1d(x[..., 0], *(n for n, _ in args), ceil_mode=ceil).shape[-1]
    usual = (rows - 1) * window.stride + window.kernel - 2 * window.padding
    assume(abs(window.size - usual) < window.stride)

    def pools(x):
        top, where = F.max_pool2d(x, *args, 1, ceil, return_indices=True)
        return where, F.max_unpool2d(top * 2, where, *args, output_size=x.shape)

    # Positions take more work than the few rows of such a tensor.
    parity(pools, [x], [2], (ranks,), [extents], dtype=torch.float64, subgroup=False, whole=True)


@given(sized_splits().filter(sum), st.integers(1, 30))
def test_adaptive_plans_tile_and_cover(extents, out):
    size = sum(extents)
    plan = adaptive_window(extents, out)
    assert sum(plan.extents) == out
    at = 0
    for rows, wanted in zip(plan.extents, plan.wanted, strict=True):
        for o in range(at, at + rows):
            a, b = adaptive_range(o, size, out)
            assert wanted[0].start <= a < b <= wanted[0].start + wanted[0].length
        at += rows


@given(sized_splits().filter(sum), st.data())
def test_fractional_plans_hold_the_windows_of_any_sample(extents, data):
    size = sum(extents)
    kernel = data.draw(st.integers(1, size))
    out = data.draw(st.integers(1, size - kernel + 1))
    sample = torch.tensor(data.draw(st.floats(0, 1, exclude_max=True)), dtype=torch.float64)
    starts = window_starts(sample, 0, out, size, kernel, out).tolist()
    plan = fractional_window(extents, kernel, out, 1)
    assert sum(plan.extents) == out
    at = 0
    for rows, wanted in zip(plan.extents, plan.wanted, strict=True):
        for start in starts[at : at + rows]:
            first = wanted[0].start or 0
            assert first <= start <= first + wanted[0].length - kernel
        at += rows
