"""`view_dims` as pure arithmetic: all ranks simulated in one process, against torch.view."""

from itertools import product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from shardfield.axes import MeshAxes
from shardfield.layout import Factor, Layout
from shardfield.plan import runs_of
from shardfield.views import view_dims


def block(whole: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """What the rank at a mesh coordinate holds of a global tensor."""
    place = dict(zip(layout.mesh.names, coordinate, strict=True))
    for dim, factors in enumerate(layout.dims):
        rank = 0
        for axis in layout.axes(dim):
            rank = rank * layout.mesh.size((axis,)) + place[axis]
        rows = [row for a, b in runs_of(factors)[rank] for row in range(a, b)]
        whole = whole.index_select(dim, torch.tensor(rows, dtype=torch.long))
    return whole


def check(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Every rank's block viewed (and moved, if so planned) is its block of the viewed whole."""
    whole = torch.arange(prod(layout.shape)).view(layout.shape)
    plan = view_dims(layout, shape)
    out = plan.layout
    assert out.shape == shape
    assert set(out.split_axes) == set(layout.split_axes)
    for coordinate in product(*(range(size) for size in layout.mesh.sizes)):
        before = block(whole, layout, coordinate)
        after = block(whole.view(shape), out, coordinate)
        assert after.shape == out.local_shape_at(coordinate)
        if plan.source is None:
            assert torch.equal(before.reshape(after.shape), after)
            continue
        assert plan.target is not None
        seen = block(whole.view(plan.source.shape), plan.source, coordinate)
        assert torch.equal(before.reshape(seen.shape), seen)
        moved = block(whole.view(plan.target.shape), plan.target, coordinate)
        assert torch.equal(moved.reshape(after.shape), after)
    return out


def mesh(*sizes: int) -> MeshAxes:
    names = ("h", "w")[: len(sizes)]
    return MeshAxes(names, sizes, (0,) * len(sizes))


def extents(size: int, parts: int):
    points = st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1).map(sorted)
    return points.map(lambda p: tuple(b - a for a, b in zip([0, *p], [*p, size], strict=True)))


@st.composite
def shapes(draw, primes):
    """A shape whose sizes are products of the given numbers, some of 1 among them."""
    dims = [1]
    for prime in primes:
        if draw(st.booleans()):
            dims.append(1)
        dims[-1] *= prime
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), 1)
    return tuple(dims)


@st.composite
def views(draw):
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 4, 5]), min_size=1, max_size=4))
    axes = mesh(*draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3)])))
    shape = draw(shapes(primes))
    dims = [(Factor(size),) for size in shape]
    free = list(range(len(shape)))
    for name in axes.names:
        if free:
            dim = free.pop(draw(st.integers(0, len(free) - 1)))
            parts = axes.size((name,))
            dims[dim] = (Factor(shape[dim], (name,), draw(extents(shape[dim], parts))),)
    chain = [draw(shapes(draw(st.permutations(primes)))) for _ in range(2)]
    return Layout(axes, dims), chain


@examples(400)
@given(views())
def test_every_rank_holds_its_part_of_the_view(case):
    layout, chain = case
    for shape in chain:
        layout = check(layout, shape)


@examples(200)
@given(views())
def test_merging_moves_nothing_and_unmerging_recovers_the_split(case):
    layout, _ = case
    flat = view_dims(layout, (prod(layout.shape),))
    assert flat.source is None
    check(layout, flat.layout.shape)
    back = view_dims(flat.layout, layout.shape)
    if 1 not in layout.shape:
        assert back.layout is layout
    assert back.source is None
    check(flat.layout, layout.shape)


def split(size: int, axis: str, *rows: int) -> tuple[Factor]:
    return (Factor(size, (axis,), rows),)


def test_case_19_flatten_keeps_inner_splits():
    axes = mesh(2)
    layout = Layout(axes, [(Factor(2),), (Factor(3),), (Factor(4),), split(6, "h", 5, 1)])
    out = check(layout, (2, 3, 24))
    assert out.dims[2] == (Factor(4), Factor(6, ("h",), (5, 1)))
    tokens = Layout(axes, [(Factor(2),), split(5, "h", 2, 3), (Factor(3),)])
    assert check(tokens, (10, 3)).dims[0] == (Factor(2), Factor(5, ("h",), (2, 3)))
    both = Layout(mesh(2, 2), [(Factor(3),), split(5, "h", 2, 3), split(4, "w", 1, 3)])
    merged = check(both, (3, 20))
    assert merged.dims[1] == (*both.dims[1], *both.dims[2])
    assert check(merged, (3, 5, 4)) is both


def test_case_20_dims_that_do_not_line_up_become_one_range():
    layout = Layout(mesh(3), [(Factor(12),), split(8, "h", 3, 3, 2)])
    plan = view_dims(layout, (16, 6))
    assert plan.layout.extents(0) == (6, 6, 4)
    check(layout, (16, 6))
    for dims in (
        [split(6, "h", 2, 2, 2, 0), (Factor(256),)],
        [(Factor(6),), split(256, "h", *(64,) * 4)],
    ):
        whole = Layout(mesh(4), dims)
        plan = view_dims(whole, (1536,))
        assert plan.source is None
        assert check(plan.layout, (6, 256)) is whole


def test_two_axes_that_do_not_line_up_become_ranges_over_both():
    layout = Layout(mesh(2, 2), [split(6, "h", 3, 3), split(4, "w", 2, 2)])
    out = check(layout, (8, 3))
    assert out.dims[0] == (Factor(8, ("h", "w"), (2, 2, 2, 2)),)
