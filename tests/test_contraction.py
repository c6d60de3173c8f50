"""Plans of contractions, without processes: every rank's block, on meshes written down."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, placed

from shardfield.axes import MeshAxes
from shardfield.contraction import Contraction, contraction, received
from shardfield.layout import Dim, Factor, Layout
from shardfield.plan import runs_of

G = torch.Generator().manual_seed(0)
EQUATIONS = [
    ("mk,kn->mn", (5, 4), (4, 6)),
    ("bmk,kn->bmn", (2, 5, 4), (4, 6)),
    ("bhqd,bhkd->bhqk", (2, 2, 5, 3), (2, 1, 6, 3)),
    ("bmk,bkn->mn", (4, 3, 4), (1, 4, 2)),
    ("k,k->", (7,), (7,)),
    ("i,j->ij", (5,), (4,)),
    ("ij,kj->i", (4, 3), (5, 3)),
    ("bi,oij,bj->bo", (4, 3), (2, 3, 5), (4, 5)),
    ("ij->j", (4, 6)),
]
Ranks = list[tuple[MeshAxes, Contraction, list[Layout]]]


def _dims(shape, places, composite=False) -> list[Dim]:
    dims: list[Dim] = [(Factor(size),) for size in shape]
    for axis, (dim, extents) in places.items():
        dims[dim] = (Factor(shape[dim], (axis,), extents),)
        if composite and shape[dim] % 2 == 0:
            half = (*extents[:-1], extents[-1] - sum(extents) // 2)
            if half[-1] >= 0:
                dims[dim] = (Factor(2), Factor(shape[dim] // 2, (axis,), half))
    return dims


def _plans(
    equation: str, mesh: dict[str, int], operands: list[list[Dim]], tokens: str = ""
) -> Ranks:
    """Every rank's plan."""
    found: Ranks = []
    for coordinate in product(*(range(size) for size in mesh.values())):
        axes = MeshAxes(tuple(mesh), tuple(mesh.values()), coordinate)
        layouts = [Layout(axes, dims) for dims in operands]
        found.append((axes, contraction(equation, "", tokens, *layouts), layouts))
    return found


def _block(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    for d, dim in enumerate(layout.dims):
        runs = runs_of(dim)[layout.mesh.rank(layout.axes(d))]
        rows = [row for start, stop in runs for row in range(start, stop)]
        x = x.index_select(d, torch.tensor(rows, dtype=torch.int64))
    return x


@examples(60)
@given(st.data())
def test_blocks_add_up_to_the_contraction(data: st.DataObject):
    equation, *shapes = data.draw(st.sampled_from(EQUATIONS))
    mesh = data.draw(st.sampled_from([{"h": 3}, {"h": 2, "w": 2}, {"h": 1, "w": 3}]))
    composite = data.draw(st.booleans())
    dims = [_dims(shape, data.draw(placed(shape, mesh)), composite) for shape in shapes]
    xs = [torch.randn(shape, generator=G, dtype=torch.float64) for shape in shapes]
    _add_up(equation, mesh, _plans(equation, mesh, dims), xs)


def _add_up(equation: str, mesh: dict[str, int], ranks: Ranks, xs: list[torch.Tensor]) -> None:
    """Blocks of the operands give every rank its block of the result, summed where they say so."""
    whole = torch.einsum(equation, *xs)
    first = ranks[0][1]
    added = [axis for axis in first.axes if axis not in first.summed.split_axes]
    sums: dict[tuple, torch.Tensor] = {}
    numbers, held = torch.arange(whole.numel()).view(whole.shape), defaultdict(list)
    for axes, plan, _ in ranks:
        assert (plan.axes, plan.sums, plan.layout.dims) == (
            first.axes,
            first.sums,
            first.layout.dims,
        )
        blocks = [_block(x, entry.target) for x, entry in zip(xs, plan.entries, strict=True)]
        place = tuple(axes.rank((axis,)) for axis in mesh if axis not in added)
        partial = torch.einsum(equation, *blocks)
        sums[place] = sums[place] + partial if place in sums else partial
    for axes, plan, _ in ranks:
        place = tuple(axes.rank((axis,)) for axis in mesh if axis not in added)
        torch.testing.assert_close(sums[place], _block(whole, plan.summed))
        held[place] += _block(numbers, plan.layout).flatten().tolist()
    copies = prod(mesh[axis] for axis in first.sums)
    for axes, plan, _ in ranks:  # what is scattered is dealt out, every element once
        place = tuple(axes.rank((axis,)) for axis in mesh if axis not in added)
        expected = _block(numbers, plan.summed).flatten().tolist() * copies
        assert sorted(held[place]) == sorted(expected)


@examples(100)
@given(st.data())
def test_weights_stand_and_sums_are_scattered_over_tokens(data: st.DataObject):
    equation, *shapes = "bmk,nk->bmn", (2, 5, 4), (6, 4)
    mesh = data.draw(st.sampled_from([{"h": 3}, {"h": 2, "w": 2}]))
    dims = [_dims(shape, data.draw(placed(shape, mesh))) for shape in shapes]
    if data.draw(st.booleans()):  # tokens over all axes
        cuts = sorted(data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=3)))
        points = [0, *cuts[: prod(mesh.values()) - 1], 5]
        extents = tuple(b - a for a, b in pairwise(points))
        dims[0] = [(Factor(2),), (Factor(5, tuple(mesh), extents),), (Factor(4),)]
    xs = [torch.randn(shape, generator=G, dtype=torch.float64) for shape in shapes]
    ranks = _plans(equation, mesh, dims, "m")
    _add_up(equation, mesh, ranks, xs)
    for _, plan, layouts in ranks:
        weight, target = layouts[1], plan.entries[1].target
        assert all(target.dims[d] == weight.dims[d] for d in (0, 1) if weight.is_split(d))
        rows = layouts[0].axes(1)
        if set(rows).isdisjoint(layouts[1].split_axes):
            assert plan.summed.dims[1] == layouts[0].dims[1]
        assert set(plan.sums).isdisjoint(layouts[1].axes(1))


@examples(60)
@given(st.data())
def test_operands_reach_their_targets(data: st.DataObject):
    """What is gathered or summed over is exactly where an operand and the computation differ."""
    equation, *shapes = data.draw(st.sampled_from(EQUATIONS))
    mesh = {"h": 2, "w": 2}
    dims = [_dims(shape, data.draw(placed(shape, mesh))) for shape in shapes]
    _, plan, layouts = _plans(equation, mesh, dims)[-1]
    for entry, layout in zip(plan.entries, layouts, strict=True):
        gathered = {axis for d in entry.spread for axis in layout.axes(d)}
        idle = set(plan.axes) - set(entry.target.split_axes)
        assert gathered | set(entry.before) | set(entry.after) == idle
        assert len(gathered) + len(entry.before) + len(entry.after) == len(idle)
        assert entry.still == (layout is entry.target)
        assert all(not entry.target.is_split(d) for d in entry.spread)


@examples(40)
@given(st.data())
def test_received_counts_elements_that_are_not_there(data: st.DataObject):
    shape, mesh = (3, 4, 5), {"h": 2, "w": 3}
    old, new = (
        _dims(shape, data.draw(placed(shape, mesh)), data.draw(st.booleans())) for _ in "ab"
    )
    index = torch.arange(60).view(shape)
    expected = 0
    for coordinate in product(range(2), range(3)):
        axes = MeshAxes(tuple(mesh), tuple(mesh.values()), coordinate)
        have, want = (set(_block(index, Layout(axes, d)).flatten().tolist()) for d in (old, new))
        expected += len(want - have)
    assert received(Layout(axes, old).dims, Layout(axes, new).dims, axes, tuple(mesh)) == expected


def _plan(equation, *operands) -> Contraction:
    """The plan of rank 0 of 4 over `h`; an operand is its shape and the dim split, or None."""
    dims = []
    for shape, dim, *cut in operands:
        extents = cut[0] if cut else (shape[dim] // 4,) * 4 if dim is not None else ()
        dims.append(_dims(shape, {} if dim is None else {"h": (dim, extents)}))
    return _plans(equation, {"h": 4}, dims)[0][1]


def _split(plan: Contraction) -> dict[str, tuple[str, ...]]:
    return {letter: plan.layout.axes(d) for d, letter in enumerate(plan.output)}


def test_rows_of_queries_stay_and_keys_are_gathered():
    plan = _plan("qd,kd->qk", ((8, 4), 0), ((8, 4), 0))
    assert _split(plan) == {"q": ("h",), "k": ()}
    assert [entry.spread for entry in plan.entries] == [(), (0,)]
    assert plan.sums == () and plan.entries[0].still


def test_the_fewer_rows_are_gathered():
    plan = _plan("qd,kd->qk", ((4, 4), 0), ((400, 4), 0))
    assert _split(plan) == {"q": (), "k": ("h",)}
    # Probabilities over split keys meet split values: nothing but the result is sent.
    plan = _plan("qk,kd->qd", ((4, 400), 1), ((400, 4), 0))
    assert plan.sums == ("h",) and not plan.moves


def test_a_split_contraction_is_summed_unless_the_rows_are_cheaper():
    plan = _plan("qk,kd->qd", ((8, 8), 0), ((8, 4), 0))  # attention: values are gathered
    assert _split(plan)["q"] == ("h",) and plan.sums == () and plan.entries[1].spread == (0,)
    plan = _plan("mk,kn->mn", ((400, 4), 0), ((4, 400), 0))
    assert _split(plan)["m"] == ("h",) and plan.entries[0].still
    plan = _plan("mk,kn->mn", ((4, 8), 0), ((8, 400), 1))
    assert _split(plan)["n"] == ("h",) and plan.entries[1].still


@pytest.mark.parametrize("larger", [0, 1])
def test_of_differently_cut_operands_the_smaller_moves(larger: int):
    left, right = ((3, 8), (8, 9)) if larger else ((9, 8), (8, 3))
    plan = _plan("mk,kn->mn", (left, 1, (2, 2, 2, 2)), (right, 0, (5, 1, 1, 1)))
    assert [entry.still for entry in plan.entries] == [larger == 0, larger == 1]
    assert plan.sums == ("h",)


def test_an_index_that_cannot_be_split_moves_its_split_to_another():
    axes = MeshAxes(("h",), (4,), (0,))
    points = Layout(axes, _dims((9, 3), {"h": (1, (1, 1, 1, 0))}))
    plan = contraction("mc,nc->mn", "c", "", points, (5, 3))
    assert plan.layout.extents(0) == (3, 3, 3, 0) and plan.sums == ()
