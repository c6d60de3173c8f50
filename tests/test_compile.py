"""`shardfield.compile`: whole graphs, equal to eager, on uneven and empty shards."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from networkx.algorithms.flow import maxflow, preflow_push
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.parallel.partition import quick_cuts
from shardfield.testing import Rank, parity, rank_pool

torch.manual_seed(0)

Extents = tuple[int, ...]
SHAPE = (2, 3, 9, 8)


class Norms(nn.Sequential):
    """Every norm between convolutions that keep and halve the rows."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, 2, 1),
            nn.GroupNorm(2, 4),
            nn.GELU(),
            nn.InstanceNorm2d(4, affine=True),
        )


class Transposed(nn.Sequential):
    """Down and up again."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(4, 4, 3, 2, 1),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 2, 2, 2),
        )


class Pyramid(nn.Module):
    """Pools down, resizes up, joins by `cat`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.leave = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(x))
        down = F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1)
        smooth = F.interpolate(down, size=(9, 8), mode="bilinear", align_corners=False)
        coarse = F.interpolate(down, scale_factor=2.0, mode="nearest")[:, :, :9]
        return self.leave(torch.cat([x, smooth], 1)) + coarse[:, :2]


class Branches(nn.Module):
    """Exchanges and gradients that look alike on a rank without rows, and there only."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, n, padding=n // 2) for n in (3, 5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(conv(x) for conv in self.convs)


class Mixed(nn.Module):
    """Plain parameters and a plain field beside shards, dropout, linear, a view, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, 1, 1))
        self.field = nn.Parameter(torch.randn(9, 8))
        self.linear = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x * self.scale + self.field, 0.25, self.training)
        tokens = self.linear(x.flatten(2).transpose(1, 2))
        return self.norm(tokens) - tokens.mean((1, 2), keepdim=True)


class Loss(nn.Module):
    """Ends in plain, reduced numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        return F.mse_loss(y, x) + (y * y).sum() / 100 + y.amax() + y.var()


class Short(nn.Sequential):
    """One of each kind: what inductor compiles in seconds.

    Split as 8 + 1 the last rank sends its row, gets none and has no rows from then on.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1)
        )


NETS: dict[str, Callable[[], nn.Module]] = {
    "norms": Norms,
    "transposed": Transposed,
    "pyramid": Pyramid,
    "branches": Branches,
    "mixed": Mixed,
    "loss": Loss,
    "short": Short,
}


def _outcome(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, gradients and buffers by name, all local; the same draws for every call."""
    torch.manual_seed(1)
    y = module(x)
    if isinstance(y, sf.ShardTensor):
        weights = torch.randn(y.shape, dtype=torch.float64)
        (y * weights).sum().backward()
    else:
        y.backward()
    named = {"output": y, "gradient of the input": x.grad}
    for name, parameter in module.named_parameters():
        named[f"gradient of {name.removeprefix('module.')}"] = parameter.grad
        parameter.grad = None
    for name, buffer in module.named_buffers():
        named[name.removeprefix("module.")] = buffer
    x.grad = None
    return {
        name: (value.to_local() if isinstance(value, sf.ShardTensor) else value).detach().clone()
        for name, value in named.items()
    }


def _compare(
    rank: Rank, make: Callable[[], nn.Module], sizes: list[Extents], options: dict[str, Any]
) -> list[str]:
    """What differs between eager and compiled, on this rank; the second call must not compile."""
    wrong = []
    mesh = rank.mesh(domain=rank.world_size)
    stance = {"first": "default", "second": "fail_on_recompile"}
    for extents in sizes:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = make().double()
        twin = copy.deepcopy(net)
        compiled = sf.compile(twin, **options)
        for attempt in stance:
            whole = torch.randn(SHAPE, dtype=torch.float64)
            x, other = (
                sf.distribute_tensor(whole, mesh, [Shard(2)], None, extents).requires_grad_()
                for _ in range(2)
            )
            expected = _outcome(net, x)
            with torch.compiler.set_stance(stance[attempt]):
                found = _outcome(compiled, other)
            wrong += [f"{extents}: {name} is missing" for name in expected.keys() - found.keys()]
            for name, value in found.items():
                same = value.shape == expected[name].shape
                if not same or not torch.allclose(value, expected[name], rtol=0, atol=1e-10):
                    wrong.append(f"{extents} {attempt}: {name} differs")
    return wrong


SIZES: dict[int, list[Extents]] = {1: [(9,)], 2: [(6, 3)], 3: [(4, 0, 5)]}


def check(net: str, ranks: int, sizes: list[Extents] | None = None, **options: Any) -> None:
    found = rank_pool(ranks).run(_compare, NETS[net], sizes or SIZES[ranks], options, timeout=240.0)
    assert found == [[]] * ranks


@pytest.mark.parametrize("net", [name for name in NETS if name != "short"])
def test_whole_graph_equals_eager_with_an_empty_shard_of_three(net: str):
    check(net, 3, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("net", ["norms", "mixed"])
def test_whole_graph_equals_eager_on_two_uneven_shards(net: str):
    check(net, 2, backend="aot_eager", fullgraph=True)


def test_whole_graph_on_one_rank():
    check("norms", 1, backend="aot_eager")


def test_whole_graph_with_the_first_or_the_last_rank_empty():
    check("branches", 3, [(0, 8, 1)], backend="aot_eager")
    check("loss", 2, [(9, 0)], backend="aot_eager")


@pytest.mark.parametrize("sizes", [(9, 0), (0, 9), (8, 1), (1, 8)], ids=str)
def test_no_collective_is_lost_or_moved_on_a_rank_without_rows(sizes: Extents):
    check("short", 2, [sizes], backend="aot_eager")


# One thread: no pool of compilers beside every rank.
def test_inductor_equals_eager_on_a_rank_that_only_sends():
    check("short", 2, [(8, 1)], options={"compile_threads": 1})


SHARDS: list[Extents] = [(9, 0), (7, 2), (8, 1), (1, 8), (4, 0, 5), (0, 8, 1), (3, 3, 3)]


@pytest.mark.conformance
@pytest.mark.parametrize("sizes", SHARDS, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_inductor_equals_eager_on_uneven_and_empty_shards(net: str, sizes: Extents):
    # Inductor has a generator of its own; eager draws from torch's.
    check(net, len(sizes), [sizes], options={"compile_threads": 1, "fallback_random": True})


def _draws(rank: Rank, sizes: Extents, backend: str) -> list[torch.Tensor]:
    """Two calls of compiled dropout, a gradient of the first, a plain draw beside it; global."""
    torch._dynamo.reset()
    x = torch.ones(2, 9, 4)
    x = sf.distribute_tensor(x, rank.mesh(domain=len(sizes)), [Shard(1)], None, sizes)
    x.requires_grad_()
    options = {"options": {"compile_threads": 1}} if backend == "inductor" else {}

    def draw(x):
        return F.dropout(F.dropout(x, 0.5), 0.25), torch.rand(2, 1, 1)

    draw = sf.compile(draw, backend=backend, **options)
    torch.manual_seed(5)
    (first, plain), (second, _) = draw(x), draw(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    return [value.full_tensor().detach() for value in (first, second, gradient)] + [plain]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.conformance)]
)
def test_compiled_dropout_draws_alike_whatever_the_split(backend: str):
    ((first, second, gradient, plain),) = rank_pool(1).run(_draws, (9,), backend)
    assert torch.equal(first, gradient)
    assert not torch.equal(first, second)
    assert 0 < int((first == 0).sum()) < first.numel()
    for sizes in [(7, 2), (9, 0), (4, 0, 5)]:
        for draws in rank_pool(len(sizes)).run(_draws, sizes, backend):
            for one, other in zip(draws, (first, second, gradient, plain), strict=True):
                assert torch.equal(one, other)


def test_the_quick_cut_of_a_graph_is_the_usual_one():
    generator = random.Random(0)
    for _ in range(50):
        graph = nx.DiGraph()
        for _ in range(60):
            ends = generator.sample(range(20), 2)
            capacity = {} if generator.random() < 0.3 else {"capacity": generator.random()}
            graph.add_edge(min(ends), max(ends), **capacity)
        graph.add_edges_from([(0, 1), (18, 19)], capacity=1.5)
        try:
            usual = nx.minimum_cut(graph, 0, 19)
        except nx.NetworkXUnbounded:
            continue
        with quick_cuts():
            value, sides = nx.minimum_cut(graph, 0, 19)
        assert sides == usual[1]
        assert value == pytest.approx(usual[0], abs=1e-12)
    assert maxflow.default_flow_func is preflow_push


def test_compiled_parity_with_one_process():
    net = nn.Sequential(nn.Conv2d(3, 4, 5, 2, 2), nn.GroupNorm(2, 4), nn.GELU())
    parity(net, [torch.randn(SHAPE)], [2], ranks=(2,), dtype=torch.float64, compiled=True)
    parity(
        nn.Conv2d(3, 4, 3, padding=1),
        [torch.randn(SHAPE)],
        [{2: "h", 3: "w"}],
        ranks=(2,),
        dtype=torch.float64,
        compiled=True,
    )


def _layouts(rank: Rank) -> tuple[int, int]:
    """Graphs compiled for one layout, met twice, and then for another."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    net = sf.compile(nn.Conv2d(1, 1, 3, padding=1), backend=counter)
    mesh = rank.mesh(domain=2)

    def run(extents: Extents) -> int:
        net(sf.distribute_tensor(torch.randn(1, 1, 9, 4), mesh, [Shard(2)], None, extents))
        return counter.frame_count

    first = [run((5, 4)) for _ in range(3)]
    return len(set(first)), run((4, 5)) - first[0]


@pytest.mark.parametrize("sizes", [(6, 3), (9, 0)])
def test_a_loss_that_is_made_in_traced_code(sizes):
    """Dynamo has a way of its own for it, which knew nothing of shards."""
    labels = torch.randint(5, (2, 9), generator=torch.Generator().manual_seed(0))

    def losses(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, classes = x.reshape(-1, 5), labels.view(-1)
        weighted = nn.CrossEntropyLoss(x.new_ones(5).cumsum(0), ignore_index=2, reduction="sum")
        smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
        return (
            nn.CrossEntropyLoss()(rows, classes),
            weighted(rows, classes),
            smoothed(rows, classes),
        )

    given = {"sizes": [sizes], "dtype": torch.float64, "compiled": "aot_eager"}
    parity(losses, [torch.randn(2, 9, 5), labels], [1, 1], ranks=(2,), **given)


def test_handlers_that_call_other_operations():
    def composed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = sum(row**2 for row in x.unbind(1))
        largest = torch.linalg.vector_norm(x, float("inf"))
        joined = torch.cat((x, 2 * x), 1).sum()  # a tuple, not a list
        parts = sum(part for part in x.movedim(1, 0))
        split = sum(n * row for n, row in enumerate(x.unbind(2)))
        return x.norm(), largest, abs(x) / len(x), parts, rows, split, joined

    given = {"sizes": [(9, 0)], "dtype": torch.float64, "compiled": "aot_eager"}
    parity(composed, [torch.randn(SHAPE)], [2], ranks=(2,), **given)


def test_equal_layouts_share_a_graph_and_other_layouts_get_their_own():
    assert rank_pool(2).run(_layouts) == [(1, 1)] * 2


def _many(rank: Rank) -> tuple[list[int], str]:
    """Graphs of three models with two layouts each, and the refusal of a third one of the last."""
    torch._dynamo.reset()
    mesh, counts = rank.mesh(domain=2), []
    for _ in range(3):
        counter = CompileCounterWithBackend("aot_eager")
        net = sf.compile(nn.Conv1d(1, 1, 3, padding=1), backend=counter, recompile_limit=2)
        for extents in ((5, 4), (4, 5), (5, 4)):
            net(sf.distribute_tensor(torch.randn(1, 1, 9), mesh, [Shard(2)], None, extents))
        counts.append(counter.frame_count)
    try:
        net(sf.distribute_tensor(torch.randn(1, 1, 9), mesh, [Shard(2)], None, (6, 3)))
    except sf.LayoutError as error:
        return counts, str(error)
    return counts, "nothing"


def test_the_limit_of_graphs_is_that_of_one_model():
    for counts, text in rank_pool(2).run(_many):
        assert counts == [2, 2, 2]
        assert "more graphs than recompile_limit=2" in text


def _blocks(rank: Rank, widths: Sequence[int]) -> int:
    """Graphs of blocks that are compiled one by one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    blocks = [
        nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for width in widths
    ]
    mesh = rank.mesh(domain=2)
    net = sf.parallelize(nn.Sequential(*blocks), mesh, activations="recompute")
    net = sf.compile(net, backend=counter, recompile_limit=2)
    for _ in range(2):
        net(sf.distribute_tensor(torch.randn(1, 9, 4), mesh, [Shard(1)])).sum().backward()
    return counter.frame_count


def test_equal_blocks_share_a_graph_and_any_number_of_others_have_their_own():
    assert rank_pool(2).run(_blocks, [8] * 4) == [2] * 2  # the sample has no gradient
    assert rank_pool(2).run(_blocks, [5, 6, 7, 8]) == [4] * 2


def _functions(rank: Rank) -> list[str]:
    torch._dynamo.reset()
    mesh = rank.mesh(domain=2)
    x = sf.distribute_tensor(torch.randn(2, 9), mesh, [Shard(1)], None, (9, 0))

    def split(pair, factor, *, shift):
        return {"both": (pair[0] * factor, pair[1] + shift), "total": pair[0].sum(), "n": 3}

    compiled = sf.compile(split, backend="aot_eager")
    found, expected = compiled([x, x + 1], 2.0, shift=x), split([x, x + 1], 2.0, shift=x)
    kinds = [type(value).__name__ for value in (*found["both"], found["total"], found["n"])]
    assert found["both"][0].layout is x.layout
    for a, b in zip(found["both"], expected["both"], strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    torch.testing.assert_close(found["total"], expected["total"])
    return kinds


def test_functions_of_nested_arguments_return_shards_and_plain_tensors():
    kinds = ["ShardTensor", "ShardTensor", "Tensor", "int"]
    assert rank_pool(2).run(_functions) == [kinds] * 2


def _refusal(rank: Rank) -> str:
    torch._dynamo.reset()
    x = sf.distribute_tensor(torch.randn(1, 3, 9), rank.mesh(domain=2), [Shard(1)], None, (2, 1))
    try:
        sf.compile(nn.Conv1d(3, 3, 3), backend="aot_eager")(x)
    except Exception as error:  # noqa: BLE001
        return str(error)
    return "nothing"


def test_unsupported_operations_are_refused_in_compiled_code_too():
    for text in rank_pool(2).run(_refusal):
        assert "conv1d on ShardTensor (1, 3, 9) split: dim 1 over domain as 2+1" in text
        assert "its channels (dim 1) are split" in text


def test_a_thousand_ranks_without_any():
    """The same kind of network on a fake process group of 1,024 ranks, without memory."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "thousand_ranks.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "loss and gradients have their global shapes" in run.stdout


def test_without_gradients_on_what_another_operation_returned() -> None:
    def body(rank: Rank) -> torch.Tensor:
        mesh = rank.mesh(domain=2)
        compiled = sf.compile(lambda x: x * 2, backend="aot_eager")
        x = sf.distribute_tensor(torch.arange(6.0), mesh["domain"], [Shard(0)], None, [5, 1])
        with torch.no_grad():
            return compiled(x + 1).full_tensor()

    for found in rank_pool(2).run(body):
        assert torch.equal(found, 2 * torch.arange(1, 7.0))
