"""Tensor parallelism: plans derived from modules, and training that equals one process."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardfield as sf
from shardfield.axes import MeshAxes
from shardfield.comm.collectives import record_traffic
from shardfield.layout import balanced
from shardfield.parallel.derive import derive_plan
from shardfield.parallel.tensor_parallel import split_parameters
from shardfield.parallel.tensor_plan import Split, TensorPlan
from shardfield.testing import rank_pool
from shardfield.tools.bench.networks import TensorBlock
from shardfield.tools.memory import kept_bytes

WIDTH, HEADS, ROWS, SAMPLES, VOCABULARY = 12, 3, 7, 4, 23


class Block(nn.Module):
    """A transformer block: separate or fused projections, a gated MLP fused or not."""

    def __init__(self, fused: bool, heads: int = HEADS, key_heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.key_heads, self.fused = heads, key_heads, fused
        self.width = WIDTH // HEADS
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        keys = key_heads * self.width
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * heads * self.width)
        else:
            self.q = nn.Linear(WIDTH, heads * self.width)
            self.k, self.v = nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.out = nn.Linear(heads * self.width, WIDTH)
        self.gate = nn.Linear(WIDTH, (2 if fused else 1) * 20)
        self.up = None if fused else nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x):
        y = self.first(x)
        b, n, _ = y.shape
        if self.fused:
            parts = self.qkv(y).reshape(b, n, 3, self.heads, self.width)
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (
                part(y).view(b, n, -1, self.width).transpose(1, 2)
                for part in (self.q, self.k, self.v)
            )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.key_heads)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, -1))
        y = self.second(x)
        if self.up is None:
            gate, up = self.gate(y).chunk(2, dim=-1)
        else:
            gate, up = self.gate(y), self.up(y)
        return x + self.down(F.silu(gate) * up)


class Tied(nn.Module):
    """Tokens in, their logits out, one table for both."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(fused), Block(fused))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)))


def made(build, *args):
    torch.manual_seed(0)
    return build(*args).double()


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SAMPLES, ROWS), generator=generator)


def activations() -> torch.Tensor:
    return torch.randn(SAMPLES, ROWS, WIDTH, dtype=torch.float64)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, sf.ShardTensor) else detached


# Plans


def extents(plan: TensorPlan, name: str) -> tuple:
    split = plan.splits[name]
    return split.dim, split.outer, tuple(n * split.inner for n in split.extents)


@pytest.mark.parametrize("fused", [False, True])
def test_heads_are_dealt_out_whole(fused: bool) -> None:
    plan = derive_plan(made(Block, fused), (activations(),), {}, 2)
    first = ["qkv.weight", "qkv.bias"] if fused else [f"{n}.{p}" for n in "qkv" for p in PARTS]
    for name in first:
        assert extents(plan, name) == (0, 3 if fused else 1, (8, 4))
    assert extents(plan, "out.weight") == (1, 1, (8, 4))
    assert extents(plan, "gate.weight") == (0, 2 if fused else 1, (10, 10))
    assert extents(plan, "down.weight") == (1, 1, (10, 10))
    assert len(plan.splits) == (6 if fused else 12)  # norms and summed biases are whole


PARTS = ("weight", "bias")


def test_key_heads_go_with_their_query_heads_or_stay_whole() -> None:
    model = made(Block, False, 6, 2)
    plan = derive_plan(model, (activations(),), {}, 2)
    assert extents(plan, "q.weight") == (0, 1, (12, 12))
    assert extents(plan, "k.weight") == (0, 1, (4, 4))
    plan = derive_plan(model, (activations(),), {}, 4)  # fewer key heads than ranks
    assert extents(plan, "q.weight") == (0, 1, (8, 8, 4, 4))
    assert "k.weight" not in plan.splits
    assert "v.bias" not in plan.splits


def test_more_ranks_than_heads_split_the_mlp_alone() -> None:
    plan = derive_plan(made(Block, True), (activations(),), {}, 4)
    assert sorted({name.partition(".")[0] for name in plan.splits}) == ["down", "gate"]


def test_torch_s_own_attention_is_split_by_heads() -> None:
    layer = made(nn.TransformerEncoderLayer, WIDTH, HEADS, 20, 0.1)
    plan = derive_plan(layer, (activations(),), {}, 2)
    assert extents(plan, "self_attn.in_proj_weight") == (0, 3, (8, 4))
    assert extents(plan, "self_attn.out_proj.weight") == (1, 1, (8, 4))
    assert extents(plan, "linear1.weight") == (0, 1, (10, 10))
    assert layer.training


def test_pairs_of_convolutions_are_split_by_whole_groups_of_the_norm_between() -> None:
    pair = nn.Sequential(
        nn.Conv2d(4, 12, 3, stride=2), nn.GroupNorm(3, 12), nn.GELU(), nn.ConvTranspose2d(12, 4, 2)
    )
    plan = derive_plan(pair, (torch.ones(2, 4, 9, 9),), {}, 2)
    assert extents(plan, "0.weight") == extents(plan, "0.bias") == (0, 1, (8, 4))
    assert extents(plan, "3.weight") == (0, 1, (8, 4))
    assert "3.bias" not in plan.splits


def test_a_tied_table_is_split_by_rows_under_both_its_names() -> None:
    plan = derive_plan(made(Tied), (tokens(0),), {}, 2)
    assert extents(plan, "table.weight") == extents(plan, "head.weight") == (0, 1, (12, 11))


class Pooled(nn.Module):
    """As many positions as features: the last map has the shape of their table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 8), nn.Embedding(8, 8)
        self.pool = nn.Linear(8, 8)

    def forward(self, ids):
        return self.pool(self.words(ids) + self.places(torch.arange(ids.shape[1])))


def test_a_table_of_positions_is_no_vocabulary() -> None:
    assert not derive_plan(Pooled(), (torch.zeros(2, 8, dtype=torch.int64),), {}, 2).splits


def test_what_flows_on_whole_is_not_split() -> None:
    chain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    assert not derive_plan(chain, (torch.ones(2, 8),), {}, 2).splits


def test_a_plan_is_printed_changed_and_kept(tmp_path) -> None:
    plan = derive_plan(made(Block, True), (activations(),), {}, 2)
    lines = [" ".join(line.split()) for line in str(plan).splitlines()]
    assert "qkv.weight 36x12 dim 0: 3 x (2+1) x 4" in lines
    assert "first.weight 12 whole" in lines
    plan.save(tmp_path / "plan.json")
    assert TensorPlan.load(tmp_path / "plan.json") == plan
    changed = plan.with_rules({"gate.*": None, "down.weight": None})
    assert set(plan.splits) - set(changed.splits) == {"gate.weight", "gate.bias", "down.weight"}
    assert changed.with_rules({"gate.bias": Split(0, 2, 20, 1)}).splits["gate.bias"].outer == 2
    with pytest.raises(sf.LayoutError, match="matches no parameter"):
        plan.with_rules({"nobody.*": None})
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(sf.LayoutError, match="the file is no plan"):
        TensorPlan.load(tmp_path / "other.json")


def test_a_plan_that_does_not_fit_is_refused() -> None:
    mesh = MeshAxes(("tensor",), (2,), (0,), ("",))
    model = made(Block, True)
    for splits, message in (
        ({"nobody": Split(0, 1, 8, 1)}, "no parameter of that name"),
        ({"down.weight": Split(1, 1, 21, 1)}, "outer x units x inner"),
        ({"down.weight": Split(1, 1, 20, 1, (9, 9))}, "the extents add up"),
    ):
        with pytest.raises(sf.LayoutError, match=message):
            split_parameters(model, TensorPlan(splits), mesh)
    tied = TensorPlan({"table.weight": Split(0, 1, 23, 1), "head.weight": Split(1, 1, 12, 1)})
    with pytest.raises(sf.LayoutError, match="two splits of the tied parameter"):
        split_parameters(made(Tied), tied, mesh)


def test_a_model_that_does_not_run_is_refused() -> None:
    with pytest.raises(sf.LayoutError, match="runs on fake tensors once"):
        derive_plan(made(Tied), (activations(),), {}, 2)


@pytest.mark.parametrize(("units", "ranks"), [(5, 4), (8, 2), (3, 3), (2, 4), (0, 2)])
def test_units_are_balanced(units: int, ranks: int) -> None:
    dealt = balanced(units, ranks)
    assert sum(dealt) == units
    assert max(dealt) - min(dealt) <= 1


# Training


def train(rank, axes: dict, fused: bool, sequence: bool, backend="", activations="keep"):
    """The largest distances of losses, gradient norms and parameters from one process."""
    mesh = sf.init_mesh(**axes)
    model, alone = made(Tied, fused), made(Tied, fused)
    with torch.no_grad():
        for parameter in model.parameters():  # rank 0's count
            parameter.add_(rank.rank)
    replicas = axes.get("data", 1)
    sf.tensor_parallel(model, mesh, example=(tokens(0),), sequence=sequence)
    held = sum(sf.ShardTensor.to_local(p).numel() for p in model.parameters() if is_split(p))
    model = sf.parallelize(model, mesh, activations=activations)
    if backend:
        model = sf.compile(model, backend=backend)
    ours, theirs = (
        torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True) for m in (model, alone)
    )
    distances = []
    for step in range(3):
        ids = tokens(step)
        mine = ids.chunk(replicas)[mesh.get_local_rank("data") if replicas > 1 else 0]
        if "domain" in axes:
            sizes = [5, 2]
            mine = sf.distribute_tensor(mine, mesh["domain"], [Shard(1)], None, sizes=sizes)
        losses = []
        for m, optimizer, x in ((model, ours, mine), (alone, theirs, ids)):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(m(x).transpose(1, 2), x))
            losses[-1].backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, alone)]
        ours.step(), theirs.step()
        loss = losses[0].detach().clone()
        if replicas > 1:
            torch.distributed.all_reduce(loss, group=mesh.get_group("data"))
        distances.append(abs(loss / replicas - losses[1]).item())
        distances.append(abs(norms[0] - norms[1]).item())
    for parameter in model.parameters():
        if is_split(parameter):  # its gradient and both moments are no larger
            state = [parameter.grad, *(ours.state[parameter][n] for n in ("exp_avg", "exp_avg_sq"))]
            assert {x.to_local().nbytes for x in state} == {parameter.to_local().nbytes}
    distances += [
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    split = sum(p.numel() for p in alone.parameters()) - sum(
        p.numel() for p in model.parameters() if not is_split(p)
    )
    return max(distances), held, split


def is_split(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, sf.ShardTensor)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, {"tensor": 3}, {"domain": 2, "tensor": 2}, {"data": 2, "tensor": 2}]
)
def test_training_equals_one_process(axes: dict, fused: bool, sequence: bool) -> None:
    ranks = 1
    for size in axes.values():
        ranks *= size
    found = rank_pool(ranks).run(train, axes, fused, sequence)
    assert max(distance for distance, _, _ in found) < 1e-10
    groups = ranks // axes["tensor"]
    assert sum(held for _, held, _ in found) == groups * found[0][2]  # all of it, once


long = partial(pytest.param, marks=pytest.mark.conformance)


@pytest.mark.parametrize(
    ("axes", "sequence", "activations", "backend"),
    [
        long({"tensor": 2}, False, "keep", "inductor"),
        ({"tensor": 2}, True, "keep", "aot_eager"),
        long({"domain": 2, "tensor": 2}, True, "recompute", "aot_eager"),
        long({"domain": 2, "tensor": 2}, False, "keep", "inductor"),
    ],
)
def test_compiled_training_equals_one_process(
    axes: dict, sequence: bool, activations: str, backend: str
) -> None:
    pool = rank_pool(2 * len(axes))
    found = pool.run(train, axes, False, sequence, backend, activations, timeout=300)
    assert max(distance for distance, _, _ in found) < 1e-10


def train_compiled_shards(rank, activations: str, sequence: bool) -> float:
    """FSDP2 opens split parameters around each compiled block."""
    mesh = sf.init_mesh(domain=2, tensor=2)
    model, alone = made(Tied), made(Tied)
    model = sf.parallelize(
        model, mesh, "shard", activations=activations, tensor_parallel="auto",
        example=(tokens(0),), sequence_parallel=sequence,
    )  # fmt: skip
    model = sf.compile(model, backend="aot_eager")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, alone)]
    distances = []
    for step in range(3):
        ids, losses = tokens(step), []
        mine = sf.distribute_tensor(ids, mesh["domain"], [Shard(1)], None, sizes=[5, 2])
        for m, optimizer, x in ((model, optimizers[0], mine), (alone, optimizers[1], ids)):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(m(x).transpose(1, 2), x))
            losses[-1].backward()
            optimizer.step()
        distances.append(abs(losses[0] - losses[1]).item())
    pairs = zip(sf.full_parameters(model).values(), alone.parameters(), strict=True)
    return max(*distances, *((p - q).abs().max().item() for p, q in pairs))


@pytest.mark.parametrize(("activations", "sequence"), [long("keep", True), ("recompute", False)])
def test_compiled_blocks_of_sharded_split_parameters(activations: str, sequence: bool) -> None:
    found = rank_pool(4).run(train_compiled_shards, activations, sequence, timeout=300)
    assert max(found) < 1e-10


def block_traffic(rank, fused: bool):
    mesh = sf.init_mesh(tensor=2)
    model = made(nn.Sequential, Block(fused), Block(fused))
    sf.tensor_parallel(model, mesh, example=(activations(),))
    x = activations().requires_grad_()
    with record_traffic() as forward:
        y = model(x * 1)
    with record_traffic() as backward:
        y.sum().backward()
    return [Counter((name, sent) for _, name, sent in t.operations) for t in (forward, backward)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_sums_twice_each_way(fused: bool) -> None:
    """Also with separate projections of queries, keys and values, and of gate and value."""
    size = 8 * SAMPLES * ROWS * WIDTH
    for counts in rank_pool(2).run(block_traffic, fused):
        assert counts == [{("all_reduce", size): 4}, {("all_reduce", size): 4}]


def token_traffic(rank, fused: bool):
    mesh = sf.init_mesh(tensor=2)
    model = made(nn.Sequential, Block(fused), Block(fused))
    sf.tensor_parallel(model, mesh, example=(activations(),), sequence=True)
    model = sf.parallelize(model, mesh)
    x = activations().requires_grad_()
    with record_traffic() as forward:
        y = model(x * 1)
    loss = y.sum()
    with record_traffic() as backward:
        loss.backward()
    counts = [Counter((name, sent) for _, name, sent in t.operations) for t in (forward, backward)]
    return y.layout.shape, y.to_local().shape, counts


@pytest.mark.parametrize("fused", [False, True])
def test_tokens_are_gathered_and_scattered_once_a_pair(fused: bool) -> None:
    """Half an all-reduce each; whole parameters wait for the bucket."""
    row, whole = 8 * SAMPLES * WIDTH, 8 * SAMPLES * ROWS * WIDTH
    for rank, (shape, local, counts) in enumerate(rank_pool(2).run(token_traffic, fused)):
        assert shape == (SAMPLES, ROWS, WIDTH)
        mine = (4, 3)[rank]
        assert local == (SAMPLES, mine, WIDTH)
        gathers, scatters = ("all_to_all", mine * row), ("all_to_all", (ROWS - mine) * row)
        # The sample is whole: the first pair gathers nothing, and uses it split and whole.
        assert counts == [
            {gathers: 3, scatters: 4},
            # What the first maps took is not kept, and gathered again.
            {gathers: 4 + 3, scatters: 3, ("all_reduce", whole): 2},
        ]


def token_layout(rank, params: str, compiled: bool) -> tuple:
    mesh = sf.init_mesh(domain=1, tensor=2)
    model = made(nn.Sequential, Block(fused=True))
    model = sf.parallelize(
        model, mesh, params, tensor_parallel="auto", example=(activations(),),
        sequence_parallel=True,
    )  # fmt: skip
    y = (sf.compile(model, backend="aot_eager") if compiled else model)(activations())
    y.sum().backward()
    return y.layout.axes(1), y.layout.extents(1)


@pytest.mark.parametrize("params", ["replicate", "shard"])
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_are_shared_out_wherever_parameters_live(params: str, compiled: bool) -> None:
    """Equal results prove nothing here: without it, all ranks would compute all tokens."""
    for axes, extents in rank_pool(2).run(token_layout, params, compiled):
        assert axes[-1] == "tensor"
        assert extents == (4, 3)


class Dropping(nn.Module):
    """Dropout between pairs, inside of them and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, HEADS, 20, 0.3, batch_first=True) for _ in "ab")
        )

    def forward(self, x):
        return self.layers(F.dropout(x, 0.2, self.training))


def dropped(rank, sequence: bool) -> tuple[list[float], list[float]]:
    mesh = sf.init_mesh(tensor=rank.world_size, seed=3)
    model, x = made(Dropping), activations()
    sf.tensor_parallel(model, mesh, example=(x,), sequence=sequence)
    model = sf.parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.linspace(-1, 1, x.numel()).double().view(x.shape), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return (
        losses,
        [w.sum().item() for w in sf.full_parameters(model).values()],
        model(x).square().mean().item(),
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_does_not_depend_on_the_number_of_tensor_ranks(sequence: bool) -> None:
    two, three = rank_pool(2).run(dropped, sequence), rank_pool(3).run(dropped, sequence)
    losses, sums, quiet = two[0]
    for other, weights, evaluated in (*two, *three):
        assert other == pytest.approx(losses, abs=1e-10)
        assert weights == pytest.approx(sums, abs=1e-10)
        assert evaluated == pytest.approx(quiet, abs=1e-10)
    assert abs(losses[-1] - quiet) > 1e-3


def kept_by_blocks(rank, blocks: int) -> list[int]:
    """Bytes after a forward: of one process, of tensor ranks, of those that share out tokens."""
    mesh, kept = sf.init_mesh(tensor=2), []
    x = torch.randn(2, 64, 48)
    for way in (None, False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(TensorBlock(48, 8) for _ in range(blocks)))
        if way is not None:
            sf.tensor_parallel(model, mesh, example=(x,), sequence=way)
            model = sf.parallelize(model, mesh)
        for _ in range(2):  # DDP makes its buckets, and makes them anew
            model(x).sum().backward()
        kept.append(kept_bytes(partial(model, x)).kept)
    return kept


def test_a_block_keeps_its_share_of_tokens() -> None:
    """What pairs take and norms read is whole on tensor ranks otherwise."""
    two, four = (rank_pool(2).run(kept_by_blocks, blocks) for blocks in (2, 4))
    for few, more in zip(two, four, strict=True):
        alone, whole, shared = (b - a for a, b in zip(few, more, strict=True))
        assert shared == alone / 2
        assert whole > 0.6 * alone


class Modulated(nn.Module):
    """A diffusion transformer's block: six modulations of one condition (adaLN-zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(5, 6 * WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))

    def forward(self, x, condition):
        modulations = self.modulation(F.silu(condition)).unsqueeze(1)
        shift, scale, gate, shift2, scale2, gate2 = modulations.chunk(6, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


def modulated(rank, axes: dict, sequence: bool) -> tuple[list[str], float]:
    mesh, inputs = sf.init_mesh(**axes), (activations(), torch.ones(SAMPLES, 5).double())
    model, alone = made(Modulated), made(Modulated)
    plan = sf.tensor_parallel(model, mesh, example=inputs, sequence=sequence)
    model = sf.parallelize(model, mesh)
    x, condition = (torch.linspace(-1, 1, t.numel()).double().view(t.shape) for t in inputs)
    mine = x
    if "domain" in axes:
        mine = sf.distribute_tensor(x, mesh["domain"], [Shard(1)], None, sizes=[6, 1])
    losses = [model(mine, condition).square().mean(), alone(x, condition).square().mean()]
    for loss in losses:
        loss.backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    wrong = max((whole(p.grad) - q.grad).abs().max().item() for p, q in pairs)
    return sorted(plan.splits), max(wrong, abs(losses[0] - losses[1]).item())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"domain": 2, "tensor": 2}], ids=str)
def test_modulations_act_on_what_is_whole_or_split_by_tokens(axes: dict, sequence: bool) -> None:
    for names, wrong in rank_pool(2 * len(axes)).run(modulated, axes, sequence):
        assert names == [
            *(f"attention.in_proj_{kind}" for kind in ("bias", "weight")),
            "attention.out_proj.weight",
            "mlp.0.bias",
            "mlp.0.weight",
            "mlp.2.weight",
        ]
        assert wrong < 1e-12


def halves(rank):
    """Weights gathered from four tensor ranks, and their gradients."""
    mesh = sf.init_mesh(tensor=4)
    model, alone = made(Block, True, 8), made(Block, True, 8)
    sf.tensor_parallel(model, mesh, example=(activations(),))
    x = torch.linspace(-1, 1, SAMPLES * ROWS * WIDTH).double().view(SAMPLES, ROWS, WIDTH)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), [model.gate.weight])
    (expected,) = torch.autograd.grad(alone(x).square().sum(), [alone.gate.weight])
    moved = copy.deepcopy(model).to(torch.float32)
    return [
        (whole(model.gate.weight) - alone.gate.weight).abs().max().item(),
        (whole(model.qkv.weight) - alone.qkv.weight).abs().max().item(),
        (gradient.full_tensor() - expected).abs().max().item(),
        {str(p.dtype) for p in moved.parameters()},
        all(isinstance(p, nn.Parameter) for p in moved.parameters()),
        {str(p.dtype) for p in model.parameters()},
    ]


def test_case_31_fused_halves_keep_their_order() -> None:
    for gate, fused, gradient, moved, parameters, kept in rank_pool(4).run(halves):
        assert gate == fused == 0
        assert gradient < 1e-12
        assert (moved, kept, parameters) == ({"torch.float32"}, {"torch.float64"}, True)


def generated(rank, build) -> tuple[bool, int]:
    mesh = sf.init_mesh(tensor=2)
    model, alone = made(build).eval(), made(build).eval()
    ids = tokens(0)
    sf.tensor_parallel(model, mesh, example={"input_ids": ids})
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = alone.generate(ids, **options)
    with record_traffic() as traffic:
        found = model.generate(ids, **options)
    return torch.equal(found, expected), len(traffic.collectives)


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=1, n_head=3)
    )


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=20, num_hidden_layers=1,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=16,
        )
    )  # fmt: skip


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 12)

    def forward(self, x):
        y = self.first(x)
        return y + self.second(F.gelu(y))


def test_features_that_are_used_elsewhere_too_are_not_split() -> None:
    assert not derive_plan(Skipping(), (torch.ones(2, 8),), {}, 2).splits


@pytest.mark.parametrize("build", [gpt2, llama])
def test_generation_with_a_cache(build) -> None:
    for equal, collectives in rank_pool(2).run(generated, build):
        assert equal
        assert collectives > 0


def nothing_to_split(rank) -> None:
    chain, mesh = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), sf.init_mesh(tensor=2)
    with pytest.raises(sf.LayoutError, match="no weight is split"):
        sf.tensor_parallel(chain, mesh, example=(torch.ones(2, 8),))
    with pytest.raises(sf.LayoutError, match="plan is"):
        sf.tensor_parallel(chain, mesh, "always")


def test_a_model_without_pairs_is_refused() -> None:
    rank_pool(2).run(nothing_to_split)
