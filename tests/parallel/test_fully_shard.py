"""FSDP2 over data x domain: what one process computes, at a share of its memory."""

from contextlib import nullcontext
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
from shardfield.operands import part_of_plain
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
        units = [
            nn.Sequential(nn.Conv2d(width, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU())
            for width in (2, 3)
        ]
        self.blocks = nn.Sequential(*units)
        self.last = nn.BatchNorm2d(3)

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
        return float(loss.detach())

    with sf.no_sync(model):
        for part in parts[:-1]:
            total += backward(*part)
    total += backward(*parts[-1])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return total, float(whole(norm))


def alone(build, pieces=2):
    model = made(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    dense = getattr(model, "dense", False)
    records = [step(model, optimizer, batch(i, dense), lambda x: x, pieces) for i in range(3)]
    return records, [p.detach() for p in model.parameters()], list(model.buffers())


def on_mesh(rank, build, axes, optimizer, pieces=2, **options):
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
        records.append(step(model, optimizer, samples, split, pieces))
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


long = partial(pytest.param, marks=pytest.mark.conformance)
CASES = [
    ({"domain": 3}, "shard", "fused"),
    ({"data": 2, "domain": 2}, "shard", "fused"),
    ({"data": 2, "domain": 2}, "hybrid", "foreach"),
    long({"domain": 1}, "shard", "foreach"),
    long({"domain": 4}, "shard", "foreach"),
    long({"domain": 3}, "hybrid", "fused"),
]


@pytest.mark.parametrize(("axes", "params", "optimizer"), CASES, ids=name)
def test_case_28_three_clipped_and_accumulated_steps_equal_one_process(axes, params, optimizer):
    run = partial(on_mesh, params=params)
    same(rank_pool(world(axes)).run(run, Net, axes, optimizer), alone(Net), axes)


@pytest.mark.parametrize("axes", [{"h": 2, "w": 2}, long({"data": 2, "domain": 2})], ids=name)
def test_sharded_outputs_train_as_in_one_process(axes):
    run, build = partial(on_mesh, params="shard"), partial(Net, dense=True)
    same(rank_pool(world(axes)).run(run, build, axes, "fused"), alone(build), axes)


@pytest.mark.conformance
@pytest.mark.parametrize("params", ["shard", "hybrid"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "axes",
    [{"data": 2, "h": 2, "w": 2}, {"data": 2, "domain": 4}, {"data": 8, "domain": 1}],
    ids=name,
)
def test_case_29_eight_ranks_equal_one_process_however_they_are_arranged(axes, params, dense):
    pieces = 1 if axes["data"] == 8 else 2  # one sample a rank
    run, build = partial(on_mesh, params=params, pieces=pieces), partial(Net, dense=dense)
    same(rank_pool(8).run(run, build, axes, "fused"), alone(build, pieces), axes)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_running_statistics_are_those_of_the_first_replica(activations):
    """Recomputing a block counts its batch once; replicas share statistics, as under DDP."""
    axes = {"data": 2, "domain": 2}
    kinds = ("replicate", "shard")

    def body(rank):
        return [
            on_mesh(rank, Normed, axes, "foreach", params=params, activations=activations)
            for params in kinds
        ]

    # DDP leaves those of other replicas behind where it accumulates; the first one's are used.
    for replicated, sharded in rank_pool(4).run(body)[:2]:
        assert replicated[2][2] == sharded[2][2] == 6  # 3 steps of 2 batches
        for place in (1, 2):
            for mine, theirs in zip(sharded[place], replicated[place], strict=True):
                assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)


class Tokens(nn.Module):
    """Every first dim is a multiple of 8."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def held(tensors):
    return sum(t.numel() * t.element_size() for t in (local(t) for t in tensors))


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def _bytes(rank, axes, params):
    mesh = rank.mesh(**axes)
    model = sf.parallelize(made(Tokens), mesh, params)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = sf.distribute_tensor(torch.randn(2, 8, 3).double(), mesh["domain"], [Shard(1)], None)
    model(x).square().mean().backward()
    optimizer.step()
    weights = list(model.parameters())
    state = [s for p in weights for n, s in optimizer.state[p].items() if n != "step"]
    return held(weights), held([p.grad for p in weights]), held(state)


@pytest.mark.parametrize(("params", "share"), [("replicate", 1), ("shard", 4), ("hybrid", 2)])
def test_bytes_of_weights_gradients_and_optimizer_state(params, share):
    total = held(made(Tokens).parameters())
    answers = rank_pool(4).run(_bytes, {"data": 2, "domain": 2}, params)
    assert answers == [(total // share, total // share, 2 * total // share)] * 4


def _collectives(rank, axes, params, activations):
    """What one backward sends: of ours by operation, and of everyone's by kind."""
    mesh = rank.mesh(**axes)
    model = sf.parallelize(made(Tokens), mesh, params, activations=activations)
    x = sf.distribute_tensor(torch.randn(2, 8, 3).double(), mesh["domain"], [Shard(1)], None)
    found = []
    for silent in (True, False):
        with sf.no_sync(model) if silent else nullcontext():
            loss = model(x).square().mean()
            with record_traffic() as ours, profile(activities=[ProfilerActivity.CPU]) as profiler:
                loss.backward()
        counts = {e.key: e.count for e in profiler.key_averages() if "c10d::" in e.key}
        found.append((ours.collectives, counts))
    return found


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_unit_is_gathered_and_reduced_once_and_nothing_else_travels(activations):
    axes = {"data": 2, "domain": 2}
    # The root's weights are whole from its forward on; those of the two blocks were freed.
    gathered = {"c10d::_allgather_base_": 2}
    for silent, loud in rank_pool(4).run(_collectives, axes, "shard", activations):
        assert silent == ([], gathered)
        assert loud == ([], {**gathered, "c10d::_reduce_scatter_base_": 3})
    for silent, loud in rank_pool(4).run(_collectives, axes, "hybrid", activations):
        once = {"c10d::_reduce_scatter_base_": 3, "c10d::allreduce_": 3}
        assert silent == ([], gathered)
        assert loud == ([], {**gathered, **once})


def test_case_24_a_mixed_precision_policy_is_as_close_as_in_one_process():
    x, target = batch(0)
    build = partial(Net, dense=False)

    def gradients(model, x):
        loss = F.mse_loss(model(x).double(), target)
        loss.backward()
        return [loss.detach(), *(whole(p.grad).double() for p in trained(model))]

    def trained(model):
        return [p for n, p in model.named_parameters() if p.requires_grad and n != "unused"]

    def body(rank):
        mesh = rank.mesh(domain=3)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        model = sf.parallelize(made(build, torch.float32), mesh, "shard", mixed_precision=policy)
        part = sf.distribute_tensor(x.float(), mesh, [Shard(2)], None, SIZES[3])
        seen = []
        model.blocks[0].register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
        found = gradients(model, part)
        (inside, outside), dtype = seen[0], torch.bfloat16
        assert isinstance(inside, sf.ShardTensor) and inside.dtype == dtype
        assert isinstance(outside, sf.ShardTensor)
        return found

    exact = gradients(made(build), x)
    rough = gradients(made(build, torch.bfloat16), x.bfloat16())

    def error(values):
        pairs = zip(values, exact, strict=True)
        return max(float((a - b).norm() / b.norm().clamp_min(1e-3)) for a, b in pairs)

    for answer in rank_pool(3).run(body):
        assert error(answer) <= 2 * error(rough) + 1e-3


class Gated(nn.Module):
    """A column-split map into a row-split one, five features over two ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.wide, self.back = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 7, 3, dtype=torch.float64, generator=generator)


def tensor_step(model, optimizer, x):
    optimizer.zero_grad()
    with sf.no_sync(model):
        model(x).square().mean().backward()
    model(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return float(whole(norm))


def _split_over_tensor(rank, axes, params, activations):
    """Norms, and the largest distance of this rank's parts of the parameters from one process's."""
    mesh = rank.mesh(**axes)
    replicas = axes.get("data", 1)
    mine = mesh.get_local_rank("data") if replicas > 1 else 0
    alone, model = made(Stack), made(Stack)
    sf.tensor_parallel(model, mesh, example=(tokens(0),))
    layouts = [getattr(p, "layout", None) for p in model.parameters()]
    layouts = [found if isinstance(found, sf.Layout) else None for found in layouts]
    model = sf.parallelize(model, mesh, params, activations=activations)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in (model, alone)]
    norms = []
    for i in range(3):
        x = tokens(i)
        part = x.chunk(replicas)[mine]
        split = sf.distribute_tensor(part, mesh["domain"], [Shard(1)], None, [5, 2])
        norms.append(
            (tensor_step(model, optimizers[0], split), tensor_step(alone, optimizers[1], x))
        )
    worst = 0.0
    held_bytes = 0
    for layout, p, q in zip(layouts, model.parameters(), alone.parameters(), strict=True):
        expected = q.detach() if layout is None else part_of_plain(q.detach(), layout)
        over = p.device_mesh["domain" if params == "hybrid" and replicas > 1 else "data_domain"]
        pieces = [*expected.chunk(over.size()), *[expected[:0]] * over.size()]
        found = p.to_local()
        held_bytes += found.numel()
        assert found.shape == pieces[over.get_local_rank()].shape
        worst = max([worst, *(found - pieces[over.get_local_rank()]).abs().flatten().tolist()])
    wholes = sf.full_parameters(model)
    for key, q in alone.named_parameters():
        worst = max(worst, (wholes[key] - q).abs().max().item())
    for layout, p in zip(layouts, model.parameters(), strict=True):
        if layout is not None:
            with pytest.raises(sf.UnsupportedOperation, match="full_parameters"):
                p.full_tensor()
    return norms, worst, held_bytes


@pytest.mark.parametrize(
    ("axes", "params", "activations"),
    [
        ({"domain": 2, "tensor": 2}, "shard", "recompute"),
        long({"domain": 2, "tensor": 2}, "shard", "offload"),
        long({"data": 2, "domain": 2, "tensor": 2}, "shard", "keep"),
        long({"data": 2, "domain": 2, "tensor": 2}, "hybrid", "recompute"),
    ],
    ids=name,
)
def test_case_28_parameters_split_over_tensor_too(axes, params, activations):
    answers = rank_pool(world(axes)).run(_split_over_tensor, axes, params, activations)
    for norms, worst, _ in answers:
        assert worst < 1e-10
        for found, expected in norms:
            assert found == pytest.approx(expected, rel=1e-10)
    if params == "shard":
        # The stem and the norms are whole on either tensor rank, three of the blocks' four are not.
        whole_ones = 16 + 2 * (8 + 4)
        split_ones = 2 * (20 + 5 + 20)
        assert sum(count for _, _, count in answers) == axes["tensor"] * whole_ones + split_ones


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def encode(self, x):
        return self.layer(x)

    def forward(self, x):
        return self.encode(x)


def test_other_methods_than_forward_are_exact_too():
    values = torch.randn(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def body(rank):
        mesh = rank.mesh(domain=2)
        model = sf.parallelize(made(Encoder), mesh, "shard")
        register_fsdp_forward_method(model, "encode")
        x = sf.distribute_tensor(values, mesh, [Shard(1)], None)
        model.encode(x).square().mean().backward()
        return [whole(p.grad) for p in model.parameters()]

    model = made(Encoder)
    model.encode(values).square().mean().backward()
    for answer in rank_pool(2).run(body):
        for mine, theirs in zip(answer, model.parameters(), strict=True):
            assert torch.allclose(mine, theirs.grad, rtol=0, atol=1e-10)


def test_state_dicts_are_those_of_the_model():
    def body(rank):
        model = sf.parallelize(made(Net), rank.mesh(domain=2), "shard", activations="recompute")
        return {name: whole(value) for name, value in model.state_dict().items()}

    expected = made(Net).state_dict()
    for state in rank_pool(2).run(body):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_what_cannot_be_sharded_is_refused():
    def body(rank):
        mesh = rank.mesh(domain=2)
        with pytest.raises(sf.LayoutError, match="params='zero'"):
            sf.parallelize(Net(), mesh, params="zero")
        with pytest.raises(sf.LayoutError, match=r"torch\.autocast around the forward"):
            sf.parallelize(Net(), mesh, mixed_precision=MixedPrecisionPolicy())
        scaled = Net()
        scaled.temperature = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(sf.LayoutError, match="0-d parameter 'temperature'"):
            sf.parallelize(scaled, mesh, "shard")
        with pytest.raises(sf.LayoutError, match="no submodule is of that kind"):
            sf.parallelize(Net(), mesh, "shard", wrap=nn.LSTM)

    rank_pool(2).run(body)


def names_of(model, blocks):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for block in blocks]


def test_blocks_are_the_repeated_members_of_containers():
    net = Net()
    assert names_of(net, blocks_of(net)) == ["blocks.0", "blocks.1", "blocks.2"]
    stack = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert blocks_of(stack) == []
    pairs = nn.ModuleList([nn.ModuleList([Block(), Encoder()]) for _ in range(2)])
    assert names_of(pairs, blocks_of(pairs)) == ["0.0", "0.1", "1.0", "1.1"]
    shared = nn.Sequential(one := Block(), one, Block())
    assert names_of(shared, blocks_of(shared)) == ["0", "2"]


def test_blocks_by_class_and_by_function():
    net = Net()
    assert names_of(net, blocks_of(net, nn.GroupNorm)) == [f"blocks.{i}.norm" for i in range(3)]
    chosen = blocks_of(net, lambda module: isinstance(module, (Block, nn.Conv2d)))
    assert names_of(net, chosen)[:3] == ["stem", "blocks.0", "blocks.0.conv"]
    assert names_of(net, outermost(chosen)) == ["stem", "blocks.0", "blocks.1", "blocks.2"]


def test_blocks_that_share_a_parameter_are_no_units_of_their_own():
    net = Net()
    net.blocks[0].mix = net.blocks[2].mix
    assert names_of(net, self_contained(net, blocks_of(net))) == ["blocks.1"]
    net.blocks[1] = net.blocks[0]
    assert self_contained(net, blocks_of(net)) == []
