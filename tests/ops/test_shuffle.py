"""Pixels between channels and space, channels between groups, on every split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch import nn

from shardfield.ops.shuffle import shuffled_rows
from shardfield.testing import parity, refused

X = torch.randn(2, 8, 6, 4, generator=torch.Generator().manual_seed(0))
SIZES = [(3, 5), (1, 5), (0, 4), (1, 3), (4, 2), (5, 0, 1), (1, 1, 4), (3, 0, 5), (1, 0, 2, 1)]


def shuffles(x):
    return F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 4)


def check(fn, inputs, *args, **options):
    """Parity of `fn` after some arithmetic, by which the harness tells a share from the whole."""
    options = {"dtype": torch.float64, "output": "sharded", **options}
    parity(lambda *xs: fn(*[x * x for x in xs]), inputs, *args, **options)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_every_dim(dim):
    check(shuffles, [X], [dim], sizes=SIZES, double=dim == 1)


def test_two_dims_at_once_and_compiled():
    sizes = [{"h": (5, 1), "w": (3, 1)}, {"h": (0, 6), "w": (1, 3)}]
    check(shuffles, [X], [{2: "h", 3: "w"}], (4,), sizes)
    check(shuffles, [X], [{1: "h", 2: "w"}], (4,), [{"h": (3, 5), "w": (5, 1)}])
    check(shuffles, [X], [2], (2,), [(5, 1)], compiled=True)
    check(shuffles, [X], [1], (2,), [(3, 5)], compiled=True)


def test_modules_merged_dims_and_unbatched_images():
    def modules(x):
        y = nn.PixelShuffle(2)(nn.PixelUnshuffle(2)(x) * 2)
        return y, nn.ChannelShuffle(2)(x), F.pixel_unshuffle(x.flatten(0, 1), 2)

    check(modules, [X], [2], sizes=[(5, 1), (1, 2, 3)])

    def merged(x):
        return F.pixel_shuffle(x.view(2, 4, 4, 3, 4).flatten(1, 2), 2)

    check(merged, [torch.randn(2, 4, 8, 3, 2)], [2], sizes=[(5, 3), (1, 0, 7)])


def test_sizes_that_do_not_divide_are_errors_on_all_ranks():
    for fn in (lambda x: F.pixel_shuffle(x, 3), lambda x: F.pixel_unshuffle(x, 4)):
        refused(fn, [X], [2], error=RuntimeError, ranks=(2,))
    refused(lambda x: F.channel_shuffle(x, 3), [X], [1], error=RuntimeError, ranks=(2,))


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_shuffled_rows(groups, per, data):
    size = groups * per
    whole = torch.arange(size).view(groups, per).t().flatten().tolist()
    at = 0
    for rows in data.draw(splits(size, 3)):
        segments, order = shuffled_rows(at, at + rows, groups, size)
        read = [row for s in segments for row in range(s.start, s.start + s.length)]
        assert [read[place] for place in order] == whole[at : at + rows]
        at += rows


@examples(8)
@given(st.data())
def test_any_split(data):
    ranks, factor = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    groups = data.draw(st.integers(1, 3))
    channels = factor**2 * groups * data.draw(st.integers(1, 2))
    rows = factor * data.draw(st.integers(1, 3))
    dim = data.draw(st.sampled_from([1, 2]))
    extents = data.draw(splits((channels, rows)[dim - 1], ranks))
    x = torch.randn(1, channels, rows, factor, generator=torch.Generator().manual_seed(1))

    def shuffled(x):
        up, down = F.pixel_shuffle(x, factor), F.pixel_unshuffle(x, factor)
        return up, down, F.channel_shuffle(x, groups)

    # A rank of two among three channels does the work of one process, and more.
    check(shuffled, [x], [dim], (ranks,), [extents], subgroup=False, whole=True)
