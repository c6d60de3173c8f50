"""Vector norms of every order, matrix norms, and what divides by them."""

from __future__ import annotations

from math import inf

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits

from shardfield.testing import parity, refused

torch.manual_seed(0)
X = torch.randn(3, 7, 4)
ORDERS = (2, 1, 3, 1.5, 0.5, -1, -2.5, inf, -inf, 0)


def of_every_order(x):
    """Norms over the split dim, another, and both."""
    found = [x.norm(), x.norm(1.0, 1), torch.norm(x, dim=(0, 2)), torch.linalg.norm(x)]
    for order in ORDERS:
        found += [torch.linalg.vector_norm(x, order, 1), torch.norm(x, order, (0, 1), True)]
    return tuple(found)


@pytest.mark.parametrize("split", [1, 2])
def test_vector_norms(split):
    parity(of_every_order, [X], [split], ranks=(2, 3), dtype=torch.float64, double=True)


def test_vector_norms_on_a_two_dimensional_mesh():
    parity(of_every_order, [X], [{0: "h", 1: "w"}], ranks=(4,), dtype=torch.float64)


def test_zeros_have_the_gradient_that_torch_gives_them():
    x = X.clone()
    x[:, 3] = 0
    x[1] = 0

    def some(x):
        orders = (2, 1, 3, 1.5, 0.5, -1, inf)
        return tuple(torch.linalg.vector_norm(x, order, 1) for order in orders)

    parity(some, [x], [1], ranks=(2, 3), dtype=torch.float64)


def test_no_power_overflows():
    parity(lambda x: x.norm(), [X * 1e30], [1], ranks=(2,), dtype=torch.float32)


def test_matrix_norms():
    def some(x):
        orders = ("fro", 1, -1, inf, -inf)
        return (
            *(torch.linalg.matrix_norm(x, order) for order in orders),
            *(torch.linalg.norm(x, order, (1, 0), keepdim=True) for order in orders),
            torch.linalg.norm(x[0, :, 1], 3),
        )

    parity(some, [X], [1], ranks=(2, 3), dtype=torch.float64, double=True)
    parity(lambda x: torch.linalg.norm(x, 2, (0, 2)), [X], [1], ranks=(2,), dtype=torch.float64)
    refused(lambda x: torch.linalg.matrix_norm(x, "nuc"), [X], [1], match="whole matrices")
    refused(lambda x: torch.linalg.norm(x, 2, (0, 1)), [X], [1], match="whole matrices")
    refused(lambda x: torch.norm(x, "nuc", (0, 1)), [X], [1], match="whole matrices")


@pytest.mark.parametrize("split", [1, 2])
def test_normalize_and_cosine_similarity(split):
    y = torch.randn(3, 7, 4)

    def some(x, y):
        return (
            F.normalize(x),
            F.normalize(x, 1.0, 2),
            F.normalize(x, dim=(1, 2), eps=3.0),
            F.cosine_similarity(x, y),
            F.cosine_similarity(x, y, -1, 5.0),
            torch.cosine_similarity(x[:1], y),
        )

    parity(some, [X, y], [split, split], ranks=(2, 3), dtype=torch.float64, double=True)
    parity(some, [X, y], [split, None], ranks=(2,), dtype=torch.float64)


@examples(12)
@given(st.data())
def test_norms_of_any_split(data):
    extents = data.draw(splits(7, 3))
    order = data.draw(st.sampled_from(ORDERS[:-1]) | st.floats(0.25, 8))
    parity(
        lambda x: torch.linalg.vector_norm(x, order, 1), [X], [1], ranks=(3,), sizes=[extents],
        dtype=torch.float64, subgroup=False,
    )  # fmt: skip


def test_compiled():
    def some(x):
        return x.norm(dim=1), torch.linalg.norm(x, 3, 1), F.normalize(x), x.norm(-1)

    parity(some, [X], [1], ranks=(2,), compiled=True, dtype=torch.float64)
