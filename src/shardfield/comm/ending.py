"""The end of a process: workers of the transport let go of Python before Python ends."""

from __future__ import annotations

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")  # Linux; elsewhere there is no such folder
_TURN = 0.005  # seconds, of this thread without Python's lock
_QUIET_TURNS = 3  # a worker may wait behind another for the lock
_BLIND_TURNS = 10  # where nobody says what threads do
_LIMIT = 1.0  # seconds


def wait_for_workers() -> None:
    """Waits until the threads beside this one are idle; to be called when Python exits.

    A worker of gloo reports the end of a collective first and lets go of it afterwards. What it
    lets go of may belong to Python: the context in which a backward started the collective, or
    its buffers. It asks for Python's lock then, and a process whose interpreter is ending by that
    time aborts (`terminate called without an active exception`), with all results right and an
    exit code that says otherwise. `destroy_process_group` does not help: a DDP model that is
    still there keeps the group and its workers.

    Takes 15 ms where threads are idle already, 1 s where one never is.

    Source: https://github.com/pytorch/pytorch/pull/179291 describes the abort.
    """
    until = time.monotonic() + _LIMIT
    left = _QUIET_TURNS if _THREADS.exists() else _BLIND_TURNS
    while left and time.monotonic() < until:
        time.sleep(_TURN)
        left = _QUIET_TURNS if _others_run() else left - 1


def _others_run() -> bool:
    """Whether a thread beside this one is at work, or would be had it a core."""
    return sum(map(_runs, _THREADS.glob("*/stat"))) > 1


def _runs(stat: Path) -> bool:
    try:
        # The state follows the name, which is in brackets and may hold any character.
        return stat.read_text().rpartition(")")[2].split()[0] in "RD"
    except OSError:  # the thread has ended meanwhile
        return False
