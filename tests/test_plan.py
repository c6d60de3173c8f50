"""Plans without processes: ranges tile, every output row finds its input, fetch and its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import Window, sized_splits, splits, transposed_windows, windows

from shardfield.comm import fetch as fetching
from shardfield.layout import Factor, canonical, cuts, even_extents, extents_of
from shardfield.plan import (
    FILL,
    DimPlan,
    Exchange,
    Segment,
    clip,
    exchange,
    runs_of,
    transposed_window,
    wanted_runs,
    wanted_whole,
    window,
)

FACTORS = st.integers(1, 4)


@st.composite
def dims(draw: st.DrawFn, axes: int = 2) -> tuple[Factor, ...]:
    """A product of one to four factors, some of them split over 1 to 3 ranks each."""
    names = [f"axis{index}" for index in range(axes)]
    factors = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 5))
        if names and draw(st.booleans()):
            extents = draw(splits(size, draw(st.integers(1, 3))))
            factors.append(Factor(size, (names.pop(0),), extents))
        else:
            factors.append(Factor(size))
    return tuple(factors)


def rows_of(dim: tuple[Factor, ...]) -> list[list[int]]:
    """Global rows of every coordinate, by cutting the array of all row numbers."""
    blocks = [np.arange(prod(factor.size for factor in dim)).reshape([f.size for f in dim])]
    for place, factor in enumerate(dim):
        if factor.axes:
            at = cuts(factor.extents)[1:-1]
            blocks = [part for block in blocks for part in np.split(block, at, axis=place)]
    return [block.reshape(-1).tolist() for block in blocks]


def unrolled(runs) -> list[int]:
    return [row for start, stop in runs for row in range(start, stop)]


def rows(segments) -> list[int | None]:
    """Global rows of segments; None is fill."""
    found: list[int | None] = []
    for part in segments:
        for index in range(part.length):
            found.append(FILL if part.start is None else part.start + index * part.step)
    return found


# Layouts


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_extents_cut_as_torch_chunk(size: int, parts: int):
    extents = even_extents(size, parts)
    chunks = [len(chunk) for chunk in torch.zeros(size).chunk(parts) if size]
    assert len(extents) == parts
    assert extents == (*chunks, *[0] * (parts - len(chunks)))
    assert extents_of(cuts(extents)) == extents


@given(dims())
def test_runs_tile_and_follow_the_local_order(dim):
    runs = runs_of(dim)
    assert [unrolled(part) for part in runs] == rows_of(dim)
    assert sorted(row for part in runs for row in unrolled(part)) == list(
        range(prod(factor.size for factor in dim))
    )
    for part in runs:
        assert all(stop > start for start, stop in part)
        assert all(first[1] < then[0] for first, then in pairwise(part)), "runs are not joined"
    assert [rows(part) for part in wanted_runs(dim)] == [unrolled(part) for part in runs]


@given(dims())
def test_canonical_keeps_size_and_ranges_and_is_final(dim):
    merged = canonical(dim)
    assert prod(factor.size for factor in merged) == prod(factor.size for factor in dim)
    assert runs_of(merged) == runs_of(dim)
    assert canonical(merged) == merged
    assert len([f for f in merged if not f.axes]) <= 1, "whole factors are only left in front"


@given(st.data())
def test_canonical_keeps_a_split_merged_with_whole_dims(data):
    size, width = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 5))
    extents = data.draw(splits(size, 3))
    split = Factor(size, ("domain",), extents)
    wide = tuple(extent * width for extent in extents)
    assert canonical([split, Factor(width)]) == (Factor(size * width, ("domain",), wide),)
    assert canonical([Factor(1), split, Factor(1)]) == (split,)
    assert canonical([Factor(2), split]) == (Factor(2), split)


@given(st.integers(-9, 9), st.integers(0, 20), st.integers(0, 8))
def test_clip_fills_what_lies_outside(start: int, length: int, size: int):
    found = rows(clip(start, start + length, size))
    assert found == [i if 0 <= i < size else FILL for i in range(start, start + length)]


# Windows


def tiles(plan: DimPlan, ranks: int) -> None:
    assert len(plan.extents) == len(plan.wanted) == ranks
    assert min(plan.extents) >= 0
    assert sum(plan.extents) == plan.size
    for extent, wanted in zip(plan.extents, plan.wanted, strict=True):
        assert extent or not wanted, "a rank without output wants rows"


def block(x: torch.Tensor, segments, fill: float = 0.0) -> torch.Tensor:
    parts = [fill if row is None else x[..., row] for row in rows(segments)]
    filled = [torch.full_like(x[..., 0], p) if isinstance(p, float) else p for p in parts]
    return torch.stack(filled, -1)


@given(windows(), st.data())
def test_every_output_row_of_a_window_has_its_input(case: Window, data):
    extents = data.draw(splits(case.size, data.draw(st.integers(1, 5))))
    plan = window(extents, case.kernel, case.stride, (case.padding,) * 2, case.dilation)
    tiles(plan, len(extents))
    x = torch.randn(1, 1, case.size, dtype=torch.float64)
    kernel = torch.randn(1, 1, case.kernel, dtype=torch.float64)
    whole = F.conv1d(x, kernel, None, case.stride, case.padding, case.dilation)
    assert plan.size == whole.shape[2]
    for expected, wanted in zip(whole.split(plan.extents, 2), plan.wanted, strict=True):
        if wanted:
            found = F.conv1d(block(x, wanted), kernel, None, case.stride, 0, case.dilation)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@given(windows(pooling=True), st.booleans(), st.data())
def test_every_output_row_of_a_pooling_has_its_input(case: Window, ceil_mode: bool, data):
    extents = data.draw(splits(case.size, data.draw(st.integers(1, 5))))
    options = {"dilation": case.dilation, "ceil_mode": ceil_mode}
    plan = window(extents, case.kernel, case.stride, (case.padding,) * 2, **options)
    tiles(plan, len(extents))
    x = torch.randn(1, 1, case.size, dtype=torch.float64)
    whole = F.max_pool1d(x, case.kernel, case.stride, case.padding, **options)
    assert plan.size == whole.shape[2]
    for expected, wanted in zip(whole.split(plan.extents, 2), plan.wanted, strict=True):
        if wanted:
            mine = block(x, wanted, float("-inf"))
            found = F.max_pool1d(mine, case.kernel, case.stride, 0, case.dilation)
            assert torch.equal(found, expected)


@given(transposed_windows(), st.data())
def test_every_output_row_of_a_transposed_window_has_its_input(drawn, data):
    case, extra = drawn
    extents = data.draw(splits(case.size, data.draw(st.integers(1, 5))))
    x = torch.randn(1, 1, case.size, dtype=torch.float64)
    kernel = torch.randn(1, 1, case.kernel, dtype=torch.float64)
    options = {"stride": case.stride, "dilation": case.dilation}
    # torch wants output_padding below stride or dilation, which the strategy keeps.
    whole = F.conv_transpose1d(
        x, kernel, None, padding=case.padding, output_padding=extra, **options
    )
    plan = transposed_window(extents, case.kernel, case.stride, case.padding, extra, case.dilation)
    tiles(plan, len(extents))
    assert plan.size == whole.shape[2]
    assert plan.crop is not None
    expected = whole.split(plan.extents, 2)
    for part, wanted, (start, stop) in zip(expected, plan.wanted, plan.crop, strict=True):
        assert stop - start == part.shape[2]
        if wanted:
            assert None not in rows(wanted)
            found = F.conv_transpose1d(block(x, wanted), kernel, None, **options)
            found = F.pad(found, (0, max(0, stop - found.shape[2])))[..., start:stop]
            torch.testing.assert_close(found, part, rtol=0, atol=1e-12)


@given(windows(max_size=30), st.data())
def test_ownership_is_monotone_and_keeps_the_ends(case: Window, data):
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, case.size)] * 2)))

    def cut(at: int) -> int:
        extents = (at, case.size - at)
        plan = window(extents, case.kernel, case.stride, (case.padding,) * 2, case.dilation)
        return plan.extents[0]

    assert cut(low) <= cut(high)
    assert cut(0) == 0
    assert cut(case.size) == case.out


@given(transposed_windows(), st.data())
def test_ownership_of_a_transposed_window_is_monotone(drawn, data):
    case, extra = drawn
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, case.size)] * 2)))

    def cut(at: int) -> int:
        options = (case.kernel, case.stride, case.padding, extra, case.dilation)
        return transposed_window((at, case.size - at), *options).extents[0]

    assert cut(low) <= cut(high)
    assert cut(0) == 0


@given(st.integers(0, 3), st.integers(0, 2), sized_splits())
def test_a_window_that_keeps_the_size_keeps_the_split(reach: int, dilation: int, extents):
    if sum(extents):
        pads = (reach * (dilation + 1),) * 2
        assert window(extents, 2 * reach + 1, 1, pads, dilation + 1).extents == extents
        odd = (reach, reach + 1)
        assert window(extents, 2 * reach + 2, 1, odd).extents == extents


DOWN = {"k3 s2 p1": (3, 2, (1, 1)), "k2 s2": (2, 2, (0, 0)), "k4 s2 p1": (4, 2, (1, 1))}
UP = {"k2 s2": (2, 2, 0, 0), "k4 s2 p1": (4, 2, 1, 0), "k3 s2 p1 op1": (3, 2, 1, 1)}


@pytest.mark.parametrize("up", UP)
@pytest.mark.parametrize("down", DOWN)
@given(levels=st.integers(1, 3), coarse=sized_splits(max_size=6))
def test_aligned_cuts_survive_the_way_down_and_up(down, up, levels, coarse):
    if not sum(coarse):
        return
    extents = tuple(rows * 2**levels for rows in coarse)
    path = [extents]
    for _ in range(levels):
        path.append(window(path[-1], *DOWN[down]).extents)
        assert path[-1] == tuple(rows // 2 for rows in path[-2])
    for skip in reversed(path[:-1]):
        back = transposed_window(path.pop(), *UP[up]).extents
        assert back == skip


@given(sized_splits(max_size=12), st.integers(1, 4))
def test_patches_of_aligned_shards_need_no_other_rank(coarse, patch: int):
    if not sum(coarse):
        return
    extents = tuple(rows * patch for rows in coarse)
    plan = window(extents, patch, patch)
    assert plan.extents == coarse
    dim = (Factor(sum(extents), ("domain",), extents),)
    assert all(exchange(runs_of(dim), plan.wanted, rank).silent for rank in range(len(extents)))


@given(st.integers(1, 5), sized_splits(max_size=3))
def test_a_window_that_does_not_fit_has_no_output(more: int, extents):
    size = sum(extents)
    assert window(extents, size + more + 1).size <= 0
    assert transposed_window(extents, 1, 1, size).size <= 0


# Fetch: every rank's exchange, its messages routed by hand


class Wire:
    """Stands in for the all-to-all: runs all ranks twice, first to collect what they send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.sent: dict[int, list[torch.Tensor]] = {}
        self.entered: set[int] = set()
        self.ranks, self.rank, self.deliver = ranks, 0, False
        monkeypatch.setattr(fetching, "all_to_all", self._all_to_all)

    def run(self, act: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        self.sent, self.entered, self.deliver = {}, set(), False
        self._every(act)
        self.deliver = True
        return self._every(act)

    def _every(self, act: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for rank in range(self.ranks):
            self.rank = rank
            found.append(act(rank))
        return found

    def _all_to_all(self, flat, receives, sends, group, operation):
        self.entered.add(self.rank)
        if not self.deliver:
            self.sent[self.rank] = list(flat.split(list(sends)))
            return flat.new_full((sum(receives),), float("nan"))
        parts = [self.sent[source][self.rank] for source in range(self.ranks)]
        assert [part.numel() for part in parts] == list(receives)
        return torch.cat(parts)


@st.composite
def segments(draw: st.DrawFn, size: int) -> tuple[Segment, ...]:
    """Fill, forward, reversed and repeated rows, in any order."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from([1, -1, 0, FILL]))
        if kind is FILL or not size:
            found.append(Segment(FILL, draw(st.integers(0, 3))))
            continue
        start = draw(st.integers(0, size - 1))
        room = {1: size - start, -1: start + 1, 0: 4}[kind]
        found.append(Segment(start, draw(st.integers(0, room)), kind))
    return tuple(found)


def fetched(monkeypatch, owned, wanted, x: torch.Tensor, fill: float):
    """What `fetch` gives all ranks, and its adjoint of random cotangents."""
    plans: list[Exchange] = [exchange(owned, wanted, rank) for rank in range(len(owned))]
    shards = [x[:, unrolled(runs)] for runs in owned]
    wire = Wire(monkeypatch, len(owned))

    def forward(rank: int) -> torch.Tensor:
        return fetching._assemble(shards[rank], 1, plans[rank], "group", fill, None)

    blocks = wire.run(forward)
    entered = set(wire.entered)
    grads = [torch.randn_like(part) for part in blocks]

    def adjoint(rank: int) -> torch.Tensor:
        return fetching._scatter_add(grads[rank], 1, plans[rank], "group", None)

    returned = wire.run(adjoint)
    assert entered == wire.entered, "forward and backward enter different collectives"
    assert entered in (set(), set(range(len(owned)))), "a rank stayed away"
    return plans, shards, blocks, grads, returned


def check_fetch(monkeypatch, owned, wanted, size: int) -> list[Exchange]:
    x = torch.randn(2, size, dtype=torch.float64)
    plans, shards, blocks, grads, returned = fetched(monkeypatch, owned, wanted, x, 0.0)
    zero = torch.zeros(2, dtype=torch.float64)
    for found, parts in zip(blocks, wanted, strict=True):
        columns = [zero if row is None else x[:, row] for row in rows(parts)]
        expected = torch.stack(columns, 1) if columns else x[:, :0]
        assert torch.equal(found, expected)
    for part, shard in zip(returned, shards, strict=True):
        assert part.shape == shard.shape
    left = sum((a * b).sum() for a, b in zip(blocks, grads, strict=True))
    right = sum((a * b).sum() for a, b in zip(shards, returned, strict=True))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-10)
    for rank, plan in enumerate(plans):
        for other, slabs in enumerate(plan.sends):
            assert sum(length for _, length in slabs) == plans[other].receives[rank]
        assert not plan.sends[rank]
        assert not plan.receives[rank]
        assert plan.silent == (not any(other.sent_rows for other in plans))
    return plans


@given(data=st.data())
def test_fetch_of_any_segments_and_its_adjoint(data):
    dim = data.draw(dims())
    owned, size = runs_of(dim), prod(factor.size for factor in dim)
    wanted = tuple(data.draw(segments(size)) for _ in owned)
    with pytest.MonkeyPatch.context() as patch:
        plans = check_fetch(patch, owned, wanted, size)
    for rank, plan in enumerate(plans):
        # No row travels that its reader owns, and a repeated row travels once.
        mine = set(unrolled(owned[rank]))
        foreign = 0
        for part in wanted[rank]:
            outside = [row for row in rows([part]) if row is not None and row not in mine]
            foreign += min(len(outside), 1) if part.step == 0 else len(outside)
        assert sum(plan.receives) == foreign
        assert plan.out_rows == len(rows(wanted[rank]))


@given(data=st.data())
def test_fetch_between_any_two_splits(data):
    before = data.draw(dims())
    size, ranks = prod(factor.size for factor in before), len(runs_of(before))
    after = (Factor(size, ("domain",), data.draw(splits(size, ranks))),)
    owned, wanted = runs_of(before), wanted_runs(after)
    with pytest.MonkeyPatch.context() as patch:
        plans = check_fetch(patch, owned, wanted, size)
    stay = [len(set(unrolled(o)) & set(rows(w))) for o, w in zip(owned, wanted, strict=True)]
    assert sum(plan.sent_rows for plan in plans) == size - sum(stay)


@given(data=st.data())
def test_fetch_of_the_whole_dim(data):
    dim = data.draw(dims())
    owned, size = runs_of(dim), prod(factor.size for factor in dim)
    with pytest.MonkeyPatch.context() as patch:
        plans = check_fetch(patch, owned, wanted_whole(size, len(owned)), size)
    for plan, held in zip(plans, owned, strict=True):
        assert plan.sent_rows == len(unrolled(held)) * (len(owned) - 1)


@given(windows(), st.data())
def test_case_5_halos_of_any_reach_come_from_whoever_owns_them(case: Window, data):
    extents = data.draw(splits(case.size, data.draw(st.integers(1, 6))))
    plan = window(extents, case.kernel, case.stride, (case.padding,) * 2, case.dilation)
    owned = runs_of((Factor(case.size, ("domain",), extents),))
    with pytest.MonkeyPatch.context() as patch:
        check_fetch(patch, owned, plan.wanted, case.size)


@given(windows(), st.data())
def test_slabs_and_the_local_block_rebuild_what_was_fetched(case: Window, data):
    """Along two dims, one after the other, as a windowed operation keeps its input."""
    extents = data.draw(splits(case.size, data.draw(st.integers(1, 4))))
    plan = window(extents, case.kernel, case.stride, (case.padding,) * 2, case.dilation)
    owned = runs_of((Factor(case.size, ("domain",), extents),))
    x = torch.randn(case.size, case.size)
    for rank in range(len(extents)):
        side = exchange(owned, plan.wanted, rank)
        if not side.out_rows:
            continue
        local = x[unrolled(owned[rank])][:, unrolled(owned[rank])]
        fetched_block = block(block(x, plan.wanted[rank]).T, plan.wanted[rank]).T.contiguous()
        first, second = fetching.slabs_of(fetched_block, [(0, side), (1, side)])
        once = fetching.reassemble(local, 0, side, first)
        assert torch.equal(fetching.reassemble(once, 1, side, second), fetched_block)
