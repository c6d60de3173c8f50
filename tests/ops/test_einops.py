"""einops expressions on split dims: they are made of views, permutations and reductions."""

from __future__ import annotations

import pytest
import torch
from einops import pack, rearrange, reduce, repeat, unpack

from shardfield.testing import parity

X = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
SIZES = [(1, 1), (1, 2), (5, 1), (0, 4), (2, 0, 4), (1, 0, 2), (1, 3, 0, 2)]


def patches(x):
    tokens = rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2)
    back = rearrange(tokens * 2, "b (h w) (p q c) -> b c (h p) (w q)", h=3, p=2, q=2)
    windows = rearrange(x, "b c (h p) (w q) -> (b h w) (p q) c", p=3, q=2)
    return tokens, back, windows, rearrange(x, "(b 1) c h w -> h (w b) c")


def parts(x):
    return (
        reduce(x, "b c (h p) (w q) -> b c h w", "mean", p=2, q=2),
        reduce(x, "b c (h p) w -> b p w", "max", p=3),
        reduce(x, "b c h w -> b c () ()", "sum"),
        repeat(x, "b c h w -> b c (h 2) (r w)", r=3),
        repeat(x, "b c h w -> (k b) c h w m", k=2, m=3),
        *unpack(pack([x, x * 2], "b * w")[0], [[3, 6], [3, 6]], "b * w"),
    )


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_every_dim(dim):
    def both(x):
        return *patches(x * x), *parts(x * x)

    parity(both, [X], [dim], sizes=SIZES, dtype=torch.float64)


def test_a_grid_of_ranks_and_compiled():
    sizes = [{"h": (5, 1), "w": (1, 3)}]
    parity(lambda x: patches(x * x), [X], [{2: "h", 3: "w"}], (4,), sizes, dtype=torch.float64)
    parity(lambda x: patches(x * x), [X], [2], (2,), [(5, 1)], compiled=True)
