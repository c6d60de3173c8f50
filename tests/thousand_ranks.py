"""A network on 1,024 ranks of a fake process group: shapes and traffic of some of them."""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardfield as sf
from shardfield.comm import record_traffic

RANKS, ROWS, WIDTH = 1024, 2 * 4096 + 1, 64


def main() -> None:
    """Runs one rank: `torch.chunk` gives 910 of them nine rows, one three, the rest none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=300)
    rank = parser.parse_args().rank
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    mesh = sf.init_mesh(domain=RANKS)
    with FakeTensorMode():
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, 2, padding=1),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.ConvTranspose2d(8, 4, 2, 2),
        )
        whole = torch.empty(1, 3, ROWS, WIDTH)
        x = sf.distribute_tensor(whole, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
        held = x.layout.extents(2)
        assert held is not None
        assert sum(held) == ROWS
        assert x.to_local().shape == (1, 3, held[rank], WIDTH)
        with record_traffic() as traffic:
            y = net(x)
        assert traffic.collectives == ["all_to_all", "all_gather", "all_to_all", "all_gather"]
        assert y.shape == (1, 4, ROWS + 1, WIDTH)
        with record_traffic() as back:
            loss = (y * y).mean()
            loss.backward()
        assert type(loss).__name__ == "FakeTensor"
        assert loss.shape == ()
        assert x.grad.shape == whole.shape
        assert all(p.grad.shape == p.shape for p in net.parameters())
        # Halos of one or two rows of at most 8 channels, each statistic twice, each parameter once.
        halo, numbers = 2 * WIDTH * (3 + 8), 2 * (8 + 2)
        assert traffic.bytes <= 4 * (halo + numbers)
        kinds = back.collectives
        assert kinds.count("all_to_all") == 2
        assert kinds.count("all_reduce") == 1 + 2 + len([*net.parameters()])
    sys.stdout.write("loss and gradients have their global shapes\n")


if __name__ == "__main__":
    main()
