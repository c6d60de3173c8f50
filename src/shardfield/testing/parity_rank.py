"""The rank's side of `parity`: shard the inputs, run, compare with the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from shardfield.comm.collectives import record_traffic
from shardfield.distribute import distribute_tensor
from shardfield.tensor import ShardTensor
from shardfield.testing.cases import Case, Extents, Split
from shardfield.testing.evaluate import difference, evaluate
from shardfield.testing.vacuity import CountWork, Work
from shardfield.testing.worker import Rank


@dataclass(frozen=True)
class Problem:
    """What is run: values in float64, global.

    Attributes:
        function: A function or module.
        inputs: Positional arguments.
        params: Tensor keyword arguments.
        splits: For each tensor leaf of the inputs, its split dims.
        double: Whether to differentiate twice.
    """

    function: Callable[..., Any]
    inputs: list[Any]
    params: dict[str, torch.Tensor]
    splits: list[Split]
    double: bool

    def tensors(self) -> list[torch.Tensor]:
        """The tensor leaves of the inputs."""
        return [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, torch.Tensor)]

    def instance(
        self,
        dtype: torch.dtype,
        device: torch.device,
        shard: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[Callable[..., Any], list[Any], dict[str, torch.Tensor]]:
        """Fresh leaves of one run: function, inputs and parameters, nothing shared between runs.

        Args:
            dtype: Type of all floating-point values.
            device: Where they live.
            shard: Called with the index of a tensor leaf and the global tensor.
        """
        index = iter(range(len(self.splits)))

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            number = next(index)
            fresh = value.detach().clone().to(device)
            floating = fresh.dtype.is_floating_point
            fresh = fresh.to(dtype) if floating else fresh
            fresh = fresh if shard is None else shard(number, fresh)
            return fresh.requires_grad_() if floating else fresh

        function = self.function
        if isinstance(function, nn.Module):
            function = copy.deepcopy(function).to(device).to(dtype)
        params = {
            name: value.detach().clone().to(device).to(dtype).requires_grad_()
            for name, value in self.params.items()
        }
        return function, tree_map(leaf, self.inputs), params


@dataclass(frozen=True)
class Expected:
    """The reference, in float64.

    Attributes:
        structure: The pytree of the outputs.
        values: By name: outputs, gradients, buffers.
        dtypes: By name: the type plain torch gives it.
        allowed: By name: the largest absolute error.
    """

    structure: str
    values: dict[str, Any]
    dtypes: dict[str, torch.dtype]
    allowed: dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """What one rank found in one case.

    Attributes:
        rank: Its global rank.
        problems: What differs from the reference.
        collectives: Names of the collectives it entered, in order.
        held: For each split input, elements held and elements of the whole.
        kinds: For each tensor output, ``"sharded"`` or ``"plain"``.
        layouts: By name, how sharded results lie.
        work: What it computed in the forward pass.
    """

    rank: int
    problems: list[str]
    collectives: list[str]
    held: list[tuple[int, int]]
    kinds: list[str]
    layouts: dict[str, str]
    work: Work


def check(
    rank: Rank,
    problem: Problem,
    expected: Mapping[torch.dtype, Expected],
    cases: Sequence[Case],
) -> list[Verdict | None]:
    """All cases on this rank; None for those it has no part in."""
    verdicts = []
    for case in cases:
        mesh = mesh_of(rank, case)
        try:
            verdicts.append(
                None if mesh is None else _check(rank, problem, expected[case.dtype], case, mesh)
            )
        except BaseException as error:
            error.add_note(f"in the parity case {case.name}")
            raise
    return verdicts


def refuse(rank: Rank, problem: Problem, case: Case) -> tuple[str, str, list[str], list[str]]:
    """What this rank raises: class, text, names of all its classes, collectives entered before."""
    mesh = mesh_of(rank, case)
    assert mesh is not None
    function, inputs, params = problem.instance(
        case.dtype, rank.device, lambda index, whole: _shard(problem, case, mesh, index, whole)
    )
    with record_traffic() as traffic:
        try:
            function(*inputs, **params)
        except Exception as error:  # noqa: BLE001
            names = [kind.__name__ for kind in type(error).__mro__]
            return names[0], str(error), names, traffic.collectives
    return "nothing", "", [], traffic.collectives


def mesh_of(rank: Rank, case: Case) -> DeviceMesh | None:
    """The mesh of a case; None on ranks outside it."""
    axes = dict(case.mesh)
    return rank.submesh(case.ranks, **axes) if case.ranks else rank.mesh(**axes)


def _shard(
    problem: Problem, case: Case, mesh: DeviceMesh, index: int, whole: torch.Tensor
) -> torch.Tensor:
    split = problem.splits[index]
    if not split:
        return whole
    dims = {axis: dim for dim, axis in split.items()}
    placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis, _ in case.mesh]
    sizes: dict[str, Extents] | None = case.sizes[index] or None
    return distribute_tensor(whole, mesh, placements, src_data_rank=None, sizes=sizes)


def _check(
    rank: Rank, problem: Problem, expected: Expected, case: Case, mesh: DeviceMesh
) -> Verdict:
    function, inputs, params = problem.instance(
        case.dtype, rank.device, lambda index, whole: _shard(problem, case, mesh, index, whole)
    )
    shards = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, ShardTensor)]
    held = [(leaf.to_local().numel(), leaf.numel()) for leaf in shards]
    module = function if isinstance(function, nn.Module) else None
    replicated = [*params.values()]
    if module is not None:
        replicated += [*module.parameters(), *module.buffers()]
    counter = CountWork(replicated)
    run = function
    if case.backend:
        from shardfield.parallel.compile import compile

        torch._dynamo.reset()
        run = compile(function, backend=case.backend, fullgraph=True)
    _seed(rank.device)
    with record_traffic() as traffic:
        results = evaluate(
            run, module, inputs, params, problem.double, None if case.backend else counter
        )
    problems = []
    if results.structure != expected.structure:
        problems.append(f"the output is {results.structure}, not {expected.structure}")
    found = results.named()
    for name in [*expected.values, *(found.keys() - expected.values.keys())]:
        if name not in found or name not in expected.values:
            problems.append(f"{name} is there on one side only")
            continue
        problems += [f"{name} {text}" for text in _differences(found[name], name, expected)]
    outputs = [leaf for leaf in results.outputs if isinstance(leaf, torch.Tensor)]
    kinds = ["sharded" if isinstance(leaf, ShardTensor) else "plain" for leaf in outputs]
    layouts = {n: str(leaf.layout) for n, leaf in found.items() if isinstance(leaf, ShardTensor)}
    return Verdict(rank.rank, problems, traffic.collectives, held, kinds, layouts, counter.work)


def _seed(device: torch.device) -> None:
    """What `torch.manual_seed(0)` does for this device; for all kinds it takes 2 ms."""
    torch.default_generator.manual_seed(0)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(0)


def _differences(found: Any, name: str, expected: Expected) -> list[str]:
    value, allowed = expected.values[name], expected.allowed.get(name, 0.0)
    if isinstance(found, torch.Tensor) and found.dtype != expected.dtypes.get(name):
        return [f"has type {found.dtype}, not {expected.dtypes.get(name)}"]
    if not isinstance(found, ShardTensor):
        text = difference(found, value, allowed)
        return [text] if text else []
    block = _block(found, value)
    if block is None:  # on every rank: it is the layout's doing
        with torch.no_grad():
            text = difference(found.full_tensor(), value, allowed)
        return [text] if text else []
    # The shards of all ranks are the whole: they agree on the layout (see `parity`).
    text = difference(found.to_local(), block, allowed)
    return [f"(the shard, {found.layout}) {text}"] if text else []


def _block(found: Any, value: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the reference, where ranges are contiguous; free of communication."""
    if tuple(found.shape) != tuple(value.shape):
        return None
    layout, block = found.layout, value
    for dim in range(value.ndim):
        if layout.contiguous(dim) is None:
            return None
        block = block.narrow(dim, layout.offset(dim), layout.local_shape[dim])
    return block
