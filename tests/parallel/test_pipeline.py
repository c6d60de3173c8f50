"""Pipelines of sharded stages train as one process does."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardfield
from shardfield.axes import mesh_axes
from shardfield.comm.collectives import record_traffic
from shardfield.testing import rank_pool

sf: Any = shardfield
SAMPLES, ROWS, PIECES, STEPS = 8, 7, 2, 3
SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
SIZES = {"even": [4, 3], "uneven": [6, 1], "empty": [7, 0]}


class Split(nn.Module):
    """Two tensors leave: one sharded, one plain; the second of them is a condition."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return F.gelu(y), y.mean((2, 3))


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x, condition):
        return self.norm(x) * self.mix(condition)[:, :, None, None]


class Tokens(nn.Module):
    """Leaves a transposed tensor behind, whose rows are its second dim."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        x = x.mean(3).transpose(1, 2)
        return x + self.mix(self.norm(x))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x).mean(1)


def parts():
    torch.manual_seed(1)
    return [part.double() for part in (Split(), Join(), Tokens(), Head())]


def stages(count):
    """The four parts as so many stages."""
    a, b, c, d = parts()
    if count == 1:
        return [nn.Sequential(Both(a, b), c, d)]
    if count == 4:
        return [a, b, c, d]
    if count == 8:
        return [a, b, *(nn.Identity() for _ in range(4)), c, d]
    return [nn.Sequential(Both(a, b)), nn.Sequential(c, d)]


class Both(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(*self.first(x))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 2, ROWS, 5, dtype=torch.float64, generator=generator)
    return x, torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)


def alone(count, steps, clip=None):
    chain = stages(count)
    optimizer = torch.optim.AdamW([p for part in chain for p in part.parameters()], lr=0.05)
    losses = []
    for step in range(steps):
        x, target = batch(step)
        optimizer.zero_grad()
        for part in chain:
            x = part(*x) if isinstance(x, tuple) else part(x)
        loss = F.mse_loss(x, target)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_([p for part in chain for p in part.parameters()], clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [[p.detach() for p in part.parameters()] for part in chain]


def on_mesh(rank, axes, kind, sizes, managed=True, steps=STEPS, pieces=PIECES, clip=None):
    mesh = rank.mesh(**axes)
    schedule, each = SCHEDULES[kind]
    pipe, ranks = mesh.get_local_rank("pipe"), axes["pipe"]
    replicas = axes.get("data", 1)
    replica = mesh.get_local_rank("data") if replicas > 1 else 0
    mine = stages(ranks * each)[pipe::ranks]
    models = [sf.parallelize(part, mesh) for part in mine] if managed else mine

    domain = [name for name in axes if name not in ("pipe", "data")]
    placements = [Shard(2), Shard(3)][: len(domain)]

    def split(x):
        return sf.distribute_tensor(x, mesh[tuple(domain)], placements, None, sizes)

    example = split(batch(0)[0].chunk(replicas * pieces)[0])
    made = sf.pipeline_stages(models, mesh, example if pipe == 0 else None)
    run = schedule(made if each > 1 else made[0], pieces, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW([p for part in mine for p in part.parameters()], lr=0.05)
    means = []
    for step in range(steps):
        x, target = (value.chunk(replicas)[replica] for value in batch(step))
        optimizer.zero_grad()
        losses: list = []
        inputs = (split(x),) if pipe == 0 else ()
        run.step(*inputs, target=target if pipe == ranks - 1 else None, losses=losses)
        if clip:
            clip_over_pipe([p for part in mine for p in part.parameters()], clip, mesh)
        optimizer.step()
        means.append(float(torch.stack(losses).detach().mean()) if losses else None)
    return pipe, replica, means, [[p.detach() for p in part.parameters()] for part in mine]


def clip_over_pipe(parameters, limit, mesh):
    """As docs/training.md says."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters]).square()
    dist.all_reduce(norm, group=mesh.get_group("pipe"))
    nn.utils.clip_grads_with_norm_(parameters, limit, norm.sqrt())


def same(answers, axes, kind, steps=STEPS, clip=None):
    ranks, each = axes["pipe"], SCHEDULES[kind][1]
    losses, parameters = alone(ranks * each, steps, clip)
    last = [(replica, means) for pipe, replica, means, _ in answers if pipe == ranks - 1]
    replicas = axes.get("data", 1)
    for step, loss in enumerate(losses):
        found = {replica: means[step] for replica, means in last}
        assert all(means[step] == found[replica] for replica, means in last)
        assert sum(found.values()) / replicas == pytest.approx(loss, abs=1e-10)
    for pipe, _, _, mine in answers:
        for part, expected in zip(mine, parameters[pipe::ranks], strict=True):
            for value, other in zip(part, expected, strict=True):
                torch.testing.assert_close(value, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("managed", [True, False], ids=["managed", "unmanaged"])
@pytest.mark.parametrize("split", SIZES)
def test_stages_train_as_one_process(kind, managed, split):
    axes = {"pipe": 2, "domain": 2}
    same(rank_pool(4).run(on_mesh, axes, kind, SIZES[split], managed), axes, kind)


def test_clipping_by_the_norm_over_all_stages():
    axes, kind, options = {"pipe": 2, "domain": 2}, "interleaved", {"clip": 0.05}
    answers = rank_pool(4).run(partial(on_mesh, **options), axes, kind, SIZES["uneven"])
    same(answers, axes, kind, **options)


@pytest.mark.parametrize("axes", [{"pipe": 4, "domain": 1}, {"pipe": 1, "domain": 2}], ids=str)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_axes_of_one_rank(kind, axes):
    sizes = {1: [ROWS], 2: [2, 5]}[axes["domain"]]
    run = partial(on_mesh, pieces=4)  # 1F1B wants as many micro-batches as stages
    ranks = axes["pipe"] * axes["domain"]
    same(rank_pool(ranks).run(run, axes, kind, sizes), axes, kind)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_pipe_domain_and_data_at_once(kind):
    axes = {"pipe": 2, "data": 2, "domain": 2}
    same(rank_pool(8).run(on_mesh, axes, kind, SIZES["uneven"]), axes, kind)


@pytest.mark.conformance
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("split", SIZES)
def test_twenty_steps_of_all_at_once(kind, split):
    axes = {"pipe": 2, "data": 2, "domain": 2}
    answers = rank_pool(8).run(partial(on_mesh, steps=20), axes, kind, SIZES[split])
    same(answers, axes, kind, steps=20)


@pytest.mark.conformance
@pytest.mark.parametrize("kind", SCHEDULES)
def test_pipe_and_two_domain_axes(kind):
    axes = {"pipe": 2, "h": 2, "w": 2}
    same(rank_pool(8).run(on_mesh, axes, kind, {"h": [5, 2], "w": [1, 4]}), axes, kind)


def shard_of(mesh, x, sizes=None):
    return sf.distribute_tensor(x, mesh["domain"], [Shard(2)], None, sizes)


def two_convs():
    torch.manual_seed(0)
    return [nn.Conv2d(2, 4, 3, padding=1).double(), nn.Conv2d(4, 2, 3, padding=1).double()]


def test_a_sharded_result_and_evaluation():
    def body(rank):
        mesh = rank.mesh(pipe=2, domain=2)
        pipe, x = mesh.get_local_rank("pipe"), shard_of(mesh, batch(0)[0], [5, 2])
        stage = sf.pipeline_stages([two_convs()[pipe]], mesh, x[:4])[0]
        run = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
        inputs, target = ((x,), None) if pipe == 0 else ((), x)
        trained = run.step(*inputs, target=target, losses=[])
        found = run.eval(*inputs, target=target)
        if pipe == 0:
            return trained, found
        assert trained.layout is found.layout is x.layout
        return trained.full_tensor().detach(), found.full_tensor().detach()

    x, target = batch(0)[0], None
    for part in two_convs():
        x = part(x)
    for rank, (trained, found) in enumerate(rank_pool(4).run(body)):
        for value in (trained, found):
            target = None if rank < 2 else x.detach()
            assert (value is None) == (target is None)
            if target is not None:
                torch.testing.assert_close(value, target, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_a_step_sends(kind):
    """A shard per boundary and micro-batch, there and back; managed gradients once."""

    def body(rank):
        mesh = rank.mesh(pipe=2, domain=2)
        schedule, each = SCHEDULES[kind]
        pipe, x = mesh.get_local_rank("pipe"), shard_of(mesh, batch(0)[0], [5, 2])
        parts = [nn.Conv2d(2, 2, 3, padding=1).double() for _ in range(2 * each)][pipe::2]
        models = [sf.parallelize(part, mesh) for part in parts]
        reduced: list[int] = []

        def hook(group, bucket):
            reduced.append(bucket.buffer().nbytes)
            return allreduce_hook(group, bucket)

        stages = sf.pipeline_stages(models, mesh, x[:4])
        run = schedule(stages if each > 1 else stages[0], 2, loss_fn=F.mse_loss)
        sent: list[int] = []
        for model, stage in zip(models, stages, strict=True):
            model.register_comm_hook(model.process_group, hook)
            for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
                setattr(stage, name, recorded(getattr(stage, name), sent))
        inputs, target = ((x,), None) if pipe == 0 else ((), x)
        with record_traffic() as traffic:
            run.step(*inputs, target=target)
        weights = sum(p.nbytes for p in parts[0].parameters())
        return sent, reduced, weights, [kind for _, kind, _ in traffic.operations]

    def recorded(get, sent):
        def call(chunk):
            operations = get(chunk)
            sent.extend(operation.tensor.nbytes for operation in operations)
            return operations

        return call

    each = SCHEDULES[kind][1]
    boundaries = {0: (each, each - 1), 1: (each - 1, each)}  # forward, backward
    for rank, (sent, reduced, weights, kinds) in enumerate(rank_pool(4).run(body)):
        shard = 4 * 2 * [5, 2][rank % 2] * 5 * 8
        assert sent == [shard] * 2 * sum(boundaries[rank // 2])
        assert reduced == [weights] * each
        assert kinds.count("all_reduce") == (0 if rank < 2 else 2)  # the losses


def test_making_stages_changes_nothing():
    def body(rank):
        mesh = rank.mesh(pipe=2, domain=2)
        part = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Dropout()).double()
        before = copy.deepcopy(part.state_dict())
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        sf.pipeline_stages([part], mesh, shard_of(mesh, batch(0)[0]))
        assert torch.equal(torch.rand(4), expected)
        for name, value in part.state_dict().items():
            assert torch.equal(value, before[name])

    rank_pool(4).run(body)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize(
    "domain", [1, pytest.param(2, marks=pytest.mark.conformance)], ids="domain={}".format
)
def test_weights_split_inside_a_stage(domain):
    x = torch.randn(4, 7, 6, dtype=torch.float64)

    def made():
        torch.manual_seed(0)
        return [nn.Sequential(Mlp(), Mlp()).double() for _ in range(2)]

    def body(rank):
        mesh = rank.mesh(pipe=2, domain=domain, tensor=2)
        pipe, part = mesh.get_local_rank("pipe"), made()[mesh.get_local_rank("pipe")]
        sf.tensor_parallel(part, mesh, example=(x[:2],))
        shard = sf.distribute_tensor(x, mesh["domain"], [Shard(1)], None, [[7], [5, 2]][domain - 1])
        [stage] = sf.pipeline_stages([sf.parallelize(part, mesh)], mesh, shard[:2])
        run = Schedule1F1B(stage, 2, loss_fn=F.mse_loss)
        run.step(*((shard,) if pipe == 0 else ()), target=x + 1 if pipe else None)
        grads = [p.grad for p in part.parameters()]
        return pipe, [g.full_tensor() if isinstance(g, sf.ShardTensor) else g for g in grads]

    first, second = made()
    F.mse_loss(second(first(x)), x + 1).backward()
    for pipe, found in rank_pool(4 * domain).run(body):
        for mine, whole in zip(found, (first, second)[pipe].parameters(), strict=True):
            torch.testing.assert_close(mine, whole.grad, rtol=1e-10, atol=1e-12)


class Recomputed(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, *args):
        return checkpoint(self.part, *args, use_reentrant=False)


def test_recomputation_and_frozen_first_stages():
    """The first stage is frozen: its output carries no gradient, and nothing waits for one."""

    def body(rank, managed):
        mesh = rank.mesh(pipe=2, domain=2)
        pipe, x = mesh.get_local_rank("pipe"), shard_of(mesh, batch(0)[0], [0, 7])
        first, second = two_convs()
        part = (first.requires_grad_(False), Recomputed(second))[pipe]
        model = sf.parallelize(part, mesh) if managed else part
        [stage] = sf.pipeline_stages([model], mesh, x[:4])
        run = Schedule1F1B(stage, 2, loss_fn=F.mse_loss)
        run.step(*((x,) if pipe == 0 else ()), target=x if pipe else None)
        return [p.grad for p in part.parameters()]

    x = batch(0)[0]
    first, second = two_convs()
    F.mse_loss(second(first(x)), x).backward()
    for managed in (True, False):
        for rank, found in enumerate(rank_pool(4).run(body, managed)):
            expected = [None, None] if rank < 2 else [p.grad for p in second.parameters()]
            for mine, theirs in zip(found, expected, strict=True):
                if theirs is None:
                    assert mine is None
                else:
                    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


class Named(nn.Module):
    def forward(self, x):
        return {"x": x}


def test_refusals_are_raised_on_the_ranks_of_every_stage():
    def body(rank):
        mesh = rank.mesh(pipe=2, domain=2)
        pipe, x = mesh.get_local_rank("pipe"), shard_of(mesh, batch(0)[0])
        with pytest.raises(sf.LayoutError, match="the axis 'pipe' says"):
            sf.pipeline_stages([nn.Identity()], rank.mesh(data=2, domain=2), x)
        with pytest.raises(sf.LayoutError, match=r"with \[1, 2\] modules"):
            sf.pipeline_stages([nn.Identity()] * (1 + pipe), mesh, x)
        with pytest.raises(sf.LayoutError, match="tensors cross from stage to stage"):
            sf.pipeline_stages([nn.Identity()], mesh, None)
        with pytest.raises(sf.LayoutError, match="tensors cross from stage to stage"):
            sf.pipeline_stages([Named()], mesh, x)
        wrong = r"stage 1 failed" if pipe == 0 else "expected input"
        with pytest.raises((sf.LayoutError, RuntimeError), match=wrong):
            sf.pipeline_stages([(nn.Identity(), nn.Conv2d(3, 1, 1).double())[pipe]], mesh, x)

    rank_pool(4).run(body)


def test_refusals_within_a_step():
    def body(rank):
        mesh = rank.mesh(pipe=2, domain=2)
        pipe, x = mesh.get_local_rank("pipe"), shard_of(mesh, batch(0)[0])
        [stage] = sf.pipeline_stages([nn.Identity()], mesh, x[:4])
        if pipe == 0:
            for other in (x, x.float()[:4], batch(0)[0][:4], x.redistribute(sizes=[1, 6])[:4]):
                with pytest.raises(sf.LayoutError, match="every micro-batch has the shapes"):
                    stage.forward_one_chunk(0, (other,))
        with pytest.raises(sf.LayoutError, match="in two parts"):
            stage.backward_maybe_with_nosync("input", {})

    rank_pool(4).run(body)


def test_nothing_is_split_over_pipe():
    def body(rank):
        mesh = rank.mesh(pipe=2, domain=2)
        x = shard_of(mesh, batch(0)[0])
        assert x.device_mesh is mesh
        assert x.placements == (Shard(2),)
        assert x.redistribute([Shard(3)]).placements == (Shard(3),)
        assert pickle.loads(pickle.dumps(x)).layout.dims == x.layout.dims
        for call in (
            lambda: sf.distribute_tensor(batch(0)[0], mesh, [Replicate(), Shard(2)]),
            lambda: sf.zeros(4, 4, mesh=mesh["pipe"], placements=[Shard(0)]),
            lambda: sf.from_local(batch(0)[0], mesh, [Shard(0), Replicate()]),
        ):
            with pytest.raises(sf.LayoutError, match=r"pass mesh\['domain'\]"):
                call()

    rank_pool(4).run(body)


def test_stages_draw_numbers_of_their_own_and_domain_ranks_the_same():
    def body(rank):
        mesh = rank.mesh(pipe=2, seed=5)
        return mesh.mesh_dim_names, tuple(mesh.mesh.shape), torch.initial_seed()

    answers = rank_pool(4).run(body)
    assert {answer[:2] for answer in answers} == {(("pipe", "domain"), (2, 2))}
    seeds = [answer[2] for answer in answers]
    assert seeds[0] == seeds[1] == 5
    assert seeds[2] == seeds[3] != 5


def test_a_stage_does_not_wait_for_others_to_join_axes():
    def body(rank):
        axes = mesh_axes(rank.mesh(pipe=2, h=1, w=2))
        assert axes.group(("h", "w"))
        with pytest.raises(sf.LayoutError, match="2 of 4 ranks"):
            axes.group(("w", "h"))

    rank_pool(4).run(body)
