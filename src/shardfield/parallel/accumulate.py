"""Several backwards, one reduction: the same for every wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, a backward adds up gradients on this rank and does not reduce them.

    Forward and backward of all micro-batches but the last run inside; `.grad` is not final there.
    The first backward outside reduces the sum.

    Args:
        model: what `parallelize` returned. Gradients of a model without a wrapper are reduced
            where parameters are used, inside as well; they add up all the same.

    Comm: what the operations need; none for managed parameters' gradients. With sharded
        parameters every rank holds whole gradients meanwhile, and weights are still gathered.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with shardfield.no_sync(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad
        tensor([[2., 2.]])
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


__all__ = ["no_sync"]
