"""Copies of rows and dims that broadcast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits

from shardfield.testing import parity, refused

X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
SIZES = [
    (1, 2),
    (3, 1),
    (4, 0),
    (5, 1),
    (0, 3, 0),
    (1, 0, 3),
    (2, 3, 1),
    (1, 1, 1, 0),
    (0, 1, 0, 3),
]
COUNTS = {0: [2, 0, 1], 1: [1, 3, 0, 2], 2: [0, 2, 1, 1, 4, 0]}


def check(fn, inputs, *args, **options):
    """Parity of `fn` after some arithmetic, by which the harness tells a share from the whole."""
    parity(lambda *xs: fn(*[x * x for x in xs]), inputs, *args, dtype=torch.float64, **options)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_dim(dim):
    def repeats(x):
        return (
            x.repeat(2, 1, 3),
            x.repeat(2, 1, 1, 2),
            x.tile(2, 2),
            torch.tile(x, (1, 2, 1, 1)),
            x.repeat_interleave(2, dim),
            torch.repeat_interleave(x, 3, (dim + 1) % 3),
            x.repeat_interleave(2),
            x.repeat_interleave(torch.tensor([2]), -1),
            x.repeat_interleave(torch.tensor(COUNTS[dim]), dim, output_size=sum(COUNTS[dim])),
            x.flatten(0, 1).repeat_interleave(torch.arange(12) % 3, 0),
        )

    check(repeats, [X], [dim], sizes=SIZES, double=dim == 1, output="sharded")


def test_compiled_and_on_a_grid_of_ranks():
    def repeats(x):
        return x.repeat(2, 1, 3), x.repeat_interleave(2, 1), x.tile(2).flatten(1)

    check(repeats, [X], [1], (2,), [(3, 1)], compiled=True)
    check(repeats, [X], [{1: "h", 2: "w"}], (4,), [{"h": (3, 1), "w": (0, 6)}])


def test_grids_of_coordinates_and_common_shapes():
    def grids(x):
        rows, columns = torch.meshgrid(x, torch.arange(3, dtype=x.dtype), indexing="ij")
        a, b = torch.meshgrid(torch.arange(2, dtype=x.dtype), x, indexing="xy")
        c, d = torch.broadcast_tensors(x, torch.ones(3, 1))
        return rows + columns, a * b, c + d, torch.atleast_2d(x), torch.atleast_3d(x)

    x = torch.randn(6, generator=torch.Generator().manual_seed(0))
    check(grids, [x], [0], sizes=[(5, 1), (6, 0), (2, 0, 4)])


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda x: x.repeat_interleave(torch.tensor([1, 2]), 1), RuntimeError),
        (lambda x: x.repeat_interleave(torch.tensor([1, -2, 1, 1]), 1), RuntimeError),
        (lambda x: x.repeat_interleave(-1, 1), RuntimeError),
        (lambda x: x.repeat_interleave(2, 5), IndexError),
        (lambda x: x.repeat(2), RuntimeError),
    ],
)
def test_errors_are_those_of_torch(fn, error):
    with pytest.raises(error):
        fn(X)
    refused(fn, [X], [1], error=error, ranks=(2,))


@examples(8)
@given(st.data())
def test_any_counts(data):
    ranks, size = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 8))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    extents = data.draw(splits(size, ranks))
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor(counts)
    check(lambda x: x.repeat_interleave(rows, 0), [x], [0], (ranks,), [extents], subgroup=False)
