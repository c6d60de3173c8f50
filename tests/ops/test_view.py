"""Views on ranks: splits survive merging, order after a flatten is exact (CASES 19, 20)."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.testing import parity, rank_pool, refused

X = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
SIZES = [(1, 3), (4, 0), (2, 0, 2), (0, 1, 0, 3), (1, 5), (1, 1, 4), (2, 2, 2, 0)]


def check(fn, inputs, *args, **options):
    """Parity of `fn` after some arithmetic, by which the harness tells a share from the whole."""
    parity(lambda *xs: fn(*[x * x for x in xs]), inputs, *args, dtype=torch.float64, **options)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_case_19_flatten_and_back(dim):
    def merged(x):
        tokens = x.flatten(2).transpose(1, 2)
        rows = tokens.reshape(-1, 3) * 2
        return tokens, rows.view(2, 24, 3).transpose(1, 2).unflatten(2, (4, 6)), x.flatten(0, 1)

    check(merged, [X], [dim], sizes=[*SIZES, (1, 2), (3, 0)], double=True)


def test_case_19_both_splits_of_a_grid_merge():
    def merged(x):
        return x.flatten(2), (x.view(2, 3, 24) * 2).view(2, 3, 4, 6), x.flatten(2).transpose(1, 2)

    sizes = [{"h": (1, 3), "w": (5, 1)}, {"h": (0, 4), "w": (3, 3)}]
    check(merged, [X], [{2: "h", 3: "w"}], (4,), sizes, output="sharded")


@pytest.mark.parametrize("dim", [0, 1])
def test_case_20_views_that_do_not_line_up(dim):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    sizes = [(3, 5), (5, 7), (0, 12), (3, 1, 4), (1, 0, 0, 7), (4, 4, 4)]
    check(lambda x: x.view(16, 6), [x], [dim], sizes=sizes, double=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_case_20_one_dim_of_everything(dim):
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    check(lambda x: (x.view(-1), x.view(-1).view(6, 256)), [x], [dim], (4,))


def test_case_20_splits_on_two_axes_that_do_not_line_up():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    sizes = [{"h": (3, 3), "w": (1, 3)}, {"h": (6, 0), "w": (0, 4)}]
    check(
        lambda x: (x.view(8, 3) * x.view(8, 3), x.view(3, 8)), [x], [{0: "h", 1: "w"}], (4,), sizes
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_orders_and_new_dims(dim):
    def views(x):
        return (
            x.permute(2, 0, 1).movedim(0, 1),
            x.mT.swapaxes(0, 1),
            x.unsqueeze(0).expand(3, -1, 4, 6),
            x.unsqueeze(-1).squeeze(),
            x.repeat(2, 1, 2, 1),
        )

    x = X[0]
    check(views, [x], [dim], sizes=[*SIZES, (1, 2), (3, 0, 0)])


def test_one_row_that_loses_its_dim_goes_to_every_rank():
    x = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    fn = lambda x: (x.squeeze(0), x.expand(3, 5), x.squeeze(0) * x)  # noqa: E731
    check(fn, [x], [0], sizes=[(1, 0), (0, 1, 0)], whole=True, ranks=(2, 3))


def test_heads_and_windows():
    def heads(x):
        return x.view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).flatten(1, 2)

    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    check(heads, [x], [1], sizes=[(2, 3), (1, 0, 4)], compiled=True)

    def windows(x):
        return x.view(2, 3, 2, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 3)

    check(windows, [X], [2], sizes=[(2, 2), (3, 1), (4, 0, 0)])


@pytest.mark.parametrize("dim", [0, 1])
def test_items_of_other_sizes(dim):
    whole = torch.arange(48).view(4, 12)

    def items(x):
        wide = x.view(torch.complex128)
        return x.view(torch.int16), x[:, 4:].view(torch.float64), wide.view(torch.int64) * 2

    parity(items, [whole], [dim], sizes=[(1, 3), (7, 5), (4, 0), (3, 0, 9), (1, 0, 0, 3)])
    refused(lambda x: x[:, 1:].view(torch.complex128), [whole], [0], error=RuntimeError, ranks=(2,))


def _writes(rank):
    mesh = rank.mesh(domain=2)
    x = sf.distribute_tensor(torch.zeros(12, 8), mesh, [Shard(1)], src_data_rank=None)
    x.view(3, 4, 8).permute(2, 0, 1).add_(1)
    assert (x.full_tensor() == 1).all()
    with pytest.raises(sf.UnsupportedOperation, match="had to move"):
        x.view(16, 6).transpose(0, 1).add_(1)
    return True


def test_writing_into_a_view_reaches_the_base_or_is_refused():
    assert all(rank_pool(2).run(_writes))


@examples(12)
@given(st.data())
def test_any_chain_of_views(data):
    """Dims are reordered, then merged and split at random, twice; with work in between."""
    sizes = data.draw(st.permutations([2, 3, 2, 1, 2]))
    shape = (sizes[0] * sizes[1], sizes[2], sizes[3] * sizes[4])
    dim = data.draw(st.integers(0, 2))
    extents = data.draw(splits(shape[dim], data.draw(st.integers(2, 4))))
    steps = []
    for _ in range(2):
        factors = data.draw(st.permutations([2, 3, 2, 1, 2]))
        cuts = sorted(data.draw(st.lists(st.integers(0, 5), max_size=3)))
        parts = [factors[a:b] for a, b in zip([0, *cuts], [*cuts, 5], strict=True)]
        steps.append((data.draw(st.integers(0, 3)), [prod(part) for part in parts]))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def chain(x):
        found = []
        for turn, wanted in steps:
            x = x.movedim(turn % x.dim(), 0).reshape(wanted)
            found.append(x.sin())
            x = found[-1] * x
        return found

    check(chain, [x], [dim], (len(extents),), sizes=[extents], subgroup=False)
