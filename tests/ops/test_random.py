"""Random numbers keyed to the global index (CASE 17)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.axes import MeshAxes
from shardfield.errors import UnsupportedOperation
from shardfield.keyed import Bits
from shardfield.layout import Factor, Layout
from shardfield.parallel.compile import compile
from shardfield.testing import rank_pool

SHAPE = (2, 6, 9, 5)


def _drawn(rank, axes, splits, sizes, draw, backend=None):
    """What `draw` gives for a tensor of ones, gathered, and this rank's part of it."""
    mesh = rank.mesh(**axes)
    names = mesh.mesh_dim_names
    placements = [Shard(splits[name]) for name in names]
    x = sf.distribute_tensor(torch.ones(SHAPE), mesh, placements, None, sizes)
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        y = draw(x)
        found += [y.full_tensor(), y.to_local()]
    return found, torch.get_rng_state()


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout, in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, -3, 100, dtype=torch.int64),
    "bernoulli": lambda x: torch.bernoulli(x * 0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli_ by tensor": lambda x: x.clone().bernoulli_(torch.full(SHAPE, 0.3)),
    "normal_": lambda x: x.clone().normal_(2, 3),
    "normal": lambda x: torch.normal(x, torch.ones(5)),
    "other fills": lambda x: (
        x.clone().exponential_(2).log()
        + x.clone().log_normal_()
        + x.clone().cauchy_().atan()
        + x.clone().geometric_(0.3)
        + x.clone().random_(7)
    ),
    "rrelu": lambda x: F.rrelu(x - 2, training=True) + F.rrelu(x.clone(), 0.1, 0.9, True, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.double(), dim=0).mul(1e9).round(),
    "stochastic depth": lambda x: stochastic_depth(x, 0.4) + stochastic_depth(x, 0.4, "batch"),
    "timm's drop_path": lambda x: drop_path(x, 0.4),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
}


def stochastic_depth(x, p, mode="row"):
    """As torchvision has it: one draw for every sample, or one for all."""
    noise = torch.empty([x.shape[0] if mode == "row" else 1] + [1] * (x.ndim - 1))
    return x * noise.bernoulli_(1 - p).div_(1 - p)


def drop_path(x, p):
    """As timm has it."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x * x.new_empty(shape).bernoulli_(1 - p).div_(1 - p) + torch.rand(shape)


@pytest.mark.parametrize("name", DRAWS)
def test_case_17_same_numbers_for_every_split(name):
    draw = DRAWS[name]

    def on(world, axes, splits, sizes=None):
        return rank_pool(world).run(_drawn, axes, splits, sizes, draw)

    (expected, state), *_ = on(1, {"domain": 1}, {"domain": 2})
    assert not torch.equal(expected[0], expected[2]), "two calls give the same numbers"
    for world, axes, splits, sizes in [
        (2, {"domain": 2}, {"domain": 2}, None),
        (2, {"domain": 2}, {"domain": 3}, None),
        (2, {"domain": 2}, {"domain": 1}, [0, 6]),
        (4, {"domain": 4}, {"domain": 2}, [1, 0, 6, 2]),
        (4, {"h": 2, "w": 2}, {"h": 2, "w": 3}, None),
    ]:
        for found, left in on(world, axes, splits, sizes):
            assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
            assert torch.equal(left, state), "the generator's state depends on the split"


def _shards(rank):
    mesh = rank.mesh(domain=2)
    x = sf.ones(64, 64, mesh=mesh, placements=[Shard(0)])
    return F.dropout(x, 0.5).to_local()


def test_case_17_shards_differ():
    first, second = rank_pool(2).run(_shards)
    assert not torch.equal(first, second)
    assert 0.45 < (first == second).float().mean() < 0.55


def _gradient(rank, checkpointed):
    mesh = rank.mesh(domain=2)
    x = sf.ones(8, 8, mesh=mesh, placements=[Shard(0)]).requires_grad_()
    layer = nn.Dropout(0.5)

    def block(x):
        return layer(torch.sin(layer(x)))

    torch.manual_seed(1)
    if checkpointed:
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    else:
        y = block(x)
    y.backward(gradient=torch.ones_like(y))
    return y.full_tensor().detach(), x.grad.full_tensor()


def test_checkpointing_recomputes_the_same_mask():
    for plain, recomputed in zip(
        rank_pool(2).run(_gradient, False), rank_pool(2).run(_gradient, True), strict=True
    ):
        assert torch.equal(plain[0], recomputed[0]) and torch.equal(plain[1], recomputed[1])
        assert torch.equal(plain[0] == 0, plain[1] * plain[0] == 0)


def _compiled(rank, backend):
    mesh = rank.mesh(domain=2)
    x = sf.ones(9, 40, mesh=mesh, placements=[Shard(0)]).requires_grad_()

    def noisy(x):
        return F.dropout(x, 0.3) + torch.randn_like(x)

    torch.manual_seed(1)
    expected = noisy(x)
    torch.manual_seed(1)
    y = compile(noisy, fullgraph=True, backend=backend)(x)
    y.backward(gradient=torch.ones_like(y))
    return y.to_local().detach(), expected.to_local().detach(), x.grad.to_local()


def test_compiled_draws_are_the_eager_ones():
    for compiled, eager, grad in rank_pool(2).run(_compiled, "aot_eager"):
        assert torch.equal(compiled, eager)
        assert set(grad.unique().tolist()) <= {0.0, torch.tensor(1 / 0.7).item()}


def _kept(rank):
    mesh = rank.mesh(domain=1)
    x = sf.ones(32, 64, mesh=mesh, placements=[Shard(0)]).requires_grad_()
    kept = []

    def pack(tensor):
        kept.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.dropout(x, 0.3)
    return kept


def test_only_a_bool_mask_is_kept():
    assert rank_pool(1).run(_kept)[0] == [(torch.bool, 32 * 64)]


def _edges(rank):
    mesh = rank.mesh(domain=1)
    x = sf.ones(4, 64, mesh=mesh, placements=[Shard(0)])
    state = torch.get_rng_state()
    assert F.dropout(x, 0.5, training=False) is x and F.dropout(x, 0.0) is x
    assert torch.equal(torch.get_rng_state(), state)
    assert F.dropout(x, 1.0).to_local().eq(0).all()
    assert F.dropout3d(sf.ones(2, 3, 4, 5, mesh=mesh, placements=[Shard(1)])).shape == (2, 3, 4, 5)
    with pytest.raises(ValueError, match="dropout probability"):
        F.dropout(x, 1.5)
    with pytest.raises(UnsupportedOperation, match="default generator"):
        x.normal_(generator=torch.Generator())
    made = sf.rand(4, 6, mesh=mesh, placements=[Shard(1)], dtype=torch.float64)
    assert made.dtype == torch.float64 and made.shape == (4, 6)
    assert sf.randn(3, mesh=mesh, placements=[Shard(0)], requires_grad=True).requires_grad
    half = torch.rand_like(sf.ones(300, 300, mesh=mesh, placements=[Shard(0)]).bfloat16())
    assert half.to_local().max() < 1


def _gumbel(rank):
    mesh = rank.mesh(domain=2)
    x = sf.randn(40, 7, mesh=mesh, placements=[Shard(0)]).requires_grad_()
    torch.manual_seed(3)
    soft = F.gumbel_softmax(x, 0.7)
    torch.manual_seed(3)
    hard = F.gumbel_softmax(x, 0.7, hard=True)
    weights = torch.rand(7)
    grads = [torch.autograd.grad((y * weights).sum(), x)[0].to_local() for y in (soft, hard)]
    return [y.detach().to_local() for y in (soft, hard)], grads


def test_hard_gumbel_softmax_chooses_the_largest_and_keeps_the_gradient():
    for (soft, hard), grads in rank_pool(2).run(_gumbel):
        assert torch.equal(hard.argmax(1), soft.argmax(1))
        assert torch.allclose(hard, F.one_hot(soft.argmax(1), 7).float(), atol=1e-6)
        torch.testing.assert_close(grads[0], grads[1])


def test_edges():
    rank_pool(1).run(_edges)


def _bits(key, shape=(500, 400), stream=0):
    axes = MeshAxes(("domain",), (1,), (0,))
    bits = Bits(Layout(axes, [(Factor(n),) for n in shape]), torch.tensor(key))
    return bits.hashed(slice(0, bits.row_keys[0].shape[0]), stream).flatten()


def _ones(bits):
    """Share of ones at each of the 32 places."""
    return torch.stack([(bits >> place & 1).double().mean() for place in range(32)])


# Shares of 200,000 fair bits are normal with this deviation; 5 of them hold for all places.
_LIMIT = 5 * 0.5 / math.sqrt(200_000)


@pytest.mark.parametrize("key", [0, 1, -1, 1 << 40])
def test_bits_are_fair_and_independent(key):
    bits = _bits(key)
    others = [_bits(key + 1), _bits(key, stream=1), _bits(key ^ (1 << 62)), bits.roll(1)]
    others += [bits.roll(400), bits.roll(401)]
    assert (_ones(bits) - 0.5).abs().max() < _LIMIT
    for other in others:
        assert (_ones(bits ^ other) - 0.5).abs().max() < _LIMIT


def test_distributions():
    mean, third, count = 0.0, 1 / 3, 200_000
    values = rank_pool(1).run(_large)[0]
    uniform, normal = values
    histogram = torch.histc(uniform, 100, 0, 1)
    chi = ((histogram - count / 100) ** 2 / (count / 100)).sum().item()
    assert 50 < chi < 160  # 99 degrees of freedom: outside once in 10,000
    assert abs((uniform**2).mean() - third) < 0.004
    assert abs(normal.mean() - mean) < 0.012 and abs(normal.var() - 1) < 0.02
    assert abs((normal**4).mean() - 3) < 0.12 and abs((normal**3).mean()) < 0.05


def _large(rank):
    mesh = rank.mesh(domain=1)
    torch.manual_seed(3)
    given = {"mesh": mesh, "placements": [Shard(0)], "dtype": torch.float64}
    return [make(500, 400, **given).to_local().flatten() for make in (sf.rand, sf.randn)]
