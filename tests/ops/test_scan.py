"""Running sums, products and log-sum-exps along split dims."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.testing import parity, rank_pool, refused

torch.manual_seed(0)
X = torch.randn(2, 7, 4)


def of_all_kinds(x):
    """Every scan along every dim."""
    found = []
    for dim in (1, -1):
        found += [x.cumsum(dim), torch.cumprod(x, dim), x.logcumsumexp(dim)]
    return tuple(found)


@pytest.mark.parametrize("split", [1, 2])
def test_scans(split):
    parity(of_all_kinds, [X], [split], ranks=(2, 3), double=True, output="sharded")


def test_scans_on_a_two_dimensional_mesh():
    parity(of_all_kinds, [X], [{1: "h", 2: "w"}], ranks=(4,), double=True)


def test_products_beside_zeros():
    x = X.clone()
    x[0, 2] = x[1, 0] = x[1, 5] = 0
    parity(lambda x: (x.cumprod(1), x.prod(1)), [x], [1], ranks=(2, 3), double=True)


def test_infinities():
    x = X * 100
    x[:, 2:5, 1] = float("-inf")
    x[:, 0, 2] = 500.0
    parity(lambda x: x.logcumsumexp(1), [x], [1], ranks=(2, 3), sizes=[(2, 5), (2, 3, 2), (5, 2)])


def test_types_and_arguments():
    def many(x):
        whole = (x * 4).round().long()
        return (
            whole.cumsum(1),
            whole.cumprod(1),
            (x > 0).cumsum(1),
            torch.cumsum(x, 1, dtype=torch.float64),
            *x.detach().cummax(2),
        )

    parity(many, [X], [1], ranks=(2, 3))
    refused(lambda x: x.cummin(1), [X], [1], match="split")


def test_a_dim_of_factors_moves_to_contiguous_ranges():
    def run(rank):
        mesh = rank.mesh(domain=2)["domain"]
        merged = sf.distribute_tensor(X, mesh, [Shard(1)], sizes=[4, 3]).flatten(0, 1)
        return merged.cumsum(0).full_tensor()

    for found in rank_pool(2).run(run):
        torch.testing.assert_close(found, X.flatten(0, 1).cumsum(0))


@examples(12)
@given(st.data())
def test_scans_of_any_split(data):
    extents = data.draw(splits(7, 3))
    parity(
        lambda x: (x.cumsum(1), x.cumprod(1), x.logcumsumexp(1)), [X], [1], ranks=(3,),
        sizes=[extents], dtype=torch.float64, subgroup=False,
    )  # fmt: skip


def test_compiled():
    parity(of_all_kinds, [X], [1], ranks=(2,), compiled=True, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "logcumsumexp"])
def test_one_row_travels(kind):
    def run(rank):
        x = sf.distribute_tensor(X.double(), rank.mesh(domain=3)["domain"], [Shard(1)])
        x.requires_grad_()
        with record_traffic() as traffic:
            y = getattr(x, kind)(1)
            y.backward(gradient=torch.ones_like(y))
        return traffic.operations

    row = 2 * 4 * 8
    backward = {"cumsum": ("all_gather", row), "cumprod": ("all_reduce", 3 * row)}
    # Of logarithms, those of the positive gradients and of the negative ones.
    backward["logcumsumexp"] = ("all_gather", 2 * row)
    for operations in rank_pool(3).run(run):
        assert operations == [
            (kind, "all_gather", row),
            (f"backward of {kind}", *backward[kind]),
        ]
