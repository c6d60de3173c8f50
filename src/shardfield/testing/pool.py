"""A pool of live ranks: started once, called many times, restarted only when a rank hangs."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle
import torch
import torch.distributed as dist

from shardfield.testing.worker import Call, Failure, Reply, named_code, serve

# What every rank needs, imported once in the fork server: a rank then starts in milliseconds.
_PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed.tensor",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "shardfield",
    "shardfield.testing.worker",
]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # A rank looks several times a second whether an absent one has failed; c10d logs each look.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


# A thread of each process group wakes up a hundred times a second as long as the rank lives, for
# groups are never freed. Ranks that have made more than this are replaced after the call, ...
_MOST_GROUPS = 32
# ... and shared ones that nobody has called for so many seconds end when another pool is asked for.
_IDLE = 60.0

_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]


class _Pickler(cloudpickle.Pickler):
    """Keeps file names, which cloudpickle drops: a rank's traceback then shows the source."""

    dispatch_table: ClassVar[Mapping[type, Callable[..., Any]]] = {
        **cloudpickle.Pickler.dispatch_table,
        CodeType: lambda code: (named_code, (code.co_filename, *_reduce_code(code))),
    }


class RankError(AssertionError):
    """A call on a pool did not return on every rank.

    Attributes:
        failures: How it ended, for each rank that did not return.
    """

    def __init__(self, world_size: int, failures: dict[int, Failure]) -> None:
        self.failures = failures
        first = {rank: item for rank, item in failures.items() if not item.follows} or failures
        parts, shown = [], set()
        for rank, item in sorted(failures.items(), key=lambda pair: pair[0] not in first):
            place = f" in {item.operation}" if item.operation else ""
            again = (item.kind, item.text) in shown and item.kind != "hang"
            text = "the same" if again else item.text
            parts.append(f"rank {rank} of {world_size}: {item.kind}{place}: {text}")
            if item.kind == "hang" or (rank in first and not again):
                parts.append(item.trace.rstrip())
            shown.add((item.kind, item.text))
        super().__init__("\n".join(parts))


class RankPool:
    """Rank processes that stay alive between calls, on this machine.

    They are replaced once they have made more than 32 process groups, whose threads never end.

    Ranks start at the first call: NCCL where every rank has a GPU, several ranks on one GPU or
    on the CPU over gloo otherwise. One thread a rank.

    Args:
        world_size: Number of ranks.
        device: ``"cpu"`` or ``"cuda"``; by default ``SHARDFIELD_TEST_DEVICE``, else what there is.
        timeout: How long a call may take, in seconds.
        grace: How long the other ranks may go on, in seconds, once one has failed.

    Example:
        >>> with RankPool(2) as pool:
        ...     pool.run(lambda rank: rank.rank)
        [0, 1]
    """

    def __init__(
        self,
        world_size: int,
        device: str | None = None,
        timeout: float = 60.0,
        grace: float = 5.0,
    ) -> None:
        chosen = device or os.environ.get("SHARDFIELD_TEST_DEVICE")
        self.world_size = world_size
        self.device = chosen or ("cuda" if torch.cuda.is_available() else "cpu")
        self.timeout = timeout
        self.grace = grace
        self._processes: list[BaseProcess] = []
        self._calls: list[connection.Connection] = []
        self._controls: list[connection.Connection] = []
        self._store: dist.TCPStore | None = None
        self._number = 0
        self._last_call = time.monotonic()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Runs ``fn(rank, *args)`` on every rank, `rank` a `Rank`.

        Functions of test modules and closures travel by value, all else by reference. Warnings
        of the ranks are raised again here. The ranks agree before each collective; a rank that
        fails ends the call on all of them, and the pool stays usable.

        Args:
            fn: The function; it is called outside any mesh.
            *args: Its further arguments, the same on all ranks.
            timeout: Seconds this call may take; by default the pool's.

        Returns:
            The results, one a rank.

        Raises:
            RankError: A rank raised, died or hung; it names rank and operation and shows where.
        """
        limit = self.timeout if timeout is None else timeout
        if not self._processes:
            self._start()
        self._number += 1
        with _pickled_by_value(sys.modules.get(getattr(fn, "__module__", None) or "")):
            function = _pickle((fn, args))
        # Below the call's own limit, so that an absent rank is named by the ranks that miss it.
        call = Call(self._number, list(sys.path), function, limit / 2)
        payload = pickle.dumps(call)
        for pipe in self._calls:
            # A rank that is dead already is found dead while its answer is collected.
            with suppress(BrokenPipeError):
                pipe.send_bytes(payload)
        try:
            replies, failures = self._collect(limit)
        except BaseException:
            # Interrupted, or the caller's own time limit: late answers must not meet a later call.
            self.close()
            raise
        _warn_again(replies)
        failures |= {
            rank: reply.failure for rank, reply in replies.items() if reply.failure is not None
        }
        groups = {reply.groups for reply in replies.values()}
        # torch names groups by counting; ranks that count differently never meet again.
        if len(groups) > 1 or max(groups, default=0) > _MOST_GROUPS:
            self.close()
        self._last_call = time.monotonic()
        if failures:
            raise RankError(self.world_size, dict(sorted(failures.items())))
        return [replies[rank].value for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends the ranks; a later call starts new ones."""
        for pipe in (*self._calls, *self._controls):
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._calls, self._controls, self._store = [], [], [], None

    def close_if_idle(self, seconds: float) -> None:
        """Ends the ranks if no call was made for longer than this."""
        if time.monotonic() - self._last_call > seconds:
            self.close()

    def _start(self) -> None:
        context = _fork_server()
        store = self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout),
        )
        for rank in range(self.world_size):
            call, call_end = context.Pipe()
            control, control_end = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, self.world_size, store.port, call_end, control_end, self.device),
                daemon=True,
                name=f"rank {rank} of {self.world_size}",
            )
            process.start()
            call_end.close()
            control_end.close()
            self._processes.append(process)
            self._calls.append(call)
            self._controls.append(control)

    def _collect(self, limit: float) -> tuple[dict[int, Reply], dict[int, Failure]]:
        """Waits for all ranks; those that hang or die are named and the pool is ended."""
        replies: dict[int, Reply] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + limit
        pending = {pipe: rank for rank, pipe in enumerate(self._calls)}
        while pending:
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = pending.pop(pipe)
                try:
                    replies[rank] = cloudpickle.loads(pipe.recv_bytes())
                    failed = replies[rank].failure is not None
                except (EOFError, ConnectionResetError):
                    failures[rank] = self._death(rank)
                    failed = True
                if failed:
                    deadline = min(deadline, time.monotonic() + self.grace)
        causes = [*failures.values(), *(reply.failure for reply in replies.values())]
        follows = any(cause is not None and not cause.follows for cause in causes)
        for rank in pending.values():
            failures[rank] = self._hang(rank, follows)
        if failures:
            self.close()
        return replies, failures

    def _death(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(5)
        assert self._store is not None
        # The others look for this key while they wait for the rank.
        self._store.set(f"call{self._number}/left/{rank}", "died")
        return Failure("death", f"the process ended with code {process.exitcode}", None, "")

    def _hang(self, rank: int, follows: bool) -> Failure:
        control = self._controls[rank]
        operation, stack = None, "no answer: the process holds the interpreter lock"
        try:
            control.send_bytes(b"where")
            if control.poll(2):
                operation, stack = pickle.loads(control.recv_bytes())
        except (EOFError, OSError):
            stack = "no answer: the process has ended"
        return Failure("hang", "it did not come back in time", operation, stack, follows)


def preload(*modules: str) -> None:
    """Has ranks find these modules imported. Call it before the first rank starts."""
    _PRELOAD.extend(name for name in modules if name not in _PRELOAD)


_pools: dict[int, RankPool] = {}


def rank_pool(world_size: int) -> RankPool:
    """The shared pool of this size. Its ranks live on between calls, but not when long unused."""
    for size, pool in _pools.items():
        if size != world_size:
            pool.close_if_idle(_IDLE)
    if world_size not in _pools:
        if not _pools:
            atexit.register(close_pools)
        _pools[world_size] = RankPool(world_size)
    return _pools[world_size]


def close_pools() -> None:
    """Ends all shared pools."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _warn_again(replies: dict[int, Reply]) -> None:
    """Raises the ranks' warnings in this process, where the caller's filters judge them."""
    seen = dict.fromkeys(warning for reply in replies.values() for warning in reply.warnings)
    for category, text, filename, line in seen:
        warnings.warn_explicit(text, category, filename, line)


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # The fork server imports from where this process does, an uninstalled checkout included.
    wanted = _ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
    }
    saved = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _pickle(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


@contextmanager
def _pickled_by_value(module: ModuleType | None) -> Iterator[None]:
    """Sends test functions as they are: ranks then import neither pytest nor the test module."""
    name = module.__name__.rpartition(".")[2] if module is not None else ""
    if module is None or not name.startswith(("test_", "conftest")):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
