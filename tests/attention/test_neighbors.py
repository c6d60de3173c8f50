"""Neighborhoods, the keys ranks want, and tiles, against their definition row by row."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from strategies import splits

from shardfield.attention.neighbors import Window, tile_rows, tiles_of, wanted_keys


@st.composite
def windows(draw: st.DrawFn) -> Window:
    kernel = draw(st.integers(1, 7))
    dilation = draw(st.integers(1, 4))
    size = draw(st.integers(kernel * dilation, kernel * dilation + 30))
    return Window(size, kernel, draw(st.integers(1, kernel)), dilation, draw(st.booleans()))


def defined(window: Window, row: int) -> list[int]:
    """NATTEN's words: within the rows of one residue, windows of the middle of each group."""
    alike = list(range(row % window.dilation, window.size, window.dilation))
    at = alike.index(row)
    group = alike[at // window.stride * window.stride :][: window.stride]
    if window.causal:
        # The group's last row tells where windows start, even if the dim ends before it.
        last = alike.index(group[-1])
        return alike[max(0, last - window.kernel + 1) : at + 1]
    middle = alike.index(group[min(window.stride // 2, len(group) - 1)])
    first = middle - window.kernel // 2
    first = min(max(first, 0), len(alike) - window.kernel)
    return alike[first : first + window.kernel]


@given(windows())
def test_neighbours_are_those_of_the_definition(window):
    for row in range(window.size):
        found = window.neighbours(row)
        assert list(found) == defined(window, row)
        assert row in found
        assert len(found) == window.kernel or (window.causal and len(found) < window.kernel)


@given(windows(), st.data())
def test_wanted_keys_are_the_least_range_that_holds_all_neighbours(window, data):
    extents = data.draw(splits(window.size, data.draw(st.integers(1, 5))))
    stops = list(accumulate(extents))
    for segments, rows, stop in zip(wanted_keys(window, extents), extents, stops, strict=True):
        needed = {key for row in range(stop - rows, stop) for key in defined(window, row)}
        if not rows:
            assert segments == ()
            continue
        (segment,) = segments
        assert (segment.start, segment.start + segment.length - 1) == (min(needed), max(needed))


@given(windows(), st.integers(1, 6), st.data())
def test_tiles_hold_every_query_once_and_its_neighbours(window, times, data):
    start = data.draw(st.integers(0, window.size))
    stop = data.draw(st.integers(start, window.size))
    first, end = window.reach(start, stop)
    met: dict[int, list[int]] = {}
    for tiles in tiles_of(window, start, stop, first, times * window.stride):
        assert len(tiles.ranges) == tiles.rows <= times * window.stride
        for n in range(tiles.count):
            for c in range(tiles.residues):
                on = c + tiles.step * tiles.rows * n
                keys = [first + tiles.key + on + tiles.step * j for j in range(tiles.keys)]
                assert first <= keys[0] and keys[-1] < end
                for i, (low, high) in enumerate(tiles.ranges):
                    query = start + tiles.query + on + tiles.step * i
                    assert query not in met
                    met[query] = keys[low:high]
    assert met == {row: defined(window, row) for row in range(start, stop)}


def test_equal_tiles_are_one_batch():
    tiles = tiles_of(Window(1000, 7), 0, 1000, 0, 10)
    assert [(t.count, t.rows, t.keys) for t in tiles] == [(1, 10, 13), (98, 10, 16), (1, 10, 13)]
    # All residues of a dilated dim lie side by side.
    tiles = tiles_of(Window(1000, 7, dilation=5), 0, 1000, 0, 10)
    assert [(t.count, t.residues, t.keys) for t in tiles] == [(1, 5, 13), (18, 5, 16), (1, 5, 13)]


def test_larger_kernels_get_larger_tiles_and_scores_are_bounded():
    sizes = [tile_rows((Window(4096, kernel),), (4096,), 48.0)[0] for kernel in (3, 31, 301)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] < 300
    assert tile_rows((Window(64, 7),) * 2, (64, 64), 48.0) == (6, 6)
    rows = tile_rows((Window(1 << 20, 1 << 18),), (1 << 20,), 48.0)[0]
    assert rows * (rows + (1 << 18) - 1) <= 1 << 20
