"""Compiling and wrapping in either order trains as one process does."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.testing import Rank, rank_pool


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 3, 2)
    return nn.Sequential(*layers).double()


BUCKETS = {"bucket_cap_mb": 1e-4}  # a reduction for every few parameters


def _gradients(rank: Rank, order: str, x: torch.Tensor) -> list[torch.Tensor]:
    mesh, network = rank.mesh(domain=2), _network()
    if order == "compiled inside":
        model = sf.parallelize(sf.compile(network, backend="aot_eager"), mesh, **BUCKETS)
    else:
        model = sf.compile(sf.parallelize(network, mesh, **BUCKETS), backend="aot_eager")
    shard = sf.distribute_tensor(x, mesh["domain"], [Shard(2)], sizes=[10, 3])
    for _ in range(2):
        network.zero_grad()
        model(shard).square().mean().backward()
    return [parameter.grad for parameter in network.parameters()]


@pytest.mark.parametrize("order", ["compiled inside", "compiled outside"])
def test_managed_gradients_of_compiled_code_equal_one_process(order: str) -> None:
    x = torch.randn(2, 3, 13, 6, dtype=torch.float64)
    whole = copy.deepcopy(_network())
    whole(x).square().mean().backward()
    for found in rank_pool(2).run(_gradients, order, x):
        for gradient, parameter in zip(found, whole.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12)
