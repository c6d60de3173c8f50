"""F.pad in every mode, crops (CASE 11), padded convolutions (CASE 4), rolls and flips."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardfield.ops.pad import padded_extents, padded_rows
from shardfield.testing import parity, refused

X = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0))
SIZES = [(4, 2), (0, 6), (5, 3), (1, 1, 4), (0, 8, 0), (1, 0, 5), (1, 1, 1, 3), (0, 7, 0, 1)]
MODES = ["constant", "reflect", "replicate", "circular"]


def check(fn, inputs, *args, **options):
    """Parity of `fn` after some arithmetic, by which the harness tells a share from the whole."""
    parity(lambda *xs: fn(*[x * x for x in xs]), inputs, *args, dtype=torch.float64, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_every_mode(mode, dim):
    def pad(x):
        return (
            F.pad(x, (5, 5, 5, 4), mode),
            F.pad(x, (0, 1, 0, 0), mode),
            F.pad(x, (-2, 3, -3, 2), mode),
        )

    sizes = [*SIZES, (1, 2), (3, 0)]
    check(pad, [X], [dim], sizes=sizes, double=True, output="sharded")


def test_case_11_crops_wider_than_a_shard():
    def crop(x):
        return (
            F.pad(x, (0, 0, -5, 0)),
            F.pad(x, (-3, -4, -2, 3), value=2.0),
            F.pad(x, (0, 0, -2, -4)),
        )

    check(crop, [X], [2], sizes=SIZES)
    for pad in [(0, 0, -4, -3), (0, 0, -9, 0)]:
        refused(lambda x, pad=pad: F.pad(x, pad), [X], [2], error=RuntimeError, sizes=[(4, 2)])


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_pads_wider_than_the_tensor_raise_what_torch_raises(mode):
    fn = lambda x: F.pad(x, (0, 0, 7, 0), mode)  # noqa: E731
    refused(fn, [X], [2], error=RuntimeError, sizes=[(4, 2)], ranks=(2,))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("dim", [2, 3])
def test_case_4_padded_convolutions(mode, dim):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, (4, 3), (2, 1), 1, padding_mode=mode)
    parity(conv, [X], [dim], sizes=SIZES, dtype=torch.float64, output="sharded")
    only = nn.Conv2d(3, 4, 3, padding=(0, 1) if dim == 2 else (1, 0), padding_mode=mode)
    parity(only, [X], [dim], sizes=SIZES, dtype=torch.float64)


def test_on_a_grid_of_ranks():
    def shift(x):
        padded = [F.pad(x, (3, 4, 5, 2), mode) for mode in MODES]
        return *padded, x.roll((3, -5), (2, 3)), x.flip(2, 3)

    sizes = [{"h": (4, 2), "w": (7, 1)}, {"h": (0, 6), "w": (4, 4)}]
    check(shift, [X], [{2: "h", 3: "w"}], (4,), sizes)


@pytest.mark.parametrize("dim", [0, 2, 3])
def test_rolls_and_flips(dim):
    def shift(x):
        return (
            x.roll(1, 2),
            torch.roll(x, (3, -2), (3, 2)),
            x.roll((-13, 1, 4), (-1, 0, -1)),
            x.flip(2),
            torch.flip(x, (0, 3)),
            x.flatten(2).roll(5, 2),
            x.roll(-7),
            x.fliplr() + x.flipud(),
        )

    check(shift, [X], [dim], sizes=SIZES, double=True)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_turns_swap_the_splits(dim):
    def turns(x):
        return [torch.rot90(x, k, (2, 3)) for k in (0, 1, 2, 3, -1)] + [x.rot90(5, [3, 1])]

    check(turns, [X], [dim], sizes=SIZES)
    refused(lambda x: torch.rot90(x, 1, (2, 2)), [X], [dim], error=RuntimeError, ranks=(2,))


def test_compiled():
    def shift(x):
        return F.pad(x, (1, 2, 3, 0), "reflect").roll(2, 2).rot90(1, (2, 3)) * 2

    check(shift, [X], [2], (2,), sizes=[(4, 2)], compiled=True)


@given(
    st.sampled_from(MODES),
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    st.integers(-6, 6),
    st.integers(-6, 6),
)
def test_rows_of_all_ranks_are_those_of_torch(mode, extents, before, after):
    size = sum(extents)
    whole = torch.arange(1.0, size + 1).view(1, 1, -1)
    kept = size + min(before, 0) + min(after, 0)
    if kept < 1 or max(before, after) >= min(size, kept):
        return
    expected = F.pad(whole, (before, after), mode).flatten().tolist()
    crop = (max(0, -before), max(0, -after))
    at, found = 0, []
    out = padded_extents(tuple(extents), before, after)
    for rows in out:
        for segment in padded_rows(mode, at - before, at + rows - before, size, crop):
            for row in range(segment.length):
                start = segment.start
                found.append(0.0 if start is None else start + segment.step * row + 1.0)
        at += rows
    assert found == expected
    assert all(rows == 0 for rows, had in zip(out[1:-1], extents[1:-1], strict=True) if not had)
