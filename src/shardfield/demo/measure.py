"""What one training step costs: bytes kept for backward, peak bytes, bytes sent."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardfield.comm import record_traffic


@dataclass(frozen=True)
class StepCost:
    """One training step, in bytes, on one rank.

    Attributes:
        kept: still allocated after the forward pass, minus before: what backward will need.
        peak: the most that was allocated at any moment, resident tensors included.
        sent: what this rank handed to the collectives of sharded operations.
        collectives: how many such collectives there were.
    """

    kept: int = 0
    peak: int = 0
    sent: int = 0
    collectives: int = 0


def measure_step(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], resident: Iterable[Tensor]
) -> tuple[Tensor, StepCost]:
    """Runs one step and counts its bytes.

    Args:
        forward: computes the loss.
        backward: computes gradients from the loss and updates the parameters.
        resident: the local tensors that live through the step: inputs, parameters, optimizer.

    Returns:
        The loss and the cost.
    """
    resident = list(resident)
    on_cuda = resident[0].is_cuda
    with record_traffic() as traffic:
        memory = _cuda_memory if on_cuda else _cpu_memory
        loss, kept, peak = memory(forward, backward)
    if not on_cuda:
        peak += storage_bytes(resident)
    return loss, StepCost(kept, peak, traffic.bytes, len(traffic.collectives))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind plain local tensors, a shared storage counted once.

    The storage, not only the part a tensor shows: a shard that keeps the whole volume alive is
    charged for the whole volume.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _cpu_memory(forward, backward) -> tuple[Tensor, int, int]:
    with _allocator_events() as in_forward:
        loss = forward()
    with _allocator_events() as in_backward:
        backward(loss)
    return loss, sum(in_forward), max(accumulate(in_forward + in_backward))


def _cuda_memory(forward, backward) -> tuple[Tensor, int, int]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    kept = torch.cuda.memory_allocated() - before
    backward(loss)
    return loss, kept, torch.cuda.max_memory_allocated()


@contextmanager
def _allocator_events() -> Iterator[list[int]]:
    """Collects the sizes that the CPU allocator hands out (positive) and takes back (negative)."""
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield sizes
    events = recorded.profiler.kineto_results.events()  # pyright: ignore
    sizes += [event.nbytes() for event in events if event.name() == "[memory]"]  # pyright: ignore
