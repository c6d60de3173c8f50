"""channels_last passes through windowed operations as in one process, across ranks too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.testing import Rank, parity, rank_pool

LAYERS = [
    nn.Conv2d(3, 8, 3, 2, 1),
    nn.ReLU(),
    nn.BatchNorm2d(8),
    nn.MaxPool2d(3, 1, 1),
    nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.ConvTranspose2d(8, 8, 4, 2, 1),
    nn.AvgPool2d(3, 2, 1),
    nn.Upsample(scale_factor=1.3),
    nn.ZeroPad2d(1),
    nn.ReflectionPad2d(1),
    nn.PixelUnshuffle(2),
    nn.Conv2d(32, 2, 1),
]


def _formats(rank: Rank) -> list[str]:
    """Layers after which a shard and the whole are not laid out alike, or differ."""
    last = torch.channels_last
    whole = torch.randn(2, 3, 34, 16, generator=torch.Generator().manual_seed(0)).to(
        memory_format=last
    )
    mesh, sizes = rank.mesh(domain=rank.world_size), (20, 14)
    x = sf.distribute_tensor(whole, mesh, [Shard(2)], None, sizes).to(memory_format=last)
    wrong = []
    with torch.no_grad():
        for layer in LAYERS:
            layer = layer.to(memory_format=last)
            x, whole = layer(x), layer(whole)
            kept = x.to_local().is_contiguous(memory_format=last)
            if kept != whole.is_contiguous(memory_format=last):
                wrong.append(f"{layer}: {kept}")
            torch.testing.assert_close(x.full_tensor(), whole)
    return wrong


def test_shards_are_laid_out_as_the_whole():
    assert rank_pool(2).run(_formats) == [[], []]


@pytest.mark.parametrize("dim", [2, 3])
def test_values_and_gradients(dim):
    net = nn.Sequential(LAYERS[0], nn.MaxPool2d(3, 1, 1), nn.Upsample(scale_factor=2), LAYERS[5])

    def run(x):
        y = net.to(x.dtype)(x.to(memory_format=torch.channels_last))
        return y, x.contiguous(memory_format=torch.channels_last) * 2

    x = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    parity(run, [x], [dim], (2, 3), dtype=torch.float64)
