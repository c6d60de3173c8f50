"""Softmax and log-sum-exp along split dims: values, second derivatives, bytes, saved memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.testing import parity, rank_pool, refused

torch.manual_seed(0)
X = torch.randn(2, 7, 5) * 3


def of_all_kinds(x):
    """Every softmax along every dim."""
    return (
        x.softmax(1),
        torch.log_softmax(x, -1),
        F.softmin(x, 1),
        F.softmax(x, dim=2),
        F.log_softmax(x, 1),
        nn.Softmax(0)(x),
        torch.logsumexp(x, 1),
        x.logsumexp((0, 2), keepdim=True),
        torch.special.logsumexp(x, (1, 2)),
    )


@pytest.mark.parametrize("split", [1, 2])
def test_softmax_and_logsumexp(split):
    parity(of_all_kinds, [X], [split], ranks=(2, 3), double=True)


def test_on_a_two_dimensional_mesh():
    parity(of_all_kinds, [X], [{1: "h", 2: "w"}], ranks=(4,), double=True)


def test_case_25_large_logits_and_masked_shards():
    x = X * 1e4
    x[:, :4, 1] = float("-inf")
    x[0, 3:, 2] = float("-inf")

    def some(x):
        return x.softmax(1), x.log_softmax(1).clamp_min(-1e30), x.logsumexp(1)

    parity(some, [x], [1], ranks=(2, 3), sizes=[(4, 3), (3, 0, 4), (2, 5), (1, 3, 3)])


def test_a_line_of_infinities_is_what_torch_makes_of_it():
    x = X.clone()
    x[:, :, 1] = float("-inf")
    x[:, 2, 2] = float("inf")
    x[:, 3, 3] = float("nan")

    def some(x):
        return tuple(y.detach() for y in (x.softmax(1), x.log_softmax(1), x.logsumexp(1)))

    parity(some, [x], [1], ranks=(2, 3), dtype=torch.float64)


def test_types():
    x = X.bfloat16()

    def run(rank):
        shard = sf.distribute_tensor(x, rank.mesh(domain=2)["domain"], [Shard(1)])
        shard.requires_grad_()
        y, wide = shard.softmax(1), F.softmax(shard, 1, dtype=torch.float32)
        (y.float() * wide).sum().backward()
        return [t.full_tensor().detach() for t in (y, wide, shard.grad)], shard.logsumexp(1)

    whole = x.double().requires_grad_()
    y = whole.softmax(1)
    y.square().sum().backward()
    for (narrow, wide, grad), total in rank_pool(2).run(run):
        assert narrow.dtype == grad.dtype == total.dtype == torch.bfloat16
        assert wide.dtype == torch.float32
        assert (narrow - y).abs().max() < 2**-8
        torch.testing.assert_close(wide.double(), y, atol=1e-6, rtol=1e-5)
        assert (grad - whole.grad).abs().max() < 2**-6
    refused(lambda x: (x * 4).long().softmax(1), [X], [1], error=RuntimeError, match="Long")


@examples(12)
@given(st.data())
def test_softmax_of_any_split(data):
    extents = data.draw(splits(7, 3))
    scale = data.draw(st.sampled_from([0.0, 1.0, 1e3]))
    parity(
        lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)), [X * scale], [1], ranks=(3,),
        sizes=[extents], dtype=torch.float64, subgroup=False,
    )  # fmt: skip


def test_compiled():
    def some(x):
        return x.softmax(1), F.log_softmax(x, 1), x.logsumexp(1), x.softmax(2)

    parity(some, [X], [1], ranks=(2,), compiled=True, dtype=torch.float64)


def test_a_maximum_and_a_sum_travel_and_the_result_is_saved():
    def run(rank, fn):
        x = torch.randn(4, 4096, dtype=torch.float64)
        x = sf.distribute_tensor(x, rank.mesh(domain=2)["domain"], [Shard(1)]).requires_grad_()
        saved = []

        def pack(tensor):
            saved.append(tensor)
            return tensor

        with (
            record_traffic() as traffic,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            y = fn(x)
        with record_traffic() as back:
            y.backward(gradient=torch.ones_like(y))
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        return traffic.operations, back.operations, sum(kept.values()), y.to_local().nbytes

    for fn, name in ((lambda x: x.softmax(1), "softmax"), (lambda x: x.log_softmax(1), None)):
        for forward, backward, kept, own in rank_pool(2).run(run, fn):
            label = name or "log_softmax"
            assert forward == [(label, "all_gather", 2 * 4 * 8)]
            assert backward == [(f"backward of {label}", "all_reduce", 4 * 8)]
            assert kept == own
