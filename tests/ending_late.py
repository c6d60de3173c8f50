"""Ends while a worker of gloo waits for Python's lock to let go of what a backward gave it.

With the argument `abandon` the process does not wait for it.
"""

import atexit
import ctypes
import sys
import time


def leave_a_worker_waiting() -> None:
    sys.setswitchinterval(60)  # seconds in which nobody takes the lock from this thread
    Gather.apply(torch.ones(3, requires_grad=True)).sum().backward()
    limit = time.monotonic() + 30
    while not worker_waits_for_the_lock():
        assert time.monotonic() < limit, "the worker never asked for the lock"


abandons = "abandon" in sys.argv
if abandons:
    # What is registered first is called last: nothing lets the worker in before the end.
    atexit.register(leave_a_worker_waiting)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import shardfield as sf  # noqa: E402
from shardfield.comm import ending  # noqa: E402

STATES = ctypes.pythonapi
for name in ("PyInterpreterState_Get", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
    getattr(STATES, name).restype = ctypes.c_void_p


class Gather(torch.autograd.Function):
    """Starts a collective in its backward and keeps nothing of it: the worker lets go last."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        values = torch.zeros(1 << 22)
        dist.all_gather([torch.empty_like(values)], values, async_op=True)
        return grad * 2


class LetsOthersIn:
    """Releases Python's lock when the interpreter takes it down."""

    def __del__(self, sleep=time.sleep):
        sleep(0.5)


def worker_waits_for_the_lock() -> bool:
    interpreter = ctypes.c_void_p(STATES.PyInterpreterState_Get())
    first = ctypes.c_void_p(STATES.PyInterpreterState_ThreadHead(interpreter))
    return STATES.PyThreadState_Next(first) is not None


sf.init_mesh()
last = LetsOthersIn()
if abandons:
    atexit.unregister(ending.wait_for_workers)
else:
    leave_a_worker_waiting()
