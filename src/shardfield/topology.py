"""Whether a mesh suits the machines its ranks run on. Pure arithmetic, no communication.

Inner axes talk most (tensor in every layer, domain in most, data once a step), and links inside a
host are the fastest. So the ranks that share the coordinates of all axes outside of one, a *block*
of this axis, should lie on as few hosts as their number asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from math import prod

from shardfield.axes import DATA, PIPE, TENSOR


def placement_warnings(
    names: Sequence[str], sizes: Sequence[int], hosts: Sequence[str]
) -> list[str]:
    """What is wrong with the places of the ranks, and what would be right.

    Args:
        names: axes of the mesh, slowest first.
        sizes: ranks along each axis.
        hosts: name of the host of every rank, in the mesh's row-major order.

    Returns:
        One text for each cause; none where every axis is placed as well as it can be.

    Example:
        >>> placement_warnings(["data", "domain"], [2, 2], ["a", "a", "b", "b"])
        []
        >>> [text] = placement_warnings(["data", "domain"], [2, 2], ["a", "b", "a", "b"])
        >>> text.partition(".")[0]
        'mesh axis domain crosses hosts, though its ranks would fit into one each'
    """
    texts = []
    numbered = by_host(hosts)
    unavoidable = misplaced(sizes, numbered)
    strewn = [axis for axis in misplaced(sizes, hosts) if axis not in unavoidable]
    if strewn:
        texts.append(
            f"mesh axis {names[strewn[-1]]} crosses hosts, though its ranks would fit into "
            f"{'one each' if _hosts_needed(prod(sizes[strewn[-1] :]), hosts) == 1 else 'fewer'}. "
            "Number the ranks host by host, as torchrun does: consecutive ranks share a machine"
        )
    order = best_order(names, sizes, hosts)
    ordered = [names[axis] for axis in order], [sizes[axis] for axis in order]
    if ordered[0] != list(names):
        axes = ", ".join(f"{name}={size}" for name, size in zip(*ordered, strict=True))
        texts.append(
            "the innermost mesh axes cross hosts, though outer ones would fit into one. "
            f"Exchange them: init_mesh({axes})"
        )
    for axis in misplaced(ordered[1], numbered)[-1:]:
        fitting = ", ".join(map(str, fitting_sizes(ordered[1], axis, hosts)))
        texts.append(
            f"mesh axis {ordered[0][axis]}={ordered[1][axis]} lies across the borders of hosts, of "
            f"which the largest has {_most(hosts)} ranks. Sizes of this axis that do not: {fitting}"
        )
    return texts


def by_host(hosts: Sequence[str]) -> list[str]:
    """The hosts of ranks that are numbered host by host, those with most ranks first."""
    counts = Counter(hosts)
    return sorted(hosts, key=lambda host: (-counts[host], host))


def misplaced(sizes: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """Axes of several ranks of which a block lies on more hosts than its size asks for."""
    return [
        axis
        for axis, size in enumerate(sizes)
        if size > 1 and not _is_compact(prod(sizes[axis:]), hosts)
    ]


def best_order(names: Sequence[str], sizes: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """The order of the axes in which the largest inner block fits into a host.

    The places of pipe, data and tensor follow from what they are for: only domain axes change
    theirs. Of equal orders, the given one.
    """
    free = [axis for axis, name in enumerate(names) if name not in (PIPE, DATA, TENSOR)]
    numbered = by_host(hosts)

    def inside(order: Sequence[int]) -> int:
        blocks = [prod(sizes[axis] for axis in order[place:]) for place in range(len(order))]
        return max((n for n in blocks if _most_hosts(n, numbered) == 1), default=1)

    orders = []
    for moved in permutations(free):
        places = dict(zip(free, moved, strict=True))
        orders.append([places.get(axis, axis) for axis in range(len(names))])
    return max(orders, key=inside)


def fitting_sizes(sizes: Sequence[int], axis: int, hosts: Sequence[str]) -> list[int]:
    """Sizes of one axis whose blocks lie on as few hosts as can be, the inner axes as they are."""
    inner = prod(sizes[axis + 1 :])
    numbered = by_host(hosts)
    largest = max(sizes[axis], _most(hosts) // inner)
    return [
        size
        for size in range(1, largest + 1)
        if len(hosts) % (inner * size) == 0 and _is_compact(inner * size, numbered)
    ]


def _is_compact(block: int, hosts: Sequence[str]) -> bool:
    return _most_hosts(block, hosts) <= _hosts_needed(block, hosts)


def _most_hosts(block: int, hosts: Sequence[str]) -> int:
    """Hosts over which the most scattered block of so many ranks is spread."""
    starts = range(0, len(hosts), block)
    return max(len(set(hosts[start : start + block])) for start in starts)


def _hosts_needed(block: int, hosts: Sequence[str]) -> int:
    return -(-block // _most(hosts))


def _most(hosts: Sequence[str]) -> int:
    return max(Counter(hosts).values())
