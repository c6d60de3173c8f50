"""Failure agreement: no rank waits for ever for a rank that raised, left, or went another way.

When it is on, the ranks of a group meet in the c10d store *before* each collective starts and
compare what they are about to do. A rank that raised or finished says so in the store. Whatever is
wrong is therefore known on every rank before anything is sent, and the process group stays usable.
When it is off, the process group's own timeout ends the wait, and the error names the operation.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from shardfield.comm._torch import default_store, resolve_group
from shardfield.errors import RankFailure

_session: _Session | None = None


class waiting:
    """Names the operation of an error that the transport raises inside the block.

    Args:
        name: The collective, for instance ``"all_reduce"``.
        group: The process group it runs on, or its name; None for the default group.
        operation: What the user called, for instance ``"conv2d"``.

    Raises:
        RankFailure: In place of an error of the transport: a timeout, a closed connection.
    """

    __slots__ = ("group", "name", "operation", "signature")

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup | str | None,
        operation: str | None = None,
        signature: object = None,
    ) -> None:
        self.name = name
        self.group = group
        self.operation = operation
        self.signature = signature

    def __enter__(self) -> None:
        if _session is not None:
            _session.current = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if _session is not None:
            _session.current = None
        # An exact type: torch's own transport errors are plain RuntimeErrors or DistErrors, while
        # NotImplementedError, out-of-memory and this package's errors are RuntimeErrors by
        # inheritance and must reach the user as they are.
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            raise _failure(self, f"the transport gave up: {_first_line(str(error))}") from error

    def title(self) -> str:
        """What is about to be communicated, in the user's words."""
        return f"{self.name} of {self.operation}" if self.operation else self.name

    def entry(self) -> str:
        """What the ranks compare: everything that must be the same on all of them."""
        if self.signature is None:
            return self.title()
        text = repr(self.signature)
        shown = text if len(text) <= 300 else text[:300] + "..."
        return f"{self.title()} with {shown} [{zlib.crc32(text.encode()):08x}]"


class collective(waiting):
    """Brackets the start of a collective: with the agreement on, the ranks meet first.

    Args:
        name: The collective, for instance ``"all_reduce"``.
        group: The process group it runs on, or its name; None for the default group.
        operation: What the user called, for instance ``"conv2d"``.
        signature: Anything whose ``repr`` must be the same on all ranks (extents, shape, dtype).

    Raises:
        RankFailure: A rank raised, finished, did not come in time, or is about to do something
            else; or the transport failed. It names the operation and the rank.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        if _session is not None:
            _session.current = self
            _session.meet(self)


def enabled() -> bool:
    """Whether the ranks of this process meet before each collective."""
    return _session is not None


def enable(store: dist.Store, rank: int, limit: float = 30.0, poll: float = 0.25) -> None:
    """Turns the agreement on in this process; every rank must do so at the same point.

    Args:
        store: A store that all ranks share; it must be used for nothing else.
        rank: This process's global rank.
        limit: How long a rank may be awaited, in seconds.
        poll: How often, in seconds, a waiting rank looks whether an absent one has failed.
    """
    global _session
    _session = _Session(store, rank, limit, poll)


def disable() -> None:
    """Turns the agreement off in this process."""
    global _session
    _session = None


def current() -> str | None:
    """The collective this process is in, with the agreement on; read from another thread."""
    call = _session.current if _session is not None else None
    return call.title() if call is not None else None


def publish(text: str) -> None:
    """Tells the other ranks why this one takes part in no further collective.

    Args:
        text: The reason, to follow "rank 3 ", for instance ``"raised ValueError: ..."``.
    """
    if _session is not None:
        _session.publish(text)


def enable_from_environment() -> None:
    """Turns the agreement on where ``SHARDFIELD_AGREEMENT=1``; needs the default process group."""
    if os.environ.get("SHARDFIELD_AGREEMENT") != "1" or _session is not None:
        return
    store = dist.PrefixStore("shardfield/agreement", default_store())
    enable(store, dist.get_rank(), float(os.environ.get("SHARDFIELD_AGREEMENT_LIMIT", "300")), 2.0)
    earlier = sys.excepthook

    def publish_and_report(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        publish(f"raised {kind.__name__}: {error}")
        earlier(kind, error, traceback)

    sys.excepthook = publish_and_report
    atexit.register(publish, "ended")


class _Session:
    """The meetings of one process: a counter for each group, and the store they meet in."""

    def __init__(self, store: dist.Store, rank: int, limit: float, poll: float) -> None:
        self._store = store
        self._rank = rank
        self._limit = limit
        self._poll = timedelta(seconds=poll)
        self.current: waiting | None = None
        self._met: dict[str, int] = {}
        self._written: dict[str, list[str]] = {}
        self._published = False
        self._lock = threading.Lock()

    def meet(self, call: collective) -> None:
        group, ranks = _members(call.group)
        if len(ranks) == 1:
            return
        with self._lock:
            number = self._met[group] = self._met.get(group, 0) + 1
        meeting = _Meeting(self._store, f"{group}/{number}", ranks, self._rank, call.entry())
        try:
            problem = self._await(meeting)
            if problem is None:
                # Whoever came to this meeting has done with the last one.
                for key in self._written.get(group, ()):
                    self._store.delete_key(key)
                self._written[group] = meeting.written
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            reason = f"the store was lost, a rank has probably died: {_first_line(str(error))}"
            raise _failure(call, reason) from error
        if problem is not None:
            self.current = None  # no __exit__ follows an __enter__ that raised
            raise _failure(call, problem)

    def publish(self, text: str) -> None:
        if self._published:
            return
        self._published = True
        try:
            self._store.set(f"left/{self._rank}", text)
        except dist.DistError:
            return

    def _await(self, meeting: _Meeting) -> str | None:
        """Waits until all ranks are there; returns why they will not be, or None."""
        deadline = time.monotonic() + self._limit
        differ = False
        while not meeting.wait(self._poll):
            absent = meeting.absent()
            entries = meeting.entries(absent)
            # The others say where they are when they have waited as long; once more, for those.
            if entries and (differ or len(entries) == len(absent)):
                return meeting.difference(entries)
            differ = bool(entries)
            for rank in absent:
                if self._store.check([f"left/{rank}"]):
                    reason = self._store.get(f"left/{rank}").decode()
                    # It may have come here and gone on to leave between the two questions.
                    if rank in meeting.absent():
                        meeting.leave()
                        return f"rank {rank} {reason}"
            if absent and time.monotonic() > deadline:
                meeting.leave()
                names = ", ".join(str(rank) for rank in absent)
                return f"rank {names} did not come within {self._limit:g} s"
        return None


class _Meeting:
    """What one rank writes and reads before one collective.

    A rank comes by a key that holds what it is about to do. Where all do the same, which is
    nearly always, every rank knows the keys of the others, and one wait for them says all.
    A rank that waits in vain says what it is at under a key that needs no guessing.

    Attributes:
        written: The keys that this rank has to delete.
    """

    def __init__(
        self, store: dist.Store, name: str, ranks: Sequence[int], rank: int, entry: str
    ) -> None:
        self._store, self._name, self._ranks, self._entry = store, name, ranks, entry
        self._keys = [f"{name}/{other}/{entry}" for other in ranks]
        self._own, self._said = f"{name}/{rank}/{entry}", f"{name}/{rank}"
        store.set(self._own, "")
        self.written = [self._own]

    def wait(self, limit: timedelta) -> bool:
        """Whether all have come, to the same."""
        try:
            self._store.wait(self._keys, limit)
        except dist.DistStoreError:
            self._store.set(self._said, self._entry)
            self.written = [self._own, self._said]
            return False
        return True

    def absent(self) -> list[int]:
        """The ranks that have not come, or to something else."""
        pairs = zip(self._ranks, self._keys, strict=True)
        return [rank for rank, key in pairs if not self._store.check([key])]

    def entries(self, ranks: Sequence[int]) -> dict[int, str]:
        """What those of the ranks are at that say they are at something else."""
        said = {rank: f"{self._name}/{rank}" for rank in ranks}
        found = {r: self._store.get(k).decode() for r, k in said.items() if self._store.check([k])}
        return {rank: entry for rank, entry in found.items() if entry != self._entry}

    def difference(self, entries: Mapping[int, str]) -> str:
        """Says who is at what."""
        there = {rank: self._entry for rank in self._ranks if rank not in self.absent()}
        lines = [f"rank {rank} is at {at}" for rank, at in sorted({**there, **entries}.items())]
        return "the ranks are about to do different things: " + "; ".join(lines)

    def leave(self) -> None:
        """Tells a rank that comes late that this one has left."""
        self._store.delete_key(self._own)
        self._store.set(self._said, f"nothing: it gave up waiting at {self._entry}")


def _failure(call: waiting, problem: str) -> RankFailure:
    return RankFailure(
        f"{call.title()} over ranks {_members(call.group)[1]} cannot take place: {problem}",
        "every rank of a group calls the same operations in the same order",
        "read that rank's own traceback; let no rank raise, skip or repeat a call on its own",
        "rank-failure",
    )


def _members(group: dist.ProcessGroup | str | None) -> tuple[str, list[int]]:
    """Name and global ranks of a group."""
    if isinstance(group, str):
        group = resolve_group(group)  # type: ignore[arg-type]
    elif group is None:
        group = dist.group.WORLD
    assert group is not None
    return group.group_name, dist.get_process_group_ranks(group)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
