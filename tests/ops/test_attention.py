"""Scaled dot-product attention on any split, by every algorithm: CASES 23 to 27."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.errors import LayoutError
from shardfield.ops.attention import attention_algorithm
from shardfield.testing import Rank, parity, rank_pool
from shardfield.tools.memory import kept_bytes

G = torch.Generator().manual_seed(0)
F64 = torch.float64


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=G)


def qkv(queries: int = 9, keys: int = 9, heads: int = 4, key_heads: int = 4):
    return [randn(2, heads, queries, 6), randn(2, key_heads, keys, 6), randn(2, key_heads, keys, 6)]


def by(algorithm: str, **options):
    def attention(q, k, v, attn_mask=None):
        with attention_algorithm(algorithm):
            return F.scaled_dot_product_attention(q, k, v, attn_mask, **options)

    return attention


SIZES = [(5, 4), (9, 0), (4, 0, 5), (1, 0, 6, 2)]
ALGORITHMS = ["ring", "heads", "gather"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_case_23_every_query_sees_every_key(algorithm):
    parity(by(algorithm), qkv(), [2, 2, 2], sizes=SIZES, output="sharded", dtype=F64)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "zigzag"])
def test_case_27_causal(algorithm):
    parity(by(algorithm, is_causal=True), qkv(), [2, 2, 2], sizes=SIZES, dtype=F64)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_case_27_fewer_key_heads_and_other_lengths(algorithm):
    attention = by(algorithm, enable_gqa=True, scale=0.3)
    parity(attention, qkv(9, 7, 4, 2), [2, 2, 2], dtype=F64, subgroup=False)
    attention = by(algorithm, is_causal=True)
    parity(attention, qkv(7, 9, 3, 3), [2, 2, 2], ranks=(2, 4), dtype=F64, subgroup=False)


BOOL = torch.rand(4, 9, 9, generator=G) > 0.4
BOOL[1, 2] = False  # a query that sees nothing


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_case_26_masks(algorithm):
    for mask in (BOOL, BOOL[0], randn(2, 1, 1, 9)):
        parity(by(algorithm), [*qkv(), mask], [2, 2, 2, None], sizes=SIZES[1:3], dtype=F64)


@pytest.mark.parametrize("algorithm", ["ring", "gather"])
def test_case_26_a_mask_split_over_its_rows(algorithm):
    parity(by(algorithm), [*qkv(), randn(2, 4, 9, 9)], [2, 2, 2, 2], sizes=SIZES[2:], dtype=F64)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_case_26_a_learned_bias_gets_its_gradient(algorithm):
    bias = {"attn_mask": randn(1, 4, 9, 9)}
    parity(by(algorithm), qkv(), [2, 2, 2], (2, 3), SIZES, params=bias, dtype=F64)


def test_case_25_zero_columns_and_large_logits():
    q, k, v = qkv()
    v[..., 0] = 0
    parity(by("ring"), [q, 1e4 * k, v], [2, 2, 2], sizes=SIZES, dtype=F64)


def test_replicated_queries_or_keys_and_splits_that_differ():
    parity(by("auto"), qkv(), [None, 2, 2], (2, 3), SIZES, dtype=F64, whole=True)
    parity(by("auto"), qkv(), [2, None, None], sizes=SIZES, dtype=F64)
    parity(by("auto", is_causal=True), qkv(), [2, None, None], (2, 3), SIZES, dtype=F64)
    parity(by("auto"), qkv(), [2, 1, 3], (2,), dtype=F64)
    parity(by("auto"), qkv(), [1, 1, 1], (2,), dtype=F64, output="sharded")
    parity(by("auto"), qkv(), [0, 0, 0], (2,), dtype=F64, output="sharded")


@pytest.mark.parametrize("algorithm", ["ring", "heads", "gather", "hybrid"])
def test_rows_of_a_flattened_grid(algorithm):
    attention = by(algorithm)

    def tokens(x):
        q, k, v = (part.flatten(2).unflatten(1, (4, 3)).transpose(2, 3) for part in x.chunk(3, 1))
        return attention(q, k, v)

    x = randn(2, 36, 5, 6)
    sizes = [{"h": (4, 1), "w": (2, 4)}, {"h": (5, 0), "w": (3, 3)}]
    parity(tokens, [x], [{2: "h", 3: "w"}], (4,), sizes, dtype=F64, subgroup=False)


def test_a_flattened_grid_may_be_causal_and_masked():
    def tokens(x, bias):
        q, k, v = (part.flatten(2).unflatten(1, (2, 3)).transpose(2, 3) for part in x.chunk(3, 1))
        return by("auto", is_causal=True)(q, k, v), by("auto")(q, k, v, bias)

    x, bias = randn(1, 18, 5, 6), {"bias": randn(30, 30)}
    sizes = [{"h": (4, 1), "w": (2, 4)}]
    parity(tokens, [x], [{2: "h", 3: "w"}], (4,), sizes, params=bias, dtype=F64, subgroup=False)


def test_queries_over_one_axis_and_keys_over_another():
    parity(by("auto"), qkv(), [{2: "h"}, {2: "w"}, {2: "w"}], (4,), dtype=F64, subgroup=False)
    parity(by("auto"), qkv(), [{2: "h"}, {1: "w"}, {1: "w"}], (4,), dtype=F64, subgroup=False)
    parity(by("auto"), qkv(), [{2: "h", 1: "w"}] * 3, (4,), dtype=F64, subgroup=False)


def test_fewer_dims_than_four_and_more():
    two, three = [randn(9, 6) for _ in range(3)], [randn(3, 9, 6) for _ in range(3)]
    parity(by("auto"), two, [0, 0, 0], (2,), dtype=F64)
    parity(by("auto", is_causal=True), three, [1, 1, 1], (2,), dtype=F64)
    parity(by("auto"), [randn(2, 2, 3, 9, 6) for _ in range(3)], [3, 3, 3], (2,), dtype=F64)


@st.composite
def problems(draw):
    ranks = draw(st.integers(2, 3))
    rows = draw(st.integers(1, 12))
    key_heads = draw(st.integers(1, 3))
    return {
        "ranks": ranks,
        "rows": rows,
        "extents": draw(splits(rows, ranks)),
        "heads": key_heads * draw(st.integers(1, 2)),
        "key_heads": key_heads,
        "causal": draw(st.booleans()),
        "algorithm": draw(st.sampled_from(["auto", "ring", "gather"])),
    }


@examples(10)
@given(problems())
def test_any_attention(case):
    tensors = qkv(case["rows"], case["rows"], case["heads"], case["key_heads"])
    attention = by(case["algorithm"], is_causal=case["causal"], enable_gqa=True)
    ranks, sizes = (case["ranks"],), [case["extents"]]
    parity(attention, tensors, [2, 2, 2], ranks, sizes, dtype=F64, subgroup=False)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_compiled_whole(algorithm):
    attention = by(algorithm, is_causal=True)
    parity(attention, qkv(), [2, 2, 2], (2,), [(5, 4)], compiled=True, dtype=F64)


def test_compiled_with_a_learned_bias():
    bias = {"attn_mask": randn(1, 4, 9, 9)}
    parity(by("ring"), qkv(), [2, 2, 2], (2,), [(9, 0)], bias, compiled=True, dtype=F64)


def _traffic(rank: Rank, algorithm: str, extents) -> tuple[int, list[str], list[str]]:
    mesh = rank.mesh(domain=rank.world_size)
    q, k, v = (
        sf.distribute_tensor(t, mesh, [Shard(2)], None, extents).requires_grad_()
        for t in (torch.randn(2, 4, 12, 6) for _ in range(3))
    )
    with attention_algorithm(algorithm):
        with record_traffic() as forward:
            y = F.scaled_dot_product_attention(q, k, v)
        with record_traffic() as backward:
            y.backward(torch.ones_like(y))
    return forward.bytes, forward.collectives, backward.collectives


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_and_collectives_are_the_plans(ranks):
    row = 2 * 4 * 12 * 4  # samples, heads, widths of key and value, bytes
    extents = {2: (7, 5), 3: (5, 3, 4), 4: (3, 3, 4, 2)}[ranks]
    ring = rank_pool(ranks).run(_traffic, "ring", extents)
    for rank, (sent, forward, backward) in enumerate(ring):
        assert sent == extents[rank] * row * (ranks - 1)
        assert forward == ["all_to_all"] * (ranks - 1)
        assert backward == ["all_to_all"] * 2 * (ranks - 1)
    gather = rank_pool(ranks).run(_traffic, "gather", extents)
    for rank, (sent, forward, backward) in enumerate(gather):
        assert sent == extents[rank] * row * (ranks - 1)
        assert (len(forward), len(backward)) == (1, 2)
    if ranks != 3:
        even = rank_pool(ranks).run(_traffic, "heads", (12 // ranks,) * ranks)
        for sent, forward, backward in even:
            assert sent == 4 * (12 // ranks) * 2 * 4 * 6 * 4 * (ranks - 1) // ranks
            assert forward == backward == ["all_to_all"] * 4


def _error_in_bfloat16(rank: Rank, algorithm: str) -> float:
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 256, 16) for _ in range(3)]
    mesh = rank.mesh(domain=rank.world_size)
    exact = F.scaled_dot_product_attention(*(t.to(torch.bfloat16).double() for t in whole))
    shards = [sf.distribute_tensor(t.to(torch.bfloat16), mesh, [Shard(2)], None) for t in whole]
    with attention_algorithm(algorithm):
        y = F.scaled_dot_product_attention(*shards)
    assert y.dtype == torch.bfloat16
    return (y.full_tensor().double() - exact).abs().max().item()


@pytest.mark.parametrize("algorithm", ["ring", "gather"])
def test_case_24_the_error_in_bfloat16_does_not_grow_with_the_ranks(algorithm):
    errors = [max(rank_pool(n).run(_error_in_bfloat16, algorithm)) for n in (1, 2, 4)]
    assert max(errors) <= 1.5 * errors[0]


def _refused(rank: Rank, algorithm: str) -> str:
    mesh = rank.mesh(domain=2)
    q, k, v = (sf.distribute_tensor(torch.randn(1, 1, 8, 4), mesh, [Shard(2)]) for _ in range(3))
    with attention_algorithm(algorithm):
        try:
            F.scaled_dot_product_attention(q, k, v)
        except LayoutError as error:
            return str(error)
    return "nothing"


def _kept(rank: Rank, algorithm: str, dtype: torch.dtype, causal: bool) -> tuple[int, int, int]:
    """Bytes that one process keeps, that this rank keeps, and of one block of keys and values."""
    shape, mesh = (2, 4, 384, 16), sf.init_mesh()
    whole = [torch.randn(shape, generator=G, dtype=torch.float32).to(dtype) for _ in range(3)]
    shards = [sf.distribute_tensor(x, mesh, [Shard(2)], None).requires_grad_() for x in whole]
    plain = [x.requires_grad_() for x in whole]

    def attend(tensors):
        projected = [x * 2 for x in tensors]  # nobody else keeps them, as in a network
        with sf.attention_algorithm(algorithm):
            return F.scaled_dot_product_attention(*projected, is_causal=causal)

    attend(shards)
    one = kept_bytes(partial(attend, plain)).kept
    kept = kept_bytes(partial(attend, shards)).kept
    return one, kept, 2 * shards[1].to_local().nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_share_and_at_most_a_block_of_keys_and_values(ranks, dtype):
    for algorithm, causal in (("ring", False), ("heads", False), ("gather", False), ("ring", True)):
        for one, kept, keys in rank_pool(ranks).run(_kept, algorithm, dtype, causal):
            assert one / ranks <= kept, algorithm
            assert kept <= one / ranks + keys + 1024, algorithm


@pytest.mark.parametrize("algorithm", ["heads", "hybrid", "zigzag"])
def test_algorithms_that_do_not_fit_are_refused(algorithm):
    for text in rank_pool(2).run(_refused, algorithm):
        assert f"attention by {algorithm!r}" in text
        assert "choose one of" in text


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "zigzag"])
def test_dropout_is_that_of_one_rank(algorithm):
    attention = by(algorithm, dropout_p=0.4, is_causal=algorithm == "zigzag")
    assert all(rank_pool(2).run(_dropped, attention, (5, 4)))
    assert all(rank_pool(3).run(_dropped, attention, (4, 0, 5)))


def _dropped(rank: Rank, attention, extents) -> bool:
    """Whether values and gradients are those of the same program with one rank a sample."""
    whole = [t.double() for t in qkv()]
    found = []
    mesh = rank.mesh(domain=rank.world_size)
    alone = rank.mesh(single=1, domain=rank.world_size)["single"]
    for axis, sizes in ((mesh, extents), (alone, (9,))):
        torch.manual_seed(3)
        shards = [
            sf.distribute_tensor(t, axis, [Shard(2)], None, sizes).requires_grad_() for t in whole
        ]
        y = attention(*shards)
        (y * y).sum().backward()
        found.append([y.full_tensor(), *(x.grad.full_tensor() for x in shards)])
    share = (found[0][0] == 0).double().mean()
    assert share < 0.1
    plain = F.scaled_dot_product_attention(*whole)
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(*found, strict=True)
    ) and not torch.allclose(found[0][0], plain)
