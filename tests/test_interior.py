"""Convolutions that take a rank's own rows first: the arithmetic, and against one process."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from ops.test_conv import geometry
from strategies import Window, examples, splits, windows
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardfield as sf
from shardfield.interior import interior, interior_from, interior_pays
from shardfield.layout import cuts
from shardfield.plan import exchange, window
from shardfield.testing import Rank, parity, rank_pool

torch.manual_seed(0)
F64 = torch.float64


def convolved(x: np.ndarray, kernel: np.ndarray, stride: int, dilation: int) -> np.ndarray:
    """The plain sum: row o is the sum over taps of x[o*stride + tap*dilation] * kernel[tap]."""
    size = (len(x) - dilation * (len(kernel) - 1) - 1) // stride + 1
    rows = [[o * stride + tap * dilation for tap in range(len(kernel))] for o in range(size)]
    return np.array([(x[row] * kernel).sum() for row in rows])


@examples(300)
@given(windows(max_size=30), st.data())
def test_own_rows_and_edges_add_up_to_the_whole(case: Window, data):
    extents = data.draw(splits(case.size, data.draw(st.integers(1, 5))))
    x = np.random.default_rng(0).standard_normal(case.size)
    kernel = np.random.default_rng(1).standard_normal(case.kernel)
    padded = np.pad(x, case.padding)
    expected = convolved(padded, kernel, case.stride, case.dilation)
    pads = (case.padding, case.padding)
    plan = window(extents, case.kernel, case.stride, pads, case.dilation)
    points, outs = cuts(extents), cuts(plan.extents)
    owned = tuple(((a, b),) if b > a else () for a, b in pairwise(points))
    for rank, rows in enumerate(plan.extents):
        step = exchange(owned, plan.wanted, rank)
        way = interior(step, case.kernel, case.stride, case.dilation)
        if way is None or not rows:
            continue
        local = np.pad(x[points[rank] : points[rank + 1]], way.padding)
        y = convolved(local, kernel, case.stride, case.dilation)
        received = [
            x[segment.start : segment.start + segment.length]
            for segment in plan.wanted[rank]
            if segment.start is not None
        ]
        whole = np.concatenate(received)
        inner = slice(points[rank] - _first(plan.wanted[rank]), None)
        halo = np.concatenate([whole[: inner.start], whole[inner.start + extents[rank] :]])
        for edge in way.edges:
            (at, count), (tap, taps), (row, length) = edge.out, edge.taps, edge.rows
            part = np.pad(halo[row : row + length], edge.zeros)
            added = convolved(part, kernel[tap : tap + taps], case.stride, case.dilation)
            assert len(added) == count
            y[at : at + count] += added
        np.testing.assert_allclose(y, expected[outs[rank] : outs[rank + 1]], atol=1e-12)


def _first(wanted) -> int:
    return next(segment.start for segment in wanted if segment.start is not None)


def test_which_shards_convolve_their_own_rows_first():
    def ways(extents, kernel, stride=1, padding=1):
        plan = window(extents, kernel, stride, (padding, padding))
        points = cuts(extents)
        owned = tuple(((a, b),) if b > a else () for a, b in pairwise(points))
        steps = [exchange(owned, plan.wanted, rank) for rank in range(len(extents))]
        return [interior(step, kernel, stride, 1) is not None for step in steps]

    assert ways((5, 4, 3), 3) == [True] * 3  # sizes that stay
    assert ways((8, 4), 3, 2) == [True, True]  # shards that start at multiples of the stride
    assert ways((7, 5), 3, 2) == [True, True]
    assert ways((6, 6), 4) == [False, True]  # the first one's windows reach further down than up
    assert ways((6, 0, 6), 3) == [True, False, True]


class OwnRowsFirst(nn.Module):
    """A network whose convolutions do so however few rows there are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with interior_from(0):
            return self.inner(x)


@examples(40)
@given(geometry(), st.booleans())
def test_any_convolution(drawn, double: bool):
    conv, x, dim, extents = drawn
    options = {"sizes": [extents], "dtype": F64, "subgroup": False, "double": double}
    parity(OwnRowsFirst(conv), [x], [dim], ranks=(len(extents),), **options)


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 5, padding=2),
        nn.GELU(),
        nn.Conv2d(4, 4, 3, 2, 1),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 2, 3, padding=2, dilation=2),
    )


def test_a_chain():
    x = torch.randn(2, 2, 9, 8)
    parity(OwnRowsFirst(chain()), [x], [2], output="sharded", double=True)
    parity(OwnRowsFirst(chain()), [x], [{0: "b", 3: "w"}], ranks=(4,), dtype=F64)


class Branches(nn.Module):
    """Two convolutions of one input, whose backward passes the engine may interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(x) + x


def test_branches_with_empty_and_one_row_shards():
    x = torch.randn(2, 2, 5, 4)
    for extents in ((4, 0, 1), (0, 5, 0), (1, 1, 3)):
        net = OwnRowsFirst(Branches())
        parity(net, [x], [2], ranks=(3,), sizes=[extents], dtype=F64, double=True)


def saving_convolutions():
    saved = [torch.ops.aten.convolution.default]
    return create_selective_checkpoint_contexts(saved)


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": saving_convolutions},
    ],
    ids=["reentrant", "not reentrant", "selective"],
)
def test_recomputed(options):
    def net(x, first, second, bias):
        with interior_from(0):
            hidden = F.gelu(F.conv2d(x, first, bias, 2, 1))
            return F.conv2d(hidden, second, bias, 1, 2, 2)

    def recomputed(x, first, second, bias):
        return checkpoint(net, F.conv2d(x, second), first, second, bias, **options)

    params = {name: torch.randn(2, 2, 3, 3) for name in ("first", "second")}
    params["bias"] = torch.randn(2)
    x = torch.randn(2, 2, 11, 8)
    parity(recomputed, [x], [2], params=params, dtype=F64, output="sharded")


def _written_into(rank: Rank) -> str:
    conv, x = nn.Conv2d(2, 2, 3, padding=1), torch.randn(1, 2, 6, 4)
    x = sf.distribute_tensor(x, rank.mesh(domain=rank.world_size), [Shard(2)], None)
    x = x.requires_grad_() * 1
    with interior_from(0):
        y = conv(x)
    x.add_(1)
    with pytest.raises(RuntimeError) as raised:
        y.sum().backward()
    return str(raised.value)


def test_writing_into_what_the_backward_needs_is_an_error():
    for text in rank_pool(2).run(_written_into):
        assert "modified by an inplace operation" in text


def _nodes(rank: Rank, elements: int, dtype: torch.dtype, compute: torch.dtype) -> set[str]:
    """Names of the nodes behind a convolution on this rank."""
    conv = nn.Conv2d(2, 2, 3, padding=1, dtype=dtype)
    x = torch.randn(1, 2, 6, 4, dtype=dtype)
    x = sf.distribute_tensor(x, rank.mesh(domain=rank.world_size), [Shard(2)], None)
    cast = torch.autocast("cpu", compute, enabled=compute != dtype)
    with interior_from(elements), cast:
        left = [conv(x.requires_grad_()).to_local().grad_fn]
    found = set()
    while left:
        node = left.pop()
        if node is not None:
            found.add(node.name())
            left += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize(
    ("elements", "dtype", "compute", "first"),
    [
        (0, torch.float32, torch.float32, True),
        (24, F64, F64, True),
        (25, F64, F64, False),  # too few of 1 x 2 x 3 x 4
        (0, torch.bfloat16, torch.bfloat16, False),  # edges would be rounded twice
        (0, torch.float32, torch.bfloat16, False),
    ],
)
def test_when(elements: int, dtype: torch.dtype, compute: torch.dtype, first: bool):
    for names in rank_pool(2).run(_nodes, elements, dtype, compute):
        assert ("_AddRowsBackward" in names) == first
        assert ("_FetchBackward" in names) != first


@pytest.mark.parametrize(
    ("shape", "weight", "pays"),
    [
        ((1, 32, 64, 32), (32, 32, 3, 3), True),
        ((1, 32, 63, 32), (32, 32, 3, 3), False),
        ((1, 64, 32, 32), (64, 128, 3, 3), False),  # more weights than rows
        ((1, 16, 32, 64, 64), (16, 16, 3, 3, 3), True),
        ((1, 8, 32, 64, 64), (16, 8, 3, 3, 3), False),  # padded, twice as slow on CPUs
        ((1, 16, 32, 64, 64), (12, 16, 3, 3, 3), False),
        ((1, 64, 12, 24, 24), (64, 64, 3, 3, 3), False),  # another kernel, five times as slow
    ],
)
def test_what_pays(shape: tuple[int, ...], weight: tuple[int, ...], pays: bool):
    assert interior_pays(torch.empty(shape), torch.empty(weight)) is pays
