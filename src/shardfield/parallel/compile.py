"""`shardfield.compile`: torch.compile with shards as plain tensors at the boundary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch._inductor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardfield.errors import LayoutError, ShardfieldError
from shardfield.parallel.activations import keeps_less, replace_inside
from shardfield.parallel.partition import RebuildHalos
from shardfield.parallel.split_weights import SplitWeights
from shardfield.tensor import ShardTensor, local_of, wrap

_DEFAULTS = {"fullgraph": True, "dynamic": False}
_REBUILD_HALOS = RebuildHalos()  # one, so that the options of equal calls are equal


def compile(target: torch.nn.Module | Callable, **options: Any) -> torch.nn.Module | Callable:
    """Compiles a module or function that takes and returns ShardTensors.

    Args:
        target: called with any nesting of ShardTensors, tensors and constants. What `parallelize`
            returns is compiled in place, inside its wrapper; block by block where parameters are
            sharded or activations recomputed or offloaded, and eagerly between blocks.
        options: those of `torch.compile`; `fullgraph=True` and `dynamic=False` by default, since
            the sizes of shards are part of their layout. `recompile_limit` (8 by default) counts
            for each block.

    Returns:
        A module that shares the parameters of `target`, or a function. Equal layouts do not
        compile again; every new layout does, on every rank. Equal blocks share their graphs.

    Raises:
        LayoutError: at a call, when there would be more graphs than `recompile_limit`.

    Comm: that of the operations inside, as functional collectives in the graph.
    """
    if isinstance(target, DistributedDataParallel):
        # Dynamo does not trace the wrapper; what it wraps is what costs time.
        target.module = compile(target.module, **options)
        return target
    options = _with_partitioner({**_DEFAULTS, **options})
    if isinstance(target, torch.nn.Module) and (blocks := _compiled_alone(target)):
        graphs = _Graphs(options, len(blocks))
        for block in blocks:
            replace_inside(block, partial(graphs.boundary, module=block))
        return target
    graphs = _Graphs(options)
    if isinstance(target, torch.nn.Module):
        return CompiledModule(target, graphs)
    return graphs.boundary(target)


def _compiled_alone(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The innermost of the parts around whose forward something is done that is not traced.

    That are FSDP2's hooks, recomputation and offloading.
    """
    parts = [m for m in model.modules() if isinstance(m, FSDPModule) or keeps_less(m)]
    chosen = {id(part) for part in parts}
    return [part for part in parts if sum(id(m) in chosen for m in part.modules()) == 1]


def _with_partitioner(options: dict[str, Any]) -> dict[str, Any]:
    """Has inductor rebuild halos instead of keeping them."""
    if options.get("backend", "inductor") != "inductor":
        return options
    from shardfield.parallel.ordering import keep_order  # imports inductor's code generator

    keep_order()
    mode = options.pop("mode", None)
    chosen = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    chosen |= {"custom_partitioner_fn": _REBUILD_HALOS, **(options.get("options") or {})}
    return {**options, "options": chosen}


class _Graphs:
    """The graphs of one call of `compile`: its equal blocks share them.

    Dynamo keeps and counts graphs by code object: with one for all that is ever compiled, models
    would share one limit.
    """

    def __init__(self, options: dict[str, Any], blocks: int = 1) -> None:
        limit = options.get("recompile_limit") or torch._dynamo.config.recompile_limit
        self._each, self._all = limit, limit * blocks
        self._options = {**options, "recompile_limit": self._all}
        self._code: CodeType | None = None

    def boundary(self, target: Callable, module: torch.nn.Module | None = None) -> Callable:
        """The compiled call of a function.

        Args:
            module: what `target` is the call of; its split parameters enter as plain tensors.
        """
        weights = SplitWeights(module, target)

        def inner(leaves, layouts, spec, held):
            values = [
                leaf if layout is None else wrap(leaf, layout)
                for leaf, layout in zip(leaves, layouts, strict=True)
            ]
            args, kwargs = tree_unflatten(values, spec)
            out = weights.call(held, args, kwargs) if held else target(*args, **kwargs)
            return _opened(out)

        self._code = inner.__code__ = self._code or inner.__code__.replace()
        compiled = torch.compile(inner, **self._options)

        def call(*args, **kwargs):
            leaves, spec = tree_flatten((args, kwargs))
            opened, layouts = _split(leaves)
            try:
                with self._settings(), weights as held:
                    out, out_layouts, out_spec = compiled(opened, layouts, spec, held)
            except FailOnRecompileLimitHit as error:
                raise self._too_many() from error
            except TorchDynamoException as error:
                raise _refusal(error) or error from None
            closed = [
                leaf if layout is None else wrap(leaf, layout)
                for leaf, layout in zip(out, out_layouts, strict=True)
            ]
            return tree_unflatten(closed, out_spec)

        return call

    def _settings(self):
        config = torch._dynamo.config
        # Dynamo would cut the graph where DDP's buckets end, through our functions.
        return config.patch(
            optimize_ddp=False,
            accumulated_recompile_limit=max(config.accumulated_recompile_limit, self._all),
        )

    def _too_many(self) -> LayoutError:
        return LayoutError(
            f"a compiled function needs more graphs than recompile_limit={self._each} allows",
            "each layout has a graph of its own, and so has each change of mode, dtype or constant",
            "pass inputs of fewer sizes, or shardfield.compile(..., recompile_limit=64)",
            "compile",
        )


class CompiledModule(torch.nn.Module):
    """A module whose forward is compiled; its parameters are those of the original."""

    def __init__(self, module: torch.nn.Module, graphs: _Graphs) -> None:
        super().__init__()
        self.module = module
        self._call = graphs.boundary(module, module)

    def forward(self, *args, **kwargs):
        """Calls the compiled forward of the original module."""
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _refusal(error: BaseException | None) -> ShardfieldError | None:
    """The error of ours that stopped the tracing, which Dynamo wraps in its own."""
    while error is not None and not isinstance(error, ShardfieldError):
        error = error.__cause__ or error.__context__
    return error


def _opened(value):
    leaves, spec = tree_flatten(value)
    opened, layouts = _split(leaves)
    return opened, layouts, spec


def _split(leaves):
    opened = [_boundary_tensor(leaf) if isinstance(leaf, ShardTensor) else leaf for leaf in leaves]
    layouts = [leaf._layout if isinstance(leaf, ShardTensor) else None for leaf in leaves]
    return opened, layouts


def _boundary_tensor(x: ShardTensor) -> torch.Tensor:
    """The plain tensor, no view of a ShardTensor, which Dynamo would ask for its own base."""
    local = local_of(x)
    # What was made under no_grad keeps no plain tensor, and an alias of it is a view of it.
    return local.data if x._local is None and not local.requires_grad else local


__all__ = ["CompiledModule", "compile"]
