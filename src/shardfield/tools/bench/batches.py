"""How much a rank computes for each byte it sends, as the batch grows. Counted, not timed."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from shardfield.comm.collectives import record_traffic
from shardfield.interior import interior_from
from shardfield.tools.bench.contestants import Sharded, TensorParallel
from shardfield.tools.bench.networks import Workload, workloads

BATCHES = (1, 2, 4, 8)
NETWORKS = ("conv stack", "ViT blocks", "tensor blocks")


@dataclass(frozen=True)
class Intensity:
    """One network at one batch size, on the first rank, one training step.

    Attributes:
        network: Its name.
        batch: Samples.
        flops: Floating-point operations of forward and backward.
        activations: Bytes of activations and their gradients that this rank sends.
        gradients: Bytes of parameter gradients in the one reduction of a step.
    """

    network: str
    batch: int
    flops: int
    activations: int
    gradients: int

    @property
    def per_byte(self) -> float:
        """Operations for each byte sent."""
        return self.flops / max(self.activations + self.gradients, 1)


def run(idle: object, scale: int = 8) -> list[dict[str, Any]]:
    """Counts one step of each network at each batch size; all ranks call it together."""
    torch.set_num_threads(1)
    chosen = [w for w in workloads(scale) if w.name in NETWORKS]
    return [asdict(counted(w, batch)) for w in chosen for batch in BATCHES]


def counted(workload: Workload, batch: int) -> Intensity:
    """Comm: two training steps."""
    shapes = [(batch, *shape[1:]) for shape in (workload.input_shape, workload.target_shape)]
    larger = replace(workload, input_shape=shapes[0], target_shape=shapes[1])
    contestant = (TensorParallel if workload.split is None else Sharded)(larger)
    with interior_from(0):  # at every batch size as at the largest
        contestant.step()  # plans, and agrees on buckets
        with record_traffic() as traffic, FlopCounterMode(display=False) as flops:
            contestant.step()
    reduced = 0
    if workload.split is not None:  # split weights have their gradients where they are
        reduced = sum(p.numel() * p.element_size() for p in contestant.network.parameters())
    return Intensity(workload.name, batch, flops.get_total_flops(), traffic.bytes, reduced)
