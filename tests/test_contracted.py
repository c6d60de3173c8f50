"""What contractions send and keep: bytes equal to the formula, and no gathered operand kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.testing import Rank, rank_pool
from shardfield.tools.memory import kept_bytes

WIDE = 8  # bytes of a float64
Place = tuple[tuple[int, ...], int | None, list[int] | None]
"""Shape of an operand, the dim split, and its extents; a dim of None: plain."""
Sent = list[tuple[str, int]]


def _operands(mesh, places: list[Place], dtype=torch.float64) -> list[torch.Tensor]:
    made = []
    for shape, dim, sizes in places:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
        if dim is not None:
            x = sf.distribute_tensor(x, mesh, [Shard(dim)], None, sizes)
        made.append(x.requires_grad_())
    return made


def _traffic(rank: Rank, fn: Callable[..., Any], places: list[Place]) -> tuple[Sent, Sent]:
    xs = _operands(rank.mesh(domain=rank.world_size), places)
    with record_traffic() as forward:
        y = fn(*xs)
    local = y.to_local() if isinstance(y, sf.ShardTensor) else y
    with record_traffic() as backward:
        local.sum().backward()
    return tuple([(kind, n) for _, kind, n in t.operations] for t in (forward, backward))


def traffic(fn: Callable[..., Any], *places: Place, ranks: int = 3) -> list[tuple[Sent, Sent]]:
    """(forward, backward) of every rank."""
    return rank_pool(ranks).run(_traffic, fn, list(places))


QUERIES, KEYS = [4, 1, 4], [2, 5, 0]


@pytest.mark.parametrize(
    "product",
    [
        lambda q, k: q @ k.transpose(-2, -1),
        partial(torch.einsum, "bqd,bkd->bqk"),
        lambda q, k: torch.baddbmm(torch.ones(1, 1, 1).double(), q, k.transpose(1, 2), alpha=2),
    ],
    ids=["matmul", "einsum", "baddbmm"],
)
def test_keys_are_gathered_and_their_gradients_added_on_their_owners(product):
    found = traffic(product, ((2, 9, 3), 1, QUERIES), ((2, 7, 3), 1, KEYS))
    for (forward, backward), rows in zip(found, KEYS, strict=True):
        sent = ("all_to_all", 2 * rows * 2 * 3 * WIDE)
        returned = ("all_to_all", (7 - rows) * 2 * 3 * WIDE)
        assert forward == [sent]
        assert backward == [sent, returned]  # keys once more for the queries' gradient


def test_values_are_gathered_for_whole_rows_of_probabilities():
    found = traffic(torch.matmul, ((2, 9, 7), 1, QUERIES), ((2, 7, 3), 1, KEYS))
    for (forward, backward), rows in zip(found, KEYS, strict=True):
        assert forward == [("all_to_all", 2 * rows * 2 * 3 * WIDE)]
        assert backward == [*forward, ("all_to_all", (7 - rows) * 2 * 3 * WIDE)]


@pytest.mark.parametrize("product", [torch.matmul, partial(torch.einsum, "bqk,bkd->bqd")])
def test_partial_results_are_summed_where_both_are_split_alike(product):
    found = traffic(product, ((2, 9, 7), 2, KEYS), ((2, 7, 3), 1, KEYS))
    for forward, backward in found:
        assert forward == [("all_reduce", 2 * 9 * 3 * WIDE)]
        assert backward == []


def test_a_linear_map_of_split_features_sums_its_result():
    bias = ((5,), None, None)
    found = traffic(F.linear, ((4, 7), 1, KEYS), ((5, 7), None, None), bias)
    for forward, backward in found:
        assert forward == [("all_reduce", 4 * 5 * WIDE)]
        assert backward == [("all_reduce", 5 * 7 * WIDE)]  # of the weight alone


def test_rows_that_stay_and_batches_split_on_one_side_send_nothing():
    for places in (
        [((4, 9, 3), 1, QUERIES), ((4, 3, 5), None, None)],
        [((9, 4, 3), 0, QUERIES), ((9, 3, 5), None, None)],
        [((9, 4, 3), 0, QUERIES), ((9, 3, 5), 0, QUERIES)],
    ):
        plain = places[1][1] is None
        for forward, backward in traffic(torch.matmul, *places):
            assert forward == []
            size = torch.Size(places[1][0]).numel()
            assert backward == ([("all_reduce", size * WIDE)] if plain else [])


def test_the_smaller_of_differently_cut_operands_is_realigned():
    # Rows 0-1 and 2-6 are computed with as 0-3, 4 and 5-6.
    found = traffic(torch.mm, ((9, 7), 1, [4, 1, 2]), ((7, 2), 0, KEYS))
    for (forward, backward), sent, got in zip(found, (0, 4, 0), (2, 0, 2), strict=True):
        moved = ("all_to_all", sent * 2 * WIDE)
        assert forward == [moved, ("all_reduce", 9 * 2 * WIDE)]
        assert backward == [moved, ("all_to_all", got * 2 * WIDE)]


def test_a_dot_product_sends_a_number():
    for forward, backward in traffic(torch.dot, ((9,), 0, QUERIES), ((9,), 0, QUERIES)):
        assert forward == [("all_reduce", WIDE)]
        assert backward == []


def test_a_trace_sends_a_number():
    for forward, backward in traffic(partial(torch.einsum, "ii->"), ((9, 9), 1, QUERIES)):
        assert forward == [("all_reduce", WIDE)]
        assert backward == []


def test_distances_gather_the_fewer_points():
    found = traffic(torch.cdist, ((9, 3), 0, QUERIES), ((7, 3), 0, KEYS))
    for (forward, backward), rows in zip(found, KEYS, strict=True):
        assert forward == [("all_to_all", 2 * rows * 3 * WIDE)]
        assert backward == [("all_to_all", (7 - rows) * 3 * WIDE)]


def _grid(rank: Rank) -> list[tuple[str, int]]:
    mesh = rank.mesh(h=2, w=2)
    x = torch.randn(6, 8, dtype=torch.float64)
    a = sf.distribute_tensor(x, mesh, [Shard(0), Shard(1)], None).requires_grad_()
    b = sf.distribute_tensor(x.t().contiguous(), mesh, [Replicate(), Shard(0)], None)
    with record_traffic() as sent:
        y = a @ b.requires_grad_()
    assert y.layout.split_axes == ("h",)
    with record_traffic() as back:
        y.backward(gradient=torch.ones_like(y))
    kinds = [[(kind, n) for _, kind, n in t.operations] for t in (sent, back)]
    assert kinds[0] == [("all_reduce", 3 * 6 * WIDE)]  # over w, of this rank's rows
    return kinds[1]


def test_on_a_grid_a_gradient_is_summed_over_the_axis_on_which_its_operand_is_whole():
    assert rank_pool(4).run(_grid) == [[("all_reduce", 4 * 6 * WIDE)]] * 4


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def _kept(rank: Rank, backend: str) -> tuple[int, int]:
    mesh = rank.mesh(domain=rank.world_size)
    whole = [torch.randn(1, 2, 64, 16).requires_grad_() for _ in "qkv"]
    alone = kept_bytes(partial(attention, *whole)).kept
    xs = _operands(mesh, [((1, 2, 64, 16), 2, None)] * 3, torch.float32)
    fn = attention
    if backend:
        fn = sf.compile(attention, backend=backend, fullgraph=True)
    fn(*xs).sum().backward()
    return alone, kept_bytes(partial(fn, *xs)).kept


def test_gathered_keys_and_values_are_not_kept():
    scores, out = 2 * 64 * 64 * 4, 2 * 64 * 16 * 4
    for alone, kept in rank_pool(2).run(_kept, ""):
        assert alone == scores + out
        assert kept == alone // 2


@pytest.mark.conformance
def test_nor_by_compiled_code():
    for alone, kept in rank_pool(2).run(_kept, "aot_eager"):
        # Besides what eager keeps, a copy of this rank's keys, transposed.
        assert kept <= alone // 2 + 2 * 32 * 16 * 4


def _checkpointed(rank: Rank) -> None:
    mesh = rank.mesh(domain=3)
    places: list[Place] = [((1, 2, 9, 4), 2, [4, 0, 5])] * 3
    plain, again, offloaded = (_operands(mesh, places) for _ in range(3))
    attention(*plain).sum().backward()
    checkpoint(attention, *again, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        y = attention(*offloaded)
    y.sum().backward()
    for a, b, c in zip(plain, again, offloaded, strict=True):
        torch.testing.assert_close(b.grad.to_local(), a.grad.to_local())
        torch.testing.assert_close(c.grad.to_local(), a.grad.to_local())


def test_checkpointing_and_offload():
    rank_pool(3).run(_checkpointed)


def _lowered(rank: Rank) -> None:
    mesh = rank.mesh(domain=2)
    q, k = _operands(mesh, [((2, 9, 4), 1, [4, 5]), ((2, 9, 4), 1, [8, 1])], torch.float32)
    rows, features = _operands(mesh, [((9, 8), 1, [2, 6]), ((3, 8), None, None)], torch.float32)
    plain = [x.full_tensor() if isinstance(x, sf.ShardTensor) else x for x in (q, k, rows)]
    with torch.autocast("cpu", torch.bfloat16):
        with record_traffic() as sent:
            scores = q @ k.transpose(1, 2)
        mapped = F.linear(rows, features)
        expected = plain[0] @ plain[1].transpose(1, 2), F.linear(plain[2], features)
    # Half as many bytes as in fp32, for the rows of which 8 or 1 are here.
    assert sent.bytes == k.to_local().shape[1] * 2 * 4 * 2
    scores.sum().backward()
    assert q.grad.dtype == torch.float32
    for found, want in zip((scores.full_tensor(), mapped), expected, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


def test_autocast_sends_what_it_computes_with():
    rank_pool(2).run(_lowered)


def _halves(rank: Rank) -> float:
    mesh = rank.mesh(domain=rank.world_size)
    a, b = (torch.randn(32, 512, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    exact = a.bfloat16().double() @ b.bfloat16().double().t()
    x = sf.distribute_tensor(a.bfloat16(), mesh, [Shard(1)], None)
    y = sf.distribute_tensor(b.bfloat16(), mesh, [Shard(1)], None)
    found = F.linear(x, y)
    assert found.dtype == torch.bfloat16
    return ((found.double() - exact).norm() / exact.norm()).item()


def test_halves_are_summed_in_fp32():
    """CASES 24's concern: partial results of 4 ranks cost no more than the rounding of each."""
    alone, four = rank_pool(1).run(_halves)[0], rank_pool(4).run(_halves)[0]
    assert four <= 1.5 * alone
