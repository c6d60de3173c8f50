"""Interpolation to any size on every split (CASE 10)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, sized_splits, splits
from torch import nn

from shardfield.ops.resize import resize_dim
from shardfield.taps import taps
from shardfield.testing import parity, refused

X = torch.randn(2, 3, 16, 6, generator=torch.Generator().manual_seed(0))
SIZES = [(9, 7), (1, 15), (5, 0, 11), (1, 9, 0, 6)]


@pytest.mark.parametrize(
    "how",
    [
        {"size": (7, 9), "mode": "bilinear"},
        {"size": (7, 9), "mode": "bilinear", "align_corners": True},
        {"scale_factor": 2, "mode": "nearest"},
        {"scale_factor": 2, "mode": "bilinear"},
        {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
        {"scale_factor": (3, 1.5), "mode": "bilinear"},
        {"scale_factor": (1.3, 2), "mode": "bilinear"},
        {"scale_factor": (1.3, 2), "mode": "bilinear", "recompute_scale_factor": True},
        {"scale_factor": 0.5, "mode": "nearest"},
        {"scale_factor": 0.5, "mode": "bilinear"},
        {"scale_factor": 0.5, "mode": "nearest-exact"},
        {"size": (13, 6), "mode": "nearest"},
        {"size": (29, 6), "mode": "nearest-exact"},
        {"scale_factor": 2, "mode": "bicubic"},
        {"size": (11, 13), "mode": "bicubic", "align_corners": True},
        {"size": (1, 1), "mode": "bilinear", "align_corners": True},
        {"size": (5, 4), "mode": "area"},
    ],
    ids=lambda how: " ".join(f"{v}" for v in how.values()),
)
def test_case_10(how):
    parity(lambda x: F.interpolate(x, **how), [X], [2], sizes=SIZES, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_case_10_three_dims(mode):
    x = torch.randn(1, 2, 7, 3, 4)

    def resize(x):
        return F.interpolate(x, scale_factor=2, mode=mode), F.interpolate(x, (5, 4, 4), mode=mode)

    parity(resize, [x], [2], (2, 3), dtype=torch.float64, output="sharded")


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_case_10_on_a_grid_of_ranks(mode):
    def resize(x):
        y = F.interpolate(x, scale_factor=(2, 1.7), mode=mode)
        return y, F.interpolate(y, (8, 3), mode=mode), F.interpolate(x, scale_factor=2, mode=mode)

    parity(resize, [X], [{2: "h", 3: "w"}], (2, 4), dtype=torch.float64)


def test_one_dim_and_double_backward():
    x = torch.randn(2, 3, 11)

    def resize(x):
        twice = F.interpolate(x, scale_factor=2, mode="linear")
        return twice**2, F.interpolate(x, 7, mode="linear") ** 2

    parity(resize, [x], [2], (2, 3), double=True, dtype=torch.float64)


@pytest.mark.parametrize("size", [(32, 12), (7, 9)])
def test_compiled_and_in_low_precision(size):
    parity(lambda x: F.interpolate(x, size, mode="bilinear"), [X], [2], (2,), compiled=True)


def test_upsample_module_keeps_aligned_cuts():
    parity(nn.Upsample(scale_factor=2), [X], [2], (2, 3), output="sharded", dtype=torch.float64)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialias(mode):
    def resize(x):
        return (
            F.interpolate(x, (5, 9), mode=mode, antialias=True),
            F.interpolate(x, scale_factor=(0.3, 1.7), mode=mode, antialias=True),
            F.interpolate(x, (1, 2), mode=mode, align_corners=True, antialias=True),
        )

    parity(resize, [X], [2], sizes=SIZES, dtype=torch.float64, double=mode == "bicubic")
    sizes = [{"h": (9, 7), "w": (1, 5)}]
    parity(resize, [X], [{2: "h", 3: "w"}], (4,), sizes, dtype=torch.float64)
    parity(resize, [X], [3], (2,), [(1, 5)], compiled=True)
    refused(
        lambda x: F.interpolate(x, 5, antialias=True),
        [X],
        [2],
        error=ValueError,
        match="restricted",
    )


@examples(12)
@given(st.data())
def test_any_size(data):
    ranks = data.draw(st.integers(2, 4))
    size, out = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 30))
    extents = data.draw(splits(size, ranks))
    mode = data.draw(st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic"]))
    more = {}
    if not mode.startswith("nearest"):
        more = {"align_corners": data.draw(st.booleans()), "antialias": data.draw(st.booleans())}
    x = torch.randn(1, 2, size, 3, generator=torch.Generator().manual_seed(1))

    def resize(x):
        return F.interpolate(x, (out, 3), mode=mode, **more)

    kind = f"{mode} antialias" if more.get("antialias") else mode
    _, calls = resize_dim(extents, out, kind, more.get("align_corners", False), None, True)
    # Where the halo of every rank is the rest of the dim, so is the work.
    whole = all(call is not None and call[0] == out for call in calls)
    options = {"dtype": torch.float64, "subgroup": False, "whole": whole}
    parity(resize, [x], [2], (ranks,), [extents], **options)


@examples(300)
@given(
    st.sampled_from(["nearest", "nearest-exact"]),
    st.integers(1, 300),
    st.integers(1, 700),
    st.booleans(),
    st.none() | st.floats(0.1, 5),
)
def test_nearest_rows_are_torchs(mode, size, out, double, scale):
    if scale is not None:
        out = int(size * scale)
        if out < 1:
            return
    ramp = torch.arange(size, dtype=torch.float64 if double else torch.float32).view(1, 1, size)
    given = {"size": out} if scale is None else {"scale_factor": scale}
    picked = F.interpolate(ramp, mode=mode, **given).flatten().long().tolist()
    assert list(taps(mode, size, out, False, scale, double).rows[0]) == picked


@given(
    sized_splits().filter(sum),
    st.integers(1, 60),
    st.sampled_from(["nearest", "linear", "bicubic"]),
    st.booleans(),
)
def test_plans_tile_and_hold_what_is_read(extents, out, mode, corners):
    size = sum(extents)
    plan, calls = resize_dim(extents, out, mode, corners, None, True)
    found = taps(mode, size, out, corners, None, True)
    assert sum(plan.extents) == out and min(plan.extents) >= 0
    at = 0
    for rows, wanted, call in zip(plan.extents, plan.wanted, calls, strict=True):
        for tap in found.rows:
            for row in tap[at : at + rows]:
                assert 0 <= wanted[0].start <= row < wanted[0].start + wanted[0].length <= size
        if call is not None:
            assert call[0] >= call[1] + call[2] and call[2] == rows
        at += rows
