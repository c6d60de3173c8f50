"""`parity` and `refused`: a function on sharded tensors against itself in one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from shardfield.errors import UnsupportedOperation
from shardfield.testing.cases import Case, Extents, Split, sweep
from shardfield.testing.evaluate import Results, evaluate, tolerance
from shardfield.testing.parity_rank import Expected, Problem, Verdict, check, refuse
from shardfield.testing.pool import rank_pool
from shardfield.testing.vacuity import is_vacuous, share

_DTYPES = (torch.float64, torch.float32)
_cases_run = 0


class ParityError(AssertionError):
    """Sharded and whole results differ, or the comparison was worth nothing."""


@dataclass(frozen=True)
class Report:
    """What `parity` ran.

    Attributes:
        cases: Number of runs on ranks.
        share: Over all cases on more than one rank, the largest share of the computing work of
            one process that its idlest rank did; 1/P plus halos is right.
    """

    cases: int
    share: float


def cases_run() -> int:
    """How many parity cases this process has run."""
    return _cases_run


def parity(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    placements: Sequence[Any],
    ranks: Sequence[int] = (1, 2, 3, 4),
    sizes: Sequence[Extents | Mapping[str, Extents]] | None = None,
    params: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] = _DTYPES,
    atol: float = 1e-10,
    compiled: bool | str = False,
    double: bool = False,
    subgroup: bool = True,
    output: Literal["sharded", "plain"] | None = None,
    whole: bool = False,
    timeout: float = 90.0,
) -> Report:
    """Runs `fn` in one process and on ranks with sharded inputs; everything must be equal.

    Compared are outputs, gradients of all floating-point inputs and of all parameters (for random
    cotangents, the same on both sides), and the buffers of a module. In float64 the error may be
    `atol`, relative to the largest value where that exceeds 1; in lower precision, 10 times that
    of plain torch. All ranks must have entered the same collectives.

    Args:
        fn: A function or module of plain torch code. A module is copied, never changed.
        inputs: Its positional arguments: global tensors, pytrees of them, other values.
        placements: For each input (or leaf of it) what is split: None for a plain replicated
            tensor, a dim for that dim over the axis ``domain``, or a mapping from dims to axes,
            for instance ``{2: "h", 3: "w"}``. The axes named make up the mesh.
        ranks: Numbers of ranks to run on.
        sizes: The splits to run, each the extents of all ranks, or a mapping from axes to them; a
            split is used where its length fits. By default all kinds of splits are swept.
        params: Replicated tensors passed by keyword, whose gradients are compared too.
        dtype: Floating-point types; the first runs on all splits, the others on two.
        atol: Error allowed in float64.
        compiled: Also run under `shardfield.compile`, with this backend (True: ``aot_eager``).
        double: Also compare the gradients of the gradients.
        subgroup: Also run on a mesh over the ranks [2, 3] of 4.
        output: What all tensor outputs on more than one rank have to be.
        whole: The function is meant to gather, so each rank may do all the work.
        timeout: Seconds for the cases of one world size.

    Returns:
        The number of cases, and how the work was shared.

    Raises:
        ParityError: A result differs; or the pass would be vacuous: no rank held less than the
            whole of an input, or every rank did the work of one process.
        RankError: A rank raised, died or hung.

    Example:
        >>> parity(nn.Conv2d(3, 4, 3, padding=1), [torch.randn(2, 3, 9, 8)], [2])
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    backend = "aot_eager" if compiled is True else compiled or ""
    problem, expected = _prepare(fn, inputs, placements, params or {}, dtypes, atol, double)
    splits = problem.splits
    if not any(splits):
        raise ParityError(f"parity of {_name(fn)} is vacuous: no input is split")
    counts = sorted({1, *ranks}) if not whole else sorted(ranks)
    cases = list(sweep(problem.tensors(), splits, counts, sizes, dtypes, backend, subgroup))
    complaints: list[str] = []
    largest, alone = 0.0, None
    for world in sorted({case.world for case in cases}):
        batch = [case for case in cases if case.world == world]
        rows = _run(problem, expected, batch, world, timeout)
        for case, verdicts in zip(batch, rows, strict=True):
            alone = alone or verdicts[0].work
            wrong = [f"rank {item.rank}: {text}" for item in verdicts for text in item.problems]
            if len(verdicts) > 1:
                wrong += _across(verdicts, output)
                if not case.backend and not whole:
                    work = [item.work for item in verdicts]
                    largest = max(largest, share(work, alone))
                    if is_vacuous(work, alone, max(size for _, size in verdicts[0].held)):
                        wrong.append("vacuous: every rank did the work of one process")
            complaints += [f"{case.name}: {text}" for text in wrong]
    if complaints:
        shown = "\n  ".join(complaints[:12])
        more = f"\n  and {len(complaints) - 12} more" if len(complaints) > 12 else ""
        raise ParityError(f"parity of {_name(fn)} fails in {len(cases)} cases:\n  {shown}{more}")
    return Report(len(cases), largest)


def refused(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    placements: Sequence[Any],
    error: type[Exception] = UnsupportedOperation,
    match: str | None = None,
    ranks: Sequence[int] = (2, 3),
    sizes: Sequence[Extents | Mapping[str, Extents]] | None = None,
    params: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """Asserts that every rank raises the same error, before any communication.

    Args:
        fn, inputs, placements, sizes, params: As in `parity`.
        error: The class of the error.
        match: A pattern its text must contain.
        ranks: Numbers of ranks to run on.

    Returns:
        The text of the error.

    Raises:
        ParityError: A rank raised nothing, another error or another text, or communicated first.
        RankError: A rank died or hung.
    """
    problem, _ = _prepare(fn, inputs, placements, params or {}, (torch.float64,), 0.0, None)
    text = ""
    found = sweep(
        problem.tensors(), problem.splits, ranks, sizes, (torch.float64,), "", subgroup=False
    )
    for case in found:
        _count(1)
        answers = rank_pool(case.world).run(refuse, problem, case)
        raised = {(kind, message) for kind, message, _, _ in answers}
        kind, text = answers[0][0], answers[0][1]
        if len(raised) > 1:
            raise ParityError(f"{case.name}: the ranks raise different errors: {sorted(raised)}")
        if not any(error.__name__ == name for name in answers[0][2]):
            raise ParityError(f"{case.name}: expected {error.__name__}, got {kind}: {text}")
        if match is not None and not re.search(match, text):
            raise ParityError(f"{case.name}: {match!r} is not in: {text}")
        if any(collectives for *_, collectives in answers):
            raise ParityError(f"{case.name}: communicated before it raised: {answers[0][3]}")
    return text


def _prepare(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    placements: Sequence[Any],
    params: Mapping[str, torch.Tensor],
    dtypes: Sequence[torch.dtype],
    atol: float,
    double: bool | None,
) -> tuple[Problem, dict[torch.dtype, Expected]]:
    """Rounds everything to the lowest type, so that all types start from the same values."""
    lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    problem = Problem(
        function=_rounded_module(fn, lowest),
        inputs=tree_map(lambda leaf: _rounded(leaf, lowest), list(inputs)),
        params={name: _rounded(value, lowest) for name, value in params.items()},
        splits=_splits(inputs, placements),
        double=bool(double),
    )
    expected: dict[torch.dtype, Expected] = {}
    if double is None:
        return problem, expected
    exact = _reference(problem, torch.float64)
    for dtype in dtypes:
        plain = _reference(problem, dtype) if dtype != torch.float64 else None
        expected[dtype] = _expected(exact, plain, dtype, atol)
    return problem, expected


def _reference(problem: Problem, dtype: torch.dtype) -> Results:
    function, inputs, params = problem.instance(dtype, torch.device("cpu"))
    torch.manual_seed(0)
    module = function if isinstance(function, nn.Module) else None
    return evaluate(function, module, inputs, params, problem.double)


def _expected(exact: Results, plain: Results | None, dtype: torch.dtype, atol: float) -> Expected:
    values, allowed, kinds = {}, {}, {}
    rough = plain.named() if plain is not None else {}
    for name, value in exact.named().items():
        values[name] = value.detach() if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor):
            kinds[name] = rough[name].dtype if plain is not None else value.dtype
            if value.dtype.is_floating_point or value.dtype.is_complex:
                bound = rough[name].detach() if plain is not None else None
                allowed[name] = tolerance(value.detach(), bound, dtype, atol)
    return Expected(exact.structure, values, kinds, allowed)


def _splits(inputs: Sequence[Any], placements: Sequence[Any]) -> list[Split]:
    """One split per tensor leaf; a single placement serves all leaves of its input."""
    if len(inputs) != len(placements):
        raise ValueError(f"{len(inputs)} inputs but {len(placements)} placements")
    found: list[Split] = []
    for value, placement in zip(inputs, placements, strict=True):
        leaves = tree_flatten(value)[0]
        given = tree_flatten(placement, is_leaf=lambda item: isinstance(item, Mapping))[0]
        if len(given) == 1:
            given = given * len(leaves)
        for leaf, item in zip(leaves, given, strict=True):
            if isinstance(leaf, torch.Tensor):
                split = {} if item is None else item
                split = {split: "domain"} if isinstance(split, int) else split
                found.append({dim % leaf.ndim: axes for dim, axes in split.items()})
    return found


def _rounded(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
        return leaf
    return leaf.detach().to(dtype).to(torch.float64)


def _rounded_module(fn: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    if not isinstance(fn, nn.Module):
        return fn
    return copy.deepcopy(fn).to(dtype).to(torch.float64)


def _run(
    problem: Problem,
    expected: Mapping[torch.dtype, Expected],
    cases: Sequence[Case],
    world: int,
    timeout: float,
) -> list[list[Verdict]]:
    """For each case, the verdicts of the ranks that belong to its mesh."""
    answers = rank_pool(world).run(check, problem, expected, cases, timeout=timeout)
    _count(len(cases))
    return [[item for item in row if item is not None] for row in zip(*answers, strict=True)]


def _across(verdicts: Sequence[Verdict], output: str | None) -> list[str]:
    """What only shows when the ranks are looked at together."""
    wrong = []
    entered = {tuple(item.collectives) for item in verdicts}
    if len(entered) > 1:
        wrong.append(f"the ranks entered different collectives: {sorted(entered)}")
    if all(held == size for item in verdicts for held, size in item.held):
        wrong.append("vacuous: no rank held less than the whole of any input")
    names = {name for item in verdicts for name in item.layouts}
    for name in sorted(names):
        lie = sorted({item.layouts.get(name, "plain") for item in verdicts})
        if len(lie) > 1:
            wrong.append(f"the ranks disagree how {name} lies: {lie}")
    kinds = {kind for item in verdicts for kind in item.kinds}
    if output is not None and kinds != {output}:
        wrong.append(f"the outputs are {sorted(kinds)}, not {output}")
    return wrong


def _count(cases: int) -> None:
    global _cases_run
    _cases_run += cases


def _name(fn: Callable[..., Any]) -> str:
    return repr(fn) if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))
