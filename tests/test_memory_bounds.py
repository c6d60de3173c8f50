"""Activation memory per rank: the bounds that a sharded forward promises, on small networks."""

import pytest
import torch
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.interior import interior_from
from shardfield.testing import Rank, rank_pool
from shardfield.tools.bench.keeping import Keeping, Model, measure, models
from shardfield.tools.memory import kept_bytes

SMALL = {model.name: model for model in models(scale=4, layers=3)}
LARGER = {model.name: model for model in models(scale=2)}
PACKAGES_EAGER = [("MONAI SegResNet", "eager"), ("diffusers UNet2DModel", "eager")]  # LARGER


def _measure(
    rank: Rank,
    name: str,
    mode: str,
    models: dict[str, Model] = SMALL,
    own_rows_from: int = 1 << 40,
) -> Keeping:
    with interior_from(own_rows_from):
        return measure(models[name], mode, sf.init_mesh())


# Less than this would mean that something else than the same was measured. Compiled code recomputes
# pointwise operations, and plain torch's keeps what ours recomputes with the halos.
LEAST = {"eager": 0.45, "save_on_cpu": 0.45, "checkpointed": 0.4, "compiled": 0.25}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (model.name, mode)
        for model in SMALL.values()
        for mode in model.modes
        if (model.name, mode) not in PACKAGES_EAGER
    ],
)
def test_a_rank_of_two_keeps_half_and_its_halos(name: str, mode: str) -> None:
    for row in rank_pool(2).run(_measure, name, mode):
        assert row.slabs > 0
        assert LEAST[mode] * row.one <= row.kept <= row.bound


@pytest.mark.parametrize("mode", ["eager", "checkpointed", "save_on_cpu"])
@pytest.mark.parametrize("name", ["conv-ReLU stack", "MONAI UNet"])
def test_convolutions_that_take_own_rows_first_keep_the_same(name: str, mode: str) -> None:
    for row in rank_pool(2).run(_measure, name, mode, SMALL, 0):
        assert LEAST[mode] * row.one <= row.kept <= row.bound


def test_convolutions_that_take_own_rows_first_hold_no_copies() -> None:
    copied = rank_pool(2).run(_measure, "conv-ReLU stack", "eager")
    for row, halos in zip(
        rank_pool(2).run(_measure, "conv-ReLU stack", "eager", SMALL, 0), copied, strict=True
    ):
        copy = halos.peak - row.peak
        assert copy >= row.one // 3 // 2  # of the block of one of three layers


@pytest.mark.parametrize(("name", "mode"), PACKAGES_EAGER)
def test_networks_of_other_packages_keep_half(name: str, mode: str) -> None:
    for row in rank_pool(2).run(_measure, name, mode, LARGER):
        assert LEAST[mode] * row.one <= row.kept <= min(0.53 * row.one, row.bound)


@pytest.mark.parametrize("ranks", [3, 4])
def test_memory_falls_with_the_number_of_ranks(ranks: int) -> None:
    for row in rank_pool(ranks).run(_measure, "conv-ReLU stack", "eager"):
        largest = -(-SMALL["conv-ReLU stack"].shape[2] // ranks)
        share = largest / SMALL["conv-ReLU stack"].shape[2]
        assert row.kept <= (share + 0.02) * row.one + row.slabs


def _distribute(rank: Rank) -> tuple[int, int, int]:
    mesh = sf.init_mesh()
    whole = torch.randn(1, 4, 64, 32)
    made = []

    def distribute() -> None:
        made.append(sf.distribute_tensor(whole, mesh["domain"], [Shard(2)]))

    # torch's broadcast of an object may be released unseen.
    kept = min(kept_bytes(distribute).kept for _ in range(5))
    local = made[0].to_local()
    return kept, local.untyped_storage().nbytes(), local.numel() * 4


def test_distribute_tensor_keeps_the_shard_alone() -> None:
    """CASES 34."""
    for kept, storage, shard in rank_pool(4).run(_distribute):
        assert kept == storage == shard == 4 * 16 * 32 * 4
