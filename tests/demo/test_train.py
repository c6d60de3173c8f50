"""The demo's training, on a crop of its volume, against the same training in one process."""

from dataclasses import asdict

import pytest
import torch

from shardfield.demo.data import Volume, load_volume
from shardfield.demo.train import build_model, split, train
from shardfield.testing import rank_pool

STEPS = 4


@pytest.fixture(scope="module")
def crop() -> Volume:
    volume = load_volume()
    image, target = (x[:, :, 60:96, 100:124, 80:96].double() for x in (volume.image, volume.target))
    return Volume(image, target)


@pytest.fixture(scope="module")
def reference(crop):
    return train(build_model().double(), crop, STEPS)


def train_split(rank, crop, sizes):
    mesh = rank.mesh(domain=rank.world_size)
    volume = crop.to(rank.device.type, torch.float64) if rank.rank == 0 else None
    model = build_model().double().to(rank.device)
    return train(*split(model, volume, mesh, sizes), STEPS)


@pytest.mark.parametrize("sizes", [[19, 17], [5, 31], [13, 10, 13]], ids=str)
def test_training_equals_one_process(crop, reference, sizes):
    runs = rank_pool(len(sizes)).run(train_split, crop, sizes)
    expected = torch.tensor(reference.losses, dtype=torch.float64)
    assert expected[-1] < expected[0]
    for run in runs:
        torch.testing.assert_close(
            torch.tensor(run.losses, dtype=torch.float64), expected, rtol=1e-9, atol=0
        )
    torch.testing.assert_close(runs[0].prediction, reference.prediction, rtol=0, atol=1e-8)
    assert all(run.prediction is None for run in runs[1:])


def test_each_rank_keeps_its_share(crop, reference):
    runs = rank_pool(2).run(train_split, crop, [19, 17])
    costs = [run.cost for run in runs]
    assert all(value > 0 for cost in costs for value in asdict(cost).values())
    # 19 of 36 rows, and halos that a crop this thin makes large.
    assert max(cost.kept for cost in costs) < 0.65 * reference.cost.kept
