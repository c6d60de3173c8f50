"""Who is timed: the same training step, sharded, by hand and in one process."""

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import shardfield as sf
from shardfield.tools.bench.byhand.networks import local_forward, with_halos
from shardfield.tools.bench.networks import Workload


class Contestant(ABC):
    """One way to run a training step of a workload: forward, loss, backward, reduced gradients."""

    network: nn.Module

    @abstractmethod
    def step(self) -> Tensor:
        """Runs a step and returns the global loss (a 0-d tensor)."""

    def gradients(self) -> list[Tensor]:
        """The reduced gradients of the last step, in the order of the network's parameters."""
        found = [p.grad for p in self.network.parameters() if p.grad is not None]
        return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


class OneProcess(Contestant):
    """Plain torch on the whole sample."""

    def __init__(self, workload: Workload) -> None:
        self.network = workload.network()
        self.input, self.target = workload.sample()

    def step(self) -> Tensor:
        """Comm: none."""
        self.network.zero_grad()
        loss = F.mse_loss(self.network(self.input), self.target)
        loss.backward()
        return loss.detach()


class ByHand(Contestant):
    """Local tensors, explicit halos, one flat gradient all-reduce that carries the loss too."""

    def __init__(self, workload: Workload, rival: str) -> None:
        assert workload.split is not None
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.network = workload.network()
        self.forward = local_forward(self.network, rival)
        self.input, self.target = (
            t.chunk(ranks, dim=workload.split)[rank].contiguous() for t in workload.sample()
        )
        self.target_numel = self.target.numel() * ranks
        parameters = list(self.network.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters) + 1, dtype=workload.dtype)
        offset = 0
        for parameter in parameters:
            view = self.flat[offset : offset + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            offset += parameter.numel()

    def step(self) -> Tensor:
        """Comm: the halos, the norms' moments, one all-reduce of the flat gradient."""
        self.flat.zero_()
        error = F.mse_loss(self.forward(self.input), self.target, reduction="sum")
        loss = error / self.target_numel
        loss.backward()
        self.flat[-1] = loss.detach()
        dist.all_reduce(self.flat)
        return self.flat[-1].clone()


class FullyShardedByHand(Contestant):
    """FSDP2 as torch has it, around convolutions of local tensors with explicit halos."""

    def __init__(self, workload: Workload) -> None:
        assert workload.split is not None
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.network = with_halos(workload.network())
        units: list[Any] = [*self.network.children(), self.network]
        for unit in units:
            fully_shard(unit)
            unit.set_force_sum_reduction_for_comms(True)
        self.input, self.target = (
            t.chunk(self.ranks, dim=workload.split)[rank].contiguous() for t in workload.sample()
        )
        self.target_numel = self.target.numel() * self.ranks

    def step(self) -> Tensor:
        """Comm: the halos, FSDP2's all-gathers and reduce-scatters, one all-reduce of the loss."""
        self.network.zero_grad()
        error = F.mse_loss(self.network(self.input), self.target, reduction="sum")
        loss = error / self.target_numel
        (loss * self.ranks).backward()  # FSDP2 averages
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total


class Sharded(Contestant):
    """The plain network through `shardfield.parallelize`, its sample split along one dim."""

    def __init__(self, workload: Workload) -> None:
        assert workload.split is not None
        mesh = sf.init_mesh()
        self.network = sf.parallelize(workload.network(), mesh, workload.params)
        self.input, self.target = (
            sf.distribute_tensor(t, mesh["domain"], [Shard(workload.split)], src_data_rank=None)
            for t in workload.sample()
        )

    def step(self) -> Tensor:
        """Comm: what shardfield needs, and DDP's buckets or FSDP2's units."""
        self.network.zero_grad()
        loss = F.mse_loss(self.network(self.input), self.target)
        loss.backward()
        return loss.detach()


class TensorParallel(OneProcess):
    """Weights split over the ranks by a derived plan, the sample whole on each."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        mesh = sf.init_mesh(tensor=dist.get_world_size())
        sf.tensor_parallel(self.network, mesh, example=(self.input,))

    def gradients(self) -> list[Tensor]:
        """Gathered, so that they can be compared."""
        found = super().gradients()
        return [
            cast(Tensor, g.full_tensor()) if isinstance(g, (sf.ShardTensor, DTensor)) else g
            for g in found
        ]


class ParallelizeModule(TensorParallel):
    """torch's own tensor parallelism of the same blocks, its plan written out."""

    def __init__(self, workload: Workload) -> None:
        OneProcess.__init__(self, workload)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        columns, rows = ("q", "k", "v", "wide"), ("out", "back")
        for block in self.network.children():
            plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
            plan |= {name: RowwiseParallel() for name in rows}
            parallelize_module(block, mesh, plan)
