"""Entries picked along one dim."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits

from shardfield.testing import parity, refused

X = torch.randn(3, 7, 9, generator=torch.Generator().manual_seed(0))
INDEX = torch.randint(3, (3, 5, 9), generator=torch.Generator().manual_seed(1))
SPLITS = [
    (1, None),
    (2, None),
    (None, 1),
    (0, 0),
    (2, 2),
    (1, 1),
    (1, 2),
    (2, 1),
    ({1: "h", 2: "w"}, {2: "w"}),
    ({2: "h"}, {1: "w"}),
    ({1: "h"}, {2: "w", 0: "h"}),
]


def gathers(x, index):
    y = x.sin().exp().cos().sin().exp()
    return [
        part.sin().exp().cos()
        for part in (
            y.gather(1, index),
            torch.gather(y[:, :5], 2, index),
            y[:, :5].gather(0, index[:2]),
            torch.take_along_dim(y, index[:1], 1),
            y.take_along_dim(index),
        )
    ]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_gather(splits):
    once = {"dtype": torch.float64, "subgroup": False}
    grid = any(isinstance(split, dict) for split in splits)
    sizes = None if grid else [(3, 4), (2, 3), (5, 4), (0, 9), (0, 5), (7, 0), (1, 1, 3), (3, 3, 3)]
    ranks = (1, 2, 3) if not grid else (4,)
    parity(gathers, [X, INDEX], splits, ranks, sizes, double=True, **once)
    if splits == (1, 1):
        parity(gathers, [X, INDEX], splits, (2,), compiled=True, **once)


def test_errors_are_those_of_torch():
    def outside(x):
        return x.gather(1, torch.full((3, 1, 9), -1))

    refused(outside, [X], [1], error=RuntimeError, ranks=(2,), match="out of bounds")
    refused(lambda x: x.gather(1, INDEX[0]), [X], [1], error=RuntimeError, ranks=(2,))


@examples(12)
@given(st.data())
def test_gather_of_any_splits(data):
    """The two split over one axis, or one of them; an index may be shorter than its input."""
    dims, ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    shape = data.draw(st.tuples(*[st.integers(1, 6)] * dims))
    along = data.draw(st.integers(0, dims - 1))
    wanted = [data.draw(st.integers(1, size)) for size in shape]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    index = torch.randint(shape[along], wanted, generator=generator)
    places = [data.draw(st.none() | st.integers(0, dims - 1)) for _ in range(2)]
    if places == [None, None]:
        places[0] = along
    rows = next(t.shape[at] for t, at in zip((x, index), places, strict=True) if at is not None)
    extents = data.draw(splits(rows, ranks))

    def worked(x):  # more than to pick, by which the harness tells a share from the whole
        for _ in range(12):
            x = x.sin()
        return x

    def picked(x, index):
        return worked(worked(x).gather(along, index))

    options = {"sizes": [extents], "dtype": torch.float64, "subgroup": False, "double": True}
    parity(picked, [x, index], places, (ranks,), **options)
