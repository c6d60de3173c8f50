"""Rank processes for one measurement: spawned once, one thread each, idle when they wait."""

import gc
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PATIENCE = timedelta(minutes=30)


class Idle:
    """Lets ranks sleep in a socket while the first one works alone: nobody spins meanwhile."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("idle", store)
        self._turn = 0

    def sleep(self) -> None:
        """Blocks until the first rank calls `wake`; each rank sleeps as often as that one wakes."""
        self._store.wait([str(self._turn)], _PATIENCE)
        self._turn += 1

    def wake(self) -> None:
        """Wakes all who sleep, or are about to."""
        self._store.set(str(self._turn), "")
        self._turn += 1


# Read when a child starts. One thread a rank; and freed memory stays with the process, as it does
# on a GPU: otherwise glibc hands it back or not by chance, and page faults decide the ratios.
_CHILD = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def launch(fn: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Runs `fn(idle, *args)` on `ranks` new processes and returns what rank 0 returned.

    The processes find the environment that torchrun would give them (`RANK`, `WORLD_SIZE`, ...),
    so `fn` sets up its process group as any program does.

    Args:
        fn: A function that can be imported by name.
        ranks: How many processes.
        args: Sent to each process; must pickle.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others are stopped.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        inherited = {name: os.environ.get(name) for name in _CHILD}
        os.environ.update(_CHILD)
        try:
            mp.spawn(_rank_main, (fn, ranks, store.port, answer, args), nprocs=ranks)
        finally:
            for name, value in inherited.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        return pickle.loads(answer.read_bytes())


def _rank_main(
    rank: int, fn: Callable[..., Any], ranks: int, port: int, answer: Path, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # modules stay for good: a collection before a measurement need not look at them
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # The parent serves the store, as torchrun's agent does: no port is guessed.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    result = fn(Idle(store), *args)
    if dist.is_initialized():
        gc.collect()  # DDP's reducers go before the group they use, not at exit
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        answer.write_bytes(pickle.dumps(result))
