"""Placement: which meshes suit which hosts, and what the advice is worth."""

import os
import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardfield as sf
from shardfield.testing import rank_pool
from shardfield.topology import best_order, by_host, fitting_sizes, misplaced, placement_warnings

AXES = ["pipe", "data", "h", "w", "tensor"]


@st.composite
def placed(draw):
    """A mesh, and hosts that hold any numbers of its ranks in any order."""
    names = [name for name in AXES if draw(st.booleans())] or ["domain"]
    sizes = [draw(st.integers(1, 4)) for _ in names]
    count = prod(sizes)
    hosts = draw(st.lists(st.sampled_from("abcd"), min_size=count, max_size=count))
    return names, sizes, hosts


@st.composite
def aligned(draw):
    """A mesh and equal hosts, each of which holds the inner axes whole, up to some axis."""
    names = AXES[draw(st.integers(0, 3)) :]
    sizes = [draw(st.integers(1, 4)) for _ in names]
    room = prod(sizes[draw(st.integers(0, len(names))) :])
    hosts = [str(rank // room) for rank in range(prod(sizes))]
    return names, sizes, hosts


@given(placed())
def test_no_warning_on_one_host(case):
    names, sizes, hosts = case
    assert placement_warnings(names, sizes, ["a"] * len(hosts)) == []


@given(aligned())
def test_no_warning_of_numbers_or_sizes_where_inner_axes_fill_the_hosts(case):
    names, sizes, hosts = case
    assert misplaced(sizes, hosts) == []
    texts = placement_warnings(names, sizes, hosts)
    assert all("Exchange" in text for text in texts)
    assert texts == [] or best_order(names, sizes, hosts) != list(range(len(names)))


@given(placed(), st.permutations("abcd"))
def test_names_of_hosts_do_not_matter(case, others):
    names, sizes, hosts = case
    renamed = [others["abcd".index(host)] for host in hosts]
    assert misplaced(sizes, hosts) == misplaced(sizes, renamed)
    count = len(placement_warnings(names, sizes, hosts))
    if len({hosts.count(host) for host in set(hosts)}) == 1:
        assert count == len(placement_warnings(names, sizes, renamed))


@given(placed())
def test_advice_once_followed_leaves_no_warning_of_its_kind(case):
    names, sizes, hosts = case
    numbered = by_host(hosts)
    assert sorted(numbered) == sorted(hosts)
    assert not any("Number" in text for text in placement_warnings(names, sizes, numbered))
    order = best_order(names, sizes, hosts)
    ordered = [names[axis] for axis in order], [sizes[axis] for axis in order]
    assert not any("Exchange" in text for text in placement_warnings(*ordered, hosts))
    for axis in misplaced(ordered[1], numbered)[-1:]:
        fitting = fitting_sizes(ordered[1], axis, hosts)
        assert 1 in fitting
        assert ordered[1][axis] not in fitting
        for size in fitting:
            inner = [size, *ordered[1][axis + 1 :]]
            assert misplaced([len(hosts) // prod(inner), *inner], numbered) in ([], [0])


@given(placed())
def test_the_best_order_moves_domain_axes_alone(case):
    names, sizes, hosts = case
    order = best_order(names, sizes, hosts)
    assert sorted(order) == list(range(len(names)))
    for place, axis in enumerate(order):
        assert place == axis or names[axis] in ("h", "w", "domain")


def test_the_right_layouts_are_silent():
    eight = [host for host in "abcd" for _ in range(8)]
    for sizes in ([2, 2, 4, 2], [4, 1, 1, 8], [1, 2, 16, 1], [2, 1, 2, 8], [1, 1, 32, 1]):
        assert placement_warnings(["pipe", "data", "domain", "tensor"], sizes, eight) == []


def test_ranks_that_are_not_numbered_by_host():
    for names, sizes in ((["data", "domain"], [2, 4]), (["pipe", "tensor"], [2, 4])):
        [text] = placement_warnings(names, sizes, list("abababab"))
        assert f"mesh axis {names[1]} crosses hosts" in text
        assert "Number the ranks host by host" in text


def test_an_axis_that_does_not_divide_a_host():
    [text] = placement_warnings(["data", "domain"], [4, 3], list("aaaabbbbcccc"))
    assert re.search(r"domain=3 lies across .* 4 ranks\. Sizes .*: 1, 2, 4$", text)


def test_domain_axes_in_the_wrong_order():
    [text] = placement_warnings(["h", "w"], [2, 3], list("aabbcc"))
    assert text.endswith("Exchange them: init_mesh(w=3, h=2)")
    assert placement_warnings(["w", "h"], [3, 2], list("aabbcc")) == []


def test_init_mesh_warns_once_on_rank_0_of_the_hosts_that_ranks_report():
    def body(rank, hosts, seed):
        os.environ["SHARDFIELD_HOST"] = hosts[rank.rank]
        try:
            rank.mesh(data=2, domain=2, seed=seed)  # another seed is another mesh
        finally:
            del os.environ["SHARDFIELD_HOST"]

    rank_pool(4).run(body, "aabb", 1)  # warnings are errors
    with pytest.warns(UserWarning, match="mesh axis domain crosses hosts") as caught:
        rank_pool(4).run(body, "abab", 2)
    assert len(caught) == 1


def test_the_variable_for_hosts_is_documented():
    assert "SHARDFIELD_HOST" in (sf.init_mesh.__doc__ or "")
