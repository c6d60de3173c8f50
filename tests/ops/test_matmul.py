"""Matrix products, every dim of every operand split; PReLU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.errors import LayoutError
from shardfield.testing import parity, rank_pool, refused

G = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(shape, generator=G)


X = randn(3, 6, 9, 4)
ONCE = {"dtype": torch.float64, "ranks": (1, 2, 3)}


@pytest.mark.parametrize("split", [0, 1, 2])
def test_linear_on_every_row_dim(split):
    parity(nn.Linear(4, 5), [X], [split], output="sharded", **ONCE)


def test_linear_on_a_grid_in_low_precision_and_compiled():
    layer = nn.Linear(4, 5)
    parity(layer, [X], [{1: "h", 2: "w"}], (4,), output="sharded")
    parity(layer, [X], [2], (2,), [(4, 5)], compiled=True, output="sharded", dtype=torch.float64)


def test_linear_of_one_sample_and_without_bias():
    def both(x, weight):
        return F.linear(x, weight), F.linear(x, weight[0])

    parity(both, [randn(9, 4)], [0], params={"weight": randn(5, 4)}, **ONCE)


def test_linear_with_split_output_features():
    def layer(x, weight, bias):
        return F.linear(x, weight, bias)

    parity(layer, [X, randn(7, 4), randn(7)], [None, 0, None], **ONCE)
    parity(layer, [X, randn(7, 4), randn(7)], [None, 0, 0], **ONCE)
    parity(layer, [X, randn(7, 4), randn(7)], [{2: "h"}, {0: "w"}, None], (4,), dtype=torch.float64)


@pytest.mark.parametrize("product", [torch.matmul, torch.Tensor.matmul, lambda a, b: a @ b])
def test_rows_columns_and_batches(product):
    a, b = randn(2, 3, 9, 4), randn(2, 3, 4, 7)
    parity(product, [a, b], [2, None], output="sharded", **ONCE)
    parity(product, [a, b], [None, 3], output="sharded", **ONCE)
    parity(product, [a, b], [1, 1], output="sharded", **ONCE)
    parity(product, [a, b], [1, None], output="sharded", **ONCE)
    parity(product, [a, b], [None, 1], output="sharded", **ONCE)


@pytest.mark.parametrize(
    ("shapes", "splits"),
    [
        (((9, 4), (4,)), (0, None)),
        (((4,), (4, 7)), (None, 1)),
        (((9, 4), (3, 4, 7)), (0, None)),
        (((3, 9, 4), (4, 7)), (0, None)),
        (((3, 9, 4), (4, 7)), (None, 1)),
        (((5, 1, 9, 4), (3, 4, 7)), (0, None)),
        (((5, 1, 9, 4), (3, 4, 7)), (None, 0)),
        (((5, 3, 9, 4), (3, 4, 7)), (1, 0)),
    ],
    ids=str,
)
def test_broadcasting(shapes, splits):
    parity(torch.matmul, [randn(*shape) for shape in shapes], splits, **ONCE)


def test_rows_and_columns_over_two_axes():
    a, b = randn(6, 9, 4), randn(6, 4, 7)
    parity(torch.matmul, [a, b], [{1: "h"}, {2: "w"}], (4,), dtype=torch.float64)
    parity(torch.bmm, [a, b], [{0: "h", 1: "w"}, {0: "h"}], (4,), dtype=torch.float64)
    parity(torch.bmm, [a, b], [{0: "h"}, {2: "w"}], (4,), dtype=torch.float64)


def test_differently_cut_batches_are_realigned():
    def product(rank):
        mesh = rank.mesh(domain=2)
        a = sf.distribute_tensor(randn(5, 3, 4), mesh, [Shard(0)], None, [1, 4])
        b = sf.distribute_tensor(randn(5, 4, 2), mesh, [Shard(0)], None, [3, 2])
        y = a.requires_grad_() @ b
        y.backward(gradient=torch.ones_like(y))
        assert y.layout.extents(0) == (1, 4)
        whole = b.full_tensor().sum(2, keepdim=True).transpose(1, 2).expand(5, 3, 4)
        assert torch.allclose(a.grad.full_tensor(), whole)
        assert torch.allclose(y.full_tensor(), a.full_tensor() @ b.full_tensor())

    rank_pool(2).run(product)


def test_sums_with_products():
    def sums(c, a, b, d, e, f):
        two = torch.addmm(c, a, b, beta=0.5, alpha=2)
        return two, torch.addmm(c[0], a, b), torch.baddbmm(d, e, f), a.mm(b), torch.mv(a, b[:, 0])

    matrices = [randn(9, 7), randn(9, 4), randn(4, 7), randn(3, 9, 7), randn(3, 9, 4)]
    last = randn(3, 4, 7)
    parity(sums, [*matrices, last], [None, 0, None, None, 1, None], **ONCE)


def test_split_summand():
    parity(torch.addmm, [randn(9, 7), randn(9, 4), randn(4, 7)], [0, 0, None], **ONCE)
    parity(torch.addmm, [randn(7), randn(9, 4), randn(4, 7)], [0, None, 1], **ONCE)


@pytest.mark.parametrize("split", [0, 1, 2])
def test_prelu(split):
    x = randn(3, 6, 9)
    parity(nn.PReLU(6), [x], [split], **ONCE)
    parity(nn.PReLU(), [x], [split], **ONCE)


def test_double_backward():
    def squares(x, weight):
        return F.linear(x, weight) ** 2, torch.matmul(x, weight.t()) ** 2

    operands = [randn(2, 9, 4), randn(5, 4)]
    parity(squares, operands, [1, None], (1, 2), double=True, dtype=torch.float64)


@pytest.mark.parametrize("splits", [(3, None), (None, 2), (3, 2), (2, 3), (3, 3), (2, 2)], ids=str)
def test_split_contractions_and_conflicts(splits):
    a, b = randn(2, 3, 8, 9), randn(2, 3, 9, 7)
    parity(torch.matmul, [a, b], splits, double=True, **ONCE)


@pytest.mark.parametrize("weight_split", [None, 0, 1])
def test_linear_of_split_features(weight_split):
    x, weight, bias = randn(2, 6, 9), randn(7, 9), randn(7)
    parity(F.linear, [x, weight, bias], [2, weight_split, None], **ONCE)
    grid = [{1: "h", 2: "w"}, None, None]
    parity(F.linear, [x, weight, bias], grid, (4,), output="sharded", dtype=torch.float64)


def test_every_product_of_split_contractions():
    def products(c, a, b, d, e, f, v):
        sums = torch.addmm(c, a, b, beta=0.5, alpha=2), torch.addmv(c[:, 0], a, v)
        batches = torch.baddbmm(d, e, f, beta=0.5), torch.addbmm(c, e, f), e @ v
        other = (
            torch.addr(c, a[:, 0], b[0]),
            torch.mv(a, v),
            a.mm(b),
            torch.linalg.multi_dot([a, b]),
        )
        return *sums, *batches, *other

    matrices = [randn(8, 6), randn(8, 9), randn(9, 6), randn(3, 8, 6), randn(3, 8, 9)]
    rest = [randn(3, 9, 6), randn(9)]
    once = {"dtype": torch.float64, "sizes": [(5, 4), (9, 0, 0)]}
    parity(products, [*matrices, *rest], [None, 1, 0, None, 2, 1, 0], (2, 3), **once)
    parity(products, [*matrices, *rest], [0, 0, 1, 0, 0, None, None], (2,), dtype=torch.float64)


def test_operands_by_name_and_what_is_refused():
    def named(c, a, b):
        return torch.addmm(c, mat2=b, mat1=a), torch.mm(a, mat2=b), torch.mv(a, vec=b[:, 0])

    matrices = [randn(8, 6), randn(8, 9), randn(9, 6)]
    parity(named, matrices, [None, 1, None], (2,), dtype=torch.float64)
    refused(lambda a, b: torch.mm(a, b, out=a.new_zeros(8, 6)), matrices[1:], [0, None])
    refused(lambda a, b: torch.mm(a, b, out_dtype=torch.float32), matrices[1:], [0, None])


def test_a_summand_times_zero_is_not_added():
    nothing = torch.full((8, 6), float("nan"))

    def product(a, b):
        return torch.addmm(nothing.to(a.dtype), a, b, beta=0)

    parity(product, [randn(8, 9), randn(9, 6)], [1, 0], **ONCE)


def scores(q, k, v, mask):
    """Attention spelled out."""
    return torch.softmax(q @ k.transpose(-2, -1) * 0.5 + mask, -1) @ v


def by_baddbmm(q, k, v, mask):
    batch, heads, rows, keys = (*q.shape[:3], k.shape[2])
    bias = mask.expand(batch, heads, rows, keys).reshape(-1, rows, keys)
    keys_t = k.flatten(0, 1).transpose(1, 2)
    weights = torch.baddbmm(bias, q.flatten(0, 1), keys_t, alpha=0.5).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, (batch, heads))


def by_einsum(q, k, v, mask):
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.5 + mask, -1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@pytest.mark.parametrize("attention", [scores, by_baddbmm, by_einsum])
def test_case_23_attention_by_hand_sees_every_key(attention):
    """Also CASES 26 (the mask is a plain tensor of which each rank uses its rows) and 27."""
    q, k, v = randn(2, 1, 9, 4), randn(2, 1, 9, 4), randn(2, 1, 9, 5)
    mask = randn(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    once = {"dtype": torch.float64, "sizes": [(5, 4), (0, 9), (2, 0, 7)]}
    parity(attention, [q, k, v, mask], [2, 2, 2, None], (2, 3), output="sharded", **once)


def test_few_queries_move_and_many_keys_stay():
    """Then probabilities are split over the keys, as the softmax takes them, and so are values."""

    def attention(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    q, k, v = randn(2, 3, 4), randn(2, 12, 4), randn(2, 12, 5)
    sizes = [(8, 4), (0, 12), (4, 0, 8)]
    parity(attention, [q, k, v], [1, 1, 1], (2, 3), sizes=sizes, dtype=torch.float64)


def test_attention_over_a_grid_in_another_layout_of_heads():
    """(B, S, H, D) with rows over h x w, as an image flattened; S = 10 over 4 (CASES 23)."""

    def attention(x, weight):
        q, k, v = F.linear(x.flatten(1, 2), weight).unflatten(-1, (3, 2, 4)).unbind(2)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)

    inputs = [randn(2, 5, 2, 6), randn(24, 6)]
    parity(attention, inputs, [{1: "h", 2: "w"}, None], (4,), dtype=torch.float64)
    parity(attention, inputs, [1, None], (2, 4), dtype=torch.float64)


def test_case_25_large_logits_stay_finite():
    q, k = 1e2 * randn(2, 8, 4), 1e2 * randn(2, 8, 4)
    v = randn(2, 8, 4) * torch.tensor([1.0, 0.0, 1.0, 1.0])
    parity(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [q, k, v], [1, 1, 1], (2,))


class Products(nn.Module):
    """What compiled code has to get right: gathers, sums, diagonals, empty shards."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.across = nn.Linear(4, 6), nn.Linear(20, 4)

    def forward(self, q, k, v):
        attended = torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1) @ v
        weights = torch.baddbmm(
            torch.ones(1, 1, 1, dtype=q.dtype),
            q.flatten(0, 1),
            k.flatten(0, 1).transpose(1, 2),
            beta=0.5,
        )
        diagonal = torch.einsum("bqq->bq", weights)
        rest = torch.tensordot(q, k, ([0, 2], [0, 2])), torch.cdist(q, k)
        return self.enter(attended), diagonal, self.across(q.transpose(2, 3)), *rest


def test_compiled_products_equal_eager_ones():
    x = [randn(2, 2, 20, 4) for _ in "qkv"]
    once = {"dtype": torch.float64, "compiled": True, "sizes": [(12, 8)]}
    parity(Products(), x, [2, 2, 2], (2,), **once)


@pytest.mark.conformance
@pytest.mark.parametrize("sizes", [(0, 20), (7, 0, 13)])
def test_compiled_products_on_empty_shards(sizes):
    x = [randn(2, 2, 20, 4) for _ in "qkv"]
    once = {"dtype": torch.float64, "compiled": True, "sizes": [sizes]}
    parity(Products(), x, [2, 2, 2], (len(sizes),), **once)


def test_local_sizes_are_refused():
    refused(torch.matmul, [X, randn(3, 5)], [2, None], error=LayoutError, match="shapes are global")
    refused(nn.Linear(3, 5), [X], [2], error=LayoutError, match="in_features")
    refused(torch.matmul, [X, randn(2, 4, 5)], [2, None], error=LayoutError, match="broadcast")


def _composite(rank):
    mesh = rank.mesh(domain=2)
    torch.manual_seed(0)
    whole, weight = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(3, 4).double()
    x = sf.distribute_tensor(whole, mesh, [Shard(1)], None, [2, 3])
    from shardfield.layout import Factor, Layout
    from shardfield.tensor import wrap

    merged = Layout(x.layout.mesh, [[*x.layout.dims[0], *x.layout.dims[1]], [Factor(4)]])
    rows = wrap(x.to_local().reshape(-1, 4), merged)
    y = F.linear(rows, weight) + rows @ weight.t()
    assert y.layout.dims[0] == merged.dims[0]
    assert torch.allclose(y.full_tensor(), 2 * whole.reshape(-1, 4) @ weight.t())
    # A plain left operand of one row per sample and place meets the split rows in its batch dims.
    plain = torch.randn(10, 1, 4).double()
    batches = wrap(
        x.to_local().reshape(-1, 4, 1), Layout(merged.mesh, [merged.dims[0], [Factor(4)], []])
    )
    expected = plain @ whole.reshape(10, 4, 1)
    assert torch.allclose((plain @ batches).full_tensor(), expected)


def test_rows_of_a_merged_dim_stay():
    rank_pool(2).run(_composite)
