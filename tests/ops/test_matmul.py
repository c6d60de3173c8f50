"""Matrix products with a contraction that is not split; PReLU."""

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


def test_split_contraction_is_refused():
    linear = nn.Linear(4, 5)
    assert "contracted dim is split" in refused(linear, [X], [3])
    assert "contracted dim is split" in refused(torch.matmul, [X, randn(4, 5)], [3, None])
    assert "contracted dim is split" in refused(torch.matmul, [X, randn(4, 5)], [None, 0])
    text = refused(torch.matmul, [randn(9, 4), randn(4, 8)], [0, 1])
    assert "diagonal block" in text and "redistribute" in text


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
