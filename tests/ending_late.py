"""Ends while a worker of gloo waits for Python's lock to let go of what a backward gave it.

With the argument `abandon` the process does not wait for it.
"""

import atexit
import ctypes
import sys
import time

import torch
import torch.distributed as dist

import shardfield as sf
from shardfield.comm import ending

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
if "abandon" in sys.argv:
    atexit.unregister(ending.wait_for_workers)
last = LetsOthersIn()
sys.setswitchinterval(60)  # seconds in which nobody takes the lock from this thread
Gather.apply(torch.ones(3, requires_grad=True)).sum().backward()
limit = time.monotonic() + 30
while not worker_waits_for_the_lock():
    assert time.monotonic() < limit, "the worker never asked for the lock"
