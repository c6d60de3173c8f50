"""Waiting for a collective: what every one of them ends with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardfield.comm._torch import functional, held_elsewhere

_state = {"releases": False}
_WORKER_RELEASES_WITHIN = 1.0  # seconds


def wait(started: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there."""
    arrived = functional.wait_tensor(started)
    if _state["releases"]:
        until = time.monotonic() + _WORKER_RELEASES_WITHIN
        while held_elsewhere(arrived) and time.monotonic() < until:
            time.sleep(1e-5)
    return arrived


@contextmanager
def workers_release_first() -> Iterator[None]:
    """Waits besides until the communication worker has let go of a collective's buffers.

    A worker lets go shortly after it has reported the end. When the caller lets go before it, the
    worker frees the memory, on its own thread, where a count of the caller's allocations does not
    see it.
    """
    before, _state["releases"] = _state["releases"], True
    try:
        yield
    finally:
        _state["releases"] = before
