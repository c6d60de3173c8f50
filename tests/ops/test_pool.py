"""Pooling: windows of every kind on every split, and adaptive sizes (CASE 9)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, sized_splits, splits, windows
from torch import nn

from shardfield.ops.adaptive import adaptive_range, adaptive_window
from shardfield.testing import parity

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


@examples(12)
@given(st.data())
def test_any_window(data):
    ranks = data.draw(st.integers(2, 4))
    window = data.draw(windows(pooling=True, max_size=14))
    ceil = data.draw(st.booleans())
    extents = data.draw(splits(window.size, ranks))
    x = torch.randn(1, 2, window.size, 4, generator=torch.Generator().manual_seed(1))
    args = (window.kernel, 1), (window.stride, 1), (window.padding, 0)

    def pools(x):
        top = F.max_pool2d(x, *args, (window.dilation, 1), ceil)
        if window.dilation > 1:
            return top
        return top, F.avg_pool2d(x, *args, ceil), F.avg_pool2d(x, *args, ceil, False)

    parity(pools, [x], [2], (ranks,), [extents], dtype=torch.float64, subgroup=False)


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
