"""Extrema and where they are: ties, NaNs, global indices on every split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.testing import parity, rank_pool, refused

torch.manual_seed(0)
X = torch.randn(5, 6, 4)
TIES = torch.tensor([[1.0, 3.0, 0.0], [3.0, 0.0, 0.0], [3.0, 3.0, 0.0], [-1.0, 3.0, 0.0]])


def of_all_kinds(x):
    """Every extremum over split and unsplit dims."""
    found = [x.min(), x.argmax(), torch.argmin(x, keepdim=True), *x.aminmax()]
    for dim in (0, 1):
        found += [*x.max(dim), *torch.min(x, dim, keepdim=True)]
        found += [x.argmax(dim), torch.argmin(x, dim, True)]
    return (*found, *torch.aminmax(x, dim=-2, keepdim=True))


@pytest.mark.parametrize("split", [0, 1])
def test_extrema_and_their_indices(split):
    parity(of_all_kinds, [X], [split], ranks=(2, 3), dtype=torch.float64, double=True)


def test_extrema_on_a_two_dimensional_mesh():
    parity(of_all_kinds, [X], [{0: "h", 1: "w"}], ranks=(4,), dtype=torch.float64)


def test_the_first_of_ties_is_taken_and_gets_the_gradient():
    parity(of_all_kinds, [TIES[None]], [1], dtype=torch.float64, subgroup=False)


def test_nan_and_infinity_win_and_have_an_index():
    x = X.clone()
    x[3, 2, 1] = x[4, 2, 1] = x[1, 1, 0] = float("nan")
    x[:, 4, 2] = float("-inf")
    x[:, 5, 2] = float("inf")

    def some(x):
        x = x.detach()
        return (*x.max(0), *x.min(0), x.argmax(0), x.argmin(1), x.argmax(), *x.aminmax(dim=0))

    parity(some, [x], [0], ranks=(2, 3), dtype=torch.float64)
    parity(some, [x], [1], ranks=(2,), dtype=torch.float64)


def test_integers_and_truth_values():
    x = (X * 4).round().to(torch.int32)

    def some(x):
        return (*x.max(0), *x.min(0), x.argmin(0), x.argmax(), x.amin(), *(x > 1).max(0))

    parity(some, [x], [0], ranks=(2, 3), dtype=torch.float64)


@examples(12)
@given(st.data())
def test_indices_are_global_for_any_split(data):
    extents = data.draw(splits(7, 3))
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=14, max_size=14))
    x = torch.tensor(drawn, dtype=torch.float32).view(7, 2)
    parity(
        lambda x: (*x.max(0), *x.min(0), x.argmax(), x.argmin(0)), [x], [0], ranks=(3,),
        sizes=[extents], dtype=torch.float64, subgroup=False,
    )  # fmt: skip


def test_a_dim_of_factors_has_the_indices_of_the_merged_one():
    x = torch.randint(0, 3, (3, 6, 2)).double()

    def run(rank):
        mesh = rank.mesh(domain=2)["domain"]
        merged = sf.distribute_tensor(x, mesh, [Shard(1)], sizes=[4, 2]).flatten(0, 1)
        assert merged.layout.contiguous(0) is None
        return (*merged.max(0), merged.argmin(0), merged.argmax())

    flat = x.flatten(0, 1)
    for found in rank_pool(2).run(run):
        for mine, wanted in zip(found, (*flat.max(0), flat.argmin(0), flat.argmax()), strict=True):
            torch.testing.assert_close(mine, wanted)


def test_compiled():
    def some(x):
        return (*x.max(1), x.argmin(1), *x.aminmax(dim=1), x.argmax(), *x.min(0))

    parity(some, [X], [1], ranks=(2,), compiled=True, dtype=torch.float64)


def test_nothing_to_reduce_is_refused():
    empty = torch.randn(4, 0)
    for fn in (torch.argmax, torch.amax, torch.max):
        refused(lambda x, fn=fn: fn(x), [empty], [0], error=sf.LayoutError, match="no element")
    refused(lambda x: x.max(3), [X], [0], error=sf.LayoutError, match="dims lie in")
