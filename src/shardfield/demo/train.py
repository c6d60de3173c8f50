"""The model and the training loop: the same lines for one process and for many ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.demo.data import Volume
from shardfield.demo.measure import StepCost, measure_step, storage_bytes

MEASURED_STEP = 1  # not the first: that one also creates the optimizer's state
EXACT_STEPS = 3  # steps repeated in float64, where rounding cannot hide an error


@dataclass
class Run:
    """What one training run gave.

    Attributes:
        losses: the loss before each update.
        seconds: wall time of each step on this rank.
        cost: bytes of the measured step on this rank.
        parameters: bytes of the model's parameters, which is what averaging gradients handles.
        prediction: (1, 1, D, H, W) global, plain, on the CPU; None on all ranks but the first.
        exact: the first `EXACT_STEPS` steps once more, in float64.
    """

    cost: StepCost
    parameters: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prediction: Tensor | None = None
    exact: "Run | None" = None


def build_model() -> nn.Module:
    """MONAI's 3-D U-Net as it comes from its package, with fixed initial weights."""
    from monai.networks.nets.unet import UNet

    torch.manual_seed(0)
    return UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2))


def split(
    model: nn.Module, volume: Volume | None, mesh: DeviceMesh, sizes: list[int]
) -> tuple[nn.Module, Volume]:
    """Splits the volume along D; the model keeps its code. All that sharding adds stands here.

    Args:
        model: any module.
        volume: global tensors (1, 1, D, H, W) on the first rank; the others may have None.
        mesh: a mesh with an axis named `domain`.
        sizes: rows of D for each rank of that axis.

    Returns:
        The model, ready to train on all ranks, and the volume, of which each rank holds its rows.
    """

    def shard(x: Tensor | None) -> Tensor:
        return sf.distribute_tensor(x, mesh["domain"], [Shard(2)], sizes=sizes)

    image, target = (volume.image, volume.target) if volume is not None else (None, None)
    return sf.parallelize(model, mesh), Volume(shard(image), shard(target))


def loss_of(model: nn.Module, volume: Volume) -> Tensor:
    """Binary cross entropy of the target density t from logits z: softplus(z) - t z."""
    logits = model(volume.image)
    return (F.softplus(logits) - volume.target * logits).mean()


def train(
    model: nn.Module,
    volume: Volume,
    steps: int,
    after_step: Callable[[int, float], None] | None = None,
) -> Run:
    """Trains on one volume, whole or split: nothing below knows which.

    Args:
        model: maps an image to logits of the target.
        volume: global tensors (1, 1, D, H, W), plain or sharded.
        steps: number of updates, at least 2.
        after_step: called with the step's index and loss.

    Returns:
        Losses, times, cost, and the prediction after the last update.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.99))
    run = Run(cost=StepCost(), parameters=storage_bytes(model.parameters()))

    def forward() -> Tensor:
        return loss_of(model, volume)

    def backward(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(steps):
        started = time.perf_counter()
        if step == MEASURED_STEP:
            loss, run.cost = measure_step(forward, backward, _resident(model, volume, optimizer))
        else:
            loss = forward()
            backward(loss)
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - started)
        if after_step is not None:
            after_step(step, run.losses[-1])

    with torch.no_grad():
        prediction = torch.sigmoid(model(volume.image))
    if isinstance(prediction, sf.ShardTensor):
        prediction = prediction.full_tensor(dst=0)
    run.prediction = None if prediction is None else prediction.cpu()
    return run


def _resident(model: nn.Module, volume: Volume, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The plain local tensors that live through a step."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    tensors = [volume.image, volume.target, *model.parameters(), *state]
    return [x.to_local() if isinstance(x, sf.ShardTensor) else x for x in tensors]
