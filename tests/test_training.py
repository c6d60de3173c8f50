"""What training loops are made of: each does on shards what it does in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import shardfield as sf
from shardfield.testing import Rank, rank_pool

torch.manual_seed(0)
X, TARGET = torch.randn(2, 3, 16, 8).double(), torch.randn(2, 2, 16, 8).double()
SIZES = [9, 7]


class UNet(nn.Module):
    """One level, with BatchNorm and a skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.SiLU())
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.leave = nn.Conv2d(8, 2, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.enter(x)
        return self.leave(torch.cat((first, self.up(self.down(first))), 1))


Shared = Callable[[torch.Tensor], torch.Tensor]


def same_on_shards(train: Callable[[Shared], Any], world: int = 2) -> None:
    """`train` gives the same tensors whether `shared`, its argument, shards what it is given."""

    def on(rank: Rank) -> list[torch.Tensor]:
        mesh = rank.mesh(domain=world)
        sizes = SIZES if world == 2 else None

        def shared(whole: torch.Tensor) -> torch.Tensor:
            return sf.distribute_tensor(whole.clone(), mesh, [Shard(2)], 0, sizes)

        found = train(shared)
        return [x.full_tensor() if isinstance(x, sf.ShardTensor) else x for x in found]

    expected = train(torch.clone)
    for found in rank_pool(world).run(on):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_grad_scaler_skips_the_step_on_all_ranks_when_one_finds_an_infinity():
    infinite = torch.ones(TARGET.shape).double()
    infinite[0, 0, -1, 0] = float("inf")  # a row of the last rank

    def train(shared):
        net, field = UNet(), shared(X).requires_grad_()
        optimizer = torch.optim.SGD([*net.parameters(), field], 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            output = net(field)
            if step == 1:
                output = output * shared(infinite)
            scaler.scale(F.mse_loss(output, shared(TARGET))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([*net.parameters(), field], 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        # Alone, so that no other gradient tells the other ranks.
        field.square().mul(shared(X).where(shared(X) < X.max(), float("inf"))).sum().backward()
        alone = torch.optim.SGD([field], 0.1)
        scaler.step(alone)
        scaler.update()
        return [*net.parameters(), field, torch.tensor(scaler.get_scale())]

    same_on_shards(train)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, foreach=True),
}


def test_optimizers_schedules_and_saved_state():
    def train(shared):
        found = []
        for make in OPTIMIZERS.values():
            torch.manual_seed(2)
            net, field = nn.Conv2d(3, 2, 3, padding=1).double(), shared(X).requires_grad_()
            optimizer = make([*net.parameters(), field])
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
            for _ in range(3):
                F.mse_loss(net(field), shared(TARGET)).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found += [net.weight, field]
        return found

    same_on_shards(train)


@pytest.mark.parametrize("foreach", [None, True])
def test_gradients_are_clipped_and_flattened(foreach):
    def train(shared):
        net, field = UNet(), shared(X).requires_grad_()
        leaves = [field, *net.parameters()]
        (net(field) - shared(TARGET)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(leaves, 3.0, foreach=foreach)
        largest = nn.utils.get_total_norm([p.grad for p in leaves], float("inf"), foreach=foreach)
        nn.utils.clip_grad_value_(leaves, 0.1, foreach=foreach)
        flat = nn.utils.parameters_to_vector(leaves)
        return [norm, largest, flat, *[p.grad for p in leaves]]

    same_on_shards(train)


def test_averaged_models_and_their_batch_statistics():
    def train(shared):
        net = UNet()
        decay = swa_utils.get_ema_multi_avg_fn(0.9)
        moving = swa_utils.AveragedModel(net, multi_avg_fn=decay, use_buffers=True)
        mean = swa_utils.AveragedModel(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            F.mse_loss(net(shared(X)), TARGET).backward()
            optimizer.step()
            optimizer.zero_grad()
            moving.update_parameters(net)
            mean.update_parameters(net)
        swa_utils.update_bn([shared(X), shared(2 * X)], mean)
        return [moving(shared(X)), mean(shared(X)), *moving.buffers(), *mean.buffers()]

    same_on_shards(train)


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight + weight.flip(-1)) / 2


def test_derived_and_substituted_parameters():
    def train(shared):
        net = UNet()
        nn.utils.parametrizations.weight_norm(net.enter[0])
        nn.utils.parametrize.register_parametrization(net.leave, "weight", Symmetric())
        F.mse_loss(net(shared(X)), shared(TARGET)).backward()
        given = {name: (1.1 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
        loss = F.mse_loss(torch.func.functional_call(net, given, (shared(X),)), shared(TARGET))
        return [*gradients(net), *torch.autograd.grad(loss, [*given.values()])]

    same_on_shards(train)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_unet_with_batch_norm_accumulates_the_same_gradients(reentrant):
    def train(shared):
        net, field = UNet(), shared(X).requires_grad_()
        for part in (field, 2 * field):
            first = checkpoint(net.enter, part, use_reentrant=reentrant)
            deep = checkpoint(lambda x: net.up(net.down(x)), first, use_reentrant=reentrant)
            (F.mse_loss(net.leave(torch.cat((first, deep), 1)), shared(TARGET)) / 2).backward()
        return [field.grad, *gradients(net), *net.buffers()]

    same_on_shards(train)


def test_hooks_see_and_change_what_they_do_in_one_process():
    def train(shared):
        net, field, seen = UNet(), shared(X).requires_grad_(), []
        net.enter.register_forward_hook(lambda module, given, output: 2 * output)
        net.down.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        net.up.register_full_backward_hook(
            lambda module, inward, outward: seen.append(outward[0]) or (3 * inward[0],)
        )
        net.leave.register_full_backward_pre_hook(lambda module, outward: (2 * outward[0],))
        net.leave.weight.register_hook(lambda grad: 5 * grad)
        net.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        F.mse_loss(net(field), shared(TARGET)).backward()
        return [field.grad, *gradients(net), *seen]

    same_on_shards(train)


METRICS = {
    "mse": torchmetrics.MeanSquaredError,
    "psnr": lambda **how: torchmetrics.image.PeakSignalNoiseRatio(data_range=2.0, **how),
    "ssim": lambda **how: torchmetrics.image.StructuralSimilarityIndexMeasure(
        data_range=2.0, **how
    ),
}


def test_torchmetrics_of_shards():
    """Sums are global already: the metric must not add the ranks' up again."""
    labels = TARGET.argmax(1)

    def train(shared):
        found = []
        for make in METRICS.values():
            metric = make(sync_on_compute=False)
            metric.update(shared(TARGET + 0.1), shared(TARGET))
            found.append(metric.compute())
        r2 = torchmetrics.R2Score(sync_on_compute=False)
        r2.update(shared(TARGET + 0.1).flatten(), shared(TARGET).flatten())
        accuracy = torchmetrics.classification.MulticlassAccuracy(2, sync_on_compute=False)
        accuracy.update(shared(TARGET), labels)
        return [*found, r2.compute(), accuracy.compute(), accuracy.tp]

    same_on_shards(train)
