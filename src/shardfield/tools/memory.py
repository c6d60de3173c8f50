"""Bytes a computation leaves allocated, and the most it held on the way.

Memory is read from the allocator itself, not from a list of saved tensors: whatever a graph keeps
alive (saved tensors, contexts, workspaces, closures) counts, and nothing counts twice.
"""

import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

from shardfield.comm.wait import workers_release_first


class AllocatedBytes(NamedTuple):
    """Bytes of one call, relative to what was allocated before it."""

    kept: int
    """Allocated by the call and still allocated when it had returned, its result included."""
    peak: int
    """The most that was allocated at any time during the call."""


def kept_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> AllocatedBytes:
    """Bytes that `fn()` keeps, with its result alive: what a forward holds for its backward.

    Call `fn` once before measuring where it compiles or fills caches on first use. On the CPU the
    events of the calling thread are read; a forward and a backward run on it, and shardfield's
    collectives wait until their worker has let go of its buffers, so that they are released on it
    too. What other libraries communicate may be released unseen, which can only add to the count.

    Args:
        fn: The forward (or a whole step). It takes nothing; its result is held until measured.
        device: Whose allocator to ask, "cpu" or a CUDA device.

    Returns:
        The bytes kept and the peak, of this process only.

    Comm: none of its own; ranks that measure a sharded forward call this together.

    Example:
        >>> import torch
        >>> from shardfield.tools.memory import kept_bytes
        >>> x, w = torch.ones(1000), torch.ones(1000, requires_grad=True)
        >>> kept_bytes(lambda: (x * w).exp()).kept  # exp keeps its result, and that is all
        4000
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        return _cuda_bytes(fn, device)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler, workers_release_first():
        result = fn()
    allocated = _replay(_cpu_allocations(profiler))
    del result
    return allocated


def _cuda_bytes(fn: Callable[[], Any], device: torch.device) -> AllocatedBytes:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
    result = fn()
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    del result
    return AllocatedBytes(
        stats["allocated_bytes.all.current"] - before, stats["allocated_bytes.all.peak"] - before
    )


def _cpu_allocations(profiler: profile) -> list[tuple[int, int]]:
    """(address, bytes) of every CPU allocation (positive) and release (negative), in order."""
    # The event tree is the one place where the profiler tells the addresses.
    roots = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    events = [
        event
        for event in _walk(roots)
        if isinstance(event.extra_fields, _ExtraFields_Allocation)
        and event.extra_fields.device.type == "cpu"
    ]
    events.sort(key=lambda event: event.start_time_ns)
    return [(event.extra_fields.ptr, event.extra_fields.alloc_size) for event in events]


def _walk(events: Iterable[Any]) -> Iterable[Any]:
    pending = list(events)
    while pending:
        event = pending.pop()
        yield event
        pending.extend(event.children)


def _replay(allocations: list[tuple[int, int]]) -> AllocatedBytes:
    """Follows each address, so that releasing what was there before the call counts as nothing."""
    live: dict[int, int] = {}
    current = peak = 0
    for address, size in allocations:
        # An address handed out again was free: another thread (a communication worker that held
        # the last reference) released it, which the calling thread's events do not show.
        current -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            current += size
            peak = max(peak, current)
    return AllocatedBytes(current, peak)
