"""What one training step costs: bytes kept for backward, peak bytes, bytes sent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from shardfield.comm import record_traffic
from shardfield.tools.memory import kept_bytes


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
    """Runs one step and counts its bytes; the forward runs two times more for that.

    Args:
        forward: computes the loss.
        backward: computes gradients from the loss and updates the parameters.
        resident: the local tensors that live through the step: inputs, parameters, optimizer.

    Returns:
        The loss and the cost.
    """
    resident = list(resident)
    device = resident[0].device
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(forward())
        backward(losses[0])

    forward()  # fills caches, which are no part of a step
    kept = kept_bytes(forward, device).kept
    with record_traffic() as traffic:
        peak = kept_bytes(step, device).peak
    peak += storage_bytes(resident)
    return losses[0], StepCost(kept, peak, traffic.bytes, len(traffic.collectives))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind plain local tensors, a shared storage counted once.

    The storage, not only the part a tensor shows: a shard that keeps the whole volume alive is
    charged for the whole volume.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
