"""The rank's side of the pool: serve calls, report failures, say where it is when it hangs."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from shardfield import registry
from shardfield.axes import join_axes
from shardfield.comm import agreement
from shardfield.errors import RankFailure
from shardfield.mesh import init_mesh

# Every call has a limit of its own, at which the parent ends the ranks. A transport that gave up
# before would fail a call whose ranks compile for different times, and every call after it: its
# connections stay closed.
_PATIENCE = timedelta(days=1)

_meshes: dict[tuple, DeviceMesh] = {}


@dataclass(frozen=True)
class Rank:
    """What a function that runs on a pool gets as its first argument.

    Attributes:
        rank: This process's global rank.
        world_size: Number of processes of the pool.
        device: Where this rank's tensors live.
    """

    rank: int
    world_size: int
    device: torch.device

    def mesh(self, **axes: Any) -> DeviceMesh:
        """`shardfield.init_mesh(**axes)`, made once per pool: process groups are never freed."""
        key = tuple(axes.items())
        if key not in _meshes:
            _meshes[key] = init_mesh(device=self.device.type, **axes)
        return _meshes[key]

    def submesh(self, ranks: Sequence[int], **axes: int) -> DeviceMesh | None:
        """A mesh over some ranks of the pool only; None on the others. All ranks must call it.

        Args:
            ranks: Global ranks, slowest axis first.
            **axes: Axis names and sizes; by default one axis ``domain``.
        """
        axes = axes or {"domain": len(ranks)}
        key = (tuple(ranks), *axes.items())
        if key not in _meshes:
            members = torch.tensor(ranks).reshape(tuple(axes.values()))
            mesh = DeviceMesh(self.device.type, members, mesh_dim_names=tuple(axes))
            if len(axes) > 1:
                join_axes(mesh, tuple(axes))
            _meshes[key] = mesh
        return _meshes[key] if self.rank in ranks else None


@dataclass(frozen=True)
class Failure:
    """How a call ended on a rank that did not return.

    Attributes:
        kind: Name of the exception's class, or ``"hang"`` or ``"death"``.
        text: The message.
        operation: The shardfield operation or collective the rank was in, if any.
        trace: The traceback, or the stacks of a rank that hangs.
        follows: Whether another rank's failure brought this one about.
    """

    kind: str
    text: str
    operation: str | None
    trace: str
    follows: bool = False


@dataclass(frozen=True)
class Call:
    """One call, as the parent sends it: `function` is pickled apart, after `path` is in force."""

    number: int
    path: list[str]
    function: bytes
    limit: float


@dataclass(frozen=True)
class Reply:
    """One rank's answer; `groups` is the number of process groups the world has made so far."""

    value: Any
    failure: Failure | None
    warnings: list[tuple[type[Warning], str, str, int]]
    groups: int


def serve(
    rank: int,
    world_size: int,
    port: int,
    calls: Connection,
    control: Connection,
    device: str,
) -> None:
    """Runs one rank until the parent closes `calls`."""
    # The parent decides what an interrupt means; a rank that died of it would hang the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # What the fork server has imported stays for good; a collection need not look at it.
    gc.freeze()
    _share_cores()
    threading.Thread(
        target=_answer, args=(control, threading.main_thread().ident), daemon=True
    ).start()
    place = _start_process_group(rank, world_size, port, device)
    store = _connect(port)
    context = Rank(rank, world_size, place)
    while True:
        try:
            call = pickle.loads(calls.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = call.path
        agreement.enable(dist.PrefixStore(f"call{call.number}", store), rank, call.limit)
        reply = _run(context, call)
        calls.send_bytes(_pack(reply))
        del call, reply


def current_operation() -> str | None:
    """The collective or operation this process is in."""
    return agreement.current() or registry.current_operation()


def named_code(name: str, make: Callable[..., CodeType], args: tuple) -> CodeType:
    """Rebuilds a code object that was sent with the name of its file."""
    return make(*args).replace(co_filename=name)


def _run(context: Rank, call: Call) -> Reply:
    value, failure = None, None
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            function, args = cloudpickle.loads(call.function)
            value = function(context, *args)
            agreement.publish("ended its part of the call")
        # Whatever it is, SystemExit and pytest's own outcomes included, the parent has to know.
        except BaseException as error:  # noqa: BLE001
            failure = Failure(
                type(error).__name__,
                str(error),
                _operation_of(error),
                traceback.format_exc(),
                isinstance(error, RankFailure),
            )
            place = f" in {failure.operation}" if failure.operation else ""
            first_line = failure.text.partition("\n")[0]
            agreement.publish(f"raised {failure.kind}{place}: {first_line}")
    seen = [(w.category, str(w.message), w.filename, w.lineno) for w in caught]
    return Reply(value, failure, list(dict.fromkeys(seen)), _world.group_count)


def _operation_of(error: BaseException) -> str | None:
    """The operation an exception came out of: the outermost that the registry dispatched."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "shardfield.registry" and "func" in frame.f_locals:
            return registry.name_of(frame.f_locals["func"])
    return None


def _pack(reply: Reply) -> bytes:
    try:
        return cloudpickle.dumps(reply)
    except Exception as error:  # noqa: BLE001
        failure = Failure(type(error).__name__, str(error), "pickling of the result", "")
        return cloudpickle.dumps(Reply(None, failure, [], reply.groups))


def _answer(control: Connection, main: int) -> None:
    """Says where the main thread is whenever the parent asks; ends the process with the parent."""
    while True:
        try:
            control.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        frames = traceback.extract_stack(sys._current_frames()[main])
        # What lies below is the interpreter's start and this file.
        bottom = max(index for index, frame in enumerate(frames) if frame.filename == __file__)
        stack = "".join(traceback.format_list(frames[bottom + 1 :]))
        control.send_bytes(pickle.dumps((current_operation(), stack)))


def _connect(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)


def _share_cores() -> None:
    """Lets no thread of this process that wakes up take the core of another one.

    gloo's loop asks the kernel again and again while another thread holds the lock it needs. With
    more ranks than cores that thread is often one whose core was taken, and waits for the end of
    a time slice: small collectives of 4 ranks on 2 cores then take 4 to 5 times as long.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _start_process_group(rank: int, world_size: int, port: int, device: str) -> torch.device:
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    names |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    place, backend = torch.device(device), "gloo"
    if device == "cuda":
        # NCCL refuses two ranks on one device; gloo then carries the tensors over the host.
        count = torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if count >= world_size else "gloo"
        place = torch.device("cuda", rank % count)
        torch.cuda.set_device(place)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("process_group", _connect(port)),
        rank=rank,
        world_size=world_size,
        timeout=_PATIENCE,
    )
    return place
