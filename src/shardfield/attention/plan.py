"""Which keys meet which queries on which rank, and what that costs. Pure arithmetic.

Source: ring attention (Liu, Zaharia, Abbeel, arXiv:2310.01889), all-to-all over heads (DeepSpeed
Ulysses, arXiv:2309.14509), their combination (arXiv:2405.07719), zigzag order of causal blocks
(Brandon et al., "Striped Attention", arXiv:2311.09431, and its successors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardfield.layout import cuts, even_extents
from shardfield.plan import Run

Rows = tuple[Run, ...]
"""The global runs of a local block's rows, in local order."""

MOST_PIECES = 32
"""Blocks whose diagonal needs more pieces than this are masked by position instead."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that meet keys, as rows of the local blocks.

    Attributes:
        q: first query row.
        q_rows: query rows.
        k: first key row.
        k_rows: key rows.
        causal: query `i` of the piece meets keys `0..i` only; `q_rows == k_rows`.
    """

    q: int
    q_rows: int
    k: int
    k_rows: int
    causal: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One exchange of key blocks, and what is computed with what arrives.

    Attributes:
        sources: ranks whose blocks make up the keys of this step, in order; may hold this rank.
        sends: rows of this rank's block that every rank gets: all or none.
        receives: rows that come from every rank.
        silent: no rank sends anything in this step.
        pieces: what this rank computes; empty where no query may see these keys.
        by_position: the diagonal does not fall into few pieces: mask by global positions.
        columns: global runs of the keys.
    """

    sources: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    silent: bool
    pieces: tuple[Piece, ...]
    by_position: bool
    columns: Rows


def length(rows: Rows) -> int:
    """Rows in all runs."""
    return sum(stop - start for start, stop in rows)


def joined(blocks: Sequence[Rows]) -> Rows:
    """The runs of blocks put behind each other."""
    runs: list[Run] = []
    for block in blocks:
        for start, stop in block:
            if stop <= start:
                continue
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
    return tuple(runs)


def pieces_of(queries: Rows, keys: Rows, causal: bool) -> tuple[Piece, ...] | None:
    """Covers every (query, key) pair that may meet exactly once; None if that takes too many."""
    if not length(queries) or not length(keys):
        return ()
    if not causal:
        return (Piece(0, length(queries), 0, length(keys)),)
    found: list[Piece] = []
    at_q = 0
    for a, b in queries:
        at_k = 0
        for c, d in keys:
            for piece in _meeting(a, b, c, d, at_q, at_k):
                _add(found, piece)
            if len(found) > MOST_PIECES:
                return None
            at_k += d - c
        at_q += b - a
    return tuple(found)


def _meeting(a: int, b: int, c: int, d: int, at_q: int, at_k: int) -> list[Piece]:
    """Pieces of queries [a, b) and keys [c, d): below, on and above the diagonal."""
    start, stop = max(a, c), min(b, d)
    found = []
    if c < min(d, a):  # keys before the first query: all see them
        found.append(Piece(at_q, b - a, at_k, min(d, a) - c))
    if start < stop:
        found.append(Piece(at_q + start - a, stop - start, at_k + start - c, stop - start, True))
        if stop < b:  # queries behind the last key
            found.append(Piece(at_q + stop - a, b - stop, at_k + start - c, stop - start))
    return found


def _add(found: list[Piece], piece: Piece) -> None:
    """Appends a piece, or widens the one it continues."""
    for index, last in enumerate(found):
        if last.causal or piece.causal:
            continue
        same_queries = (last.q, last.q_rows) == (piece.q, piece.q_rows)
        if same_queries and last.k + last.k_rows == piece.k:
            found[index] = Piece(last.q, last.q_rows, last.k, last.k_rows + piece.k_rows)
            return
        same_keys = (last.k, last.k_rows) == (piece.k, piece.k_rows)
        if same_keys and last.q + last.q_rows == piece.q:
            found[index] = Piece(last.q, last.q_rows + piece.q_rows, last.k, last.k_rows)
            return
    found.append(piece)


def area(pieces: Sequence[Piece]) -> float:
    """(query, key) pairs that are computed."""
    return sum(p.q_rows * p.k_rows * (0.5 if p.causal else 1.0) for p in pieces)


def _needed(queries: Rows, keys: Rows, causal: bool) -> bool:
    if not length(queries) or not length(keys):
        return False
    return not causal or min(c for c, d in keys if d > c) < max(b for a, b in queries if b > a)


def key_steps(
    queries: Sequence[Rows], keys: Sequence[Rows], rank: int, causal: bool, together: bool
) -> tuple[Step, ...]:
    """The exchanges of `rank`, whatever a rank needs of every other's keys.

    Args:
        queries: rows of every rank of the group.
        keys: likewise.
        together: one exchange and one block (gather), else one rank's block at a time (ring).
    """
    ranks = len(keys)
    rounds = [tuple(range(1, ranks))] if together else [(), *((hop,) for hop in range(1, ranks))]

    def wants(other: int, hop: int) -> int:
        source = (other - hop) % ranks
        return length(keys[source]) if _needed(queries[other], keys[source], causal) else 0

    steps = []
    for hops in rounds:
        receives, sends = [0] * ranks, [0] * ranks
        for hop in hops:
            receives[(rank - hop) % ranks] = wants(rank, hop)
            sends[(rank + hop) % ranks] = wants((rank + hop) % ranks, hop)
        own = not hops or together
        sources = tuple(
            source for source in range(ranks) if receives[source] or (own and source == rank)
        )
        columns = joined([keys[source] for source in sources])
        pieces = pieces_of(queries[rank], columns, causal)
        steps.append(
            Step(
                sources,
                tuple(sends),
                tuple(receives),
                not any(wants(other, hop) for other in range(ranks) for hop in hops),
                (Piece(0, length(queries[rank]), 0, length(columns)),)
                if pieces is None
                else pieces,
                pieces is None,
                columns,
            )
        )
    return tuple(steps)


def zigzag(size: int, ranks: int) -> tuple[Rows, ...]:
    """Rows of every rank such that a causal triangle is shared equally: chunks r and 2P-1-r."""
    points = cuts(even_extents(size, 2 * ranks))
    return tuple(
        joined(
            [
                ((points[rank], points[rank + 1]),),
                ((points[2 * ranks - 1 - rank], points[2 * ranks - rank]),),
            ]
        )
        for rank in range(ranks)
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What the choice of an algorithm supposes of the machine; the same on all ranks.

    Attributes:
        bandwidth: bytes per second that a rank sends and receives at once.
        latency: seconds that an exchange takes whatever its size.
        rate: floating-point operations per second inside attention.
    """

    bandwidth: float
    latency: float
    rate: float


MACHINES = {"cpu": Machine(1.5e9, 1e-4, 3e10), "cuda": Machine(1.5e11, 2e-5, 2e14)}
"""By device type. One core of a server; an accelerator with links inside a node."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The local problem of one group of ranks.

    Attributes:
        queries: rows of every rank.
        keys: likewise.
        batch: product of the leading dims this rank holds.
        heads: query heads this rank holds.
        key_heads: key and value heads this rank holds.
        width: of queries and keys.
        value_width: of values.
        itemsize: bytes of an element.
        causal: query `i` meets keys `0..i` only.
        mask_rows: a mask of which a rank holds the rows of its own queries only.
        grid: ranks along every mesh axis of the group; two or more allow the hybrid.
    """

    queries: tuple[Rows, ...]
    keys: tuple[Rows, ...]
    batch: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    itemsize: int
    causal: bool = False
    mask_rows: bool = False
    grid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to compute it.

    Attributes:
        name: "ring", "zigzag" (ring after an exchange that balances causal work), "heads",
            "hybrid" (heads over the last mesh axis, ring over the others) or "gather".
        bytes: received by the rank that receives most, forward.
        seconds: modelled, forward and backward, of the slowest rank.
    """

    name: str
    bytes: int
    seconds: float


def choices(sizes: Sizes, machine: Machine) -> tuple[Choice, ...]:
    """Every algorithm that is exact for these sizes, the cheapest first.

    Backward counts 2.5 times the products of the forward. Ring and gather send keys and values
    again and their gradients back; heads send the four gradients.
    """
    ranks = len(sizes.keys)
    found = []
    row = sizes.batch * sizes.key_heads * (sizes.width + sizes.value_width) * sizes.itemsize
    work = 2.0 * sizes.batch * sizes.heads * (sizes.width + sizes.value_width)

    def rotating(name: str, queries, keys, together: bool, extra: int) -> None:
        seconds, most = 0.0, 0
        all_steps = [
            key_steps(queries, keys, rank, sizes.causal, together) for rank in range(ranks)
        ]
        totals = [sum(sum(step.receives) for step in steps) * row for steps in all_steps]
        most = max(totals) + extra
        for at in range(len(all_steps[0])):
            steps = [steps[at] for steps in all_steps]
            compute = max(area(step.pieces) for step in steps) * work / machine.rate
            sent = max(max(sum(step.receives), sum(step.sends)) for step in steps) * row
            travel = 0.0 if steps[0].silent else machine.latency + sent / machine.bandwidth
            if together:
                seconds += 3.5 * compute + 3 * travel
            else:  # a block travels while the one before is computed
                seconds += max(compute, travel) + max(2.5 * compute, 2 * travel)
        if extra:
            seconds += 2 * (4 * machine.latency + extra / machine.bandwidth)
        found.append(Choice(name, most, seconds))

    rotating("ring", sizes.queries, sizes.keys, False, 0)
    rotating("gather", sizes.queries, sizes.keys, True, 0)
    if sizes.causal and not sizes.mask_rows:
        extra = _zigzag_bytes(sizes)
        q = zigzag(sum(map(length, sizes.queries)), ranks)
        k = zigzag(sum(map(length, sizes.keys)), ranks)
        rotating("zigzag", q, k, False, extra)
    if not sizes.mask_rows and sizes.key_heads > 1:
        found.append(_over_heads(sizes, machine, work))
        if len(sizes.grid) > 1 and min(sizes.grid) > 1:
            found.append(_hybrid(sizes, machine))
    return tuple(sorted(found, key=lambda choice: choice.seconds))


def split_heads(sizes: Sizes, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query heads and key heads of every rank, groups of query heads whole."""
    keys = even_extents(sizes.key_heads, ranks)
    group = sizes.heads // sizes.key_heads
    return tuple(group * n for n in keys), keys


def _over_heads(sizes: Sizes, machine: Machine, work: float) -> Choice:
    q_heads, k_heads = split_heads(sizes, len(sizes.keys))
    q_rows = [length(rows) for rows in sizes.queries]
    k_rows = [length(rows) for rows in sizes.keys]
    wide = (sizes.width + sizes.value_width) * sizes.batch * sizes.itemsize
    most = 0
    for rank in range(len(q_rows)):
        into = (sum(q_rows) - q_rows[rank]) * q_heads[rank] * sizes.width
        into += q_rows[rank] * (sizes.heads - q_heads[rank]) * sizes.value_width
        arrived = into * sizes.batch * sizes.itemsize
        arrived += (sum(k_rows) - k_rows[rank]) * k_heads[rank] * wide
        most = max(most, arrived)
    area = sum(q_rows) * sum(k_rows) * (0.5 if sizes.causal else 1.0)
    compute = area * work * max(q_heads) / sizes.heads / machine.rate
    seconds = 3.5 * compute + 2 * (4 * machine.latency + most / machine.bandwidth)
    return Choice("heads", most, seconds)


def after_heads(sizes: Sizes, place: int) -> Sizes:
    """The problem of one outer group once the last mesh axis is split over heads.

    Args:
        place: index of this rank along that axis.
    """
    inner = sizes.grid[-1]

    def joined_rows(rows: Sequence[Rows]) -> tuple[Rows, ...]:
        return tuple(joined(rows[at : at + inner]) for at in range(0, len(rows), inner))

    q_heads, k_heads = split_heads(sizes, inner)
    return replace(
        sizes,
        queries=joined_rows(sizes.queries),
        keys=joined_rows(sizes.keys),
        heads=q_heads[place],
        key_heads=k_heads[place],
        grid=sizes.grid[:-1],
    )


def _hybrid(sizes: Sizes, machine: Machine) -> Choice:
    inner = sizes.grid[-1]
    ring = next(
        c for c in choices(replace(after_heads(sizes, 0), grid=()), machine) if c.name == "ring"
    )
    most, rows = 0, list(zip(sizes.queries, sizes.keys, strict=True))
    for at in range(0, len(rows), inner):
        q, k = zip(*rows[at : at + inner], strict=True)
        part = replace(sizes, queries=tuple(q), keys=tuple(k), causal=False)
        most = max(most, _over_heads(part, machine, 0.0).bytes)
    seconds = ring.seconds + 2 * (4 * machine.latency + most / machine.bandwidth)
    return Choice("hybrid", most + ring.bytes, seconds)


def _zigzag_bytes(sizes: Sizes) -> int:
    """Bytes the rank that receives most gets by going to zigzag order and back."""
    ranks = len(sizes.keys)

    def moved(owned: Sequence[Rows], width: int) -> list[int]:
        wanted = zigzag(sum(map(length, owned)), ranks)
        kept = [_overlap(a, b) for a, b in zip(owned, wanted, strict=True)]
        into = [length(rows) - k for rows, k in zip(wanted, kept, strict=True)]
        return [n * width for n in into]

    size = sizes.batch * sizes.itemsize
    q = moved(sizes.queries, sizes.heads * (sizes.width + sizes.value_width) * size)
    k = moved(sizes.keys, sizes.key_heads * (sizes.width + sizes.value_width) * size)
    return max(a + b for a, b in zip(q, k, strict=True))


def _overlap(first: Rows, second: Rows) -> int:
    return sum(max(0, min(b, d) - max(a, c)) for a, b in first for c, d in second)


__all__ = [
    "MACHINES",
    "Choice",
    "Machine",
    "Piece",
    "Rows",
    "Sizes",
    "Step",
    "after_heads",
    "choices",
    "key_steps",
    "pieces_of",
    "split_heads",
    "zigzag",
]
