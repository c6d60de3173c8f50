"""Tokens of images: patches over cuts, position embeddings, class and register tokens, pooling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.testing import Rank, parity, rank_pool

IMAGE = torch.randn(2, 3, 12, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(1))
ROWS = [(5, 7), (1, 11), (0, 12), (5, 1, 6), (7, 0, 5), (1, 2, 0, 9)]
SIZES = [(5, 4), (1, 8), (9, 0), (4, 0, 5), (1, 1, 7), (3, 0, 5, 1)]


class Encoder(nn.Module):
    """Patches, a class token, registers and positions before a layer of attention; two heads."""

    def __init__(self, patch: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 8, patch, patch)
        count = (12 // patch[0]) * (8 // patch[1])
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.registers = nn.Parameter(torch.randn(1, 3, 8))
        self.positions = nn.Parameter(torch.randn(1, count + 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        x = torch.cat([x[:, :1], self.registers.expand(len(x), -1, -1), x[:, 1:]], 1)
        x = self.layer(x)
        return x[:, 0], x[:, 4:].mean(1), x[:, 1:4], x[:, 4:]


@pytest.mark.parametrize("patch", [(4, 2), (3, 4)])
def test_tokens_of_patches_that_lie_over_cuts(patch):
    encoder = Encoder(patch)
    parity(encoder, [IMAGE], [2], sizes=ROWS, dtype=torch.float64, compiled=patch == (4, 2))
    parity(encoder, [IMAGE], [3], (2, 3), [(3, 5), (1, 0, 7)], dtype=torch.float64)
    grid = [{"h": (5, 7), "w": (1, 7)}, {"h": (12, 0), "w": (3, 5)}]
    parity(encoder, [IMAGE], [{2: "h", 3: "w"}], (4,), grid, dtype=torch.float64)


def test_patches_by_a_view():
    def patches(x):
        x = x.reshape(2, 3, 4, 3, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(2, 8, 36)
        return x * x

    parity(patches, [IMAGE], [2], sizes=ROWS, dtype=torch.float64, double=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_positions_that_are_split_as_the_tokens_are(compiled):
    """Split alike nothing moves; a class token shifts them by one row."""
    positions = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(2))

    def embedded(x, positions):
        alike = x + positions
        later = torch.cat([x.new_zeros(2, 1, 4), x], 1)[:, :9] * positions
        return alike, later, F.layer_norm(alike * positions, (4,))

    inputs = [TOKENS, positions]
    if compiled:
        parity(embedded, inputs, [1, 1], (2,), [(5, 4)], dtype=torch.float64, compiled=True)
        return
    parity(embedded, inputs, [1, 1], sizes=SIZES, dtype=torch.float64, double=True)
    parity(embedded, inputs, [1, None], sizes=SIZES, dtype=torch.float64)


def test_a_grid_of_positions_is_resized_and_flattened():
    positions = torch.randn(1, 6, 4, 3, generator=torch.Generator().manual_seed(2))

    def embedded(x, positions):
        positions = F.interpolate(positions.permute(0, 3, 1, 2), (12, 8), mode="bicubic")
        return (x + positions).flatten(2).transpose(1, 2)

    sizes = [(6, 6), (2, 10), (0, 12), (4, 2, 6)]
    parity(embedded, [IMAGE, positions], [2, 1], sizes=sizes, dtype=torch.float64)
    parity(embedded, [IMAGE, positions], [2, None], sizes=ROWS, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["mean", "weights", "blocks", "strided"])
def test_pooling_of_tokens(kind):
    def pooled(x):
        x = x * x
        if kind == "mean":
            return x[:, 1:].mean(1), x.amax(1), x[:, -1]
        if kind == "weights":
            return (x.mean(-1).softmax(1).unsqueeze(1) @ x).squeeze(1), (x * x).sum(1)
        if kind == "blocks":
            pooled = F.avg_pool1d(x.mT, 2, 2).mT, F.adaptive_avg_pool1d(x.mT, 4).mT
            return *pooled, x.unflatten(1, (3, 3)).mean(2)
        rows = x[:, 1:].transpose(1, 2).reshape(2, 4, 4, 2)
        return F.max_pool2d(rows, 2).flatten(2).transpose(1, 2)

    parity(pooled, [TOKENS], [1], sizes=SIZES, dtype=torch.float64)


class Embedded(nn.Module):
    """Tokens with learned positions, of which every rank stores its own rows only."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = nn.Parameter(positions)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.positions)


def _trained(rank: Rank | None, sizes: tuple[int, ...]) -> Tensor:
    """The positions after two steps, of one process or of ranks that store them split."""
    torch.manual_seed(0)
    positions, x = torch.randn(1, 9, 4, dtype=torch.float64), TOKENS.double()
    model = Embedded(positions).double()
    if rank is not None:
        mesh = rank.mesh(domain=rank.world_size)
        x = sf.distribute_tensor(x, mesh, [Shard(1)], None, sizes)
        stored = sf.distribute_tensor(positions, mesh, [Shard(1)], None, sizes)
        model.positions = nn.Parameter(stored)
        assert isinstance(model.positions, nn.Parameter)
        assert model.positions.to_local().shape == (1, sizes[rank.rank], 4)
        assert "positions" in dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        with record_traffic() as traffic:
            loss = (model(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
        if rank is not None:
            # The loss, the weight and the bias of `out`: positions send nothing.
            assert sorted(n for _, _, n in traffic.operations) == [8, 4 * 8, 16 * 8]
        optimizer.step()
    found = model.positions
    assert found.grad is not None
    return (found.full_tensor() if isinstance(found, sf.ShardTensor) else found).detach()


@pytest.mark.parametrize("sizes", [(5, 4), (9, 0), (1, 2, 6)])
def test_learned_positions_stored_split_train_without_communication(sizes):
    expected = _trained(None, ())
    for found in rank_pool(len(sizes)).run(_trained, sizes):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _first_rank_holds_more(rank: Rank) -> list[int]:
    mesh = rank.mesh(domain=2)
    x = sf.distribute_tensor(TOKENS, mesh, [Shard(1)], None, (5, 4))
    with record_traffic() as traffic:
        y = torch.cat([torch.zeros(2, 3, 4), x], 1)
        y = torch.cat([y, torch.zeros(2, 1, 4)], 1)
    assert not traffic.operations
    return [y.to_local().shape[1], y.shape[1]]


def test_tokens_before_and_after_stay_with_the_first_and_the_last_rank():
    assert rank_pool(2).run(_first_rank_holds_more) == [[8, 13], [5, 13]]
