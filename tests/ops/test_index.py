"""Slices, rows, splits and index tensors, read and written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits

from shardfield.ranges import rows_in
from shardfield.testing import parity, refused

X = torch.randn(3, 7, 9, generator=torch.Generator().manual_seed(0))
SIZES = [
    (4, 3),
    (0, 7),
    (1, 2),
    (1, 8),
    (1, 0, 6),
    (3, 3, 3),
    (0, 0, 3),
    (1, 4, 0, 2),
    (3, 3, 3, 0),
]


def check(fn, inputs, *args, **options):
    """Parity of `fn` after some arithmetic, by which the harness tells a share from the whole."""
    parity(lambda *xs: fn(*[x * x for x in xs]), inputs, *args, dtype=torch.float64, **options)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_stay_with_their_owners(dim):
    def slices(x):
        return (
            x[1:],
            x[..., ::2],
            x[1:3, 2:7, 1:9:4],
            x[:, 3:3, -3:],
            x[:, None, 1::3, ..., None],
            x.narrow(1, 2, 4),
            *x.split([2, 0, 7], 2),
            *x.chunk(2, 1),
            *x.tensor_split(2, 0),
        )

    check(slices, [X], [dim], sizes=SIZES, output="sharded")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pieces_of_every_name(dim):
    def pieces(x):
        return (
            *x.tensor_split([1, 5, 5], 2),
            *torch.tensor_split(x, torch.tensor(2), 1),
            *x.tensor_split(torch.tensor([2, 3]), 1),
            *x.hsplit([2, 9]),
            *torch.vsplit(x, 3),
            *x.dsplit(3),
            *torch.unsafe_chunk(x, 2, 2),
            *x.unsafe_split(4, 1),
            torch.narrow_copy(x, 2, 1, 7),
        )

    check(pieces, [X], [dim], sizes=[(1, 2), (4, 3), (5, 4), (1, 0, 2), (1, 6, 0), (0, 0, 9)])
    refused(lambda x: x.vsplit(2), [X], [dim], error=RuntimeError, ranks=(2,))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_row_of_a_split_dim_goes_to_every_rank(dim):
    def rows(x):
        return x[0] * 2, x[1, 2:], x[..., -1], x[:, None, 4], x.select(1, -1), x[1:2, 3, ..., 4]

    check(rows, [X], [dim], sizes=SIZES, double=True)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_unbind_gives_every_rank_every_row(dim):
    def rows(x):
        first, *others = x.unbind(dim)
        return first, sum(n * row for n, row in enumerate(others)), torch.stack(list(x), 1)

    check(rows, [X], [dim], sizes=SIZES, double=True)


def test_unbind_on_a_grid_of_ranks():
    sizes = [{"h": (4, 3), "w": (1, 8)}, {"h": (0, 7), "w": (9, 0)}]
    check(lambda x: (x.unbind(1), x.unbind(-1)), [X], [{1: "h", 2: "w"}], (4,), sizes)


def test_rows_on_a_grid_of_ranks():
    def rows(x):
        return x[:, 3], x[:, 3, 4], x[:, 2:5, 4], x[:, 5:, ::2]

    sizes = [{"h": (4, 3), "w": (1, 8)}, {"h": (0, 7), "w": (9, 0)}]
    check(rows, [X], [{1: "h", 2: "w"}], (4,), sizes)


@pytest.mark.parametrize("dim", [1, 2])
def test_merged_dims_move_to_ranges_where_a_slice_cuts_them(dim):
    def slices(x):
        return x.flatten(1)[:, 5:40], x.flatten(0, 1)[7:14], x.flatten(0, 1)[3:], x.view(-1)[::7]

    check(slices, [X], [dim], sizes=SIZES)


def test_index_tensors_along_whole_dims():
    rows, mask = torch.tensor([2, 0, 1, 1]), torch.tensor([True, False, True])
    spots = torch.tensor([[0, 5], [8, 2]])

    def picked(x):
        return (
            x[rows],
            x[mask],
            x[rows, None],
            x[[0, 2], 2:5],
            x[rows[:2], :, spots[0]],
            x[0, :, rows],
            x[..., spots],
            x.index_select(2, rows),
        )

    check(picked, [X], [1], sizes=SIZES, double=True)


ROWS, SPOTS = torch.tensor([2, 0, 0, -1]), torch.tensor([[0, 5], [-2, 4]])


def picked(x):
    return (
        x[:, ROWS],
        x[..., SPOTS],
        x[ROWS, :, 2 * ROWS],
        x.index_select(2, ROWS.abs()),
        x[SPOTS % 3, SPOTS],
        x[None, 1, :, None, ROWS],
        x[:, SPOTS, 1:, None],
        x[:, ROWS[:0]],
        (x > 1)[:, SPOTS],
        (10 * x).long()[ROWS, SPOTS[:, :1]],
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_that_an_index_tensor_picks_of_a_split_dim_go_to_every_rank(dim):
    check(picked, [X], [dim], sizes=SIZES, double=True)


def test_index_tensors_on_a_grid_of_ranks_and_compiled():
    sizes = [{"h": (4, 3), "w": (1, 8)}, {"h": (0, 7), "w": (9, 0)}]
    check(picked, [X], [{1: "h", 2: "w"}], (4,), sizes)
    check(picked, [X], [1], (2,), [(4, 3)], compiled=True)


def test_plain_masks_of_split_dims():
    mask = torch.tensor([True, False, True])

    def masked(x):
        return x[mask] * 2, x[mask.repeat(7, 1).T] * 2, x[:, :, X[0, 0] > 0] * 2

    for dim in range(3):
        check(masked, [X], [dim], sizes=SIZES)


@pytest.mark.parametrize(
    "splits", [(None, 0), (1, None), (1, 0), (0, 0), ({1: "h"}, {0: "w"})], ids=str
)
def test_split_index_tensors(splits):
    index = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 2]])

    def some(x, i):
        y = x.sin().exp().cos().sin().exp()
        return [p.sin().exp().cos() for p in (y[i], y[:, i], y[..., i + 1], y[i, :, 2 * i])]

    once = {"dtype": torch.float64, "subgroup": False}
    parity(some, [X, index], splits, sizes=[(2, 5), (0, 7), (3, 0), (1, 1, 2)], double=True, **once)
    if splits == (1, 0):
        parity(some, [X, index], splits, (2,), [(3, 4)], compiled=True, **once)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_writing_into_slices(dim):
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))

    def write(x, values):
        y = x * 1
        y[1:, 2:5] = 0.5
        y[..., ::2] = values[:, :5]
        y[2] = values
        y[:, 3] = y[:, 0] * 2
        y[0, 1, 2] = 7
        y[:, None, 2:4] = values[:1, :] * 3
        y[y > 1.5] = 0
        return y * 2

    check(write, [X, values], [dim, None], sizes=SIZES)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_writing_beside_merged_dims(dim):
    """Rotary embeddings written by halves: `out = empty_like(q); out[..., 0::2] = ...`."""

    def rotated(x):
        x = x.flatten(0, 1) if dim < 2 else x.flatten(1)
        x = x.unflatten(1, (-1, 3)).mT
        y = torch.zeros_like(x)
        y[..., 0, :] = x[..., 1, :] * x[..., 0, :]
        y[..., 1:, :] = x[..., :2, :]
        y[y > 1.5] = 0
        return y * x

    check(rotated, [X], [dim], sizes=SIZES)


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda x: x[x > 0], "the mask is itself split"),
        (lambda x: x.__setitem__((0, ROWS), 1.0), "is split"),
        (lambda x: x.__setitem__((x > 0).long(), 1.0), "a split index"),
        (lambda x: x.flatten(0, 1).__setitem__(slice(3, 9), 1.0), "rows of merged dims"),
    ],
)
def test_what_differs_between_ranks_is_refused(fn, match):
    refused(fn, [X], [1], match=match, sizes=[(4, 3)], ranks=(2,))


@pytest.mark.parametrize("index", [(0, 7), (0, -8), (0, 0, 0, 0), (0, torch.tensor([7]))])
def test_errors_of_indices_are_those_of_torch(index):
    refused(lambda x: x[index], [X], [1], error=IndexError, sizes=[(4, 3)], ranks=(2,))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_rows_before_a_cut(step):
    for start in range(6):
        for stop in range(start, 9):
            for before in range(10):
                rows = [row for row in range(start, stop, step) if row < before]
                assert rows_in((start, stop, step), before) == len(rows)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple:
    """An index of slices, ints, new dims and an ellipsis, as torch takes them."""
    items: list = []
    used = draw(st.integers(0, len(shape)))
    dots = draw(st.integers(0, used))
    dims = [*range(dots), *range(len(shape) - used + dots, len(shape))]
    for place, dim in enumerate(dims):
        if place == dots:
            items.append(Ellipsis)
        if draw(st.integers(0, 4)) == 0:
            items.append(None)
        size = shape[dim]
        bound = st.none() | st.integers(-size - 2, size + 2)
        cut = st.builds(slice, bound, bound, st.none() | st.integers(1, 4))
        items.append(draw(cut | st.integers(-size, size - 1)))
    if dots == used:
        items.append(Ellipsis)
    return tuple(items)


@st.composite
def split_shapes(draw: st.DrawFn):
    """A tensor of 1 to 3 dims, the dim that is split, and how."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    extents = draw(splits(shape[dim], draw(st.integers(2, 4))))
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)), dim, extents


@examples(12)
@given(split_shapes(), st.data())
def test_any_rows_read_and_read_again(drawn, data):
    x, dim, extents = drawn
    first = data.draw(indices(tuple(x.shape)))
    left = tuple(x[first].shape)
    second = data.draw(indices(left)) if 0 not in left else ...
    options = {"sizes": [extents], "subgroup": False}
    check(lambda x: (x[first], x[first][second]), [x], [dim], (len(extents),), **options)


@examples(12)
@given(split_shapes(), st.data())
def test_any_rows_written(drawn, data):
    """A number, a tensor that broadcasts, and rows of the tensor itself."""
    x, dim, extents = drawn
    index = data.draw(indices(tuple(x.shape)))
    shape = tuple(x[index].shape)
    kept = data.draw(st.integers(0, len(shape)))
    wanted = [size if data.draw(st.booleans()) else 1 for size in shape[len(shape) - kept :]]
    values = torch.randn(wanted, generator=torch.Generator().manual_seed(1))

    def write(x, values):
        y, z, again = x * 1, x * 2, x * 3
        y[index] = 0.5
        z[index] = values
        again[index] = x[index] * 2
        return y, z * z, again

    options = {"sizes": [extents], "subgroup": False}
    check(write, [x, values], [dim, None], (len(extents),), **options)
