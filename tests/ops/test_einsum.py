"""Contractions by indices, every index of every operand split in any way; distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, placed
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.errors import LayoutError
from shardfield.testing import Rank, parity, rank_pool, refused

G = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(shape, generator=G, dtype=torch.float64)


def _whole(x):
    return x.full_tensor() if isinstance(x, sf.ShardTensor) else x


def _derivatives(fn, xs, cotangent) -> list[torch.Tensor]:
    """Value, gradients, and gradients of their squares."""
    y = fn(*xs)
    loss = (y * cotangent).sum() + (y * y).sum()
    first = torch.autograd.grad(loss, xs, create_graph=True)
    second = torch.autograd.grad(sum((g * g).sum() for g in first), xs)
    return [_whole(value).detach() for value in (y, *first, *second)]


def _compare(
    rank: Rank, fn: Callable[..., Any], whole: list[torch.Tensor], axes: dict[str, int], places
) -> list[str]:
    mesh = rank.mesh(**axes)
    xs = []
    for x, place in zip(whole, places, strict=True):
        splits = [Shard(place[axis][0]) if axis in place else Replicate() for axis in axes]
        sizes = {axis: list(extents) for axis, (_, extents) in place.items()}
        if place:
            x = sf.distribute_tensor(x, mesh, splits, None, sizes)
        xs.append(x.detach().requires_grad_())
    plain = [x.clone().requires_grad_() for x in whole]
    cotangent = torch.linspace(-1, 1, fn(*plain).numel(), dtype=torch.float64)
    cotangent = cotangent.view(fn(*plain).shape)
    expected = _derivatives(fn, plain, cotangent)
    with record_traffic() as traffic:
        found = _derivatives(fn, xs, cotangent)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    return traffic.collectives


MESHES = [{"domain": 2}, {"domain": 3}, {"domain": 1}, {"h": 2, "w": 2}, {"domain": 4}]
CONTRACTIONS = [
    ("ij,jk->ik", (4, 5), (5, 6)),
    ("bhqd,bhkd->bhqk", (2, 2, 5, 3), (2, 1, 6, 3)),
    ("...ij,...jk", (2, 1, 3, 4), (3, 4, 2)),
    ("a...,b...->ab...", (2, 3, 4), (3, 3, 4)),
    ("i...->...", (3, 4, 2)),
    ("ii->i", (5, 5)),
    ("ii", (6, 6)),
    ("iij,j->i", (4, 4, 3), (3,)),
    ("iji,jk->ki", (4, 3, 4), (3, 2)),
    ("iii->i", (3, 3, 3)),
    ("ij,jk,kl->il", (3, 4), (4, 5), (5, 2)),
    ("bi,oij,bj->bo", (3, 4), (2, 4, 5), (3, 5)),
    ("ij,kj->", (4, 5), (3, 5)),
    ("ij,ij->ij", (4, 5), (4, 5)),
    ("i,j->ij", (5,), (6,)),
    ("ij,j", (1, 5), (5,)),
    ("ibk,bkj->bij", (4, 3, 1), (3, 5, 2)),
]


@examples(40)
@given(st.data())
def test_any_einsum_of_any_splits(data: st.DataObject):
    """Also cuts that differ between operands, on a line and on a grid; twice differentiable."""
    equation, *shapes = data.draw(st.sampled_from(CONTRACTIONS))
    axes = data.draw(st.sampled_from(MESHES))
    places = [data.draw(placed(shape, axes)) for shape in shapes]
    whole = [randn(*shape) for shape in shapes]

    def fn(*xs):
        return torch.einsum(equation, *xs)

    ranks = torch.Size(axes.values()).numel()
    entered = rank_pool(ranks).run(_compare, fn, whole, axes, places)
    assert all(row == entered[0] for row in entered)


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(3, 1, 4, 5), (2, 5, 3)]),
    "matrix-vector": (torch.matmul, [(2, 4, 5), (5,)]),
    "vector-matrix": (torch.matmul, [(5,), (2, 5, 3)]),
    "linear": (F.linear, [(2, 5, 4), (6, 4), (6,)]),
    "baddbmm": (torch.baddbmm, [(3, 1, 6), (3, 5, 4), (3, 4, 6)]),
    "addbmm": (torch.addbmm, [(5, 6), (3, 5, 4), (3, 4, 6)]),
    "addmv": (torch.addmv, [(5,), (5, 4), (4,)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, ([0, 2], [1, 0])), [(3, 4, 5), (5, 3, 2)]),
    "tensordot of 1": (lambda a, b: torch.tensordot(a, b, 1), [(3, 4, 5), (5, 2)]),
    "dot": (torch.dot, [(7,), (7,)]),
    "vdot": (torch.vdot, [(7,), (7,)]),
    "outer": (torch.outer, [(5,), (7,)]),
    "inner": (torch.inner, [(2, 5, 4), (3, 4)]),
    "bilinear": (F.bilinear, [(3, 2, 4), (3, 2, 5), (6, 4, 5), (6,)]),
    "multi_dot": (lambda *a: torch.linalg.multi_dot(a), [(4,), (4, 5), (5, 2)]),
    "lists": (lambda a, b: torch.einsum(a, [..., 0, 1], b, [1, 2]), [(2, 4, 5), (5, 3)]),
}


@examples(40)
@given(st.data())
def test_any_function_of_any_splits(data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(FUNCTIONS)))
    fn, shapes = FUNCTIONS[name]
    axes = data.draw(st.sampled_from(MESHES))
    places = [data.draw(placed(shape, axes)) for shape in shapes]
    whole = [randn(*shape) for shape in shapes]
    ranks = torch.Size(axes.values()).numel()
    entered = rank_pool(ranks).run(_compare, fn, whole, axes, places)
    assert all(row == entered[0] for row in entered)


ONCE = {"dtype": torch.float64, "ranks": (1, 2, 3)}


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances(p: float):
    def distances(x, y):
        return torch.cdist(x, y, p)

    points = [randn(2, 9, 3), randn(1, 7, 3)]
    for splits in ([1, None], [1, 1], [0, None], [None, 1]):
        parity(distances, points, splits, (2, 3), sizes=[(6, 3), (4, 0, 5)], dtype=torch.float64)
    parity(distances, points, [2, 1], (2,), dtype=torch.float64)


def test_distances_take_the_product_by_global_rows():
    parity(torch.cdist, [randn(30, 3), randn(20, 3)], [0, None], (2, 3), dtype=torch.float64)


def test_bilinear_module_and_einops():
    def product(q, k):
        return einops.einsum(q, k, "b h q d, b h k d -> b h q k")

    parity(nn.Bilinear(4, 5, 3), [randn(2, 9, 4), randn(2, 9, 5)], [1, 1], **ONCE)
    parity(product, [randn(1, 2, 9, 4), randn(1, 2, 9, 4)], [2, 2], **ONCE)


def test_complex_numbers():
    def products(x, y):
        a, b = x + 1j * y, y - 2j * x
        numbers = torch.vdot(a, b), torch.dot(a, b), torch.einsum("i,i->", a, b)
        return *[torch.view_as_real(n) for n in numbers], torch.outer(a, b).abs()

    parity(products, [randn(9), randn(9)], [0, 0], (2,), dtype=torch.float64)


def test_shapes_that_torch_refuses_are_layout_errors():
    x, y = randn(4, 6), randn(5, 7)
    text = refused(lambda x, y: torch.einsum("ij,jk->ik", x, y), [x, y], [1, 0], LayoutError)
    assert "shapes are global" in text and "einsum" in text
    refused(torch.dot, [randn(4), randn(5)], [0, 0], LayoutError, match="shapes are global")
    refused(torch.cdist, [x, y], [0, 0], LayoutError, match="shapes are global")
    refused(lambda x, y: torch.tensordot(x, y, 1), [x, y], [0, 0], LayoutError, match="global")
    refused(lambda x: torch.einsum("ij->k", x), [x], [0], LayoutError, match="global")
