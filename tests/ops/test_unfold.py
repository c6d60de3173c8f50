"""Sliding windows as data, their sums, and diagonals, on every split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits, windows

from shardfield.testing import parity, refused

X = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(0))
SIZES = [
    (1, 1),
    (1, 2),
    (7, 1),
    (0, 5),
    (1, 0, 2),
    (1, 5, 2),
    (3, 0, 2),
    (1, 1, 0, 1),
    (2, 0, 5, 1),
]


def check(fn, inputs, *args, **options):
    """Parity of `fn` after some arithmetic, by which the harness tells a share from the whole."""
    parity(lambda *xs: fn(*[x * x for x in xs]), inputs, *args, dtype=torch.float64, **options)


def columns(x):
    windows = F.unfold(x, 3, padding=1, stride=2)
    back = F.fold(windows * 2, x.shape[-2:], 3, padding=1, stride=2)
    return windows, back, F.unfold(x, (3, 2), 2, (1, 0), (2, 1)), F.unfold(x[0], 2)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_unfold_and_fold(dim):
    check(columns, [X], [dim], sizes=SIZES, double=dim == 2)


def test_on_a_grid_of_ranks_and_compiled():
    check(columns, [X], [{2: "h", 3: "w"}], (4,), [{"h": (7, 1), "w": (2, 3)}])
    both = lambda x: (*columns(x), x.unfold(2, 3, 2))  # noqa: E731
    check(both, [X], [2], (2,), [(5, 3)], compiled=True)


@pytest.mark.parametrize("dim", [1, 2])
def test_fold_of_windows_that_are_split_anywhere(dim):
    x = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(0))

    def folds(x):
        return (
            F.fold(x, (6, 8), 2, stride=2),
            F.fold(x, (5, 4), 2),
            F.fold(x[0], (6, 8), 2, stride=2),
        )

    sizes = [(5, 7), (12, 0), (3, 0, 9), (1, 10, 1), (2, 3, 0, 7)]
    check(folds, [x], [dim], sizes=sizes, output="sharded")


@pytest.mark.parametrize("dim", [0, 2, 3])
def test_windows_of_a_tensor(dim):
    def windows(x):
        patches = x.unfold(2, 2, 2).unfold(3, 3, 1)
        return patches, x.unfold(0, 2, 1) * 2, x.flatten(2).unfold(-1, 4, 3)

    check(windows, [X], [dim], sizes=SIZES, double=dim == 2)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_diagonals_and_triangles(dim):
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))

    def parts(x):
        return (
            x.diagonal(0, 1, 2),
            x.diagonal(2, -1, 0),
            x.diagonal(-3, 1, 2) * 2,
            x.diagonal(9, 1, 2),
            x.tril(),
            x.triu(3),
            torch.tril(x, -2),
        )

    check(parts, [x], [dim], sizes=SIZES)


def test_triangles_on_a_grid_of_ranks():
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    sizes = [{"h": (3, 2), "w": (1, 7)}, {"h": (0, 5), "w": (4, 4)}]
    check(lambda x: (x.tril(1), x.triu()), [x], [{0: "h", 1: "w"}], (4,), sizes)
    refused(lambda x: x.diagonal(), [x], [{0: "h", 1: "w"}], match="both split", ranks=(4,))


def test_errors_are_those_of_torch():
    refused(lambda x: F.unfold(x, 9), [X], [2], error=RuntimeError, ranks=(2,))
    refused(lambda x: x.unfold(2, 9, 1), [X], [2], error=RuntimeError, ranks=(2,))
    refused(lambda x: F.fold(x.flatten(2), (3, 3), 2), [X], [2], error=RuntimeError, ranks=(2,))


@examples(10)
@given(st.data())
def test_any_window(data):
    ranks = data.draw(st.integers(2, 4))
    w = data.draw(windows(max_size=12))
    extents = data.draw(splits(w.size, ranks))
    x = torch.randn(1, 2, w.size, 3, generator=torch.Generator().manual_seed(1))
    args = (w.kernel, 1), (w.dilation, 1), (w.padding, 0), (w.stride, 1)

    def both(x):
        found = F.unfold(x, *args)
        return (
            found,
            F.fold(found * found, (w.size, 3), *args),
            x.unfold(2, min(w.kernel, w.size), w.stride),
        )

    check(both, [x], [2], (ranks,), [extents], subgroup=False)
