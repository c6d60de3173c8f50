"""Elementwise operations that torch does not tag, comparisons of whole tensors, tables, counts."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.testing import parity, rank_pool, refused

torch.manual_seed(0)
X, Y = torch.randn(2, 3, 7), torch.rand(2, 3, 7) + 0.5
NUMBERS = torch.randint(0, 5, (3, 7))

ARITHMETIC = {
    "operators": lambda x, y: (
        7 // y.detach() + x.detach() // y.detach() + y,
        x % y.detach(),
        2**y,
        y**2,
        abs(x),
        -x,
        +x,
        divided(x, y),
    ),
    "aliases": lambda x, y: (
        torch.subtract(x, y).absolute().negative(),
        torch.true_divide(x, y).clip(-y, y),
        torch.arctan2(x, y).fix(),
        torch.special.expit(x) + torch.special.gammaln(y) + torch.special.i0e(x),
    ),
    "with bounds": lambda x, y: (
        x.clamp(-y, y),
        x.clamp_min(y[0]) + torch.max(x, y[1]),
        torch.lerp(x, y, y),
        x.lerp(y, 0.3),
        torch.addcmul(x, x, y, value=2),
        torch.addcdiv(x, x, y[:, :1]),
        torch.where(x > y, x, 2.0),
        x.masked_fill(x > y[:1], 3),
        (x / (x > 0)).nan_to_num(posinf=4.0, neginf=-4.0),
        F.logsigmoid(x) + F.hardswish(x) + F.softsign(x) + F.tanhshrink(x),
    ),
    "halves": lambda x, y: (F.glu(x.movedim(0, 2), 2), F.glu(torch.cat((x, y)), 0)),
}


def divided(x, y):
    """Written in place."""
    z = x * 1
    z /= y
    z -= 2 // y.detach()
    z.masked_fill_(z > 1, 2)
    return operator.itruediv(z, 2)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_elementwise(name):
    for places in ([2, 2], [1, None], [2, 1]):
        parity(ARITHMETIC[name], [X, Y], places, ranks=(3,), dtype=torch.float64)


def test_halves_along_a_split_dim():
    x = torch.randn(3, 10)
    parity(lambda x: F.glu(x), [x], [1], ranks=(2, 3), dtype=torch.float64, double=True, whole=True)


def of_numbers(x, n):
    """Complex numbers and bits."""
    z = torch.complex(x, x + 1)
    parts = z.real, z.imag, z.conj().resolve_conj().imag, torch.polar(x, x).real, z.abs()
    return [*parts, n << 1, 1 << n, n >> 1, n & 3, ~n, n.bitwise_xor(1), torch.gcd(n, n + 2)]


def test_complex_numbers_and_bits():
    parity(of_numbers, [X[0], NUMBERS], [1, 1], ranks=(3,), dtype=torch.float64)


def looked_up(x, n, table):
    """Where a value stands in a table, and how often it occurs."""
    edges = table.sort()[0] if type(table) is torch.Tensor else table
    return (
        torch.bucketize(x, edges),
        torch.searchsorted(edges, x, right=True),
        torch.isin(n, torch.tensor([1, 4])),
        F.one_hot(n, 6),
        F.one_hot(n),
        torch.bincount(n.flatten()),
        n.flatten().bincount(torch.arange(21.0).to(x.dtype), minlength=9),
    )


@pytest.mark.parametrize("places", [[1, 1, None], [0, 0, 0]], ids=str)
def test_tables(places):
    table = torch.tensor([-1.0, -0.3, 0.2, 0.9])
    parity(looked_up, [X[0], NUMBERS, table], places, ranks=(2, 3), dtype=torch.float64)


def test_whole_tensors_are_compared_alike_on_every_rank():
    def compared(x, y):
        near = x.clone()
        near[-1, -1, -1] += 1e-12  # one element of one rank
        return (
            torch.equal(x, near),
            x.allclose(near),
            x.equal(y),
            torch.equal(x, x + 0),
            x.equal(y[..., :2]),
            7.0 in x.round(),
            x.is_same_size(y),
            float(torch.isclose(x, near).sum()),
        )

    parity(compared, [X, Y], [2, None], ranks=(2, 3), dtype=torch.float64, whole=True)
    refused(lambda x: x.masked_select(x > 0), [X], [2], match="depends on the values")


def test_out_is_a_tensor_of_the_result_s_layout():
    def into(rank):
        mesh = rank.mesh(domain=2)
        x, y = (sf.distribute_tensor(t, mesh, [Shard(2)]) for t in (X, Y))
        assert torch.maximum(x, y, out=y) is y
        with pytest.raises(sf.UnsupportedOperation, match="does not fit"):
            torch.maximum(x, y, out=x[:1])
        return y.full_tensor()

    for found in rank_pool(2).run(into):
        assert torch.equal(found, torch.maximum(X, Y))


@examples(8)
@given(data=st.data())
def test_a_plain_operand_of_any_broadcast_shape(data):
    sizes = data.draw(splits(7, 3))
    keep = data.draw(st.tuples(*[st.booleans()] * 3))
    lead = data.draw(st.integers(0, 2))
    shape = [n if kept else 1 for n, kept in zip(X.shape, keep, strict=True)][lead:]
    other = torch.rand(shape) + 0.5
    op = data.draw(st.sampled_from([torch.lerp, torch.addcmul]))
    given_ = {"ranks": (3,), "sizes": [sizes], "dtype": torch.float64}
    parity(lambda x, y, z: op(x, y, z), [X, other, other], [2, None, None], **given_)


def test_a_plain_tensor_is_cast_like_a_sharded_one():
    def like(x, plain):
        return x * plain.float().to(x) + plain.half().type_as(x)

    parity(like, [X, torch.ones(X.shape[-1])], [2, None], dtype=torch.float64, ranks=(1, 2))
