"""cat and stack along whole and split dims, of equal, differing and replicated operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.testing import parity, rank_pool

G = torch.Generator().manual_seed(0)
X, Y, P = (torch.randn(2, 3, 8, generator=G) for _ in range(3))
SIZES = [
    (1, 1),
    (3, 0),
    (1, 2),
    (5, 3),
    (1, 0, 7),
    (1, 1, 1),
    (0, 2, 0),
    (2, 0, 5, 1),
    (0, 0, 3, 0),
]


def check(fn, inputs, *args, **options):
    """Parity of `fn` after some arithmetic, by which the harness tells a share from the whole."""
    parity(lambda *xs: fn(*[x * x for x in xs]), inputs, *args, dtype=torch.float64, **options)


@pytest.mark.parametrize("along", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_operands_of_one_split_beside_a_replicated_one(dim, along):
    def join(x, y, plain):
        return torch.cat([x, plain, y, x * 2], along), torch.stack([x, plain, y], along)

    check(join, [X, Y, P], [dim, dim, None], sizes=SIZES)


@pytest.mark.parametrize("along", [0, 1, 2])
def test_operands_split_over_different_dims(along):
    def join(x, y):
        return torch.cat([x, y], along), torch.stack([y, x], along)

    check(join, [X, Y], [2, 1], (2, 3), double=True)


@pytest.mark.parametrize("along", [0, 1, 2])
def test_on_a_grid_of_ranks_with_operands_split_over_one_axis(along):
    def join(x, y, plain):
        return torch.cat([x, y, plain], along)

    places = [{1: "h", 2: "w"}, {2: "w"}, None]
    check(join, [X, Y, P], places, (4,), double=True)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_stacks_of_tensors_with_few_dims(dims):
    def join(x, plain):
        pair = [x, plain]
        joined = torch.hstack(pair), torch.vstack(pair), torch.dstack(pair)
        return *joined, torch.column_stack(pair), torch.row_stack(pair)

    x, plain = X[(0,) * (3 - dims)], P[(0,) * (3 - dims)]
    check(join, [x, plain], [dims - 1, None], sizes=[(5, 3), (1, 0, 7), (2, 0, 5, 1)])


def test_uneven_parts_and_empty_operands():
    def join(x, y):
        return torch.cat([torch.empty(0), x[:, :, 1:4], y, x[:, :, :0]], 2), torch.cat([x, y], 2)

    check(join, [X, Y], [2, 2], sizes=[(5, 3), (1, 0, 7), (2, 0, 5, 1)])


def _silent(rank):
    mesh = rank.mesh(domain=2)
    x = sf.distribute_tensor(X, mesh, [Shard(2)], src_data_rank=None, sizes=[5, 3])
    with sf.comm.record_traffic() as traffic:
        torch.cat([x, x], 1)
        torch.stack([x, x], 2)
        torch.cat([torch.ones(2, 3, 1), x, torch.ones(2, 3, 2)], 2)
    quiet = list(traffic.collectives)
    with sf.comm.record_traffic() as traffic:
        y = torch.cat([x, x], 2)
    return quiet, traffic.collectives, traffic.bytes, y.layout.extents(2)


def test_skips_and_class_tokens_move_nothing():
    answers = rank_pool(2).run(_silent)
    for quiet, collectives, _, extents in answers:
        assert quiet == []
        assert collectives == ["all_to_all"]
        assert extents == (10, 6)
    # Rank 0 holds rows 0-4 and 8-12 and is to hold 0-9: it gets 5-7 and gives 10-12.
    assert [sent for _, _, sent, _ in answers] == [3 * 6 * 4, 3 * 6 * 4]


def _meeting(rank) -> list[tuple[int, ...]]:
    mesh = rank.mesh(domain=2)

    def rows(*sizes):
        x = torch.ones(1, 2 * sizes[0], 6)
        return sf.distribute_tensor(x, mesh, [Shard(2)], None, sizes)

    skip, up, wide = rows(3, 3), rows(4, 2), rows(5, 1)
    found = [torch.cat([up, skip, wide], 1), wide[:, :6] + skip, skip + wide[:, :6], up + up * 2]
    return [y.layout.extents(2) for y in [*found, up.add_(wide[:, :8])]]


def test_operands_of_different_splits_meet_at_the_most_balanced() -> None:
    for extents in rank_pool(2).run(_meeting):
        assert extents == [(3, 3), (3, 3), (3, 3), (4, 2), (4, 2)]


@examples(12)
@given(st.data())
def test_any_operands(data):
    """Of differing splits and sizes along the dim they join, empty ones included."""
    size, along = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 2))
    extents = data.draw(splits(size, data.draw(st.integers(2, 4))))
    x = torch.randn(2, size, 3, generator=torch.Generator().manual_seed(1))
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, x.shape[along])] * 2))) for _ in range(2)]
    kinds = data.draw(st.lists(st.sampled_from("xyzp"), min_size=2, max_size=4))
    plain = torch.randn(2, size, 3, generator=torch.Generator().manual_seed(2))

    def join(x, plain):
        first, second = (x.narrow(along, a, b - a) for a, b in cuts)
        operands = {"x": x, "y": first, "z": second * 2, "p": plain}
        joined = torch.cat([operands[kind] for kind in kinds], along)
        return joined, joined * joined, torch.stack([x, plain], along)

    options = {"sizes": [extents], "subgroup": False}
    check(join, [x, plain], [1, None], (len(extents),), **options)
