"""A tensor-parallel plan from a module itself, by running it once on fake tensors.

Megatron's pairs (Shoeybi et al., 2019) are found, not listed: for every linear map, the linear maps
that its input comes from. Their output features are split in ways that the shapes between suggest,
and what lies between is run again with these splits, as one rank would. The first split that comes
through without communication, and reaches the features that the last map contracts, is taken: that
map then needs one sum over the ranks, and its sources one in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shardfield.axes import TENSOR, MeshAxes
from shardfield.comm.collectives import Silence, record_traffic
from shardfield.composite import body_of, is_composite
from shardfield.errors import LayoutError
from shardfield.layout import Dim, Factor, Layout, balanced
from shardfield.parallel.tensor_plan import Split, TensorPlan
from shardfield.registry import is_registered
from shardfield.tensor import ShardTensor, wrap

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """One torch function that the model called.

    Attributes:
        function, args, kwargs: the call.
        sources: for every tensor among the arguments, the call it came from; None: from outside.
        out: what it returned.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: tuple[int | None, ...]
    out: Any


@dataclass(frozen=True)
class Linear:
    """A call that contracts the features of an activation with a parameter.

    Features are the last dim, or the channels of a convolution.

    Attributes:
        call: its index.
        input: place of the activation among the arguments.
        weight, bias: names of parameters.
        rows: dim of the weight that is the output features; the other one is contracted.
        features: how many.
        back: place of the features among the dims of the activations, from the end.
    """

    call: int
    input: int
    weight: str
    bias: str | None
    rows: int
    features: int
    back: int = 1


def derive_plan(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: int
) -> TensorPlan:
    """The plan for `ranks` tensor ranks of a model called as `model(*args, **kwargs)`.

    Args:
        args, kwargs: plain tensors of the global shapes; their values are not read.

    Comm: none. Memory: none for activations.

    Raises:
        LayoutError: the model cannot run on fake tensors.
    """
    trace = _traced(model, args, kwargs)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    splits: dict[str, Split] = {}
    rows_split: set[str] = set()
    for last in trace.linears.values():
        between, firsts = trace.between(last)
        if not firsts or last.weight in splits or any(f.weight in rows_split for f in firsts):
            continue
        if any(f.weight in splits for f in firsts) or trace.leaks(firsts, between, last):
            continue
        found = _first_silent(trace, last, between, firsts, ranks)
        if found is None:
            continue
        cuts, arrived = found
        for first, cut in cuts.items():
            splits[first.weight] = cut.on(first.rows)
            if first.bias is not None:
                splits[first.bias] = cut.on(0)
        splits[last.weight] = _of_dim(arrived, 1 - last.rows)
        rows_split.add(last.weight)
    splits |= _vocabulary(trace, splits, shapes, ranks)
    for names in trace.tied:  # all names of a shared parameter have the rule of one
        rule = next((splits[name] for name in names if name in splits), None)
        if rule is not None:
            splits |= dict.fromkeys(names, rule)
    return TensorPlan(splits, shapes, ranks)


class _Trace:
    """The calls of one forward."""

    def __init__(self, mode: FakeTensorMode, names: dict[int, str]) -> None:
        self.mode = mode
        self.names = names  # by id of the fake parameter
        self.tied: list[list[str]] = []
        self.calls: list[Call] = []
        self.linears: dict[int, Linear] = {}
        self.tables: list[str] = []

    def between(self, last: Linear) -> tuple[list[int], list[Linear]]:
        """The calls that lead to the input of a linear map, and the linear maps they start from."""
        found: set[int] = set()
        firsts: dict[int, Linear] = {}
        pending = [self._source(last.call, last.input)]
        while pending:
            index = pending.pop()
            if index is None or index in found or index in firsts:
                continue
            if index in self.linears:
                firsts[index] = self.linears[index]
                continue
            found.add(index)
            pending += self.calls[index].sources
        return sorted(found), [firsts[index] for index in sorted(firsts)]

    def leaks(self, firsts: list[Linear], between: list[int], last: Linear) -> bool:
        """Whether what the first maps return is used elsewhere too, where it would be gathered."""
        reached = {first.call for first in firsts}
        inside = {*between, last.call}
        for index, call in enumerate(self.calls):
            if reached.intersection(call.sources):
                if index not in inside:
                    return True
                if index != last.call:
                    reached.add(index)
        return False

    def _source(self, index: int, place: int) -> int | None:
        call = self.calls[index]
        before = len([x for x in tree_leaves(call.args[:place]) if isinstance(x, Tensor)])
        return call.sources[before]


class _Recorder(TorchFunctionMode):
    """Lists the torch functions that run; those that torch writes in Python by what they call."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace
        self.made: dict[int, int] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_composite(func) and (self._takes_parameters(args) or not is_registered(func)):
            with self:
                return body_of(func)(*args, **kwargs)
        out = func(*args, **kwargs)
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not tensors:
            return out
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        sources = tuple(self.made.get(id(x)) for x in leaves)
        index = len(self.trace.calls)
        self.trace.calls.append(Call(func, tuple(args), kwargs, sources, out))
        self.made |= {id(x): index for x in tensors}
        self._note(index, func, args, kwargs)
        return out

    def _takes_parameters(self, args: tuple) -> bool:
        return any(isinstance(x, Tensor) and id(x) in self.trace.names for x in args)

    def _note(self, index: int, func: Any, args: tuple, kwargs: dict) -> None:
        names = self.trace.names
        given = [names.get(id(x)) if isinstance(x, Tensor) else None for x in args]
        given += [None] * (3 - len(given))
        bias = kwargs.get("bias")
        found = None
        if func is F.linear and given[1]:
            name = given[2] or (names.get(id(bias)) if bias is not None else None)
            found = Linear(index, 0, given[1], name, 0, args[1].shape[0])
        elif func in (torch.addmm, Tensor.addmm) and given[2]:
            found = Linear(index, 1, given[2], given[0], 1, args[2].shape[1])
        elif func in _PRODUCTS and given[1] and args[1].dim() == 2:
            found = Linear(index, 0, given[1], None, 1, args[1].shape[1])
        elif func in _CONVOLUTIONS and given[1] and _ungrouped(args, kwargs):
            rows = int("transpose" in func.__name__)
            back = args[1].dim() - 1
            found = Linear(index, 0, given[1], given[2], rows, args[1].shape[rows], back)
        elif func is torch.embedding and given[0]:
            self.trace.tables.append(given[0])
        if found is not None:
            self.trace.linears[index] = found


def _ungrouped(args: tuple, kwargs: dict) -> bool:
    """Whether a convolution mixes all its channels."""
    return (args[6] if len(args) > 6 else kwargs.get("groups", 1)) == 1


_CONVOLUTIONS = (
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


def _traced(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    everything = dict(model.named_parameters(remove_duplicate=False))
    fakes = {key: fake(p.detach()) for key, p in {id(p): p for p in everything.values()}.items()}
    state = {name: fakes[id(p)] for name, p in everything.items()}
    trace = _Trace(mode, {})
    by_fake: dict[int, list[str]] = {}
    for name, value in state.items():
        by_fake.setdefault(id(value), []).append(name)
    trace.names.update({key: names[0] for key, names in by_fake.items()})
    trace.tied = [names for names in by_fake.values() if len(names) > 1]
    state |= {name: fake(b) for name, b in model.named_buffers()}
    training = model.training
    try:
        model.eval()  # dropout splits like its input, and draws nothing here
        with mode, torch.no_grad(), _Recorder(trace):
            torch.func.functional_call(
                model, state, tree_map(fake, tuple(args)), tree_map(fake, dict(kwargs))
            )
    except Exception as error:
        raise LayoutError(
            f"a tensor-parallel plan of {type(model).__name__}",
            f"it runs on fake tensors once; there it raised {type(error).__name__}: {error}",
            "pass example inputs that the model accepts, or a TensorPlan written by hand",
            "tensor-parallel",
        ) from error
    finally:
        model.train(training)
    return trace


@dataclass(frozen=True)
class _Cut:
    """Output features as outer x units x inner, the units dealt out."""

    outer: int
    units: int
    inner: int
    extents: tuple[int, ...]

    def on(self, dim: int) -> Split:
        return Split(dim, self.outer, self.units, self.inner, self.extents)

    def dim(self) -> Dim:
        return (
            Factor(self.outer),
            Factor(self.units, (TENSOR,), self.extents),
            Factor(self.inner),
        )


def _first_silent(
    trace: _Trace, last: Linear, between: list[int], firsts: list[Linear], ranks: int
) -> tuple[dict[Linear, _Cut], Dim] | None:
    """The first cuts that come through without communication, and how they arrive."""
    for cuts in _candidates(trace, between, firsts, ranks):
        try:
            arrived = _arrived(trace, last, between, cuts, ranks)
        except Exception:  # noqa: BLE001 - would communicate, or takes no such split
            continue
        if arrived is not None:
            return cuts, arrived
    return None


def _candidates(
    trace: _Trace, between: list[int], firsts: list[Linear], ranks: int
) -> Iterator[dict[Linear, _Cut]]:
    """Ways to cut the features of all first maps alike; then with the small ones left whole."""
    sizes, parts = {1}, {1}
    for out in (trace.calls[index].out for index in between):
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                sizes.update(n for n in x.shape[-3:] if n)
                parts.update(n for n in x.shape if 0 < n <= _PARTS)
        if isinstance(out, (list, tuple)):
            parts.update({len(out)} if 0 < len(out) <= _PARTS else ())
    widest = max(first.features for first in firsts)
    for call in (trace.calls[index] for index in between):
        for count in call.args:  # groups of a norm, say
            if type(count) is int and count > 1 and widest % count == 0:
                sizes.add(widest // count)
    for inner, outer in product(sorted(sizes), sorted(parts)):
        fitting = [f for f in firsts if not f.features % (outer * inner)]
        groups = [[f for f in fitting if f.features == widest]]
        if len(fitting) == len(firsts) > len(groups[0]):
            groups.insert(0, fitting)
        for group in groups:
            counts = {f: f.features // (outer * inner) for f in group}
            common = gcd(*counts.values())
            if group and common >= ranks:
                dealt = balanced(common, ranks)
                yield {
                    f: _Cut(outer, n, inner, tuple(share * n // common for share in dealt))
                    for f, n in counts.items()
                }


# Parts of a fused projection, at most: queries, keys and values, gate and value, modulations.
_PARTS = 8


def _arrived(
    trace: _Trace, last: Linear, between: list[int], cuts: Mapping[Linear, _Cut], ranks: int
) -> Dim | None:
    """How the contracted dim of `last` is split if its sources are; None if anything else is."""
    mesh = _mesh(ranks)
    values: dict[int, Any] = {}
    for first, cut in cuts.items():
        out = trace.calls[first.call].out
        dims: list[Dim] = [(Factor(size),) for size in out.shape]
        dims[len(dims) - first.back] = cut.dim()
        layout = Layout(mesh, dims)
        with trace.mode:
            values[first.call] = wrap(out.new_empty(layout.local_shape), layout)
    with trace.mode, torch.no_grad(), record_traffic(Silence()):
        for index in between:
            call = trace.calls[index]
            args, kwargs = _replaced(call, trace, values)
            values[index] = call.function(*args, **kwargs)
    args, _ = _replaced(trace.calls[last.call], trace, values)
    x = args[last.input]
    if not isinstance(x, ShardTensor):
        return None
    layout = x.layout
    contracted = len(layout.dims) - last.back
    if layout.split_axes != (TENSOR,) or not layout.is_split(contracted):
        return None
    return layout.dims[contracted]


def _replaced(call: Call, trace: _Trace, values: dict[int, Any]) -> tuple[tuple, dict]:
    """The arguments of a call, those that other calls made taken from `values`."""
    sources = iter(call.sources)

    def value(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        index = next(sources)
        if index is None or index not in values:
            return x
        made = tree_leaves(trace.calls[index].out)
        place = next(i for i, other in enumerate(made) if other is x)
        return tree_leaves(values[index])[place]

    return tree_map(value, (call.args, call.kwargs))


@cache
def _mesh(ranks: int) -> MeshAxes:
    """Axes without processes, seen from the rank that has the largest share."""
    return MeshAxes((TENSOR,), (ranks,), (0,), ("nobody",))


def _of_dim(dim: Dim, place: int) -> Split:
    """The rule for a dim of these factors."""
    at = next(i for i, factor in enumerate(dim) if factor.axes)
    outer = inner = 1
    for factor in dim[:at]:
        outer *= factor.size
    for factor in dim[at + 1 :]:
        inner *= factor.size
    return Split(place, outer, dim[at].size, inner, dim[at].extents)


def _vocabulary(
    trace: _Trace,
    splits: Mapping[str, Split],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: int,
) -> dict[str, Split]:
    """Tables, and linear maps of a table's shape (tied or not), by rows.

    A table with no more rows than columns is no vocabulary: square maps would pass for its head.
    """
    found: dict[str, Split] = {}
    for table in trace.tables:
        rows, columns = shapes[table]
        heads = [
            x
            for x in trace.linears.values()
            if x.rows == 0 and shapes[x.weight] == (rows, columns) and x.weight not in splits
        ]
        if heads and rows >= max(ranks, columns + 1) and table not in splits:
            split = Split(0, 1, rows, 1, balanced(rows, ranks))
            names = [table, *(n for head in heads for n in (head.weight, head.bias) if n)]
            found |= dict.fromkeys(names, split)
    return found
