"""What a block keeps for its backward: everything, its inputs, or copies on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from shardfield.errors import LayoutError
from shardfield.tensor import ShardTensor, local_of

KINDS = ("keep", "recompute", "offload")


def keep_less(
    blocks: Sequence[nn.Module], kind: str, context_fn: Callable[[], Any] | None = None
) -> None:
    """Has blocks recompute, or keep on the host, what their backward reads; in place.

    Copies of a block do the same; an unpickled one keeps everything.

    Args:
        blocks: none inside another.
        kind: "recompute" runs a block's forward once more before its backward, with the random
            state of the first time; "offload" copies what it keeps to the host, weights excepted.
        context_fn: of `torch.utils.checkpoint.checkpoint`: what is recomputed, by operation.

    Comm: "recompute" enters a block's collectives once more, on every rank.
    """
    for block in blocks:
        around = _offloaded
        if kind == "recompute":
            around = partial(_recomputed, context_fn=context_fn or noop_context_fn)
        run = getattr(block.forward, "__func__", None) or _unbound(block.forward)
        _put(block, around, run)


def _put(block: nn.Module, around: Callable, run: Callable) -> None:
    changed = around(run)
    changed.around, changed.run = around, run
    # Bound, so that a copied block runs itself and not the one it was copied from.
    block.forward = MethodType(changed, block)


def keeps_less(block: nn.Module) -> bool:
    """Whether `keep_less` changed this very block."""
    return hasattr(block.forward, "around")


class Enclosing:
    """A forward around another one, which `replace_inside` replaces.

    Attributes:
        run: the inner one.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


def replace_inside(block: nn.Module, change: Callable[[Callable], Callable]) -> None:
    """Replaces the forward of a block, inside of what was put around it."""
    around: Any = block.forward
    enclosing = getattr(around.run, "inner", None) if keeps_less(block) else around
    if isinstance(enclosing, Enclosing):
        enclosing.run = change(enclosing.run)
        return
    if not keeps_less(block):
        block.forward = change(around)
        return

    def run(self, *args, **kwargs):
        return inner(*args, **kwargs)

    inner = run.inner = change(MethodType(around.run, block))
    _put(block, around.around, run)


def check_activations(kind: str, context_fn: object, blocks: Sequence[nn.Module]) -> None:
    """Raises LayoutError where `keep_less` could not do what was asked."""
    if kind not in KINDS:
        raise LayoutError(
            f"parallelize(activations={kind!r})",
            f"activations is one of {KINDS}",
            'activations="recompute", or leave it out',
            "parallelize",
        )
    if context_fn is not None and kind != "recompute":
        raise LayoutError(
            f"parallelize(activations={kind!r}, context_fn=...)",
            "context_fn says what is recomputed",
            'activations="recompute"',
            "parallelize",
        )
    if kind != "keep" and not blocks:
        raise LayoutError(
            f"parallelize(activations={kind!r})",
            "it acts on the repeated blocks of a model, and this one has none",
            "wrap=, a class of submodules or a function that chooses them",
            "parallelize",
        )


def _unbound(forward: Callable) -> Callable:
    return lambda self, *args, **kwargs: forward(*args, **kwargs)


# Both are called `forward`: pickle names a bound method by its function and finds the class's.
def _recomputed(run: Callable, context_fn: Callable[[], Any]) -> Callable:
    def forward(self, *args, **kwargs):
        contexts = context_fn
        if self.training:
            contexts = partial(_once_for_buffers, self, context_fn)
        return checkpoint(run, self, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return forward


def _once_for_buffers(block: nn.Module, context_fn: Callable[[], Any]):
    """The contexts of both runs; the second one updates no running statistics again."""
    first, again = context_fn()
    held = [(m._buffers, name) for m in block.modules() for name in m._buffers]
    written: list[tuple[dict, str]] = []
    return _noting(held, written, first), _sparing(written, again)


@contextmanager
def _noting(held: list[tuple[dict, str]], written: list[tuple[dict, str]], inner):
    before = [_version(buffers[name]) for buffers, name in held]
    with inner:
        yield
    written += [
        place
        for place, seen in zip(held, before, strict=True)
        if _version(place[0][place[1]]) != seen
    ]


@contextmanager
def _sparing(written: list[tuple[dict, str]], inner):
    kept = [buffers[name] for buffers, name in written]
    for buffers, name in written:
        buffers[name] = buffers[name].clone()
    try:
        with inner:
            yield
    finally:
        for (buffers, name), buffer in zip(written, kept, strict=True):
            buffers[name] = buffer


def _version(buffer: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if buffer is None else (id(buffer), buffer._version)


def _offloaded(run: Callable) -> Callable:
    def forward(self, *args, **kwargs):
        with _offloading(self):
            return run(self, *args, **kwargs)

    return forward


def _offloading(block: nn.Module) -> saved_tensors_hooks:
    # Weights stay: they are there anyway, and FSDP2 frees and refills their storage in place.
    weights = {_storage(parameter) for parameter in block.parameters()}
    host = save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(tensor: torch.Tensor):
        return tensor if _storage(tensor) in weights else host.pack_hook(tensor)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else host.unpack_hook(packed)

    return saved_tensors_hooks(pack, unpack)


def _storage(tensor: torch.Tensor) -> int:
    """Identifies what holds a tensor's values; unlike its address, also where that is empty."""
    plain = local_of(tensor) if isinstance(tensor, ShardTensor) else tensor
    return plain.untyped_storage()._cdata


__all__ = ["KINDS", "check_activations", "keep_less", "keeps_less", "replace_inside"]
