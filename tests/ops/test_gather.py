"""Entries picked along one dim."""

from __future__ import annotations

import pytest
import torch

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
