"""The one place where collectives start: counted, named, and guarded against a missing rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardfield.comm import agreement, small, traced
from shardfield.comm._torch import BelowAutograd, functional, rank_of, size_of
from shardfield.comm.wait import wait


@dataclass
class Traffic:
    """What this rank sent while recording.

    Attributes:
        collectives: names of the collectives entered, in order.
        bytes: payload this rank handed to them for other ranks: all-to-all, what leaves this rank;
            all-reduce, the reduced tensor once; all-gather, this rank's block once.
        operations: (operation, collective, bytes) of every entry.
    """

    collectives: list[str] = field(default_factory=list)
    bytes: int = 0
    operations: list[tuple[str | None, str, int]] = field(default_factory=list)

    def entered(self, operation: str | None, name: str, sent: int) -> None:
        """Notes a collective that is about to start."""
        self.collectives.append(name)
        self.bytes += sent
        self.operations.append((operation, name, sent))


class Silence(Traffic):
    """Stops whoever is about to start a collective."""

    def entered(self, operation: str | None, name: str, sent: int) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(f"{operation} communicates: {name} of {sent} bytes")


_recording: list[Traffic] = []


@contextmanager
def record_traffic(traffic: Traffic | None = None) -> Iterator[Traffic]:
    """Counts the collectives of shardfield that this rank enters, eagerly run ones only.

    Args:
        traffic: what to add to; by default a new count.

    Example:
        >>> with shardfield.comm.record_traffic() as traffic:
        ...     y = model(x)
        >>> traffic.bytes, traffic.collectives
    """
    traffic = Traffic() if traffic is None else traffic
    _recording.append(traffic)
    try:
        yield traffic
    finally:
        _recording.remove(traffic)


def _count(name: str, sent: int, operation: str | None) -> None:
    for traffic in _recording:
        traffic.entered(operation, name, sent)


def _enter(
    name: str,
    sent: int,
    group: str,
    operation: str | None,
    signature: object,
    run: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Runs a collective: counted and agreed on first."""
    if _recording:
        _count(name, sent, operation)
    # Gradients are ours: torch's own, in Python, would cost as much again as the call.
    with agreement.collective(name, group, operation, signature), BelowAutograd():
        return run()


def all_reduce(
    tensor: torch.Tensor, group: str, operation: str | None, reduction: str = "sum"
) -> torch.Tensor:
    """A new tensor: `tensor` reduced over `group`."""
    tensor = tensor.contiguous()
    if torch.compiler.is_dynamo_compiling():
        return traced.all_reduce(tensor, reduction, group)
    return _enter(
        "all_reduce",
        tensor.numel() * tensor.element_size(),
        group,
        operation,
        (tensor.shape, tensor.dtype, reduction),
        lambda: small.all_reduce(tensor, reduction, group),
    )


# Others travel as bytes: gloo has no all-to-all of complex numbers or of short integers.
_SENT_AS_THEY_ARE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def all_to_all(
    tensor: torch.Tensor,
    receives: Sequence[int],
    sends: Sequence[int],
    group: str,
    operation: str | None,
) -> torch.Tensor:
    """Sends consecutive parts of a 1-D tensor to the ranks of `group`, returns what arrives."""
    if tensor.dtype not in _SENT_AS_THEY_ARE:
        size = tensor.element_size()
        counts = [size * count for count in receives], [size * count for count in sends]
        return all_to_all(tensor.view(torch.uint8), *counts, group, operation).view(tensor.dtype)
    if torch.compiler.is_dynamo_compiling():
        return traced.all_to_all(tensor, receives, sends, group)
    sent = sum(sends)
    if _recording:
        sent -= sends[rank_of(group)]  # a transposition's own part stays here
    return _enter(
        "all_to_all",
        sent * tensor.element_size(),
        group,
        operation,
        tensor.dtype,
        lambda: wait(functional.all_to_all_single(tensor, receives, sends, group)),
    )


class Pending:
    """An all-to-all that travels while this rank computes; it holds what is sent until then."""

    def __init__(
        self, tensor: torch.Tensor, sent: torch.Tensor | None, group: str, operation: str | None
    ) -> None:
        self._tensor, self._sent, self._group, self._operation = tensor, sent, group, operation

    def wait(self) -> torch.Tensor:
        """What arrived; call it once, on every rank in the same order."""
        if torch.compiler.is_dynamo_compiling():
            return self._tensor
        with agreement.waiting("all_to_all", self._group, self._operation), BelowAutograd():
            arrived = wait(self._tensor)
        self._sent = None
        return arrived


def start_all_to_all(
    tensor: torch.Tensor,
    receives: Sequence[int],
    sends: Sequence[int],
    group: str,
    operation: str | None,
) -> Pending:
    """`all_to_all` of floating-point numbers that is waited for later; at once in traced code.

    `tensor` must stay as it is until then.
    """
    if torch.compiler.is_dynamo_compiling():
        arrived = traced.all_to_all(tensor, receives, sends, group)
        return Pending(arrived, None, group, operation)
    if _recording:
        sent = sum(sends) - sends[rank_of(group)]
        _count("all_to_all", sent * tensor.element_size(), operation)
    with agreement.collective("all_to_all", group, operation, tensor.dtype), BelowAutograd():
        started = functional.all_to_all_single(tensor, receives, sends, group)
    return Pending(started, tensor, group, operation)


def all_gather(tensor: torch.Tensor, group: str, operation: str | None) -> torch.Tensor:
    """The tensors of all ranks of `group`, stacked along a new leading dim; shapes must agree."""
    block = tensor.contiguous().unsqueeze(0)
    if torch.compiler.is_dynamo_compiling():
        return traced.all_gather(block, size_of(group), group)
    return _enter(
        "all_gather",
        tensor.numel() * tensor.element_size(),
        group,
        operation,
        (tensor.shape, tensor.dtype),
        lambda: wait(functional.all_gather_into_tensor(block, size_of(group), group)),
    )
