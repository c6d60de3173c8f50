"""Neighborhood attention on any split, against attention over all keys under a mask."""

from __future__ import annotations

import sys
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.attention import tiles
from shardfield.attention.neighbors import Window
from shardfield.comm import record_traffic
from shardfield.errors import LayoutError
from shardfield.nn.functional import neighborhood_attention
from shardfield.testing import Rank, parity, rank_pool, refused
from shardfield.tools.memory import kept_bytes

G = torch.Generator().manual_seed(0)
F64 = torch.float64


def qkv(*rows: int, heads: int = 2, key_heads: int = 2, width: int = 4):
    shapes = [(2, *rows, h, 4) for h in (heads, key_heads)] + [(2, *rows, key_heads, width)]
    return [torch.randn(shape, generator=G) for shape in shapes]


def _each(value, dims: int):
    return value if isinstance(value, tuple) else (value,) * dims


def masked(q, k, v, kernel_size, stride=1, dilation=1, is_causal=False, scale=None):
    """The definition: all scores, a mask, softmax."""
    dims = q.dim() - 3
    options = zip(
        *(_each(o, dims) for o in (kernel_size, stride, dilation, is_causal)), strict=True
    )
    meets = torch.ones(1, 1, dtype=torch.bool)
    for size, option in zip(q.shape[1:-2], options, strict=True):
        here = torch.zeros(size, size, dtype=torch.bool)
        for row in range(size):
            here[row, list(Window(size, *option).neighbours(row))] = True
        meets = (meets[:, None, :, None] & here[None, :, None, :]).flatten(2).flatten(0, 1)
    group = q.shape[-2] // k.shape[-2]
    rows = q.shape[1:-2]
    q, k, v = (x.flatten(1, dims).transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~meets, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).unflatten(1, rows)


def by(**options):
    def attention(q, k, v):
        sharded = any(isinstance(x, sf.ShardTensor) for x in (q, k, v))
        return (neighborhood_attention if sharded else masked)(q, k, v, **options)

    return attention


@st.composite
def problems(draw, most: int = 3):
    dims = draw(st.integers(1, most))
    rows, options = [], []
    for _ in range(dims):
        kernel = draw(st.integers(1, 5))
        dilation = draw(st.integers(1, 3))
        room = {1: 20, 2: 8, 3: 3}[dims]
        rows.append(draw(st.integers(kernel * dilation, kernel * dilation + room)))
        options.append((kernel, draw(st.integers(1, kernel)), dilation, draw(st.booleans())))
    names = ("kernel_size", "stride", "dilation", "is_causal")
    return tuple(rows), dict(zip(names, zip(*options, strict=True), strict=True))


@examples(15)
@given(problems(), st.sampled_from([0.01, 2.0, 48.0]), st.integers(1, 2), st.sampled_from([4, 5]))
def test_whole_tensors_equal_masked_attention(problem, load, group, width):
    """Tiles of any size, several batches, value rows of another width: gradients too."""
    rows, options = problem
    tensors = [x.double() for x in qkv(*rows, heads=2 * group, width=width)]
    results = []
    before = tiles.LOAD["cpu"], tiles.TAKEN["cpu"]
    tiles.LOAD["cpu"], tiles.TAKEN["cpu"] = load, 300
    try:
        for attention in (neighborhood_attention, masked):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = attention(*leaves, **options, scale=0.4)
            weight = torch.linspace(-1, 1, out.numel(), dtype=F64).view(out.shape)
            results.append([out, *torch.autograd.grad(out, leaves, weight)])
    finally:
        tiles.LOAD["cpu"], tiles.TAKEN["cpu"] = before
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 7},
        {"kernel_size": 4, "dilation": 2},
        {"kernel_size": 5, "is_causal": True},
        {"kernel_size": 5, "stride": 3, "scale": 0.3},
    ],
    ids=str,
)
def test_one_dim_split_in_any_way(options):
    parity(by(**options), qkv(11), [1, 1, 1], output="sharded", dtype=F64)


def test_windows_of_all_rows():
    parity(by(kernel_size=11), qkv(11), [1, 1, 1], (2, 4), dtype=F64, whole=True)


def test_single_precision():
    parity(by(kernel_size=5), qkv(11), [1, 1, 1], (2, 4))


def test_windows_wider_than_shards_of_two_dims():
    options = {"kernel_size": (5, 3), "dilation": (2, 1), "is_causal": (False, True)}
    parity(by(**options), qkv(11, 6), [1, 1, 1], (2, 4), dtype=F64, subgroup=False)
    parity(by(**options), qkv(11, 6), [2, 2, 2], (3,), dtype=F64, subgroup=False)


def test_a_grid_of_ranks():
    split = {1: "h", 2: "w"}
    parity(by(kernel_size=5), qkv(7, 6), [split] * 3, (2, 4), dtype=F64, subgroup=False)
    split = {2: "h", 3: "w"}
    options = {"kernel_size": (1, 3, 2), "stride": (1, 1, 2)}
    parity(by(**options), qkv(2, 4, 5), [split] * 3, (4,), dtype=F64, subgroup=False)


def test_samples_and_heads():
    attention, sizes = by(kernel_size=3), [(1, 3), (4, 0)]
    parity(attention, qkv(5, heads=4, key_heads=4), [2, 2, 2], (2,), sizes, dtype=F64)
    parity(attention, qkv(5, heads=4), [2, 2, 2], (2, 3), dtype=F64)
    parity(attention, qkv(5), [0, 0, 0], (2,), dtype=F64)
    parity(attention, qkv(9, heads=4), [{1: "h", 2: "w"}] * 3, (4,), dtype=F64, subgroup=False)


def test_operands_that_are_whole_or_split_otherwise():
    attention = by(kernel_size=5)
    parity(attention, qkv(9), [1, None, None], (2, 3), dtype=F64)
    parity(attention, qkv(9), [None, 1, None], (2,), dtype=F64)
    parity(attention, qkv(9), [1, 2, 3], (2,), dtype=F64)
    split = [{1: "h"}, {2: "w"}, {2: "w"}]
    parity(attention, qkv(18), split, (4,), dtype=F64, subgroup=False)


def test_rows_of_a_flattened_grid_are_moved_to_ranges():
    def flattened(q, k, v):
        return by(kernel_size=7)(*(x.flatten(1, 2) for x in (q, k, v)))

    parity(flattened, qkv(3, 4), [{2: "w"}] * 3, (2,), dtype=F64, subgroup=False)


@examples(8)
@given(problems(2), st.data())
def test_any_neighborhood(problem, data):
    rows, options = problem
    ranks = data.draw(st.integers(2, 3))
    dim = data.draw(st.integers(0, len(rows) - 1))
    sizes = [data.draw(splits(rows[dim], ranks))]
    # A window may hold all rows: that ranks share the work is for the tests above to see.
    parity(by(**options), qkv(*rows), [1 + dim] * 3, (ranks,), sizes, dtype=F64, whole=True)


def test_compiled_whole():
    attention = by(kernel_size=(3, 5), dilation=(2, 1))
    sizes = [(5, 4), (9, 0)]
    parity(attention, qkv(9, 6), [1, 1, 1], (2,), sizes, compiled=True, dtype=F64)


def _passes(rank: Rank, rows: tuple[int, ...], sizes, options) -> tuple[list, list]:
    mesh = rank.mesh(domain=rank.world_size)
    q, k, v = (
        sf.distribute_tensor(x, mesh, [Shard(1)], None, sizes).requires_grad_() for x in qkv(*rows)
    )
    with record_traffic() as forward:
        y = neighborhood_attention(q, k, v, **options)
    with record_traffic() as backward:
        y.backward(torch.ones_like(y))
    return tuple([(kind, n) for _, kind, n in t.operations] for t in (forward, backward))


@pytest.mark.parametrize("sizes", [(10, 6), (5, 1, 10), (6, 0, 2, 8)])
@pytest.mark.parametrize(
    "options", [{"kernel_size": 3}, {"kernel_size": 5, "dilation": 3, "is_causal": True}], ids=str
)
def test_ranks_send_the_halo_only(sizes, options):
    rows, row = (sum(sizes), 15), 2 * 15 * 2 * 4 * 4  # bytes of one row of keys
    window = Window(rows[0], options["kernel_size"], 1, options.get("dilation", 1),
                    options.get("is_causal", False))  # fmt: skip
    stops = list(accumulate(sizes))
    owned = [range(stop - n, stop) for stop, n in zip(stops, sizes, strict=True)]
    sends, receives = [0] * len(sizes), [0] * len(sizes)
    for reader, mine in enumerate(owned):
        needed = [key for query in mine for key in window.neighbours(query)]
        for key in range(min(needed), max(needed) + 1) if needed else ():
            owner = next(rank for rank, own in enumerate(owned) if key in own)
            sends[owner] += owner != reader
            receives[reader] += owner != reader
    found = rank_pool(len(sizes)).run(_passes, rows, sizes, options)
    for (forward, backward), out, back in zip(found, sends, receives, strict=True):
        assert forward == [("all_to_all", out * row)] * 2  # keys and values
        assert backward == [("all_to_all", back * row)] * 2


def _kept(rank: Rank, rows: int) -> tuple[int, int]:
    mesh = rank.mesh(domain=rank.world_size)
    q, k, v = (sf.distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in qkv(rows, 64))

    def forward():
        return neighborhood_attention(q, k, v, kernel_size=7)

    forward()
    return kept_bytes(forward)


def test_the_result_its_log_sum_exp_and_halos_are_kept():
    """Keys and values are the caller's; what the work takes on the way does not grow."""
    for ranks, rows in ((1, 256), (2, 256)):
        mine = rows // ranks * 64 * 2 * 2 * 4  # samples, heads, bytes
        halo = (ranks - 1) * 2 * 3 * 64 * 2 * 2 * 4 * 4  # keys and values, rows, widths
        for kept, peak in rank_pool(ranks).run(_kept, rows):
            assert mine * (4 + 1) + halo <= kept <= mine * (4 + 1) + halo + 1024
            assert peak - kept < 3 * 4 * tiles.TAKEN["cpu"] + (ranks - 1) * 2 * (mine * 4 + halo)


def test_sizes_that_do_not_fit_are_refused():
    tensors = qkv(8, 6)
    for options in (
        {"kernel_size": 7},
        {"kernel_size": 3, "dilation": 3},
        {"kernel_size": 3, "stride": 4},
        {"kernel_size": (3, 3, 3)},
        {"kernel_size": 0},
    ):
        with pytest.raises(LayoutError, match="at most the rows"):
            neighborhood_attention(*tensors, **options)
        text = refused(by(**options), tensors, [1, 1, 1], LayoutError, ranks=(2,), sizes=[(5, 3)])
        assert "kernel_size \\* dilation" not in text and "neighborhood attention of" in text
    with pytest.raises(LayoutError, match="key heads divide query heads"):
        neighborhood_attention(*qkv(8, heads=3), kernel_size=3)


def test_the_backward_is_not_differentiable():
    q, k, v = (x.requires_grad_() for x in qkv(8))
    (grad,) = torch.autograd.grad(neighborhood_attention(q, k, v, 3).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="neighborhood_attention_backward"):
        grad.sum().backward()


def test_autocast_computes_in_its_type():
    tensors = qkv(8)
    with torch.autocast("cpu", torch.bfloat16):
        found = neighborhood_attention(*tensors, 3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), masked(*tensors, 3), atol=0.03, rtol=0.03)


NATTEN = """
from natten.inner import na1d, na2d, neighborhood_attention_generic as generic

def na2d_of_old(query, key, value, kernel_size, dilation=1, is_causal=False, rpb=None, scale=None):
    raise AssertionError("reached natten")
"""

INNER = """
def neighborhood_attention_generic(query, key, value, kernel_size, stride=1, dilation=1,
                                   is_causal=False, scale=None, additional_keys=None,
                                   additional_values=None, backend=None, return_lse=False):
    return query + 1

def na1d(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None,
         additional_keys=None, additional_values=None, backend=None, return_lse=False):
    return neighborhood_attention_generic(query, key, value, kernel_size)

na2d = na1d
"""


@pytest.fixture
def natten(tmp_path, monkeypatch) -> ModuleType:
    """A package of that name, imported after shardfield."""
    (tmp_path / "natten").mkdir()
    (tmp_path / "natten" / "__init__.py").write_text(NATTEN)
    (tmp_path / "natten" / "inner.py").write_text(INNER)
    monkeypatch.syspath_prepend(tmp_path)
    import natten

    yield natten
    for name in [name for name in sys.modules if name.partition(".")[0] == "natten"]:
        del sys.modules[name]


def test_natten_takes_sharded_tensors(natten, tmp_path):
    whole = qkv(8)
    assert natten.na1d(*whole, 3).equal(whole[0] + 1)  # plain tensors go on to natten
    for sharded, right in rank_pool(2).run(_natten, str(tmp_path), whole):
        torch.testing.assert_close(sharded, right)


def _natten(rank: Rank, path: str, whole) -> tuple[torch.Tensor, torch.Tensor]:
    sys.path.insert(0, path)
    try:
        import natten
        from natten.inner import neighborhood_attention_generic

        mesh = rank.mesh(domain=2)
        shards = [sf.distribute_tensor(x, mesh, [Shard(1)], None) for x in whole]
        found = natten.na1d(*shards, 3, dilation=2, backend="any")
        again = natten.generic(query=shards[0], key=shards[1], value=shards[2], kernel_size=3,
                               dilation=2, is_causal=None)  # fmt: skip
        assert natten.generic is neighborhood_attention_generic
        assert again.to_local().equal(found.to_local())
        compiled = sf.compile(lambda *x: natten.na1d(*x, 3, dilation=2), backend="aot_eager")
        assert compiled(*shards).to_local().equal(found.to_local())
        with pytest.raises(sf.UnsupportedOperation, match="no return_lse"):
            natten.na1d(*shards, 3, return_lse=True)
        return found.full_tensor(), masked(*whole, 3, dilation=2)
    finally:
        sys.path.remove(path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "natten"]:
            del sys.modules[name]
