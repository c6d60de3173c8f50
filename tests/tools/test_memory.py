"""kept_bytes against what plain torch keeps, counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardfield.tools.memory import kept_bytes

FLOAT = 4


def test_a_chain_of_exponentials_keeps_each_result() -> None:
    x = torch.ones(1000, requires_grad=True)
    assert kept_bytes(lambda: x.exp().exp().exp()).kept == 3 * 1000 * FLOAT


def test_what_nobody_needs_is_not_kept_but_counts_in_the_peak() -> None:
    x = torch.ones(1000)
    kept, peak = kept_bytes(lambda: x.exp().exp())
    assert (kept, peak) == (1000 * FLOAT, 2 * 1000 * FLOAT)


def test_memory_released_that_was_there_before_counts_as_nothing() -> None:
    held = [torch.ones(5000)]
    assert kept_bytes(lambda: [torch.ones(1000), held.clear()]).kept == 1000 * FLOAT


@pytest.mark.parametrize("depth", [1, 4])
def test_conv_relu_stack_keeps_the_output_of_each_relu(depth: int) -> None:
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(depth)]
    network = nn.Sequential(*(layer for pair in layers for layer in pair))
    x = torch.randn(1, 8, 20, 24)
    # ReLU keeps its result, which is what the next convolution keeps too; a convolution's own
    # result is needed by nobody.
    assert kept_bytes(lambda: network(x)).kept == depth * x.numel() * FLOAT


def test_conv_group_norm_gelu_keeps_three_tensors_and_the_statistics() -> None:
    network = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
    x = torch.randn(3, 8, 20, 24)
    statistics = 2 * 3 * 2 * FLOAT
    assert kept_bytes(lambda: network(x)).kept == 3 * x.numel() * FLOAT + statistics


def test_concatenated_halos_are_seen() -> None:
    convolution = nn.Conv2d(8, 8, 3, padding=(0, 1))
    x = torch.randn(1, 8, 20, 24)
    row = torch.zeros(1, 8, 1, 24)
    kept = kept_bytes(lambda: convolution(torch.cat([row, x, row], dim=2))).kept
    assert kept == (8 * 22 * 24 + x.numel()) * FLOAT


def test_checkpointing_keeps_the_output_and_the_random_state() -> None:
    network = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
    x = torch.randn(1, 8, 20, 24)
    allocated = kept_bytes(lambda: checkpoint(network, x, use_reentrant=False))
    assert allocated.kept == x.numel() * FLOAT + torch.get_rng_state().numel()
    assert allocated.peak >= 2 * x.numel() * FLOAT


def test_a_whole_step_keeps_the_gradients() -> None:
    network = nn.Linear(64, 32)
    x = torch.randn(128, 64)

    def step() -> None:
        F.mse_loss(network(x), torch.zeros(128, 32)).backward()

    kept, peak = kept_bytes(step)
    assert kept == (64 * 32 + 32) * FLOAT
    assert peak >= 128 * 32 * FLOAT


def test_a_view_costs_nothing() -> None:
    x = torch.randn(100, 10)
    assert kept_bytes(lambda: (x.view(10, 100), x[:50], x.t())) == (0, 0)


def test_nothing_survives_the_measurement() -> None:
    x = torch.ones(1000, requires_grad=True)
    first = kept_bytes(lambda: x.exp())
    assert kept_bytes(lambda: x.exp()) == first
