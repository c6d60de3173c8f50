"""The harness itself: it passes what is right, and fails every way of being wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import Window, sized_splits, splits, windows
from torch import nn

import shardfield.testing as harness
from shardfield.comm import collectives
from shardfield.errors import LayoutError, UnsupportedOperation
from shardfield.layout import Factor, Layout
from shardfield.tensor import ShardTensor, wrap
from shardfield.testing import (
    ParityError,
    RankError,
    RankPool,
    parity,
    rank_pool,
    refused,
    split_cases,
)
from shardfield.testing.cases import grid
from shardfield.testing.evaluate import difference, tolerance

torch.manual_seed(0)
X = torch.randn(2, 3, 9, 6)
BIAS = torch.randn(3, 1, 1)


def scaled(x, bias):
    return torch.relu(x) * bias + x


def sharded(x):
    return isinstance(x, ShardTensor)


def as_shard(whole, like):
    """This rank's part of a plain tensor, in the layout of `like`."""
    layout, local = like.layout, whole
    for dim in range(whole.ndim):
        local = local.narrow(dim, layout.offset(dim), layout.local_shape[dim])
    return wrap(local, layout)


def test_right_function_passes_on_every_split():
    before = harness.cases_run()
    report = parity(scaled, [X, BIAS], [2, None], output="sharded")
    assert report.cases == harness.cases_run() - before > 30
    assert report.share < 0.5


def test_two_axes_and_a_reduction_to_a_plain_tensor():
    report = parity(lambda x: (x * x).sum(), [X], [{2: "h", 3: "w"}], output="plain")
    assert report.share <= 0.5


def test_module_parameters_pytrees_and_keyword_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 1, 1))

        def forward(self, pair, factor, bias):
            first, second = pair
            return {"sum": (first * self.weight + second * bias) * factor, "factor": factor}

    net = Net()
    parity(net, [[X, X + 1], 2.0], [3, None], params={"bias": BIAS}, ranks=(2, 3))
    assert net.weight.grad is None
    assert net.weight.dtype == torch.float32


def test_given_sizes_are_used_where_they_fit():
    report = parity(scaled, [X, BIAS], [2, None], ranks=(2, 3), sizes=[(9, 0), (1, 8), (3, 3, 3)])
    # One rank, (9, 0) and (3, 3, 3) in both types, (1, 8) in one.
    assert report.cases == 2 + 2 + 1 + 2


def test_case_32_gathering_and_computing_everything_on_every_rank_fails():
    def cheat(x, bias):
        if not sharded(x):
            return scaled(x, bias)
        return as_shard(scaled(x.full_tensor(), bias), x)

    with pytest.raises(ParityError, match="vacuous: every rank did the work of one process"):
        parity(cheat, [X, BIAS], [2, None], ranks=(2,), sizes=[(5, 4)])


def test_case_32_gathering_before_a_reduction_fails():
    def cheat(x):
        x = x.full_tensor() if sharded(x) else x
        return (x * x).sum()

    with pytest.raises(ParityError, match="vacuous: every rank did the work of one process"):
        parity(cheat, [X], [2], ranks=(2,), sizes=[(5, 4)])
    assert parity(cheat, [X], [2], ranks=(2,), sizes=[(5, 4)], whole=True).cases == 2


def test_case_32_gathering_to_move_fails():
    def cheat(x):
        return as_shard(x.full_tensor().transpose(0, 1), x) if sharded(x) else x.transpose(0, 1)

    square = torch.randn(3, 3, 9)
    with pytest.raises(ParityError, match="vacuous: every rank did the work of one process"):
        parity(cheat, [square], [2], ranks=(2,), sizes=[(5, 4)])


def test_moving_rows_between_ranks_is_not_vacuous():
    def move(x):
        return x.redistribute(sizes=(2, 7)) if sharded(x) and len(x.layout.extents(2)) == 2 else x

    parity(move, [X], [2], ranks=(2,), sizes=[(5, 4)])


@pytest.mark.parametrize(
    ("conv", "shape", "extents"),
    [
        (nn.Conv1d(1, 1, 4, padding=1, dilation=3, bias=False), (2, 1, 11), (5, 6)),
        (nn.ConvTranspose1d(1, 1, 1, bias=False), (1, 1, 1), (0, 1)),
        (nn.Conv1d(1, 1, 1, padding_mode="reflect", bias=False), (1, 1, 1), (0, 1)),
    ],
)
def test_moving_rows_and_tying_an_idle_rank_in_is_not_vacuous(conv, shape, extents):
    # So small that what a rank does beside its part of the work weighs as much as all the work.
    parity(conv, [torch.randn(shape)], [2], ranks=(2,), sizes=[extents])


def test_case_32_nothing_split_fails():
    with pytest.raises(ParityError, match="vacuous: no input is split"):
        parity(scaled, [X, BIAS], [None, None])


def test_local_result_passed_off_as_global_fails():
    def local(x):
        return x.to_local().sum() if sharded(x) else x.sum()

    with pytest.raises(ParityError, match=r"P=2 default float64: rank 0: output 0 is off by"):
        parity(local, [X], [2], ranks=(2,))


def test_gradient_that_is_not_summed_over_ranks_fails():
    def forgets(x, bias):
        if not sharded(x):
            return x * bias
        return wrap(x.to_local() * bias, x.layout)

    with pytest.raises(ParityError, match="gradient of input 1 is off by"):
        parity(forgets, [X, BIAS], [2, None], ranks=(2,))


def test_missing_gradient_fails():
    def detaches(x, bias):
        return x * (bias.detach() if sharded(x) else bias)

    with pytest.raises(ParityError, match="gradient of input 1 is NoneType"):
        parity(detaches, [X, BIAS], [2, None], ranks=(2,))


def test_float32_run_in_lower_precision_fails():
    def rough(x):
        return (x.to(torch.bfloat16).to(torch.float32) if x.dtype == torch.float32 else x) * 3.0

    def only_sharded(x):
        return rough(x) if sharded(x) else x * 3.0

    with pytest.raises(ParityError, match=r"float32: rank 0: output 0 .*is off"):
        parity(only_sharded, [X], [2], ranks=(2,))


def test_different_collectives_on_the_ranks_fail():
    def extra(x):
        if sharded(x) and x.to_local().shape[2] > 4:
            collectives._count("all_reduce", 0, "extra")
        return x * 2.0

    with pytest.raises(ParityError, match="the ranks entered different collectives"):
        parity(extra, [X], [2], ranks=(2,), sizes=[(5, 4)])


def test_shards_that_are_right_alone_and_do_not_tile_fail():
    def overlapping(x):
        """Every rank believes that it has most rows."""
        y = x.detach() * 2
        if not sharded(y) or len(y.layout.extents(2)) != 2:
            return y
        mine = torch.distributed.get_rank()
        extents = [(6, 3), (3, 6)][mine]
        dims = [*y.layout.dims]
        dims[2] = (Factor(9, ("domain",), extents),)
        rows = y.full_tensor().narrow(2, 0 if mine == 0 else 3, 6)
        return wrap(rows, Layout(y.layout.mesh, dims))

    with pytest.raises(ParityError, match="disagree how output 0 lies"):
        parity(overlapping, [X], [2], ranks=(2,), sizes=[(5, 4)], subgroup=False)


def test_wrong_kind_of_output_fails():
    with pytest.raises(ParityError, match=r"the outputs are \['sharded'\], not plain"):
        parity(lambda x: x * 2.0, [X], [2], ranks=(2,), output="plain")


def test_rank_that_raises_names_the_case_and_the_operation():
    def alone(x):
        if sharded(x) and x.to_local().shape[2] == 4:
            raise AttributeError("no such method")
        return (x * x).sum()

    with pytest.raises(RankError) as caught:
        parity(alone, [X], [2], ranks=(2,), sizes=[(5, 4)])
    assert "AttributeError" in str(caught.value)
    assert "in the parity case P=2 given 0 (domain: (5, 4)) float64" in str(caught.value)
    assert "rank 1 raised AttributeError" in caught.value.failures[0].text


def test_refused_wants_the_same_error_on_all_ranks_before_communication():
    def refuse(x):
        raise UnsupportedOperation(f"spiral on {x.layout}", "no plan", "gather", "operations")

    text = refused(refuse, [X], [2], match="spiral on .* split")
    assert text.startswith("spiral on (2, 3, 9, 6) split: dim 2 over domain as")

    def differs(x):
        raise UnsupportedOperation(f"spiral on {tuple(x.to_local().shape)}")

    with pytest.raises(ParityError, match="different errors"):
        refused(differs, [X], [2])

    def late(x):
        refuse(x * (x * x).sum())

    with pytest.raises(ParityError, match="communicated before it raised"):
        refused(late, [X], [2])
    with pytest.raises(ParityError, match="expected LayoutError, got UnsupportedOperation"):
        refused(refuse, [X], [2], error=LayoutError)
    with pytest.raises(ParityError, match="got nothing"):
        refused(torch.relu, [X], [2])
    with pytest.raises(ParityError, match="is not in"):
        refused(refuse, [X], [2], match="helix")


def test_pool_returns_results_of_closures_and_stays_alive():
    pool = rank_pool(3)
    shift = torch.tensor(10)
    pids = pool.run(lambda rank: os.getpid())
    assert [int(v) for v in pool.run(lambda rank, y: rank.rank + shift + y, 5)] == [15, 16, 17]
    assert pool.run(lambda rank: os.getpid()) == pids
    assert len(set(pids)) == 3


def test_pool_seeds_every_call_alike():
    first = rank_pool(2).run(lambda rank: torch.rand(3).tolist())
    assert first == rank_pool(2).run(lambda rank: torch.rand(3).tolist())
    assert first[0] == first[1]


def test_pool_raises_the_warnings_of_its_ranks():
    def warn(rank):
        if rank.rank == 1:
            warnings.warn("from rank 1", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="from rank 1"):
        rank_pool(2).run(warn)


def test_pool_reports_a_result_that_cannot_be_pickled():
    with pytest.raises(RankError, match="pickling of the result"):
        rank_pool(2).run(lambda rank: threading.Lock())


def test_ranks_that_made_many_groups_are_replaced():
    def make(rank, groups):
        for _ in range(groups):
            torch.distributed.new_group([0])
        return os.getpid()

    with RankPool(1) as pool:
        first = pool.run(make, 20)
        assert pool.run(make, 20) == first  # the 41 groups of the world are too many after it
        assert pool.run(make, 0) != first


def test_shared_ranks_end_when_long_unused(monkeypatch):
    process = rank_pool(1).run(lambda rank: os.getpid())
    rank_pool(2).run(lambda rank: None)
    assert rank_pool(1).run(lambda rank: os.getpid()) == process
    monkeypatch.setattr("shardfield.testing.pool._IDLE", 0.0)
    rank_pool(2)
    assert rank_pool(1).run(lambda rank: os.getpid()) != process


def test_pool_context_closes():
    with RankPool(1) as pool:
        assert pool.run(lambda rank: rank.world_size) == [1]


def test_pool_survives_an_interrupted_call():
    def interrupt(*_):
        raise TimeoutError("the caller's limit")

    with RankPool(2) as pool:
        assert pool.run(lambda rank: 1) == [1, 1]
        earlier = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(TimeoutError, match="the caller's limit"):
                pool.run(lambda rank: time.sleep(30))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, earlier)
        assert pool.run(lambda rank: 2) == [2, 2]


def test_pool_whose_ranks_made_different_groups_starts_anew():
    def alone(rank):
        if rank.rank == 0:
            raise ValueError("before the mesh")
        rank.submesh([1, 2])

    with RankPool(3) as pool:
        with pytest.raises(RankError, match="before the mesh"):
            pool.run(alone)
        meshes = pool.run(lambda rank: str(rank.submesh([0, 1])), timeout=20)
        assert [mesh == "None" for mesh in meshes] == [False, False, True]


def test_case_7_mesh_over_ranks_2_and_3_of_4():
    def coordinates(rank):
        mesh = rank.submesh([2, 3])
        return None if mesh is None else mesh.get_local_rank()

    assert rank_pool(4).run(coordinates) == [None, None, 0, 1]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 9, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_split_cases_tile_and_hold_the_awkward_ones(size, ranks):
    cases = split_cases(size, ranks)
    assert len(set(cases.values())) == len(cases)
    for extents in cases.values():
        assert (len(extents), sum(extents)) == (ranks, size)
        assert min(extents) >= 0
    if size and ranks > 1:
        assert any(extents[0] == 0 for extents in cases.values())
        assert any(extents[-1] == 0 for extents in cases.values())
        assert any(max(extents) == size for extents in cases.values())
    if size >= ranks > 2:
        assert any(0 in extents[1:-1] and extents[0] for extents in cases.values())
        assert any(extents[:-1] == (1,) * (ranks - 1) for extents in cases.values())


def test_grid_spreads_ranks_over_axes():
    assert grid(4, ["h", "w"]) == (("h", 2), ("w", 2))
    assert sorted(size for _, size in grid(3, ["h", "w"])) == [1, 3]
    assert grid(1, ["h", "w"]) == (("h", 1), ("w", 1))
    assert grid(4, ["domain"]) == (("domain", 4),)


@given(st.data())
def test_strategies_draw_valid_splits_and_windows(data):
    ranks = data.draw(st.integers(1, 4))
    extents = data.draw(splits(7, ranks))
    assert (len(extents), sum(extents)) == (ranks, 7)
    assert min(extents) >= 0
    assert len(data.draw(sized_splits())) in range(1, 5)
    window: Window = data.draw(windows())
    x, weight = torch.zeros(1, 1, window.size), torch.zeros(1, 1, window.kernel)
    out = F.conv1d(x, weight, None, window.stride, window.padding, window.dilation)
    assert out.shape[2] == window.out >= 1
    pool = data.draw(windows(pooling=True))
    options = {"stride": pool.stride, "padding": pool.padding, "dilation": pool.dilation}
    assert F.max_pool1d(torch.zeros(1, pool.size), pool.kernel, **options).shape[1] == pool.out


def test_difference_finds_shape_nan_infinity_and_size_of_errors():
    a = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.float64)
    assert difference(a, a.clone(), 0.0) is None
    assert "NaNs" in str(difference(a.nan_to_num(), a, 0.0))
    assert "off by inf" in str(difference(torch.tensor([1.0, float("nan"), 0.0]), a, 1.0))
    assert "shape" in str(difference(a[:2], a, 0.0))
    assert "differs in 1" in str(difference(torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0))
    assert "not 3" in str(difference(2, 3, 0.0))


def test_tolerance_grows_with_the_scale_and_with_the_error_of_plain_torch():
    exact = torch.tensor([100.0], dtype=torch.float64)
    assert tolerance(exact, None, torch.float64, 1e-10) == pytest.approx(1e-8)
    assert tolerance(exact, exact.float(), torch.float32, 0.0) == pytest.approx(
        10 * 4 * torch.finfo(torch.float32).eps * 100
    )
    assert tolerance(exact, exact.float() + 0.5, torch.float32, 0.0) == pytest.approx(5.0)
