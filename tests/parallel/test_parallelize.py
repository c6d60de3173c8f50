"""`parallelize` and unmanaged training: what one process computes, on every mesh."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardfield as sf
from shardfield.comm.collectives import record_traffic
from shardfield.testing import rank_pool

ROWS, SAMPLES = 9, 4
SIZES = {1: [9], 2: [7, 2], 3: [0, 8, 1], 4: [3, 0, 5, 1]}


class Net(nn.Module):
    """Parameters on split values, on replicated ones (the head), and on both (`scale`)."""

    def __init__(self, norm="group"):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        norms = {"group": nn.GroupNorm(2, 4), "batch": nn.BatchNorm2d(4)}
        self.norm = norms[norm]
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.head = nn.Linear(4, 3)

    def body(self, x):
        x = F.relu(self.norm(self.block(x)))
        return self.block(x) * self.scale.view(-1, 1, 1)

    def forward(self, x):
        x = self.pool(self.body(self.stem(x)))
        return self.head(x.mean((2, 3)) * self.scale)


class Checkpointed(Net):
    def __init__(self, reentrant, **options):
        super().__init__()
        self.run = partial(checkpoint, use_reentrant=reentrant, **options)

    def body(self, x):
        return self.run(super().body, x)

    def forward(self, x):
        # DDP takes no parameter from both sides of a reentrant checkpoint.
        return self.head(self.pool(self.body(self.stem(x))).mean((2, 3)))


class Offloaded(Net):
    def body(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().body(x)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.stem.requires_grad_(False)
        self.norm.bias.requires_grad_(False)


class Derived(Net):
    """Parameters that reach the shards through other tensors."""

    def __init__(self):
        super().__init__()
        self.stem = nn.utils.parametrizations.weight_norm(self.stem)

    def body(self, x):
        weight, bias = self.block.weight * 2, self.scale[:4] + self.norm.bias
        y = F.conv2d(x, weight, bias, padding=1)
        return F.relu(self.norm(y)) + self.block(x)


def made(build) -> Any:
    torch.manual_seed(1)
    return build().double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 2, ROWS, 6, dtype=torch.float64, generator=generator)
    return x, torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)


def step(model, optimizer, samples, split, clip=None, pieces=1):
    """One optimizer step on some samples; their loss and the norm of the gradient."""
    x, target = samples
    optimizer.zero_grad()
    losses = []
    parts = list(zip(x.chunk(pieces), target.chunk(pieces), strict=True))
    for index, (some, aim) in enumerate(parts):
        loss = F.mse_loss(model(split(some)), aim) / pieces
        if index + 1 < pieces and hasattr(model, "no_sync"):
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else torch.zeros(())
    optimizer.step()
    return sum(losses), norm


def alone(build, **options):
    """Losses, norms and final parameters of one process."""
    model = made(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    records = [step(model, optimizer, batch(i), lambda x: x, **options) for i in range(3)]
    return records, [p.detach() for p in model.parameters()], list(model.buffers())


def on_mesh(rank, build, axes, managed=True, **options):
    """The same on a mesh: every data replica has its share of the samples."""
    mesh = rank.mesh(**axes)
    replicas = axes.get("data", 1)
    mine = mesh.get_local_rank("data") if replicas > 1 else 0
    domain = mesh["domain"]
    sizes = SIZES[axes["domain"]]
    model = made(build)
    if rank.rank:  # parallelize brings rank 0's weights and buffers to all
        with torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                value.mul_(0) if managed else None
    model = sf.parallelize(model, mesh) if managed else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def split(x):
        return sf.distribute_tensor(x, domain, [Shard(2)], src_data_rank=None, sizes=sizes)

    records = []
    for i in range(3):
        x, target = batch(i)
        samples = x.chunk(replicas)[mine], target.chunk(replicas)[mine]
        records.append(step(model, optimizer, samples, split, **options))
    return records, [p.detach() for p in model.parameters()], list(model.buffers())


def same(answers, expected, axes):
    records, parameters, buffers = expected
    replicas, domain = axes.get("data", 1), axes["domain"]
    for index, (loss, norm) in enumerate(records):
        found = [answer[0][index] for answer in answers]
        losses = [float(pair[0]) for pair in found]
        for start in range(0, replicas * domain, domain):
            assert len(set(losses[start : start + domain])) == 1
        assert sum(losses[::domain]) / replicas == pytest.approx(float(loss), abs=1e-9)
        for _, other in found:
            assert float(other) == pytest.approx(float(norm), abs=1e-9)
    for answer in answers:
        for mine, theirs in zip(answer[1], parameters, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)
        for mine, theirs in zip(answer[2], buffers, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)


MESHES = [
    {"domain": 1},
    {"domain": 2},
    {"domain": 3},
    {"domain": 4},
    {"data": 2, "domain": 2},
]
NETS = {
    "plain": Net,
    "checkpoint": partial(Checkpointed, False),
    "checkpoint whole": partial(Checkpointed, False, early_stop=False),
    "checkpoint reentrant": partial(Checkpointed, True),
    "offload": Offloaded,
    "frozen": Frozen,
    "derived": Derived,
}


def world(axes):
    return axes.get("data", 1) * axes["domain"]


def name(value):
    if isinstance(value, dict):
        return " ".join(f"{key}={size}" for key, size in value.items())
    return str(value)


@pytest.mark.parametrize("axes", MESHES, ids=name)
def test_case_29_three_steps_equal_one_process(axes):
    same(rank_pool(world(axes)).run(on_mesh, Net, axes), alone(Net), axes)


@pytest.mark.parametrize("axes", MESHES[1:], ids=name)
@pytest.mark.parametrize("kind", [kind for kind in NETS if kind != "plain"])
def test_kinds_of_networks_train_as_in_one_process(kind, axes):
    build = NETS[kind]
    same(rank_pool(world(axes)).run(on_mesh, build, axes), alone(build), axes)


@pytest.mark.parametrize("kind", NETS)
def test_unmanaged_parameters_train_as_in_one_process(kind):
    build, axes = NETS[kind], {"domain": 3}
    same(rank_pool(3).run(on_mesh, build, axes, False), alone(build), axes)


@pytest.mark.parametrize("axes", MESHES[1:], ids=name)
def test_clipping_and_accumulation(axes):
    options = {"clip": 0.1, "pieces": 2}
    run = partial(on_mesh, **options)
    same(rank_pool(world(axes)).run(run, Net, axes), alone(Net, **options), axes)


@pytest.mark.parametrize("domain", [1, 3])
def test_batch_norm_and_its_buffers(domain):
    axes, build = {"domain": domain}, partial(Net, norm="batch")
    same(rank_pool(domain).run(on_mesh, build, axes), alone(build), axes)


def test_weights_and_buffers_are_those_of_rank_0_everywhere():
    def body(rank):
        model = made(partial(Net, norm="batch"))
        with torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                value.add_(rank.rank)
        model = sf.parallelize(model, rank.mesh(data=2, domain=2))
        return [value.detach().clone() for value in [*model.parameters(), *model.buffers()]]

    expected = made(partial(Net, norm="batch"))
    for answer in rank_pool(4).run(body):
        values = [*expected.parameters(), *expected.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(answer, values, strict=True))


def test_case_24_bfloat16_is_as_close_to_float64_as_in_one_process():
    x, target = batch(0)

    def gradients(model, x):
        loss = F.mse_loss(model(x).double(), target)
        loss.backward()
        return [loss.detach(), *(p.grad.double() for p in model.parameters())]

    def body(rank):
        mesh = rank.mesh(domain=3)
        model = sf.parallelize(made(Net).float(), mesh)
        part = sf.distribute_tensor(x.float(), mesh, [Shard(2)], None, SIZES[3])
        with torch.autocast(rank.device.type, torch.bfloat16):
            found = gradients(model, part)
        return found

    exact = gradients(made(Net), x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = gradients(made(Net).float(), x.float())

    def error(values):
        pairs = zip(values, exact, strict=True)
        return max(float((a - b).norm() / b.norm().clamp_min(1e-3)) for a, b in pairs)

    for answer in rank_pool(3).run(body):
        assert error(answer) <= 2 * error(rough) + 1e-3


@pytest.mark.parametrize("axes", MESHES[1:], ids=name)
def test_autograd_grad_of_managed_parameters_is_exact(axes):
    def body(rank):
        mesh = rank.mesh(**axes)
        model = sf.parallelize(made(Net), mesh)
        x = sf.distribute_tensor(
            batch(0)[0], mesh["domain"], [Shard(2)], None, SIZES[axes["domain"]]
        )
        loss = model(x).square().mean()
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(penalty, weights)]

    model = made(Net)
    loss = model(batch(0)[0]).square().mean()
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, create_graph=True)
    penalty = torch.stack([g.square().sum() for g in first]).sum()
    expected = [*first, *torch.autograd.grad(penalty, weights)]
    for answer in rank_pool(world(axes)).run(body):
        for mine, theirs in zip(answer, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def small():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3))


def test_a_copied_or_pickled_managed_model_is_unmanaged():
    def body(rank):
        mesh = rank.mesh(domain=2)
        managed: Any = sf.parallelize(made(small), mesh)
        x = sf.distribute_tensor(batch(0)[0], mesh, [Shard(2)], None, SIZES[2])
        found = []
        for copied in (
            copy.deepcopy(managed.module),
            pickle.loads(pickle.dumps(managed.module)),
            managed.module,
        ):
            if copied is managed.module:
                copied = managed
            copied(x).square().mean().backward()
            found.append([p.grad for p in copied.parameters()])
        return found

    model = made(small)
    model(batch(0)[0]).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    for answer in rank_pool(2).run(body):
        for gradients in answer:
            for mine, theirs in zip(gradients, expected, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10)


def test_state_dicts_go_between_a_managed_and_a_plain_model():
    def body(rank):
        model: Any = sf.parallelize(made(Net), rank.mesh(domain=2))
        return model.module.state_dict()

    model = made(Net)
    for state in rank_pool(2).run(body):
        assert set(state) == set(model.state_dict())
        model.load_state_dict(state)


def test_managed_gradients_are_reduced_by_the_wrapper_alone():
    def body(rank):
        mesh = rank.mesh(domain=2)
        counts = []
        for managed in (True, False):
            model = made(Net)
            model = sf.parallelize(model, mesh) if managed else model
            x = sf.distribute_tensor(batch(0)[0], mesh, [Shard(2)], None)
            loss = model(x).square().mean()
            with record_traffic() as traffic:
                loss.backward()
            counts.append([name for name, kind, _ in traffic.operations if kind == "all_reduce"])
        return counts

    for managed, unmanaged in rank_pool(2).run(body):
        # A view of a parameter is no parameter: it is reduced where it is used.
        assert managed.count("backward of mul") == 1
        assert set(managed) <= {"backward of group_norm", "backward of mul"}
        assert unmanaged.count("backward of conv2d") == 6, unmanaged


def test_what_cannot_be_wrapped_is_refused():
    def body(rank):
        mesh = rank.mesh(domain=2)
        with pytest.raises(sf.LayoutError, match="tensor=2"):
            sf.parallelize(Net(), rank.mesh(tensor=2, domain=1))
        frozen = Net().requires_grad_(False)
        assert sf.parallelize(frozen, mesh) is frozen

    rank_pool(2).run(body)


def test_models_that_differ_between_ranks_are_refused_on_all_of_them():
    def body(rank):
        mesh = rank.mesh(data=2, domain=2)
        width = 5 if rank.rank == 3 else 4  # along neither axis does the first rank differ
        for params in ("replicate", "shard"):
            with pytest.raises(sf.LayoutError, match="models that differ along the mesh axis"):
                sf.parallelize(nn.Linear(3, width), mesh, params)

    rank_pool(4).run(body)


def test_weights_in_any_memory_format_start_as_on_the_first_rank():
    def body(rank):
        torch.manual_seed(rank.rank)
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        sf.parallelize(conv, rank.mesh(domain=2))
        return conv.weight.detach().clone(), conv.weight.is_contiguous()

    (first, contiguous), (second, _) = rank_pool(2).run(body)
    assert torch.equal(first, second)
    assert not contiguous


def test_a_model_is_not_changed_by_a_call_that_is_refused():
    def body(rank):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        split = {"tensor_parallel": "auto", "example": (torch.ones(2, 4),)}
        with pytest.raises(sf.LayoutError, match="activations is one of"):
            sf.parallelize(model, rank.mesh(tensor=2), activations="forget", **split)
        return [type(parameter) for parameter in model.parameters()]

    for kinds in rank_pool(2).run(body):
        assert set(kinds) == {nn.Parameter}


class WrittenLast(nn.Module):
    """Its last result is written in place after it was made."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.used(x)
        x *= 2
        return x


def _looks_for_unused(rank):
    mesh = rank.mesh(domain=2)
    torch.manual_seed(0)
    net = sf.parallelize(WrittenLast(), mesh, find_unused_parameters=True)
    x = sf.distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], None)
    net(x).sum().backward()
    return net.module.used.bias.grad.tolist(), net.module.unused.bias.grad


def test_unused_parameters_are_looked_for_behind_a_result_written_in_place():
    assert rank_pool(2).run(_looks_for_unused) == [([8.0] * 3, None)] * 2
