"""The benchmark measures what it says: statistics, halo arithmetic, and a rival that is right."""

import copy
import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from shardfield.tools.bench import batches, contest
from shardfield.tools.bench.intervals import paired_ratio
from shardfield.tools.bench.launch import Idle, launch
from shardfield.tools.bench.networks import workloads
from shardfield.tools.bench.report import Results
from shardfield.tools.bench.slabs import rows_from_others


def test_the_interval_of_fifteen_pairs_is_the_fourth_and_the_twelfth() -> None:
    ratios = [float(n) for n in range(1, 16)]
    assert paired_ratio(ratios, [1.0] * 15) == (8.0, 4.0, 12.0)


@pytest.mark.parametrize("count", range(6, 40))
def test_the_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    ratios = [float(n) for n in range(count)]
    _, low, high = paired_ratio(ratios, [1.0] * count)
    assert _coverage(count, int(low)) >= 0.95
    assert _coverage(count, int(low) + 1) < 0.95
    assert low == count - 1 - high


def _coverage(count: int, trimmed: int) -> float:
    """Probability that the true median lies between the order statistics left at the ends."""
    return sum(math.comb(count, n) for n in range(trimmed + 1, count - trimmed)) / 2**count


def test_few_pairs_give_the_extremes() -> None:
    assert paired_ratio([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == (2.0, 1.0, 3.0)


def test_unpaired_times_are_refused() -> None:
    with pytest.raises(ValueError, match=r"longer|shorter"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one pair"):
        paired_ratio([], [])


LAYERS = [
    nn.Conv2d(1, 1, 3, padding=1),
    nn.Conv2d(1, 1, 3, stride=2, padding=1),
    nn.Conv2d(1, 1, 4, stride=4),
    nn.Conv2d(1, 1, 5, dilation=2, padding=4),
    nn.Conv2d(1, 1, 1),
    nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose2d(1, 1, 2, stride=2),
    nn.ConvTranspose2d(1, 1, 4, stride=2, padding=1),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("inputs", [(8, 8), (9, 7), (4, 8, 4), (16,), (13, 3)], ids=str)
def test_rows_from_others_are_those_whose_gradient_is_not_zero(
    layer: nn.Conv2d, inputs: tuple[int, ...]
) -> None:
    layer = copy.deepcopy(layer).double()
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    x = torch.ones(1, 1, sum(inputs), 16, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    cuts = [round(y.shape[2] * sum(inputs[:n]) / sum(inputs)) for n in range(len(inputs) + 1)]
    outputs = [high - low for low, high in pairwise(cuts)]
    expected = []
    for rank, rows in enumerate(y.split(outputs, dim=2)):
        (gradient,) = torch.autograd.grad(rows.sum(), x, retain_graph=True)
        touched = gradient[0, 0].abs().sum(1).nonzero().flatten()
        own = range(sum(inputs[:rank]), sum(inputs[: rank + 1]))
        expected.append(sum(int(row) not in own for row in touched))
    assert rows_from_others(inputs, outputs, layer) == expected


def test_a_pointwise_module_needs_no_rows() -> None:
    assert rows_from_others([5, 5], [5, 5], nn.ReLU()) == [0, 0]


GRIDS = ["conv stack", "conv stack, FSDP2", "conv3d stack", "U-Net"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, [*GRIDS, "SegResNet", "attention 4096", "ViT blocks, bf16", "tensor blocks"]),
        pytest.param(4, GRIDS, marks=pytest.mark.conformance),
    ],
)
def test_all_contestants_agree_and_are_timed(ranks: int, names: list[str]) -> None:
    chosen = [workload for workload in workloads() if workload.name in names]
    contests = launch(contest.run, ranks, 1, [workload.name for workload in chosen], 8)
    assert [c["workload"] for c in contests] == [workload.name for workload in chosen]
    for workload, times in zip(chosen, (c["seconds"] for c in contests), strict=True):
        assert set(times) == set(workload.kinds)
        assert all(len(t) == 1 and t[0] > 0 for t in times.values())


def test_a_larger_batch_computes_more_for_each_byte() -> None:
    rows = [batches.Intensity(**row) for row in launch(batches.run, 2, 16)]
    for name in batches.NETWORKS:
        mine = [row for row in rows if row.network == name]
        one = mine[0]
        loss = 0 if name == "tensor blocks" else 4  # one number, whatever the batch
        assert one.activations > loss
        for row in mine:
            assert row.flops == row.batch * one.flops
            assert row.activations - loss == row.batch * (one.activations - loss)
            assert row.gradients == one.gradients
    conv = [row.per_byte for row in rows if row.network == "conv stack"]
    assert sorted(conv) == conv
    assert conv[-1] > conv[0]  # gradients do not grow with the batch
    tensor = {round(row.per_byte, 6) for row in rows if row.network == "tensor blocks"}
    assert len(tensor) == 1  # split weights send activations only


def test_a_wrong_gradient_stops_the_contest() -> None:
    with pytest.raises(Exception, match=r"Disagreement.*by hand"):
        launch(_contest_with_a_lost_halo, 2)


def _contest_with_a_lost_halo(idle: Idle) -> object:
    from shardfield.tools.bench.byhand import halo

    halo.WithHalo.backward = staticmethod(
        lambda ctx, gradient: (gradient.narrow(2, 1, gradient.shape[2] - 2), None, None)
    )
    return contest.run(idle, 1, ["conv stack"], 8, ("by hand", "one process"))


def test_results_are_written_with_their_verdicts() -> None:
    results = Results(tiny={"sharded": [3.0, 3.0], "plain": [2.0, 1.0]}, pairs=2)
    (ratio,) = json.loads(results.as_json())["ratios"]
    assert (ratio["median"], ratio["target"], ratio["met"]) == (2.25, 1.8, False)
