"""What blocks keep for their backward: less, and the same result to the last bit."""

import copy
import importlib
import pickle
from collections import Counter
from functools import partial
from typing import Any, ClassVar

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import shardfield as sf
from shardfield.comm.collectives import record_traffic
from shardfield.testing import rank_pool
from shardfield.tools.memory import kept_bytes

WIDTH, ROWS = 8, 12
SIZES = {2: [9, 3], 3: [0, 11, 1]}


class Mixer(nn.Module):
    """Random, and with rows of its neighbours."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)
        self.drop, self.out = nn.Dropout(0.3), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x, scale=1.0):
        return x + self.out(self.drop(nn.functional.gelu(self.norm(self.conv(x))))) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, WIDTH, 1)
        self.layers = nn.ModuleList([Mixer(), Mixer(), Mixer()])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def made(build, dtype=torch.float64) -> Any:
    torch.manual_seed(1)
    return build().to(dtype)


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def gradients(model, x):
    torch.manual_seed(7)
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(local(p.grad) for p in model.parameters()), torch.rand(3)]


def sample(rank, axes, dtype=torch.float64, shape=(2, 2, ROWS)):
    mesh = rank.mesh(**axes)
    torch.manual_seed(3 + mesh["data"].get_local_rank() if "data" in axes else 3)
    x = torch.randn(shape, dtype=dtype, device=rank.device)
    sizes = SIZES[axes["domain"]] if shape[-1] == ROWS else None
    return mesh, sf.distribute_tensor(x, mesh["domain"], [Shard(2)], None, sizes)


def convolutions_kept(context, op, *args, **kwargs):
    kept = str(op) == "aten.convolution.default"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    return create_selective_checkpoint_contexts(convolutions_kept)


WAYS = {
    "keep": {},
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "selective": {"activations": "recompute", "context_fn": selective},
}


@pytest.mark.parametrize("axes", [{"domain": 3}, {"data": 2, "domain": 2}], ids=str)
def test_every_way_gives_the_same_bits(axes):
    def body(rank):
        mesh, x = sample(rank, axes)
        return [
            [
                gradients(sf.parallelize(made(Net).to(rank.device), mesh, params, **way), x)
                for way in WAYS.values()
            ]
            for params in ("replicate", "shard")
        ]

    for answer in rank_pool(torch.Size(axes.values()).numel()).run(body):
        for keep, *others in answer:
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(other, keep, strict=True))


def _kept(rank):
    """Bytes that a forward leaves allocated, by way; for the last one, of replicated parameters."""
    mesh, x = sample(rank, {"domain": 2}, torch.float32, (2, 2, 512))
    kept = []
    for params, way in (*(("shard", way) for way in WAYS), ("replicate", "recompute")):
        model = made(Net, torch.float32).to(rank.device)
        model = sf.parallelize(model, mesh, params, **WAYS[way])
        model(x).sum().backward()
        # FSDP2's workers may release unseen what the forward allocated.
        kept.append(min(kept_bytes(partial(model, x), rank.device).kept for _ in range(3)))
    return kept


def test_bytes_kept():
    activation = 2 * WIDTH * 256 * 4
    state = torch.get_rng_state().numel()
    for keep, recompute, offload, some, replicated in rank_pool(2).run(_kept):
        # The stem's and every layer's output, which are the next one's input, and the random
        # states; nothing else of size.
        assert 0 <= recompute - 4 * activation - 3 * state < 512
        assert abs(recompute - replicated) < 512
        assert keep - recompute > 8 * activation
        # Two convolutions a layer.
        assert abs(some - recompute - 6 * activation) < 512
        # Copies on the host are the same bytes where the device is the host.
        assert offload < recompute if rank_pool(2).device != "cpu" else abs(offload - keep) < 512


class Counting(torch.autograd.graph.save_on_cpu):
    packed: ClassVar[list[torch.Tensor]] = []

    def __init__(self, pin_memory):
        super().__init__(pin_memory)
        copy_to_host = self.pack_hook

        def pack(tensor):
            Counting.packed.append(tensor)
            return copy_to_host(tensor)

        self.pack_hook = pack


@pytest.mark.parametrize("params", ["replicate", "shard"])
def test_what_layers_keep_goes_to_the_host_and_weights_stay(params):
    def body(rank):
        mesh, x = sample(rank, {"domain": 2}, torch.float32)
        shard_of = 2 * WIDTH * x.to_local().shape[-1]
        module = importlib.import_module("shardfield.parallel.activations")
        original, module.save_on_cpu = module.save_on_cpu, Counting
        Counting.packed.clear()
        try:
            model = sf.parallelize(
                made(Net, torch.float32).to(rank.device), mesh, params, activations="offload"
            )
            y = model(x)
        finally:
            module.save_on_cpu = original
        sizes = [tensor.numel() for tensor in Counting.packed]
        y.sum().backward()
        return sizes.count(shard_of), [size for size in sizes if size > shard_of]

    # Of every layer: the inputs of two convolutions, the norm's, gelu's and dropout's mask.
    for whole, larger in rank_pool(2).run(body):
        assert whole == 15
        assert larger == []


def test_recomputation_enters_the_collectives_of_its_block_once_more():
    def body(rank):
        mesh, x = sample(rank, {"domain": 2})
        found = []
        for way in ("keep", "recompute"):
            model = sf.parallelize(made(Net), mesh, "shard", activations=way)
            with record_traffic() as forward:
                loss = model(x).square().mean()
            with record_traffic() as backward:
                loss.backward()
            found.append((Counter(forward.collectives), Counter(backward.collectives)))
        return found

    for keep, recompute in rank_pool(2).run(body):
        blocks = keep[0] - Counter({"all_reduce": 1})  # the loss
        assert blocks.total() > 0
        assert recompute == (keep[0], keep[1] + blocks)


def test_copied_and_pickled_models_run_themselves():
    def body(rank):
        mesh, x = sample(rank, {"domain": 2})
        model: Any = sf.parallelize(made(Net), mesh, activations="recompute").module.eval()
        found = []
        for other in (copy.deepcopy(model), pickle.loads(cloudpickle.dumps(model))):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
                for parameter in other.parameters():
                    parameter.fill_(0.25)
            found.append(other(x).full_tensor())
        return found

    model = made(Net).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    torch.manual_seed(3)
    expected = model(torch.randn(2, 2, ROWS, dtype=torch.float64))
    for answer in rank_pool(2).run(body):
        for found in answer:
            assert torch.allclose(found, expected, rtol=0, atol=1e-10)


def test_what_cannot_be_done_is_refused():
    def body(rank):
        mesh = rank.mesh(domain=2)
        with pytest.raises(sf.LayoutError, match="'keep', 'recompute', 'offload'"):
            sf.parallelize(Net(), mesh, activations="drop")
        with pytest.raises(sf.LayoutError, match="says what is recomputed"):
            sf.parallelize(Net(), mesh, activations="offload", context_fn=selective)
        with pytest.raises(sf.LayoutError, match="this one has none"):
            sf.parallelize(nn.Linear(2, 2), mesh, activations="recompute")

    rank_pool(2).run(body)


def test_blocks_are_compiled_inside_of_what_stands_around_them():
    def body(rank):
        mesh, x = sample(rank, {"domain": 2})
        found = []
        for params, way in (("shard", "keep"), ("replicate", "recompute"), ("hybrid", "offload")):
            model = sf.parallelize(made(Net).eval(), mesh, params, activations=way)
            found.append(gradients(sf.compile(model, backend="aot_eager"), x))
            assert len(found[-1]) == len(found[0])
        eager = sf.parallelize(made(Net).eval(), mesh, "shard")
        return found, gradients(eager, x)

    for found, eager in rank_pool(2).run(body):
        for way in (found[0], found[2]):
            for mine, theirs in zip(way, eager, strict=True):
                assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)
        assert torch.allclose(found[1][0], eager[0], rtol=0, atol=1e-10)
