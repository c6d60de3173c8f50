"""What every rank of a contest runs: first that all agree, then the interleaved pairs."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import shardfield as sf
from shardfield.tools.bench.contestants import (
    ByHand,
    Contestant,
    FullyShardedByHand,
    OneProcess,
    ParallelizeModule,
    Sharded,
    TensorParallel,
)
from shardfield.tools.bench.launch import Idle
from shardfield.tools.bench.networks import Workload, workloads


class Disagreement(Exception):
    """The contestants compute different gradients, so that comparing their times means nothing."""


@dataclass(frozen=True)
class Contest:
    """Times of one workload, one entry a pair, in seconds, the slowest rank's.

    Attributes:
        workload: Its name.
        seconds: By the clock, of each of the workload's contestants.
        processor: The same in processor time: without waiting, and all but untouched by other
            programs, so it tells work from contention.
        agreement: Of each contestant, the relative distance of its gradient from one process's.
    """

    workload: str
    seconds: dict[str, list[float]]
    processor: dict[str, list[float]]
    agreement: dict[str, float]


def run(
    idle: Idle,
    pairs: int,
    names: list[str],
    scale: int = 1,
    kinds: tuple[str, ...] = (),
) -> list[dict[str, object]]:
    """Times the named workloads on all ranks of the world; by default, all their contestants.

    Raises:
        Disagreement: on all ranks, when two contestants' gradients differ.
    """
    sf.init_mesh(device="cpu")
    chosen = [w for w in workloads(scale) if w.name in names]
    return [asdict(contest(w, idle, pairs, kinds or w.kinds)) for w in chosen]


def contest(workload: Workload, idle: Idle, pairs: int, kinds: tuple[str, ...]) -> Contest:
    """Times one workload; `kinds` names the contestants, "one process" among them."""
    makers: dict[str, Callable[[Workload], Contestant]] = {
        "shardfield": TensorParallel if workload.split is None else Sharded,
        **{rival: partial(ByHand, rival=rival) for rival in workload.rivals},
        "parallelize_module": ParallelizeModule,
        "FSDP2 by hand": FullyShardedByHand,
        "one process": OneProcess,
    }
    first = dist.get_rank() == 0
    contestants = {kind: makers[kind](workload) for kind in kinds if kind != "one process" or first}
    steps = {kind: contestants[kind].step if kind in contestants else _nothing for kind in kinds}
    for kind, step in steps.items():  # the first step allocates, plans and agrees on buckets
        _timed(step, idle, alone=kind == "one process")
    agreement = _check_agreement(workload, contestants, kinds)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    processor: dict[str, list[float]] = {kind: [] for kind in kinds}
    for pair in range(pairs):
        turn = pair % len(kinds)
        for kind in (*kinds[turn:], *kinds[:turn]):  # nobody always follows the same one
            clock, busy = _timed(steps[kind], idle, alone=kind == "one process")
            seconds[kind].append(clock)
            processor[kind].append(busy)
    return Contest(workload.name, seconds, processor, agreement)


def _nothing() -> None:
    """The step of a rank that has none."""


def _timed(step: Callable[[], object], idle: Idle, alone: bool) -> tuple[float, float]:
    """Seconds of one step by the clock and of the processor, each of the rank that has most.

    `alone` leaves all ranks but the first asleep.
    """
    gc.collect()
    dist.barrier()
    times = torch.zeros(2, dtype=torch.float64)
    if alone and dist.get_rank() != 0:
        idle.sleep()
    else:
        clock, busy = time.perf_counter(), time.process_time()
        step()
        times[0], times[1] = time.perf_counter() - clock, time.process_time() - busy
        if alone:
            idle.wake()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times[0].item(), times[1].item()


def _check_agreement(
    workload: Workload, contestants: Mapping[str, Contestant], kinds: tuple[str, ...]
) -> dict[str, float]:
    """Relative distance of each gradient from one process's; the same verdict on every rank."""
    distances = {}
    some = next(iter(contestants.values()))
    reference = [torch.empty(p.shape, dtype=p.dtype) for p in some.network.parameters()]
    if "one process" in contestants:
        reference = contestants["one process"].gradients()
    expected = torch.cat([t.reshape(-1) for t in reference]).double()
    dist.broadcast(expected, src=0)
    for kind in kinds:
        if kind == "one process":
            continue
        distance = _distance(contestants[kind].gradients(), expected)
        dist.all_reduce(distance, dist.ReduceOp.MAX)
        distances[kind] = distance.item()
        if not distances[kind] <= workload.rounding:
            raise Disagreement(
                f"{workload.name}: the gradient of {kind!r} is {distances[kind]:.2e} away from "
                f"that of one process, relative to its norm; at most {workload.rounding:.0e} is "
                "rounding."
            )
    return distances


def _distance(gradients: list[Tensor], expected: Tensor) -> Tensor:
    actual = torch.cat([g.reshape(-1) for g in gradients]).double()
    if actual.shape != expected.shape:
        return torch.tensor(torch.inf, dtype=torch.float64)
    return (actual - expected).norm() / expected.norm()
