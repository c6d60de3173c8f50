"""Reductions: CASES 13 and 14, products, merged variances, refused scalars."""

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
X = torch.randn(9, 12, 8)
DIMS = (1, -1, (0, 2))


def of_all_kinds(x, dims=DIMS, keepdim=False):
    """Every reduction over every choice of dims."""
    found = []
    for dim in dims:
        found += [x.sum(dim, keepdim), torch.mean(x, dim, keepdim), x.amax(dim, keepdim)]
        found += [torch.amin(x, dim, keepdim=keepdim), *torch.var_mean(x, dim, keepdim=keepdim)]
        found += [x.std(dim, correction=0, keepdim=keepdim)]
    return found


@pytest.mark.parametrize("split", [0, 1, 2])
def test_reductions_over_split_and_unsplit_dims(split):
    parity(of_all_kinds, [X], [split], ranks=(2, 3), double=True)


def test_reductions_on_a_two_dimensional_mesh():
    parity(of_all_kinds, [X], [{1: "h", 2: "w"}], ranks=(4,), double=True)
    parity(lambda x: of_all_kinds(x, (1,), True), [X], [{1: "h", 2: "w"}], ranks=(4,))


def test_case_14_means_weigh_by_counts_and_keep_the_other_splits():
    x = torch.randn(3, 4)
    parity(lambda x: x.mean(0), [x], [0], output="plain", double=True)
    parity(lambda x: x.mean(1, keepdim=True), [X], [2], output="sharded", double=True)
    parity(lambda x: x.mean(2), [X], [1], output="sharded")


def test_full_reductions_are_plain():
    def fully(x):
        x = x * 1.0
        return (
            x.sum(),
            x.mean(),
            x.var(),
            x.std(False),
            x.amax(),
            x.max(),
            x.min(),
            x.sum((0, 1, 2)),
        )

    parity(fully, [X], [1], output="plain", double=True)


def test_ties_on_several_ranks_share_the_gradient():
    x = torch.tensor([[1.0, 3.0], [3.0, 0.0], [3.0, 3.0], [-1.0, 3.0]])
    parity(lambda x: (x.amax(0), x.amin(0), x.max(), x.min()), [x], [0], double=True)


def test_nan_on_one_rank_reaches_all():
    def run(rank):
        x = torch.arange(12.0).view(4, 3)
        x[0, 1] = float("nan")
        x = sf.distribute_tensor(x, rank.mesh(domain=2)["domain"], [Shard(0)])
        return x.amax(0).tolist(), x.amin(0).tolist(), x.max().isnan().item()

    for high, low, whole in rank_pool(2).run(run):
        assert whole
        assert high[0] == 9 and low[0] == 0
        assert high[1] != high[1] and low[1] != low[1]


def test_other_arguments_and_types():
    def many(x):
        return (
            x.sum(axis=1, keepdims=True),
            x.var(1, False, True),
            x.float().mean(1, dtype=torch.float64),
            (x > 0).sum(1),
            (x > 0).any(1),
            (x > -1).all(),
            (x * 4).round().to(torch.int32).amax(1),
            torch.max(x, x * 2),
        )

    parity(many, [X], [1], ranks=(2, 3))
    parity(lambda x: (*x.max(0), x.argmin(0), x.logsumexp(0)), [X], [1], ranks=(2,))


def test_a_dim_of_factors_is_reduced_in_place():
    def run(rank):
        mesh = rank.mesh(domain=2)
        layout = sf.Layout
        x = sf.distribute_tensor(X.double(), mesh["domain"], [Shard(1)], sizes=[9, 3])
        dims = (*x.layout.dims[:0], x.layout.dims[0] + x.layout.dims[1], x.layout.dims[2])
        local = x.to_local().reshape(-1, X.shape[2])
        merged = sf.tensor.wrap(local, layout(x.layout.mesh, dims))
        assert merged.shape == (108, 8)
        return merged.sum(0), merged.var(0), merged.amax(0)

    flat = X.double().view(108, 8)
    for total, variance, most in rank_pool(2).run(run):
        torch.testing.assert_close(total, flat.sum(0))
        torch.testing.assert_close(variance, flat.var(0))
        torch.testing.assert_close(most, flat.amax(0))


@examples(12)
@given(st.data())
def test_variances_merge_for_any_split(data):
    extents = data.draw(splits(7, 3))
    shift = data.draw(st.sampled_from([0.0, 1e3]))
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(1)) + shift
    parity(
        lambda x: torch.var_mean(x, 0), [x], [0], ranks=(3,), sizes=[extents],
        dtype=torch.float64, atol=1e-9, subgroup=False,
    )  # fmt: skip


def test_one_collective_of_the_result():
    def run(rank):
        x = sf.distribute_tensor(X, rank.mesh(domain=2)["domain"], [Shard(1)]).requires_grad_()
        with record_traffic() as traffic:
            y = x.mean(1).sum() + x.var(1).sum() + x.sum(2).sum()
            y.backward()
        return traffic.operations

    for operations in rank_pool(2).run(run):
        assert operations == [
            ("mean", "all_reduce", 9 * 8 * 4),
            ("var", "all_gather", 2 * 9 * 8 * 4),
            ("sum", "all_reduce", 4),
        ]


def test_half_precision_is_added_up_in_fp32():
    def run(rank):
        x = torch.ones(4096, 2, dtype=torch.bfloat16)
        x = sf.distribute_tensor(x, rank.mesh(domain=2)["domain"], [Shard(0)], sizes=[4095, 1])
        return x.sum(0), x.mean(0)

    for total, mean in rank_pool(2).run(run):
        assert total.dtype == mean.dtype == torch.bfloat16
        assert total.tolist() == [4096.0] * 2 and mean.tolist() == [1.0] * 2


@pytest.mark.parametrize("ask", [lambda x: x.item(), float, bool, int, lambda x: x.tolist()])
def test_case_13_scalars_of_a_sharded_tensor_are_refused(ask):
    text = refused(lambda x: ask(x), [torch.ones(1)], [0], ranks=(2,))
    assert "x.sum()" in text and "full_tensor()" in text


def test_products_nans_and_counts():
    x = X.clone()
    x[2, 3, 1] = x[5, :, 2] = x[0, 7, 2] = 0
    parity(lambda x: (x.prod(1), x[..., 0].prod(), x.prod(2, True)), [x], [1], double=True)
    parity(lambda x: x[..., :2].prod(1), [x], [{1: "h", 2: "w"}], ranks=(4,), double=True)
    x[4, 5, 1] = x[0, :, 3] = float("nan")

    def counted(x):
        return (
            torch.nansum(x, 1),
            x.nansum((0, 2), keepdim=True),
            torch.nanmean(x, (0, 1)),
            x.nanmean(),
            x.nanmean(1).nansum(),
            torch.count_nonzero(x, 1),
            x.count_nonzero(),
            x.isnan().any(1),
            torch.all(x > -9, dim=(0, 2), keepdim=True),
        )

    for split in (0, 1):
        parity(counted, [x], [split], ranks=(2, 3), dtype=torch.float64)


def test_integers_and_types():
    x = torch.arange(1, 9).view(4, 2)

    def many(x):
        return (
            x.prod(0),
            x.prod(dtype=torch.float64),
            x.nansum(0),
            x.float().prod(0),
            (x > 1).prod(0),
        )

    parity(many, [x], [0], ranks=(2, 3), dtype=torch.float64)
    refused(lambda x: x.nanmean(0), [x], [0], error=RuntimeError, match="floating point")


def test_variance_of_complex_numbers():
    def run(rank):
        z = torch.view_as_complex(X.double()[..., :2].contiguous())
        shard = sf.distribute_tensor(z, rank.mesh(domain=2)["domain"], [Shard(1)])
        return torch.var_mean(shard, 1), torch.var_mean(z, 1)

    for found, wanted in rank_pool(2).run(run):
        torch.testing.assert_close(found, wanted)


def test_what_has_no_exact_form_is_refused():
    parity(lambda x: (*x.median(2), x.kthvalue(2, 2)[0], *torch.mode(x)), [X], [1], ranks=(2,))
    refused(lambda x: x.median(1), [X], [1], match="split")
    refused(lambda x: x.nanmedian(), [X], [1], match="split")
    refused(lambda x: x.mode(1), [X], [1], match="split")
    refused(lambda x: x.kthvalue(2, 1), [X], [1], match="split")
    refused(lambda x: x.sum(5), [X], [1], error=sf.LayoutError, match="dims lie in")


def test_compiled():
    def some(x):
        return (
            *(x.sum(1), x.mean((1, 2)), torch.var_mean(x, 1), x.amax(1), x.std(2)),
            *(x.prod(1), x.nanmean(1), x.count_nonzero(1), (x > 0).any(1)),
        )

    parity(some, [X], [1], ranks=(2,), compiled=True, dtype=torch.float64)
