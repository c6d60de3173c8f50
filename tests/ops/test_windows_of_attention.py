"""Windows of attention (Swin, Pangu-Weather) over shards that no window fits.

Partition and reverse are written as those models write them: a view, a permutation, a view. Cuts
move to the nearest window, and back where the result meets the rows it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.testing import Rank, parity, rank_pool

Sizes = Sequence[int]
WIDE = 8  # bytes of a float64
PLANE = torch.randn(2, 12, 8, 3, generator=torch.Generator().manual_seed(0))
SPACE = torch.randn(2, 4, 9, 8, 4, generator=torch.Generator().manual_seed(0))
ROWS = [(5, 7), (1, 11), (0, 12), (5, 0, 7), (1, 10, 1), (7, 2, 2, 1), (0, 0, 5, 7)]


def partition(x: Tensor, window: Sizes) -> Tensor:
    """(B, *grid, C) to (B * windows, places in a window, C)."""
    batch, *grid, channels = x.shape
    cut = [n for size, w in zip(grid, window, strict=True) for n in (size // w, w)]
    outer, inner = range(1, len(cut), 2), range(2, len(cut) + 1, 2)
    x = x.view(batch, *cut, channels).permute(0, *outer, *inner, len(cut) + 1).contiguous()
    return x.view(-1, prod(window), channels)


def reverse(windows: Tensor, window: Sizes, shape: Sizes) -> Tensor:
    batch, *grid, channels = shape
    counts = [size // w for size, w in zip(grid, window, strict=True)]
    dims, last = len(grid), 2 * len(grid) + 1
    order = [
        d for pair in zip(range(1, dims + 1), range(dims + 1, last), strict=True) for d in pair
    ]
    x = windows.view(batch, *counts, *window, channels).permute(0, *order, last).contiguous()
    return x.view(batch, *grid, channels)


def regions(grid: Sizes, window: Sizes, shift: Sizes) -> Tensor:
    """Swin's mask: which places of a window were neighbours before the roll."""
    image = torch.zeros(1, *grid, 1)
    bounds = [
        [slice(-w), slice(-w, -s), slice(-s, None)] if s else [slice(None)]
        for w, s in zip(window, shift, strict=True)
    ]
    for number, place in enumerate(product(*bounds)):
        image[(slice(None), *place)] = number
    places = partition(image, window).squeeze(-1)
    return (places[:, None] - places[:, :, None]).masked_fill_(
        places[:, None] != places[:, :, None], -9
    )


class Block(nn.Module):
    """A block of Swin: padded, rolled, cut in windows that attend, put together again."""

    def __init__(self, channels: int, heads: int, window: Sizes, shift: Sizes) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, tuple(window), tuple(shift)
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.table = nn.Parameter(torch.randn(prod(2 * w - 1 for w in window), heads))
        places = torch.stack(torch.meshgrid(*map(torch.arange, window), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None]
        index = torch.zeros(apart.shape[1:], dtype=torch.long)
        for distance, w in zip(apart, window, strict=True):
            index = index * (2 * w - 1) + distance + w - 1
        self.register_buffer("index", index)

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, places, channels = x.shape
        qkv = self.qkv(x).reshape(windows, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] / qkv.shape[-1] ** 0.5) @ qkv[1].transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(places, places, -1).permute(2, 0, 1)
        scores = scores + bias.contiguous().unsqueeze(0)
        if mask is not None:
            count = mask.shape[0]
            scores = scores.view(windows // count, count, self.heads, places, places)
            scores = (scores + mask.unsqueeze(1).unsqueeze(0)).view(-1, self.heads, places, places)
        x = (scores.softmax(-1) @ qkv[2]).transpose(1, 2).reshape(windows, places, channels)
        return self.out(x)

    def forward(self, x: Tensor) -> Tensor:
        whole, dims = x, tuple(range(1, x.ndim - 1))
        grid = x.shape[1:-1]
        pads = [n for size, w in zip(grid, self.window, strict=True) for n in (-size % w, 0)]
        x = F.pad(self.norm(x), (0, 0, *reversed(pads)))
        padded, mask = x.shape, None
        if any(self.shift):
            mask = regions(padded[1:-1], self.window, self.shift).to(x.dtype)
            x = torch.roll(x, [-s for s in self.shift], dims)
        windows = self.attention(partition(x, self.window), mask)
        x = reverse(windows, self.window, padded)
        if any(self.shift):
            x = torch.roll(x, self.shift, dims)
        return whole + x[(slice(None), *[slice(0, size) for size in grid])].contiguous()


def there_and_back(x: Tensor, window: Sizes) -> tuple[Tensor, Tensor]:
    x = x * x
    windows = partition(x, window)
    seen = (windows @ windows.mT).softmax(-1) @ windows
    return seen, reverse(seen, window, x.shape) + x


@pytest.mark.parametrize("window", [(4, 4), (3, 2), (6, 8), (12, 4)])
def test_partition_and_reverse(window):
    def fn(x):
        return there_and_back(x, window)

    double = window == (4, 4)
    parity(fn, [PLANE], [1], sizes=ROWS, dtype=torch.float64, double=double)
    parity(fn, [PLANE], [2], (2, 3), [(3, 5), (1, 0, 7)], dtype=torch.float64)
    grid = [{"h": (5, 7), "w": (1, 7)}, {"h": (12, 0), "w": (3, 5)}]
    parity(fn, [PLANE], [{1: "h", 2: "w"}], (4,), grid, dtype=torch.float64)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, 4])
def test_partition_of_a_volume(dim):
    sizes = [(1, 1), (1, 3), (4, 5), (7, 1), (2, 0, 7), (1, 1, 6), (3, 0, 1, 0)]
    parity(lambda x: there_and_back(x, (2, 3, 4)), [SPACE], [dim], sizes=sizes, dtype=torch.float64)


@examples(4)
@given(st.data())
def test_any_windows_of_any_rows(data):
    window = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    counts = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    grid = [n * w for n, w in zip(counts, window, strict=True)]
    x = torch.randn(data.draw(st.integers(1, 2)), *grid, 2)
    ranks = data.draw(st.integers(2, 4))
    if ranks == 4 and data.draw(st.booleans()):
        size = {"h": data.draw(splits(grid[0], 2)), "w": data.draw(splits(grid[1], 2))}
        split = {1: "h", 2: "w"}
    else:
        split = data.draw(st.sampled_from([1, 2]))
        size = data.draw(splits(grid[split - 1], ranks))
    fn = lambda x: there_and_back(x, window)  # noqa: E731
    if any(n not in (0, sum(s)) for s in ([size] if split in (1, 2) else size.values()) for n in s):
        parity(fn, [x], [split], (ranks,), [size], dtype=torch.float64)


@pytest.mark.parametrize("shift", [(0, 0), (2, 1)])
def test_swin_blocks(shift):
    """Eleven rows padded to twelve, seven columns to nine."""
    block, x = Block(4, 2, (4, 3), shift), torch.randn(2, 11, 7, 4)
    sizes = [(5, 6), (1, 10), (0, 11), (5, 1, 5), (10, 0, 1), (1, 2, 0, 8)]
    parity(block, [x], [1], sizes=sizes, dtype=torch.float64, compiled=any(shift))
    parity(block, [x], [2], (2, 3), [(2, 5), (1, 0, 6)], dtype=torch.float64)
    grid = [{"h": (5, 6), "w": (1, 6)}, {"h": (11, 0), "w": (4, 3)}]
    parity(block, [x], [{1: "h", 2: "w"}], (4,), grid, dtype=torch.float64)


def test_swin_blocks_of_a_volume():
    block, x = Block(4, 2, (2, 4, 3), (1, 2, 1)), torch.randn(1, 3, 10, 6, 4)
    sizes = [(4, 6), (1, 1, 8), (0, 3, 0, 7)]
    parity(block, [x], [2], sizes=sizes, dtype=torch.float64)
    grid = [{"h": (1, 2), "w": (7, 3)}]
    parity(block, [x], [{1: "h", 2: "w"}], (4,), grid, dtype=torch.float64)


def earth(x: Tensor, bias: Tensor) -> Tensor:
    """Attention of Pangu-Weather: rolled along longitude, a bias for every height and latitude.

    Windows of 2 x 3 x 4; padded at both ends of the latitudes; longitudes come first.
    """
    batch, height, rows, columns, channels = x.shape
    x = F.pad(x, (0, 0, 0, 0, 1, 2, 0, 0)).roll((-1, -2, -2), (1, 2, 3))
    rows += 3
    x = x.view(batch, height // 2, 2, rows // 3, 3, columns // 4, 4, channels)
    x = x.permute(0, 5, 1, 3, 2, 4, 6, 7).reshape(-1, height // 2 * (rows // 3), 24, channels)
    scores = (x @ x.mT + bias).softmax(-1) @ x
    x = scores.view(batch, columns // 4, height // 2, rows // 3, 2, 3, 4, channels)
    x = x.permute(0, 2, 4, 3, 5, 1, 6, 7).reshape(batch, height, rows, columns, channels)
    return x.roll((1, 2, 2), (1, 2, 3))[:, :, 1 : rows - 2]


def test_pangu_windows_with_a_bias_of_the_place():
    params = {"bias": torch.randn(2 * 4, 24, 24, generator=torch.Generator().manual_seed(1))}
    for dim, sizes in [(2, [(4, 5), (1, 0, 8), (2, 5, 1, 1)]), (1, [(1, 3)]), (3, [(3, 5)])]:
        parity(earth, [SPACE], [dim], sizes=sizes, params=params, dtype=torch.float64)
    grid = [{"h": (4, 5), "w": (3, 5)}]
    parity(earth, [SPACE], [{2: "h", 3: "w"}], (4,), grid, params, torch.float64)


def merged(x: Tensor) -> Tensor:
    """Swin's patch merging: odd grids are padded, every second row and column joined."""
    rows, columns = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, columns % 2, 0, rows % 2))
    x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    return F.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize("rows", [11, 12])
def test_patch_merging(rows):
    x = torch.randn(2, rows, 7, 3, generator=torch.Generator().manual_seed(0))
    sizes = [(5, rows - 5), (1, rows - 1), (0, rows), (5, 1, rows - 6), (3, 0, 1, rows - 4)]
    parity(merged, [x], [1], sizes=sizes, dtype=torch.float64, double=True)
    grid = [{"h": (5, rows - 5), "w": (1, 6)}]
    parity(merged, [x], [{1: "h", 2: "w"}], (4,), grid, dtype=torch.float64)
    volume = torch.randn(1, 5, rows, 4, 2, generator=torch.Generator().manual_seed(0))
    fn = lambda x: torch.cat([x[:, :4, i::2, j::2] for i, j in product((0, 1), (0, 1))], -1)  # noqa: E731
    if rows % 2 == 0:
        parity(fn, [volume * 2], [2], (2, 3), sizes, dtype=torch.float64)


# What is sent


def _sent(rank: Rank, act: str, grid: dict[int, tuple[str, Sizes]], window: Sizes):
    """(bytes sent by every all-to-all) forward and backward of a step on a 2 x 12 x 8 x 3 grid."""
    mesh = rank.mesh(**{axis: len(sizes) for axis, sizes in grid.values()})
    placements = [Shard(dim) for dim in grid]
    x = sf.distribute_tensor(
        PLANE.double(), mesh, placements, None, {axis: tuple(s) for axis, s in grid.values()}
    ).requires_grad_()
    with record_traffic() as forward:
        y = partition(x, window)
        if act != "partition":
            y = reverse(y * 2, window, x.shape)
        if act == "block":
            y = x + y
    with record_traffic() as backward:
        y.to_local().sum().backward()
    assert {kind for _, kind, _ in [*forward.operations, *backward.operations]} <= {"all_to_all"}
    return [[n for _, _, n in traffic.operations] for traffic in (forward, backward)]


def fitted(sizes: Sizes, unit: int) -> list[int]:
    """Cuts at the multiples nearest to those of `sizes`."""
    return [(point + unit // 2) // unit * unit for point in (0, *accumulate(sizes))]


def moved(sizes: Sizes, nearest: Sizes) -> tuple[list[int], list[int]]:
    """Rows every rank sends and receives when cuts move."""
    points = [0, *accumulate(sizes)]
    sends, receives = [0] * len(sizes), [0] * len(sizes)
    for owner, (start, stop) in enumerate(pairwise(points)):
        for reader, (low, high) in enumerate(pairwise(nearest)):
            if owner != reader:
                rows = max(0, min(stop, high) - max(start, low))
                sends[owner] += rows
                receives[reader] += rows
    return sends, receives


@pytest.mark.parametrize("sizes", [(5, 7), (1, 11), (5, 0, 7), (3, 6, 3), (7, 2, 2, 1)])
@pytest.mark.parametrize("unit", [4, 3])
def test_only_rows_between_a_cut_and_the_nearest_window_are_sent(sizes, unit):
    row, nearest = 2 * 8 * 3 * WIDE, fitted(sizes, unit)
    sends, receives = moved(sizes, nearest)
    # A sum takes the more balanced of two splits.
    stays = max(sizes) <= max(b - a for a, b in pairwise(nearest))
    once = 1 if any(sends) else 0
    for act in ("partition", "reverse", "block"):
        found = rank_pool(len(sizes)).run(_sent, act, {1: ("domain", sizes)}, (unit, 4))
        for rank, (forward, backward) in enumerate(found):
            out, back = [sends[rank] * row] * once, [receives[rank] * row] * once
            if act != "block":
                assert (forward, backward) == (out, back)
            elif stays:
                assert (forward, backward) == (out + back, out + back)
            else:
                assert (forward, backward) == (out + out, back + back)


def test_windows_that_fit_send_nothing():
    for sizes in [(4, 8), (8, 0, 4)]:
        grid = {1: ("domain", sizes)}
        assert rank_pool(len(sizes)).run(_sent, "block", grid, (4, 2)) == [[[], []]] * len(sizes)


def test_on_a_grid_of_ranks_each_axis_sends_its_own_rows():
    """Cuts 5 | 7 and 3 | 5: row 4 goes down, then column 3 to the left."""
    found = rank_pool(4).run(_sent, "partition", {1: ("h", (5, 7)), 2: ("w", (3, 5))}, (4, 4))
    for rank, (forward, backward) in enumerate(found):
        down, right = divmod(rank, 2)
        row, column = 2 * (3, 5)[right] * 3 * WIDE, 2 * (4, 8)[down] * 3 * WIDE
        assert forward == [(row, 0)[down], (0, column)[right]]
        assert sorted(backward) == sorted([(0, row)[down], (column, 0)[right]])
