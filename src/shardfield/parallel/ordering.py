"""Keeps collectives in the order of the graph through inductor's scheduler.

Traced collectives have torch's ordered effect (`comm.traced`). Lowering files what each has to wait
for under the name of the *buffer* it makes; the scheduler of torch 2.13 looks it up under the name
of the *operation*, and finds nothing: a collective whose operand is empty on one rank then floats
to another place on that rank alone, and all wait for ever.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch._inductor.graph import GraphLowering
from torch.utils._ordered_set import OrderedSet


class _UnderBothNames(defaultdict):
    """Buffers to wait for, by the name of the operation or of the buffer it makes."""

    def __init__(self, graph: Any) -> None:
        super().__init__(OrderedSet)
        self._graph = graph

    def __getitem__(self, name: str) -> OrderedSet[str]:
        found = super().__getitem__(name)
        operation = self._graph.name_to_op.get(name)
        # Operations that make no buffer of their own have no such name.
        buffer = getattr(operation, "name", None)
        if buffer is None or buffer == name or buffer not in self:
            return found
        return found | super().__getitem__(buffer)


def keep_order() -> None:
    """Has every graph that inductor lowers from now on keep its ordered effects in order."""
    if getattr(GraphLowering, "_shardfield_ordered", False):
        return
    make = GraphLowering.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        self.additional_star_deps = _UnderBothNames(self)

    GraphLowering.__init__ = __init__  # type: ignore[method-assign]
    GraphLowering._shardfield_ordered = True  # type: ignore[attr-defined]
