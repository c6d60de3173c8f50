"""What every operation sends: collectives and bytes, equal to the formula, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.ops.fractional import fractional_window
from shardfield.testing import Rank, rank_pool

torch.manual_seed(0)
WIDE = 8  # bytes of a float64
Extents = tuple[int, ...]
Sent = list[tuple[str, int]]


@dataclass(frozen=True)
class Passes:
    """(collective, bytes this rank sent) of every entry, forward and backward."""

    forward: Sent
    backward: Sent


def _run(
    rank: Rank,
    fn: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    dim: int,
    sizes: Extents,
    params: Sequence[torch.Tensor],
) -> Passes:
    mesh = rank.mesh(domain=rank.world_size)
    xs = [
        sf.distribute_tensor(
            torch.randn(*shape, dtype=torch.float64), mesh, [Shard(dim)], None, sizes
        ).requires_grad_()
        for shape in shapes
    ]
    if isinstance(fn, nn.Module):
        fn = fn.double()
    given = [p.detach().double().requires_grad_() for p in params]
    with record_traffic() as forward:
        y = fn(*xs, *given)
    local = y.to_local() if isinstance(y, sf.ShardTensor) else y
    with record_traffic() as backward:
        if local.requires_grad:
            local.sum().backward()
    return Passes(*[[(kind, n) for _, kind, n in t.operations] for t in (forward, backward)])


def traffic(
    fn: Callable[..., Any],
    shape: tuple[int, ...] | list[tuple[int, ...]],
    sizes: Extents,
    dim: int = 2,
    params: Sequence[torch.Tensor] = (),
) -> list[Passes]:
    """Both passes of `fn` on every rank, its inputs split along `dim`."""
    shapes = shape if isinstance(shape, list) else [shape]
    found = rank_pool(len(sizes)).run(_run, fn, shapes, dim, sizes, params)
    for name in ("forward", "backward"):
        kinds = [[kind for kind, _ in getattr(passes, name)] for passes in found]
        assert all(row == kinds[0] for row in kinds), f"{name}: ranks differ: {kinds}"
    return found


def exchanged(sizes: Extents, wanted: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Rows that every rank sends so that each gets its range, and rows it receives."""
    stops = list(accumulate(sizes))
    starts = [stop - rows for stop, rows in zip(stops, sizes, strict=True)]
    sends, receives = [0] * len(sizes), [0] * len(sizes)
    for reader, (low, high) in enumerate(wanted):
        for owner, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            rows = max(0, min(high, stop) - max(low, start))
            if owner != reader:
                sends[owner] += rows
                receives[reader] += rows
    return sends, receives


def same_size(sizes: Extents, reach: int) -> list[tuple[int, int]]:
    """Rows that a stride-1 window which keeps the size reads, `reach` to either side."""
    total, stops = sum(sizes), list(accumulate(sizes))
    return [
        (max(0, stop - rows - reach), min(total, stop + reach)) if rows else (0, 0)
        for stop, rows in zip(stops, sizes, strict=True)
    ]


def check(
    found: list[Passes],
    sends: Sequence[int],
    receives: Sequence[int],
    row: int,
    params: Sequence[torch.Tensor] = (),
) -> None:
    """One exchange forward and one back, if any rank sends; an all-reduce per parameter."""
    sums = sorted(p.numel() * WIDE for p in params)
    once = 1 if any(sends) else 0
    for passes, out, back in zip(found, sends, receives, strict=True):
        assert passes.forward == [("all_to_all", out * row * WIDE)] * once
        moved = [n for kind, n in passes.backward if kind == "all_to_all"]
        assert moved == [back * row * WIDE] * once
        assert sorted(n for kind, n in passes.backward if kind == "all_reduce") == sums


# Windows: halo rows only


@pytest.mark.parametrize("sizes", [(5, 4), (5, 1, 3), (3, 2, 0, 4), (0, 0, 9)])
@pytest.mark.parametrize("kernel", [3, 5, 9])
def test_case_8_convolutions_send_halo_rows_only(sizes: Extents, kernel: int):
    """Grouped or not, for a batch of two: the rows a neighbour reads, of every channel once."""
    row = 2 * 4 * 6
    for groups in (1, 4):
        conv = nn.Conv2d(4, 8, kernel, padding=kernel // 2, groups=groups)
        found = traffic(conv, (2, 4, sum(sizes), 6), sizes)
        check(found, *exchanged(sizes, same_size(sizes, kernel // 2)), row, [*conv.parameters()])


def test_strided_convolution_sends_what_the_next_rank_reads():
    conv = nn.Conv2d(2, 3, 3, 2, 1)
    # Outputs 0-4 read rows 0-9 and outputs 5-8 rows 9-16: one row goes from rank 1 to rank 0.
    found = traffic(conv, (2, 2, 17, 5), (9, 8))
    check(found, (0, 1), (1, 0), 2 * 2 * 5, [*conv.parameters()])


def test_patches_of_aligned_shards_send_nothing():
    conv = nn.Conv2d(2, 3, 4, 4)
    for passes in traffic(conv, (2, 2, 16, 8), (12, 4)):
        assert passes.forward == []
        assert [kind for kind, _ in passes.backward] == ["all_reduce", "all_reduce"]


def test_transposed_convolution_sends_what_reaches_over_the_cut():
    conv = nn.ConvTranspose2d(2, 3, 4, 2, 1)
    found = traffic(conv, (2, 2, 9, 5), (5, 4))
    check(found, (1, 1), (1, 1), 2 * 2 * 5, [*conv.parameters()])
    for passes in traffic(nn.ConvTranspose2d(2, 3, 2, 2), (2, 2, 9, 5), (5, 4)):
        assert passes.forward == []


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)], ids=repr)
def test_pooling_sends_halo_rows_only(pool):
    sizes = (5, 1, 3)
    found = traffic(pool, (2, 2, 9, 5), sizes)
    check(found, *exchanged(sizes, same_size(sizes, 1)), 2 * 2 * 5)
    for passes in traffic(nn.MaxPool2d(2), (2, 2, 12, 4), (8, 4)):
        assert passes == Passes([], [])


def test_interpolation_sends_the_rows_beside_the_cut():
    up = nn.Upsample(scale_factor=2, mode="nearest")
    assert traffic(up, (2, 2, 9, 5), (5, 4)) == [Passes([], [])] * 2
    smooth = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    check(traffic(smooth, (2, 2, 9, 5), (5, 4)), (1, 1), (1, 1), 2 * 2 * 5)


def test_antialiasing_sends_what_the_filter_reaches():
    """A filter of 8 rows: outputs 0 and 1 read rows 0-9, outputs 2 and 3 rows 6-15."""

    def shrink(x):
        return F.interpolate(x, (4, 5), mode="bilinear", antialias=True)

    check(traffic(shrink, (2, 2, 16, 5), (8, 8)), (2, 2), (2, 2), 2 * 2 * 5)


def test_windows_as_data_and_their_sums_send_halos_only():
    sizes = (5, 1, 3)
    halos = exchanged(sizes, same_size(sizes, 1))
    unfold = nn.Unfold(3, padding=1)
    check(traffic(unfold, (2, 2, 9, 5), sizes), *halos, 2 * 2 * 5)
    fold = nn.Fold((9, 5), 3, padding=1)
    check(traffic(fold, (2, 18, 45), (25, 5, 15)), *halos, 2 * 18 * 5)
    # Windows 0-3 read rows 0-5, windows 4-6 rows 4-8.
    check(traffic(lambda x: x.unfold(2, 3, 1), (2, 2, 9, 5), (5, 4)), (1, 1), (1, 1), 2 * 2 * 5)


def test_shuffles_send_the_rows_between_the_cut_and_the_nearest_multiple():
    assert traffic(nn.PixelShuffle(2), (2, 4, 9, 5), (5, 4)) == [Passes([], [])] * 2
    assert traffic(nn.PixelUnshuffle(2), (2, 3, 10, 4), (8, 2)) == [Passes([], [])] * 2
    check(traffic(nn.PixelUnshuffle(2), (2, 3, 10, 4), (5, 5)), (0, 1), (1, 0), 2 * 3 * 4)
    # Of channels 0-7 in two groups, the first four become 0, 4, 1, 5.
    groups = nn.ChannelShuffle(2)
    assert traffic(groups, (2, 8, 3, 5), (2, 1)) == [Passes([], [])] * 2
    check(traffic(groups, (2, 8, 3, 5), (4, 4), dim=1), (2, 2), (2, 2), 2 * 3 * 5)


def test_fractional_pooling_sends_what_some_sample_reaches():
    sizes = (9, 7)
    plan = fractional_window(sizes, 3, 7, 2)
    reached = [(rows[0].start, rows[0].start + rows[0].length) for rows in plan.wanted]
    assert reached == [(0, 12), (6, 16)]
    pool = nn.FractionalMaxPool2d(3, (7, 2))
    check(traffic(pool, (2, 2, 16, 5), sizes), *exchanged(sizes, reached), 2 * 2 * 5)


def test_adaptive_maxima_gather_one_value_and_one_position_of_each_rank():
    for passes in traffic(nn.AdaptiveMaxPool2d(1), (2, 3, 9, 5), (5, 1, 3)):
        assert passes == Passes([("all_to_all", 2 * 2 * 3 * WIDE)] * 2, [])


def unpooled(x: torch.Tensor, window: int):
    """Unpooling by 2, every value back to the first place of its window."""
    rows, columns = 16 + window, 8 + window
    places = torch.arange(9).view(9, 1) * 2 * columns + torch.arange(5) * 2
    assert isinstance(x, sf.ShardTensor)
    places = sf.distribute_tensor(
        places.expand(2, 2, 9, 5).contiguous(), x.device_mesh, [Shard(2)], None, (5, 4)
    )
    return F.max_unpool2d(x, places, window, 2, 0, (rows, columns))


def test_unpooling_sends_values_and_positions_beside_the_cut():
    assert traffic(lambda x: unpooled(x, 2), (2, 2, 9, 5), (5, 4)) == [Passes([], [])] * 2
    # Windows of 3: output rows 0-10 are rank 0's, and window 5, of rank 1, covers row 10 too.
    row = 2 * 2 * 5 * WIDE
    first, second = traffic(lambda x: unpooled(x, 3), (2, 2, 9, 5), (5, 4))
    assert first == Passes([("all_to_all", 0)] * 2, [("all_to_all", row)])
    assert second == Passes([("all_to_all", row)] * 2, [("all_to_all", 0)])


def test_mesh_of_two_axes_sends_rows_then_columns_with_corners():
    """The columns are those of the block with its halo rows, padding at the outer edge included."""

    def run(rank: Rank) -> list[tuple[str, int]]:
        mesh = rank.mesh(h=2, w=2)
        x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
        sizes = {"h": (5, 4), "w": (4, 3)}
        x = sf.distribute_tensor(x, mesh, [Shard(2), Shard(3)], None, sizes)
        with record_traffic() as sent:
            nn.Conv2d(3, 2, 3, padding=1).double()(x)
        return [(kind, n) for _, kind, n in sent.operations]

    for index, sent in enumerate(rank_pool(4).run(run)):
        height, width = (5, 4)[index // 2], (4, 3)[index % 2]
        rows, columns = 2 * 3 * width * WIDE, 2 * 3 * (height + 2) * WIDE
        assert sent == [("all_to_all", rows), ("all_to_all", columns)]


# Statistics and reductions: a few numbers


@pytest.mark.parametrize(
    ("norm", "numbers"),
    [
        (nn.BatchNorm2d(4, affine=False), 2 * 4),
        (nn.GroupNorm(2, 4, affine=False), 2 * 2 * 2),
        (nn.InstanceNorm2d(4), 2 * 2 * 4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("sizes", [(5, 4), (9, 0, 0), (4, 1, 4)])
def test_norms_merge_once_forward_and_once_backward(norm, numbers: int, sizes: Extents):
    for passes in traffic(norm, (2, 4, 9, 5), sizes):
        assert passes.forward == [("all_gather", numbers * WIDE)]
        assert passes.backward == [("all_reduce", numbers * WIDE)]


def test_norms_in_evaluation_and_over_whole_dims_send_nothing_forward():
    norm = nn.BatchNorm2d(4, affine=False).eval()
    assert traffic(norm, (2, 4, 9, 5), (5, 4)) == [Passes([], [])] * 2
    last = nn.LayerNorm(5)
    for passes in traffic(last, (2, 4, 9, 5), (5, 4)):
        assert passes.forward == []
        assert passes.backward == [("all_reduce", 5 * WIDE)] * 2


REDUCTIONS = {
    "sum": (lambda x: x.sum(), 1),
    "mean": (lambda x: x.mean(), 1),
    "sum of the split dim": (lambda x: x.sum(2), 2 * 3 * 5),
    "mean kept": (lambda x: x.mean((2, 3), keepdim=True), 2 * 3),
    "mse": (lambda x: F.mse_loss(x, torch.zeros_like(x)), 1),
    "l1": (lambda x: F.l1_loss(x, torch.zeros_like(x)), 1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_send_the_result_once_and_nothing_backward(name: str):
    fn, numbers = REDUCTIONS[name]
    for passes in traffic(fn, (2, 3, 9, 5), (5, 1, 3)):
        assert passes == Passes([("all_reduce", numbers * WIDE)], [])


LINE = 2 * 3 * 5 * WIDE  # a number for every line of the split dim
ALONG = {
    "prod": (lambda x: x.prod(2), [("all_gather", LINE)], []),
    "logsumexp": (lambda x: x.logsumexp(2), [("all_gather", LINE)], []),
    "norm": (lambda x: x.norm(3, 2), [("all_gather", LINE)], []),
    "nanmean": (lambda x: x.nanmean(2), [("all_reduce", 2 * LINE)], []),
    "any": (lambda x: (x > 0).any(2), [("all_reduce", LINE // WIDE)], []),
    "amax": (lambda x: x.amax(2), [("all_reduce", 2 * LINE)], [("all_reduce", LINE)]),
    "max": (lambda x: x.max(2)[0], [("all_reduce", 2 * LINE), ("all_reduce", LINE)], []),
    "argmin": (lambda x: x.argmin(2), [("all_reduce", 2 * LINE), ("all_reduce", LINE)], []),
    "softmax": (lambda x: x.softmax(2), [("all_gather", 2 * LINE)], [("all_reduce", LINE)]),
    "cumsum": (lambda x: x.cumsum(2), [("all_gather", LINE)], [("all_gather", LINE)]),
}


@pytest.mark.parametrize("name", ALONG)
def test_partial_results_travel_along_a_split_dim(name: str):
    fn, forward, backward = ALONG[name]
    assert traffic(fn, (2, 3, 9, 5), (5, 1, 3)) == [Passes(forward, backward)] * 3
    assert traffic(fn, (2, 3, 9, 5), (3, 1, 1), dim=3) == [Passes([], [])] * 3


def test_local_response_norm_sends_the_channels_that_windows_reach():
    fn, sizes = (lambda x: F.local_response_norm(x, 4)), (3, 1, 4)
    wanted = [(0, 4), (1, 5), (2, 8)]  # two channels before, one after
    sends, receives = exchanged(sizes, wanted)
    check(traffic(fn, (2, 8, 6), sizes, dim=1), sends, receives, 2 * 6)


def test_reduction_of_whole_dims_sends_nothing():
    assert traffic(lambda x: x.sum((1, 3)), (2, 3, 9, 5), (5, 4)) == [Passes([], [])] * 2


def test_variance_gathers_mean_and_second_moment():
    for passes in traffic(lambda x: x.var(2), (2, 3, 9, 5), (5, 4)):
        assert passes == Passes([("all_gather", 2 * 2 * 3 * 5 * WIDE)], [])


# Moving whole tensors


def test_full_tensor_sends_every_shard_to_every_other_rank_and_nothing_backward():
    sizes = (5, 1, 3)
    for rows, passes in zip(
        sizes, traffic(lambda x: x.full_tensor(), (2, 3, 9, 5), sizes), strict=True
    ):
        assert passes == Passes([("all_to_all", rows * 2 * 3 * 5 * WIDE * 2)], [])


def test_full_tensor_for_one_rank_is_sent_to_that_rank_only():
    def run(rank: Rank):
        mesh = rank.mesh(domain=3)
        x = sf.distribute_tensor(torch.randn(2, 9).double(), mesh, [Shard(1)], None, (5, 1, 3))
        with record_traffic() as sent:
            whole = x.full_tensor(dst=1)
        return whole is not None, sent.collectives, sent.bytes

    row = 2 * WIDE
    assert rank_pool(3).run(run) == [
        (False, ["all_to_all"], 5 * row),
        (True, ["all_to_all"], 0),
        (False, ["all_to_all"], 3 * row),
    ]


def test_redistribute_to_other_sizes_sends_what_changes_owner():
    before, after, row = (5, 1, 3), (2, 4, 3), 2 * 3 * 5
    sends, receives = exchanged(before, [(0, 2), (2, 6), (6, 9)])
    found = traffic(lambda x: x.redistribute(sizes=after), (2, 3, 9, 5), before)
    check(found, sends, receives, row)
    assert sum(sends) == 3
    same = traffic(lambda x: x.redistribute(sizes=before), (2, 3, 9, 5), before)
    assert same == [Passes([], [])] * 3


def test_redistribute_to_another_dim_sends_every_element_that_leaves_once():
    rows, columns = (5, 1, 3), (2, 2, 1)  # as torch.chunk cuts five columns

    def move(x):
        return x.redistribute([Shard(3)])

    found = traffic(move, (2, 3, 9, 5), rows)
    for rank, passes in enumerate(found):
        out, back = rows[rank] * (5 - columns[rank]), columns[rank] * (9 - rows[rank])
        assert passes.forward == [("all_to_all", 2 * 3 * out * WIDE)]
        assert passes.backward == [("all_to_all", 2 * 3 * back * WIDE)]


def test_redistribute_to_replicate_gathers_and_its_gradient_is_free():
    for rows, passes in zip(
        (5, 4), traffic(lambda x: x.redistribute([Replicate()]), (2, 3, 9, 5), (5, 4)), strict=True
    ):
        assert passes == Passes([("all_to_all", rows * 2 * 3 * 5 * WIDE)], [])


@pytest.mark.parametrize("source", [0, 2])
def test_case_34_distribute_sends_each_rank_its_shard_and_keeps_only_that(source: int):
    sizes, shape = (5, 1, 3), (1, 3, 9, 5)

    def run(rank: Rank):
        mesh = rank.mesh(domain=3)
        whole = torch.randn(*shape, dtype=torch.float64) if rank.rank == source else None
        with record_traffic() as sent:
            x = sf.distribute_tensor(whole, mesh, [Shard(2)], source, sizes)
        return sent.collectives, sent.bytes, x.to_local().untyped_storage().nbytes()

    row = 3 * 5 * WIDE
    for rank, (kinds, sent, alive) in enumerate(rank_pool(3).run(run)):
        assert kinds == ["all_to_all"]
        assert sent == ((9 - sizes[rank]) * row if rank == source else 0)
        assert alive == sizes[rank] * row


def test_case_34_distribute_from_own_copies_sends_nothing():
    def run(rank: Rank):
        whole = torch.randn(1, 3, 9, 5)
        with record_traffic() as sent:
            x = sf.distribute_tensor(whole, rank.mesh(domain=2), [Shard(2)], src_data_rank=None)
        local = x.to_local()
        return sent.collectives, local.untyped_storage().nbytes() - local.numel() * 4

    assert rank_pool(2).run(run) == [([], 0), ([], 0)]


# What sends nothing


BIAS = torch.randn(3, 1, 1)
FIELD = torch.randn(9, 5)  # replicated, of the global size: every rank takes its rows
FREE = {
    "pointwise": lambda x: F.gelu(x * x + 1.0).clamp(max=2.0),
    "two tensors": lambda x: x * torch.tanh(x) - x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "flatten": lambda x: x.flatten(2),
    "view": lambda x: x.view(1, 2, 3, 9, 5),
    "unsqueeze": lambda x: x.unsqueeze(2).squeeze(2),
    "channels": lambda x: x[:, 1:],
    "cat": lambda x: torch.cat([x, 2 * x], 1),
    "repeat": lambda x: x.repeat(2, 1, 3, 1).tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 2),
    "counted repeats": lambda x: x.repeat_interleave(torch.arange(9), 2),
    "turn": lambda x: x.rot90(1, (2, 3)),
    "triangle": lambda x: x.tril().diagonal(1, 2, 3),
    "items": lambda x: x.detach().view(torch.int32),
    "stack": lambda x: torch.stack([x, x]),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "softmax": lambda x: x.softmax(1),
}


@pytest.mark.parametrize("name", FREE)
def test_local_operations_send_nothing(name: str):
    assert traffic(FREE[name], (2, 3, 9, 5), (5, 0, 4)) == [Passes([], [])] * 3


def test_parameters_meet_shards_for_free_and_their_gradients_are_summed_once():
    weight = torch.randn(4, 5)
    for passes in traffic(F.linear, (2, 3, 9, 5), (5, 4), params=[weight]):
        assert passes == Passes([], [("all_reduce", 20 * WIDE)])
    for passes in traffic(lambda x, b: x * b, (2, 3, 9, 5), (5, 4), params=[BIAS]):
        assert passes == Passes([], [("all_reduce", 3 * WIDE)])
    for passes in traffic(lambda x, f: x + f, (2, 3, 9, 5), (5, 4), params=[FIELD]):
        assert [kind for kind, _ in passes.forward] == []
        assert len(passes.backward) == 1


class UNet(nn.Module):
    """Two levels: convolutions, strided ones down, transposed ones up, skips by `cat`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.ConvTranspose2d(8, 4, 4, 2, 1)]
        )
        self.leave = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.enter(x))
        second = F.relu(self.down[0](first))
        third = F.relu(self.down[1](second))
        up = torch.cat([second, F.relu(self.up[0](third))], 1)
        up = torch.cat([first, F.relu(self.up[1](up))], 1)
        return self.leave(up)


WINDOWED = 6


@pytest.mark.parametrize("sizes", [(8, 8), (12, 4), (4, 8, 4), (8, 0, 8)])
def test_aligned_unet_realigns_nothing(sizes: Extents):
    net = UNet()
    for passes in traffic(net, (1, 1, 16, 8), sizes):
        assert [kind for kind, _ in passes.forward] == ["all_to_all"] * WINDOWED
        kinds = [kind for kind, _ in passes.backward]
        assert kinds.count("all_to_all") == WINDOWED
        assert kinds.count("all_reduce") == len([*net.parameters()])
        assert len(kinds) == WINDOWED + len([*net.parameters()])


def test_unaligned_unet_moves_a_few_rows_at_the_skips():
    aligned = traffic(UNet(), (1, 1, 16, 8), (8, 8))
    odd = traffic(UNet(), (1, 1, 16, 8), (9, 7))
    for passes, other in zip(odd, aligned, strict=True):
        extra = len(passes.forward) - len(other.forward)
        assert 0 < extra <= 2
        # A row or two of four channels and eight columns at each level, beside the halos.
        assert (
            sum(n for _, n in passes.forward) <= sum(n for _, n in other.forward) + 4 * 8 * WIDE * 3
        )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halo_bytes_do_not_grow_with_the_shard(ranks: int):
    conv = nn.Conv2d(2, 2, 3, padding=1)
    sent = []
    for rows in (4, 8):
        found = traffic(conv, (1, 2, rows * ranks, 6), (rows,) * ranks)
        sent.append([sum(n for _, n in passes.forward) for passes in found])
    assert sent[0] == sent[1]
    assert sum(sent[0]) == 2 * (ranks - 1) * prod((2, 6)) * WIDE


def test_rows_picked_of_a_split_dim_are_added_up_and_nothing_else_is_sent():
    rows, index = torch.tensor([0, 5, 8, 8]), torch.randint(9, (2, 3, 4))

    def whole_dims(x):
        return x[:, 1], x[torch.tensor([1, 0, 0])], x.gather(0, torch.zeros(1, 3, 9).long())

    for passes in traffic(lambda x: x[:, :, rows], (2, 3, 9), (2, 6, 1)):
        assert passes == Passes([("all_reduce", 2 * 3 * 4 * WIDE)], [])
    for passes in traffic(lambda x: x.gather(2, index), (2, 3, 9), (2, 6, 1)):
        assert passes == Passes([("all_reduce", 2 * 3 * 4 * WIDE)], [])
    for passes in traffic(lambda x: sum(y.sum() for y in whole_dims(x)), (2, 3, 9), (2, 6, 1)):
        assert passes == Passes([("all_reduce", WIDE)] * 3, [])
