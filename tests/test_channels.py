"""Convolutions whose weight is split by output or by input channels."""

import pytest
import torch
import torch.nn.functional as F

from shardfield.testing import parity, refused

G = torch.Generator().manual_seed(0)
X = torch.randn(2, 4, 9, 5, generator=G)
WEIGHT, BIAS = torch.randn(6, 4, 3, 3, generator=G), torch.randn(6, generator=G)
BACK, SHIFT = torch.randn(4, 6, 3, 2, generator=G), torch.randn(6, generator=G)
ONCE = {"dtype": torch.float64, "ranks": (1, 2, 3), "subgroup": False}


def plain(x, weight, bias):
    return F.conv2d(x, weight, bias, stride=(2, 1), padding=1)


def transposed(x, weight, bias):
    return F.conv_transpose2d(x, weight, bias, stride=2, padding=(1, 0))


CASES = {
    "output channels": (plain, WEIGHT, BIAS, [None, 0, None]),
    "output channels and bias": (plain, WEIGHT, BIAS, [None, 0, 0]),
    "rows and output channels": (plain, WEIGHT, BIAS, [{2: "h"}, {0: "w"}, {0: "w"}]),
    "input channels": (plain, WEIGHT, BIAS, [1, 1, None]),
    "input channels, input whole": (plain, WEIGHT, BIAS, [None, 1, None]),
    "rows and input channels": (plain, WEIGHT, BIAS, [{2: "h", 1: "w"}, {1: "w"}, None]),
    "rows, input channels whole": (plain, WEIGHT, BIAS, [{2: "h"}, {1: "w"}, None]),
    "transposed, output channels": (transposed, BACK, SHIFT, [{2: "h"}, {1: "w"}, {0: "w"}]),
    "transposed, input channels": (transposed, BACK, SHIFT, [{3: "h", 1: "w"}, {0: "w"}, None]),
}


@pytest.mark.parametrize("case", CASES)
def test_split_channels(case: str) -> None:
    fn, weight, bias, splits = CASES[case]
    parity(fn, [X, weight, bias], splits, compiled=case == "output channels", **ONCE)


REFUSED = {
    "its kernel is split": (lambda x, w: F.conv2d(x, w), X, WEIGHT, [None, 2]),
    "one mesh axis splits": (lambda x, w: F.conv2d(x, w), X, WEIGHT, [2, 0]),
    "in groups": (lambda x, w: F.conv2d(x, w, groups=2), X, WEIGHT[:, :2], [None, 0]),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_is_refused(rule: str) -> None:
    fn, x, weight, splits = REFUSED[rule]
    refused(fn, [x, weight], splits, match=rule)
