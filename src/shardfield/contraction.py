"""Plans of contractions: which mesh axes split which index, and what has to move for it. Pure.

A contraction is written as `torch.einsum` writes it, one letter an index: `"mk,kn->mn"`. It is
computed in blocks: every mesh axis splits one index at most, every operand enters with exactly the
rows of its indices that this rank computes with, and results that are partial over an axis, because
it splits an index that is summed, are added up. An operand that lies split over an axis which the
computation gives to another index has to be gathered along it, or its split moved.

Indices stay split as they lie where that is possible. Where operands disagree about an axis or
about the cuts of an index, the assignment is chosen that moves the fewest elements: those that
ranks receive to hold what they compute with, and `2(p-1)/p` of a partial result for every axis of
`p` ranks that it is summed over. Of equal ones it is the first, that of the leftmost operand, so
that the rows of `q @ k.T` stay split and its columns whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from shardfield.axes import MeshAxes
from shardfield.constant import constant
from shardfield.errors import LayoutError
from shardfield.layout import Dim, Factor, Layout, balanced, canonical, even_extents
from shardfield.plan import Run, runs_of

Operand = Layout | tuple[int, ...]
"""A sharded operand's layout, or the shape of a plain, replicated one."""

Assignment = dict[str, Dim]
"""How the computation splits its indices; those left out are whole."""


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """How one operand enters a contraction.

    Attributes:
        plain: it is not sharded: a rank uses its part of it.
        rest: its layout outside.
        before: axes over which it is whole and the computation split; its gradient is partial.
        middle: its layout once its cuts are aligned, its splits transposed, its whole dims sliced.
        spread: dims of `middle` that are then gathered along axes which split the computation; its
            gradient is added up on the rows' owners.
        target: its layout inside.
        after: axes of the computation over which it was split and `middle` is whole.
        still: nothing moves.
        kept: its indices in its gradient's contraction; over the others that is constant.
        ones: local shape of that gradient, 1 along the others.
    """

    plain: bool
    rest: Layout
    before: tuple[str, ...]
    middle: Layout
    spread: tuple[int, ...]
    target: Layout
    after: tuple[str, ...]
    still: bool
    kept: str
    ones: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Contraction:
    """A contraction of operands as they lie.

    Attributes:
        layout: of the result.
        summed: of the result before its rows are scattered.
        scattered: dims of which every rank then gets some rows of the sum.
        inputs: indices of every operand.
        output: indices of the result.
        axes: mesh axes over which the computation is split.
        sums: those of them over which results are partial.
        entries: how every operand enters.
        moves: some operand is not where it is computed with.
        tokens: sequence parallelism: what is gathered is used by several maps.
    """

    layout: Layout
    summed: Layout
    scattered: tuple[int, ...]
    inputs: tuple[str, ...]
    output: str
    axes: tuple[str, ...]
    sums: tuple[str, ...]
    entries: tuple[Entry, ...]
    moves: bool
    tokens: bool


def mesh_of(asked: str, *operands: Operand) -> MeshAxes:
    """The one mesh of the sharded operands.

    Raises:
        LayoutError: they lie on several.
    """
    meshes = [operand.mesh for operand in operands if isinstance(operand, Layout)]
    if any(mesh is not meshes[0] for mesh in meshes):
        raise LayoutError(
            f"{asked} of tensors on different root meshes",
            "operands lie on one mesh",
            "call init_mesh once, and use its parts (mesh['domain'])",
            "mesh",
        )
    return meshes[0]


@constant
def contraction(equation: str, whole: str, tokens: str, *operands: Operand) -> Contraction:
    """Plans a contraction whose shapes fit.

    Args:
        equation: as for `torch.einsum`, with an arrow, without ellipsis; no index twice in one
            operand. A size of 1 broadcasts.
        whole: indices that the computation cannot split. A split there moves to the longest index
            of the operand that is not split.
        tokens: an index of the result (sequence parallelism). Splits of the last operand stand
            and others give way; a sum over axes that it is split over is scattered over `tokens`.
    """
    left, _, output = equation.partition("->")
    inputs = tuple(left.split(","))
    mesh = mesh_of(equation, *operands)
    rest = [
        operand if isinstance(operand, Layout) else Layout(mesh, [(Factor(n),) for n in operand])
        for operand in operands
    ]
    sizes: dict[str, int] = {}
    for letters, layout in zip(inputs, rest, strict=True):
        for letter, size in zip(letters, layout.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    candidates = _candidates(inputs, rest, sizes, whole)
    if tokens:
        candidates = _yielding(candidates, inputs[-1], rest[-1])
    choices = list(_assignments(candidates))
    chosen = choices[0]
    if len(choices) > 1:
        chosen = min(choices, key=lambda choice: moved(inputs, output, rest, sizes, choice))
    used = [axis for dim in chosen.values() for axis in _axes(dim)]
    axes = tuple(axis for axis in mesh.names if axis in used)
    summed = Layout(mesh, [chosen.get(letter, (Factor(sizes[letter]),)) for letter in output])
    partial = tuple(axis for axis in axes if axis not in summed.split_axes)
    out = summed
    if tokens:
        of_last = tuple(axis for axis in partial if axis in rest[-1].split_axes)
        out = _scattered(summed, output.index(tokens), of_last)
    entries = tuple(
        _entry(
            not isinstance(operand, Layout),
            rest[i],
            inputs[i],
            output + "".join(_full(inputs[j], rest[j], sizes) for j in range(len(rest)) if j != i),
            sizes,
            chosen,
            axes,
        )
        for i, operand in enumerate(operands)
    )
    return Contraction(
        out,
        summed,
        (output.index(tokens),) if out is not summed else (),
        inputs,
        output,
        axes,
        tuple(axis for axis in partial if axis not in out.split_axes),
        entries,
        not all(entry.plain or entry.still for entry in entries),
        bool(tokens),
    )


def _axes(dim: Dim) -> tuple[str, ...]:
    return tuple(axis for factor in dim for axis in factor.axes)


def _full(letters: str, layout: Layout, sizes: dict[str, int]) -> str:
    """Indices of an operand along which it is not broadcast."""
    return "".join(
        letter for letter, size in zip(letters, layout.shape, strict=True) if size == sizes[letter]
    )


def _candidates(
    inputs: Sequence[str], rest: Sequence[Layout], sizes: dict[str, int], whole: str
) -> list[tuple[str, Dim]]:
    """Every split that an operand brings, from left to right."""
    found: list[tuple[str, Dim]] = []
    for letters, layout in zip(inputs, rest, strict=True):
        full = _full(letters, layout, sizes)
        for d, letter in enumerate(letters):
            axes, dim = layout.axes(d), layout.dims[d]
            if not axes or letter not in full:
                continue
            if letter in whole:
                free = [
                    other
                    for e, other in enumerate(letters)
                    if other in full and other not in whole and not layout.is_split(e)
                ]
                if not free:
                    continue
                letter = max(free, key=lambda other: sizes[other])
                size = sizes[letter]
                dim = (Factor(size, axes, even_extents(size, layout.mesh.size(axes))),)
            if (letter, dim) not in found:
                found.append((letter, dim))
    return found


def _yielding(
    candidates: Sequence[tuple[str, Dim]], letters: str, layout: Layout
) -> list[tuple[str, Dim]]:
    """The splits of one operand, of this layout, and what of other candidates leaves them alone."""
    standing = [
        (letter, dim)
        for d, (letter, dim) in enumerate(zip(letters, layout.dims, strict=True))
        if layout.is_split(d)
    ]
    others = []
    for letter, dim in candidates:
        if letter not in dict(standing):
            dim = without(dim, layout.split_axes, layout.mesh)
            if _axes(dim) and (letter, dim) not in others:
                others.append((letter, dim))
    return [*standing, *others]


def without(dim: Dim, axes: Collection[str], mesh: MeshAxes) -> Dim:
    """A dim split no longer over `axes`: its shares joined where these are the last of its axes."""
    factors = []
    for factor in dim:
        kept = tuple(axis for axis in factor.axes if axis not in axes)
        if kept == factor.axes:
            factors.append(factor)
        elif kept and kept == factor.axes[: len(kept)]:
            share = len(factor.extents) // mesh.size(kept)
            cuts = range(0, len(factor.extents), share)
            extents = tuple(sum(factor.extents[at : at + share]) for at in cuts)
            factors.append(Factor(factor.size, kept, extents))
        else:
            factors.append(Factor(factor.size))
    return tuple(factors)


def _scattered(layout: Layout, d: int, axes: tuple[str, ...]) -> Layout:
    """The layout with the shares of a dim of one factor split further, over `axes`."""
    if not axes or len(layout.dims[d]) > 1:
        return layout
    mesh, (factor,) = layout.mesh, layout.dims[d] or (Factor(1),)
    shares = factor.extents or (factor.size,)
    extents = [n for share in shares for n in balanced(share, mesh.size(axes))]
    return layout.replace({d: (Factor(factor.size, (*factor.axes, *axes), tuple(extents)),)})


def _assignments(
    candidates: Sequence[tuple[str, Dim]], chosen: tuple[int, ...] = (), at: int = 0
) -> Iterator[Assignment]:
    """Every set of candidates that go together and to which no other can be added, first first."""

    def fits(index: int) -> bool:
        letter, dim = candidates[index]
        return all(
            letter != candidates[other][0]
            and not set(_axes(dim)) & set(_axes(candidates[other][1]))
            for other in chosen
        )

    if at < len(candidates):
        if fits(at):
            yield from _assignments(candidates, (*chosen, at), at + 1)
        yield from _assignments(candidates, chosen, at + 1)
    elif not any(fits(index) for index in range(len(candidates)) if index not in chosen):
        yield dict(candidates[index] for index in chosen)


def _target(letters: str, layout: Layout, sizes: dict[str, int], chosen: Assignment) -> list[Dim]:
    return [
        chosen[letter] if letter in chosen and size == sizes[letter] else (Factor(size),)
        for letter, size in zip(letters, layout.shape, strict=True)
    ]


def _entry(
    plain: bool,
    rest: Layout,
    letters: str,
    others: str,
    sizes: dict[str, int],
    chosen: Assignment,
    axes: tuple[str, ...],
) -> Entry:
    target = Layout(rest.mesh, _target(letters, rest, sizes, chosen))
    idle = set(axes) - set(target.split_axes)
    spread = tuple(
        d
        for d in range(len(letters))
        if (gone := set(rest.axes(d)) - set(target.axes(d)))
        and gone <= idle
        and target.dims[d] == canonical(without(rest.dims[d], gone, rest.mesh))
    )
    middle = target.replace({d: rest.dims[d] for d in spread})
    partial = tuple(axis for axis in axes if axis in idle and axis not in middle.split_axes)
    full = _full(letters, rest, sizes)
    kept = "".join(letter for letter in letters if letter in full and letter in others)
    return Entry(
        plain,
        rest,
        axes if plain else tuple(axis for axis in partial if axis not in rest.split_axes),
        middle,
        spread,
        target,
        tuple(axis for axis in partial if axis in rest.split_axes),
        _shared(rest) == _shared(target),
        kept,
        tuple(
            rows if letter in kept else 1
            for letter, rows in zip(letters, target.local_shape, strict=True)
        ),
    )


def _shared(layout: Layout) -> Layout:
    """The layout without its splits over axes of one rank."""
    mesh, dims = layout.mesh, []
    for dim in layout.dims:
        factors = []
        for factor in dim:
            axes = tuple(axis for axis in factor.axes if mesh.size((axis,)) > 1)
            factors.append(Factor(factor.size, axes, factor.extents if axes else ()))
        dims.append(factors)
    return Layout(mesh, dims)


def moved(
    inputs: Sequence[str],
    output: str,
    rest: Sequence[Layout],
    sizes: dict[str, int],
    chosen: Assignment,
) -> int:
    """Elements that all ranks receive together under an assignment; the data axis counts once."""
    mesh = rest[0].mesh
    used = {axis for layout in rest for axis in layout.split_axes}
    axes = tuple(axis for axis in mesh.names if axis in used)
    ranks = mesh.size(axes)
    total = 0
    for letters, layout in zip(inputs, rest, strict=True):
        total += received(layout.dims, _target(letters, layout, sizes, chosen), mesh, axes)
    elements = prod(sizes[letter] for letter in output)
    kept = prod(mesh.size(_axes(dim)) for letter, dim in chosen.items() if letter in output)
    for letter, dim in chosen.items():
        if letter not in output:
            for axis in _axes(dim):
                share = mesh.size((axis,))
                total += 2 * (share - 1) * elements * ranks // (kept * share)
    return total


def received(have: Sequence[Dim], want: Sequence[Dim], mesh: MeshAxes, axes: Sequence[str]) -> int:
    """Elements of its new block that a rank does not hold, added up over the ranks of `axes`."""
    total = 0
    for index in product(*(range(mesh.size((axis,))) for axis in axes)):
        place = dict(zip(axes, index, strict=True))
        wanted = held = 1
        for old, new in zip(have, want, strict=True):
            there, here = _runs_at(old, mesh, place), _runs_at(new, mesh, place)
            wanted *= sum(stop - start for start, stop in here)
            held *= _overlap(there, here)
        total += wanted - held
    return total


def _runs_at(dim: Dim, mesh: MeshAxes, place: dict[str, int]) -> tuple[Run, ...]:
    index = 0
    for axis in _axes(dim):
        index = index * mesh.size((axis,)) + place[axis]
    return runs_of(dim)[index]


@lru_cache(maxsize=4096)
def _overlap(first: tuple[Run, ...], second: tuple[Run, ...]) -> int:
    """Rows in both of two ascending sequences of runs."""
    i = j = rows = 0
    while i < len(first) and j < len(second):
        rows += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return rows
