"""Which keys meet which queries: every pair that may meet, exactly once, whatever the splits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits

from shardfield.attention.plan import (
    MACHINES,
    Rows,
    Sizes,
    choices,
    key_steps,
    length,
    pieces_of,
    zigzag,
)
from shardfield.layout import cuts


def contiguous(extents) -> tuple[Rows, ...]:
    points = cuts(extents)
    return tuple(((a, b),) for a, b in zip(points, points[1:], strict=False))


def indices(rows: Rows) -> list[int]:
    return [index for a, b in rows for index in range(a, b)]


@st.composite
def problems(draw):
    ranks = draw(st.integers(1, 5))
    queries, keys = draw(st.integers(0, 14)), draw(st.integers(0, 14))
    if draw(st.booleans()):
        return zigzag(queries, ranks), zigzag(keys, ranks)
    return contiguous(draw(splits(queries, ranks))), contiguous(draw(splits(keys, ranks)))


@examples(200)
@given(problems(), st.booleans(), st.booleans())
def test_every_pair_meets_exactly_once(problem, causal, together):
    queries, keys = problem
    ranks = len(keys)
    every = [key_steps(queries, keys, rank, causal, together) for rank in range(ranks)]
    seen = []
    for rank in range(ranks):
        own = indices(queries[rank])
        for at, step in enumerate(every[rank]):
            assert [every[other][at].sends[rank] for other in range(ranks)] == list(step.receives)
            assert step.silent == all(not any(steps[at].sends) for steps in every)
            assert not step.by_position
            columns = indices(step.columns)
            for piece in step.pieces:
                for i in range(piece.q_rows):
                    width = i + 1 if piece.causal else piece.k_rows
                    seen += [(own[piece.q + i], columns[piece.k + j]) for j in range(width)]
    total_q, total_k = (sum(map(length, rows)) for rows in problem)
    wanted = {(i, j) for i in range(total_q) for j in range(total_k) if not causal or j <= i}
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted


@examples(100)
@given(st.integers(0, 60), st.integers(1, 8))
def test_zigzag_tiles_the_rows_and_shares_the_triangle(size, ranks):
    rows = zigzag(size, ranks)
    assert sorted(index for part in rows for index in indices(part)) == list(range(size))
    if size % (2 * ranks) == 0:
        work = {sum(index + 1 for index in indices(part)) for part in rows}
        assert len(work) == 1


def test_a_ragged_diagonal_is_masked_by_position():
    striped = tuple((at, at + 1) for at in range(0, 80, 2))
    assert pieces_of(striped, striped, causal=True) is None
    (step,) = key_steps([striped], [striped], 0, True, False)
    assert step.by_position
    assert len(step.pieces) == 1


def even(tokens: int, ranks: int, heads: int, causal: bool = False) -> Sizes:
    rows = contiguous([tokens // ranks] * ranks)
    return Sizes(rows, rows, 2, heads, heads, 32, 32, 4, causal)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_follow_the_formulas(ranks):
    tokens, heads = 4096, 8
    found = {c.name: c.bytes for c in choices(even(tokens, ranks, heads), MACHINES["cpu"])}
    whole = 2 * heads * tokens * 32 * 4  # bytes of the global keys
    assert found["ring"] == found["gather"] == 2 * whole * (ranks - 1) // ranks
    # A rank's shard of queries, keys, values and output, less what stays.
    assert found["heads"] == 4 * whole // ranks * (ranks - 1) // ranks


def test_the_cheapest_comes_first_and_causal_work_is_balanced():
    for causal in (False, True):
        found = choices(even(16384, 4, 8, causal), MACHINES["cpu"])
        assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    by_name = {c.name: c.seconds for c in found}
    assert by_name["zigzag"] < 0.7 * by_name["ring"]


def test_fewer_heads_than_ranks_prefer_the_ring():
    assert choices(even(16384, 8, 2), MACHINES["cpu"])[0].name in ("ring", "gather")
