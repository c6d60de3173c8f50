"""Into layouts and out of them: distribute, gather, redistribute, factories."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardfield
from shardfield.comm.collectives import record_traffic
from shardfield.testing import parity, rank_pool, split_cases

sf: Any = shardfield  # its functions return torch.Tensor, whose ShardTensor attributes are read
X: Any = torch.arange(2 * 7 * 6, dtype=torch.float64).view(2, 7, 6)


def on_ranks(count):
    def decorate(fn):
        def test():
            rank_pool(count).run(fn)

        test.__name__, test.__doc__ = fn.__name__, fn.__doc__
        return test

    return decorate


def refuses(text):
    return pytest.raises(sf.LayoutError, match=text)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_only_the_source_has_the_tensor_and_sends_each_rank_its_shard(ranks):
    def body(rank):
        mesh = rank.mesh(domain=ranks)
        for source in sorted({0, ranks - 1}):
            for dim in range(3):
                for sizes in (None, *split_cases(X.shape[dim], ranks).values()):
                    mine = X.clone().requires_grad_() if rank.rank == source else None
                    with record_traffic() as traffic:
                        x = sf.distribute_tensor(mine, mesh, [Shard(dim)], source, sizes)
                    assert isinstance(x, sf.ShardTensor)
                    assert x.is_leaf
                    assert x.requires_grad
                    slices = sf.local_slices(X.shape, mesh, [Shard(dim)], sizes)
                    assert torch.equal(x.to_local(), X[slices])
                    assert x.to_local().is_contiguous()
                    if sizes is not None:
                        assert x.layout.extents(dim) == tuple(sizes)
                    sent = X.numel() - X[slices].numel() if rank.rank == source else 0
                    assert traffic.bytes == (sent * 8 if ranks > 1 else 0)

    rank_pool(ranks).run(body)


@on_ranks(2)
def test_case_34_a_shard_keeps_no_more_than_itself_alive(rank):
    mesh = rank.mesh(domain=2)
    for source in (0, None):
        for dim in (1, 2):
            x = sf.distribute_tensor(X[:1], mesh, [Shard(dim)], source)
            local = x.to_local()
            assert local.untyped_storage().nbytes() == local.numel() * 8


@on_ranks(2)
def test_every_rank_has_the_tensor(rank):
    mesh = rank.mesh(domain=2)
    mine = X + 100 * rank.rank
    with record_traffic() as traffic:
        x = sf.distribute_tensor(mine, mesh, [Shard(1)], None, [6, 1])
    assert not traffic.collectives
    assert torch.equal(x.to_local(), mine[sf.local_slices(X.shape, mesh, [Shard(1)], [6, 1])])
    assert not x.requires_grad
    mine.zero_()
    assert x.to_local().any()


@on_ranks(2)
def test_types_negative_dims_and_zero_extents(rank):
    mesh = rank.mesh(domain=2)
    for dtype in (torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.complex64):
        value = X.to(dtype)
        x = sf.distribute_tensor(value if rank.rank == 0 else None, mesh, [Shard(-1)])
        assert x.dtype == dtype
        assert torch.equal(x.full_tensor(), value)
    empty = sf.distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)])
    assert empty.full_tensor().shape == (0, 3)
    assert float(empty.sum()) == 0


@on_ranks(4)
def test_two_axes_and_sizes_of_each(rank):
    mesh = rank.mesh(h=2, w=2)
    sizes = {"h": [6, 1], "w": [0, 6]}
    for source in (0, 3, None):
        mine = X if source in (None, rank.rank) else None
        x = sf.distribute_tensor(mine, mesh, [Shard(1), Shard(2)], source, sizes)
        h, w = mesh.get_coordinate()
        assert x.to_local().shape == (2, sizes["h"][h], sizes["w"][w])
        assert torch.equal(x.full_tensor(), X)
        assert x.placements == (Shard(1), Shard(2))
    for axis in ("h", "w"):
        x = sf.distribute_tensor(X, mesh[axis], [Shard(1)])
        assert torch.equal(x.full_tensor(), X)
        assert x.layout.split_axes == (axis,)
    x = sf.distribute_tensor(X, mesh, [Replicate(), Shard(2)])
    assert x.placements == (Replicate(), Shard(2))
    assert torch.equal(x.full_tensor(), X)


@on_ranks(4)
def test_data_replicas_hold_their_own_samples(rank):
    mesh = rank.mesh(data=2, domain=2)
    replica = mesh.get_coordinate()[0]
    mine = X + 1000 * replica
    x = sf.distribute_tensor(
        mine if mesh["domain"].get_local_rank() == 0 else None, mesh["domain"], [Shard(1)]
    )
    assert x.placements == (Replicate(), Shard(1))
    assert torch.equal(x.full_tensor(), mine)
    assert float(x.mean()) == float(mine.mean())
    assert torch.equal(x.redistribute([Shard(2)]).full_tensor(), mine)
    with refuses("independent samples"):
        sf.distribute_tensor(X, mesh, [Shard(0), Shard(1)])


@on_ranks(4)
def test_case_7_a_mesh_over_some_ranks_only(rank):
    mesh = rank.submesh([2, 3])
    if mesh is None:
        return
    mine = X if rank.rank == 3 else None
    x = sf.distribute_tensor(mine, mesh, [Shard(1)], src_data_rank=1, sizes=[1, 6])
    assert torch.equal(x.full_tensor(), X)
    whole = x.full_tensor(dst=1)
    assert (whole is None) is (rank.rank != 3)
    y = sf.ShardTensor.from_local(x.to_local(), mesh, [Shard(1)])
    assert y.layout is x.layout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_of_any_size_join_and_gradients_flow(ranks):
    def body(rank):
        mesh = rank.mesh(domain=ranks)
        for dim in range(3):
            for sizes in split_cases(X.shape[dim], ranks).values():
                part = (
                    X[sf.local_slices(X.shape, mesh, [Shard(dim)], sizes)].clone().requires_grad_()
                )
                x = sf.ShardTensor.from_local(part * 1, mesh, [Shard(dim)])
                assert x.shape == X.shape
                assert x.layout.extents(dim) == tuple(sizes)
                assert torch.equal(x.full_tensor(), X)
                (x * x).sum().backward()
                assert torch.equal(part.grad, 2 * part)

    rank_pool(ranks).run(body)


@on_ranks(4)
def test_shards_on_two_axes_join(rank):
    mesh = rank.mesh(h=2, w=2)
    sizes = {"h": [6, 1], "w": [0, 6]}
    placements = [Shard(1), Shard(2)]
    part = X[sf.local_slices(X.shape, mesh, placements, sizes)]
    x = sf.from_local(part, mesh, placements)
    assert torch.equal(x.full_tensor(), X)
    assert x.layout.extents(1) == (6, 1)
    assert x.layout.extents(2) == (0, 6)


@on_ranks(3)
def test_shards_that_do_not_fit_are_refused_on_all_ranks(rank):
    mesh = rank.mesh(domain=3)
    bad = [
        (torch.zeros(2, 4 + (rank.rank == 1)), [Shard(0)], "rank 1 should hold \\[2, 4\\]"),
        (torch.zeros((2, 4)[: 1 + (rank.rank > 0)]), [Shard(0)], "one number of dims"),
        (torch.zeros(2, dtype=torch.int32 if rank.rank else torch.int64), [Shard(0)], "one dtype"),
        (torch.zeros(2, 3 + rank.rank), [Replicate()], "agree over ranks"),
        (torch.zeros(2, 3), [Shard(2)], "names no dim"),
        (torch.zeros(2, 3), [Shard(-3)], "names no dim"),
        (torch.zeros(2, 3), [Partial()], "partial sums never reach the user"),
        (torch.zeros(2, 3), [], "one placement per axis"),
        (torch.zeros(2, 3), [Shard(0), Shard(1)], "one placement per axis"),
        (torch.zeros(()), [Shard(0)], "names no dim"),
    ]
    for local, placements, text in bad:
        with refuses(text):
            sf.from_local(local, mesh, placements)
    with refuses("spread over ranks already"):
        sf.from_local(sf.from_local(torch.zeros(2), mesh, [Shard(0)]), mesh, [Shard(0)])


@on_ranks(2)
def test_replicated_shards_are_plain(rank):
    x = sf.from_local(X, rank.mesh(domain=2), [Replicate()])
    assert type(x) is torch.Tensor
    assert torch.equal(x, X)


@on_ranks(3)
def test_case_21_chosen_sizes_gather_in_order_and_to_one_rank(rank):
    mesh = rank.mesh(domain=3)
    for sizes in ([2, 4, 1], [0, 7, 0], [7, 0, 0]):
        x = sf.distribute_tensor(X, mesh, [Shard(1)], sizes=sizes)
        assert torch.equal(x.full_tensor(), X)
        for target in range(3):
            with record_traffic() as traffic:
                whole = x.full_tensor(dst=target)
            if rank.rank == target:
                assert torch.equal(whole, X)
                assert traffic.bytes == 0
            else:
                assert whole is None
                assert traffic.bytes == x.to_local().numel() * 8
        with refuses("dst=3"):
            x.full_tensor(dst=3)
        with refuses("dst=-1"):
            x.full_tensor(dst=-1)


@on_ranks(4)
def test_full_tensor_of_two_axes_on_each_rank(rank):
    x = sf.distribute_tensor(
        X, rank.mesh(h=2, w=2), [Shard(1), Shard(2)], None, {"h": [6, 1], "w": [0, 6]}
    )
    for target in range(4):
        whole = x.full_tensor(dst=target)
        assert (whole is not None) is (rank.rank == target)
        assert whole is None or torch.equal(whole, X)


def moved(dim=1, split=""):
    """To the dim, cut as the harness calls that split."""

    def move(x):
        if not isinstance(x, sf.ShardTensor):
            return x * x * 1
        found = split_cases(x.shape[dim], x.device_mesh.size())
        return (x * x).redistribute([Shard(dim)], found.get(split)) * 1

    return move


X1 = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "move",
    [
        moved(2),
        moved(0),
        moved(2, "uneven"),
        moved(2, "none first"),
        moved(1, "none last"),
        moved(1, "all on one"),
        moved(1),
    ],
    ids=["other dim", "short dim", "uneven", "empty", "resize", "all on one", "even"],
)
def test_redistribute_keeps_values_and_gradients(move):
    parity(move, [X1], [1], double=True, output="sharded", dtype=torch.float64, subgroup=False)


def test_case_22_to_replicate_and_back_with_gradients():
    def there_and_back(x):
        if not isinstance(x, sf.ShardTensor):
            return x * x * x
        whole = (x * x).redistribute([Replicate()])
        assert type(whole) is torch.Tensor
        assert whole.shape == (2, 5, 6)
        again = sf.distribute_tensor(x.detach().full_tensor(), x.device_mesh, [Shard(2)], None)
        again = again * 0 + whole
        assert again.layout.axes(2) == ("domain",)
        return again * x

    parity(there_and_back, [X1], [1], double=True, ranks=(2, 3), whole=True, subgroup=False)
    parity(lambda x: full(x * x) * 3, [X1], [1], double=True, output="plain", whole=True)


def full(x):
    return x.full_tensor() if isinstance(x, sf.ShardTensor) else x


@on_ranks(2)
def test_case_22_five_rows_stay_five(rank):
    mesh = rank.mesh(domain=2)
    value = torch.arange(50.0).view(5, 10)
    x = sf.distribute_tensor(value, mesh, [Shard(0)])
    assert x.redistribute([Replicate()]).shape == (5, 10)
    assert torch.equal(x.redistribute([Replicate()]), value)
    assert x.redistribute([Shard(0)]) is x
    assert x.redistribute() is x
    assert x.redistribute(sizes=[1, 4]).layout.extents(0) == (1, 4)
    assert x.redistribute(sizes=[1, 4]).redistribute(sizes={"domain": [3, 2]}).layout is x.layout


@on_ranks(4)
def test_redistribute_on_two_axes_and_beside_data(rank):
    mesh = rank.mesh(h=2, w=2)
    x = sf.distribute_tensor(X, mesh, [Shard(1), Shard(2)])
    for placements in (
        [Shard(2), Shard(1)],
        [Shard(0), Shard(2)],
        [Replicate(), Shard(1)],
        [Shard(2), Replicate()],
        [Replicate(), Replicate()],
    ):
        y = x.redistribute(placements)
        assert torch.equal(full(y), X)
        assert getattr(y, "placements", (Replicate(),) * 2) == tuple(placements)
    y = x.redistribute(sizes={"h": [0, 7], "w": [5, 1]})
    assert torch.equal(y.full_tensor(), X)
    mesh = rank.mesh(data=2, domain=2)
    x = sf.distribute_tensor(X, mesh["domain"], [Shard(1)])
    assert x.redistribute([Shard(2)]).placements == (Replicate(), Shard(2))
    assert x.redistribute([Replicate(), Shard(2)]).placements == (Replicate(), Shard(2))


@on_ranks(2)
def test_wrong_arguments_are_refused_before_communication(rank):
    mesh = rank.mesh(domain=2)
    x = sf.distribute_tensor(X, mesh, [Shard(1)], None)

    def put(*args, **kwargs):
        return lambda: sf.distribute_tensor(X, mesh, *args, src_data_rank=None, **kwargs)

    with record_traffic() as traffic:
        for wrong, text in (
            (put([Shard(3)]), "names no dim"),
            (put([Shard(-4)]), "names no dim"),
            (put([]), "one placement per axis"),
            (put([Shard(0), Shard(1)]), "one placement per axis"),
            (put([Partial()]), "partial sums"),
            (put([Shard(1)], sizes=[3, 3]), "which sum up"),
            (put([Shard(1)], sizes=[8, -1]), "which sum up"),
            (put([Shard(1)], sizes=[7]), "one non-negative size per rank"),
            (put([Shard(1)], sizes={"domain": [3, 3]}), "which sum up"),
            (put([Shard(1)], sizes={"h": [3, 4]}), "sizes are for split axes"),
            (put([Replicate()], sizes=[3, 4]), "exactly one split axis"),
            (lambda: sf.distribute_tensor(None, mesh, [Shard(0)], None), "every rank's own tensor"),
            (lambda: sf.distribute_tensor(X, mesh, [Shard(0)], 2), "the mesh has 2 ranks"),
            (lambda: sf.distribute_tensor(x, mesh, [Shard(0)], None), "redistribute"),
            (lambda: x.redistribute([Shard(5)]), "names no dim"),
            (lambda: x.redistribute([Shard(0), Shard(1)]), "one placement per mesh axis"),
            (lambda: x.redistribute(sizes=[3, 3]), "which sum up"),
            (lambda: x.redistribute([Partial()]), "partial sums"),
            (lambda: sf.zeros(4, mesh=mesh, placements=[Shard(1)]), "names no dim"),
            (lambda: sf.local_slices((4,), mesh, [Shard(0)], [3, 2]), "which sum up"),
        ):
            with refuses(text):
                wrong()
    assert not traffic.collectives


@on_ranks(2)
def test_the_source_finds_its_faults_on_all_ranks(rank):
    mesh = rank.mesh(domain=2)
    mine = X if rank.rank == 0 else None
    for wrong, text in (
        (lambda: sf.distribute_tensor(mine, mesh, [Shard(3)]), "names no dim"),
        (lambda: sf.distribute_tensor(mine, mesh, [Shard(1)], 0, [3, 3]), "which sum up"),
        (lambda: sf.distribute_tensor(mine, mesh, [Shard(1)], 1), "the source has the tensor"),
    ):
        with record_traffic() as traffic, refuses(text):
            wrong()
        assert not traffic.collectives


@on_ranks(2)
def test_meshes_without_names_and_dtensors_are_refused(rank):
    from torch.distributed.device_mesh import DeviceMesh

    unnamed = DeviceMesh(rank.device.type, [0, 1])
    with refuses("axis names"):
        sf.distribute_tensor(X, unnamed, [Shard(0)], None)
    mesh = rank.mesh(domain=2)
    theirs = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    with pytest.raises(sf.ShardfieldError):
        sf.ones(4, 3, mesh=mesh, placements=[Shard(0)]) + theirs
    with refuses("DTensor"):
        sf.distribute_tensor(theirs, mesh, [Shard(0)], None)


@on_ranks(4)
def test_more_ranks_than_rows(rank):
    mesh = rank.mesh(domain=4)
    x = sf.distribute_tensor(X[:, :2], mesh, [Shard(1)])
    assert x.layout.extents(1) == (1, 1, 0, 0)
    assert torch.equal(x.full_tensor(), X[:, :2])
    assert torch.equal(x.redistribute([Shard(2)]).full_tensor(), X[:, :2])
    assert float(x.mean()) == float(X[:, :2].mean())


@given(rows=st.integers(0, 9), ranks=st.sampled_from([1, 2, 3, 4]), data=st.data())
def test_slices_tile_the_array(rows, ranks, data):
    sizes = data.draw(st.sampled_from([None, *split_cases(rows, ranks).values()]))

    def body(rank):
        return sf.local_slices((3, rows), rank.mesh(domain=ranks), [Shard(1)], sizes)

    found = rank_pool(ranks).run(body)
    covered = np.concatenate([np.arange(rows)[part] for _, part in found])
    assert covered.tolist() == list(range(rows))
    assert all(outer == slice(0, 3) for outer, _ in found)


@on_ranks(3)
def test_factories_make_the_global_tensor(rank):
    mesh = rank.mesh(domain=3)
    where = {"mesh": mesh, "placements": [Shard(0)]}
    for made, expected in (
        (sf.zeros(5, 2, **where), torch.zeros(5, 2)),
        (sf.zeros((5, 2), **where), torch.zeros(5, 2)),
        (sf.ones(5, dtype=torch.int32, **where), torch.ones(5, dtype=torch.int32)),
        (sf.ones(5, sizes=[0, 4, 1], **where), torch.ones(5)),
        (sf.full((5, 2), 2.5, **where), torch.full((5, 2), 2.5)),
        (sf.full((5,), 2, **where), torch.full((5,), 2)),
        (sf.full((5,), True, **where), torch.full((5,), True)),
        (sf.arange(7, **where), torch.arange(7)),
        (sf.arange(1, 8, 2, **where), torch.arange(1, 8, 2)),
        (sf.arange(1.0, 4.0, 0.5, **where), torch.arange(1.0, 4.0, 0.5)),
        (sf.linspace(0, 1, 7, **where), torch.linspace(0, 1, 7)),
        (
            sf.linspace(0, 1, 7, dtype=torch.float64, **where),
            torch.linspace(0, 1, 7, dtype=torch.float64),
        ),
    ):
        assert isinstance(made, sf.ShardTensor)
        assert made.dtype == expected.dtype
        assert torch.equal(made.full_tensor(), expected)
    assert type(sf.zeros(5, mesh=mesh, placements=[Replicate()])) is torch.Tensor


@on_ranks(4)
def test_placements_follow_merged_and_moved_dims(rank):
    x = sf.distribute_tensor(X, rank.mesh(h=2, w=2), [Shard(1), Shard(2)])
    assert x.permute(2, 0, 1).placements == (Shard(2), Shard(0))
    assert x.flatten(1).placements == (Shard(1), Shard(1))
    assert x.sum(1).placements == (Replicate(), Shard(1))
