"""FSDP2 over data x domain: what one process computes, at a share of its memory."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

import shardfield as sf
from shardfield.comm.collectives import record_traffic
from shardfield.parallel.blocks import blocks_of, outermost, self_contained
from shardfield.testing import rank_pool

ROWS, COLUMNS, SAMPLES = 9, 6, 8
SIZES = {1: [9], 2: [7, 2], 3: [0, 8, 1], 4: [3, 0, 5, 1]}


class Block(nn.Module):
    """Parameters on split values; `mix` reaches them through another tensor."""

    def __init__(self, width=4):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)
        self.mix = nn.Parameter(torch.randn(width, width, 1, 1))

    def forward(self, x):
        return x + F.conv2d(F.gelu(self.norm(self.conv(x))), self.mix.tanh())


class Net(nn.Module):
    """Also a parameter on both kinds of values, one on replicated ones, frozen and unused ones."""

    def __init__(self, dense=False):
        super().__init__()
        self.dense = dense
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.head = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.randn(5))
        self.blocks[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = x * self.scale.view(-1, 1, 1)
        if self.dense:
            return x[:, :3]
        return self.head(x.mean((2, 3)) * self.scale)


class Normed(nn.Module):
    """Batch norms in blocks, and one outside."""

    def __init__(self):
        super().__init__()
        unit = lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())  # noqa: E731
        self.blocks = nn.Sequential(unit(), unit())
        self.last = nn.BatchNorm2d(2)

    def forward(self, x):
        return self.last(self.blocks(x)).mean((2, 3))


def made(build, dtype=torch.float64) -> Any:
    torch.manual_seed(1)
    return build().to(dtype)


def batch(step, dense=False, samples=SAMPLES):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 2, ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    shape = (samples, 3, ROWS, COLUMNS) if dense else (samples, 3)
    return x, torch.randn(shape, dtype=torch.float64, generator=generator)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model, optimizer, samples, split, pieces=2):
    """One step with accumulation and clipping: the loss and the norm of the gradient."""
    optimizer.zero_grad()
    total = 0.0
    parts = list(zip(*(t.chunk(pieces) for t in samples), strict=True))

    def backward(x, target):
        y = model(split(x))
        loss = F.mse_loss(y, split(target) if isinstance(y, sf.ShardTensor) else target) / pieces
        loss.backward()
        return float(loss)

    with sf.no_sync(model):
        for part in parts[:-1]:
            total += backward(*part)
    total += backward(*parts[-1])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return total, float(whole(norm))


def alone(build, **options):
    model = made(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    dense = getattr(model, "dense", False)
    records = [step(model, optimizer, batch(i, dense), lambda x: x) for i in range(3)]
    return records, [p.detach() for p in model.parameters()], list(model.buffers())


def on_mesh(rank, build, axes, optimizer, **options):
    mesh = rank.mesh(**axes)
    replicas = axes.get("data", 1)
    mine = mesh.get_local_rank("data") if replicas > 1 else 0
    names = tuple(name for name in axes if name != "data")
    model = made(build)
    if rank.rank:  # parallelize brings rank 0's weights and buffers to all
        with torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                value.mul_(0)
    model = sf.parallelize(model, mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **{optimizer: True})
    dense = getattr(model, "dense", False)
    places = [Shard(2 + place) for place in range(len(names))]
    sizes = {n: SIZES[axes[n]] if n != "w" else [COLUMNS - 2, 2] for n in names if axes[n] > 1}

    def split(x):
        return sf.distribute_tensor(x, mesh[names], places, src_data_rank=None, sizes=sizes)

    records = []
    for i in range(3):
        samples = [t.chunk(replicas)[mine] for t in batch(i, dense)]
        records.append(step(model, optimizer, samples, split))
    held = [whole(p.detach()) for p in model.parameters()]
    return records, held, list(model.buffers())


def world(axes):
    return torch.Size(axes.values()).numel()


def same(answers, expected, axes):
    replicas = axes.get("data", 1)
    for index, (loss, norm) in enumerate(expected[0]):
        found = [answer[0][index] for answer in answers]
        losses = [loss for loss, _ in found]
        shared = len(losses) // replicas
        assert sum(losses[::shared]) / replicas == pytest.approx(loss, rel=1e-10, abs=1e-10)
        for _, other in found:
            assert other == pytest.approx(norm, rel=1e-10, abs=1e-10)
    for answer in answers:
        for place in (1, 2):
            for mine, theirs in zip(answer[place], expected[place], strict=True):
                assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)


def name(value):
    if isinstance(value, dict):
        return " ".join(f"{key}={size}" for key, size in value.items())
    return str(value)


CASES = [
    ({"domain": 1}, "shard", "foreach"),
    ({"domain": 3}, "shard", "fused"),
    ({"domain": 4}, "shard", "foreach"),
    ({"data": 2, "domain": 2}, "shard", "fused"),
    ({"data": 2, "domain": 2}, "hybrid", "foreach"),
    ({"domain": 3}, "hybrid", "fused"),
]


@pytest.mark.parametrize(("axes", "params", "optimizer"), CASES, ids=name)
def test_case_28_three_clipped_and_accumulated_steps_equal_one_process(axes, params, optimizer):
    run = partial(on_mesh, params=params)
    same(rank_pool(world(axes)).run(run, Net, axes, optimizer), alone(Net), axes)


@pytest.mark.parametrize("axes", [{"h": 2, "w": 2}, {"data": 2, "domain": 2}], ids=name)
def test_sharded_outputs_train_as_in_one_process(axes):
    run, build = partial(on_mesh, params="shard"), partial(Net, dense=True)
    same(rank_pool(world(axes)).run(run, build, axes, "fused"), alone(build), axes)


@pytest.mark.conformance
@pytest.mark.parametrize("params", ["shard", "hybrid"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "axes", [{"data": 2, "h": 2, "w": 2}, {"data": 2, "domain": 4}, {"data": 8, "domain": 1}], ids=name
)
def test_case_29_eight_ranks_equal_one_process_however_they_are_arranged(axes, params, dense):
    run, build = partial(on_mesh, params=params), partial(Net, dense=dense)
    options = {"pieces": 1} if axes["data"] == 8 else {}
    same(rank_pool(8).run(run, build, axes, "fused"), alone(build, **options), axes)
