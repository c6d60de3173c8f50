"""The cells of the matrix, and one training of each: 20 steps against one process."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import shardfield as sf
from matrix.nets import NETS, Net
from shardfield.testing import Rank, rank_pool

STEPS, LIMIT = 20, 1e-9


class Way(NamedTuple):
    """Axes of the mesh, where parameters live, and whether tensor ranks share out the tokens."""

    axes: dict[str, int]
    params: str
    sequence: bool = False


MESHES: dict[str, Way] = {
    "data 2": Way({"data": 2}, "replicate"),
    "domain 2": Way({"domain": 2}, "replicate"),
    "domain 3": Way({"domain": 3}, "replicate"),
    "tensor 2": Way({"tensor": 2}, "replicate"),
    "data 2, domain 2": Way({"data": 2, "domain": 2}, "replicate"),
    "data 2, tensor 2": Way({"data": 2, "tensor": 2}, "replicate"),
    "domain 2, tensor 2": Way({"domain": 2, "tensor": 2}, "replicate"),
    "h 2, w 2": Way({"h": 2, "w": 2}, "replicate"),
    "domain 2, FSDP2": Way({"domain": 2}, "shard"),
    "data 2, domain 2, FSDP2": Way({"data": 2, "domain": 2}, "shard"),
    "data 2, domain 2, HSDP": Way({"data": 2, "domain": 2}, "hybrid"),
    "domain 2, tensor 2, FSDP2": Way({"domain": 2, "tensor": 2}, "shard"),
    "data 2, domain 2, tensor 2": Way({"data": 2, "domain": 2, "tensor": 2}, "replicate"),
    "data 2, h 2, w 2": Way({"data": 2, "h": 2, "w": 2}, "replicate"),
    "tensor 2, sequence": Way({"tensor": 2}, "replicate", True),
    "domain 2, tensor 2, sequence": Way({"domain": 2, "tensor": 2}, "replicate", True),
    "data 2, tensor 2, sequence": Way({"data": 2, "tensor": 2}, "replicate", True),
    "domain 2, tensor 2, FSDP2, sequence": Way({"domain": 2, "tensor": 2}, "shard", True),
}
ACTIVATIONS = ("keep", "recompute")


class Cell(NamedTuple):
    """One combination."""

    mesh: str
    net: str
    activations: str


class Outcome(NamedTuple):
    """Largest differences from one process, over all steps, parameters and ranks."""

    loss: float
    parameters: float


def applies(cell: Cell) -> bool:
    """Whether the network has the dims that the mesh splits."""
    axes, _, sequence = MESHES[cell.mesh]
    if sequence and not NETS[cell.net].tokens:
        return False
    return all(axis in ("data", "tensor") or axis in NETS[cell.net].split for axis in axes)


ALL = [
    cell
    for mesh in MESHES
    for net in NETS
    for activations in ACTIVATIONS
    if applies(cell := Cell(mesh, net, activations))
]


def every_pair() -> list[Cell]:
    """A subset in which each two of mesh, network and activations meet, where they can."""
    chosen = []
    for row, mesh in enumerate(MESHES):
        for column, net in enumerate(NETS):
            cell = Cell(mesh, net, ACTIVATIONS[(row + column) % 2])
            if applies(cell):
                chosen.append(cell)
    return chosen


def run(cell: Cell) -> Outcome:
    """Trains one cell on its ranks."""
    axes = MESHES[cell.mesh].axes
    losses, parameters = alone(cell.net)
    ranks = rank_pool(prod(axes.values())).run(train, cell)
    return Outcome(
        max(abs(a - b) for found, _ in ranks for a, b in zip(found, losses, strict=True)),
        max(
            (a - b).abs().max().item()
            for _, found in ranks
            for a, b in zip(found, parameters, strict=True)
        ),
    )


@cache
def alone(name: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final parameters of one process."""
    net = NETS[name]
    model = net.network()
    optimizer = _optimizer(model)
    losses = []
    for step in range(STEPS):
        x, target = net.batch(step)
        losses.append(_step(net, model, optimizer, x, target).item())
    return losses, [p.detach() for p in model.parameters()]


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=True)


def _step(net: Net, model, optimizer, x, target) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net.loss(model(x), target)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(rank: Rank, cell: Cell) -> tuple[list[float], list[torch.Tensor]]:
    """The same on this rank of a mesh."""
    axes, params, sequence = MESHES[cell.mesh]
    net, mesh = NETS[cell.net], sf.init_mesh(**axes)
    model = net.network()
    weights: dict = {
        "tensor_parallel": "auto",
        "example": (net.batch(0)[0],),
        "sequence_parallel": sequence,
    }
    model = sf.parallelize(
        model, mesh, params, activations=cell.activations, **(weights if "tensor" in axes else {})
    )
    optimizer = _optimizer(model)
    replicas = axes.get("data", 1)
    replica = mesh.get_local_rank("data") if replicas > 1 else 0
    losses = []
    for step in range(STEPS):
        x, target = (part.chunk(replicas)[replica] for part in net.batch(step))
        x = _split(x, net, mesh, axes)
        target = _split(target, net, mesh, axes) if net.dense else target
        loss = _step(net, model, optimizer, x, target)
        if replicas > 1:
            dist.all_reduce(loss, group=mesh.get_group("data"))
        losses.append(loss.item() / replicas)
    return losses, list(sf.full_parameters(model).values())


def _split(value: torch.Tensor, net: Net, mesh, axes: dict[str, int]) -> torch.Tensor:
    """Uneven shards: the first rank of an axis has most."""
    names = tuple(axis for axis in axes if axis not in ("data", "tensor"))
    if not names:
        return value
    sizes = {}
    for axis in names:
        rows = value.shape[net.split[axis]]
        points = [rows * (n + 1) // (axes[axis] + 1) for n in range(axes[axis])]
        sizes[axis] = [b - a for a, b in zip(points, [*points[1:], rows], strict=True)]
        sizes[axis][0] += points[0]
    part = mesh[names if len(names) > 1 else names[0]]
    placements = [Shard(net.split[axis]) for axis in names]
    return sf.distribute_tensor(value, part, placements, None, sizes)
