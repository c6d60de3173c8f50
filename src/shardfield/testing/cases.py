"""What the harness sweeps: splits of a dim, meshes, element types. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

Split = Mapping[int, str]
"""Which dims of a tensor are split, and over which mesh axes."""

Extents = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One run on the ranks.

    Attributes:
        name: What a failure is called.
        mesh: Names and sizes of the mesh axes.
        ranks: Global ranks of the mesh; empty for the whole pool.
        sizes: For each tensor input, extents by mesh axis; empty for the default split.
        dtype: Type of the floating-point inputs and parameters.
        backend: Backend of `shardfield.compile`; empty for eager.
    """

    name: str
    mesh: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    sizes: tuple[dict[str, Extents], ...]
    dtype: torch.dtype
    backend: str = ""

    @property
    def world(self) -> int:
        """Ranks of the pool this case needs."""
        count = 1
        for _, size in self.mesh:
            count *= size
        return max((*self.ranks, count - 1)) + 1


def split_cases(size: int, ranks: int) -> dict[str, Extents]:
    """Ways to cut `size` rows over `ranks` ranks, the awkward ones included.

    Args:
        size: Global extent.
        ranks: Number of ranks.

    Returns:
        Extents by name, without repetition: even, uneven, one row a rank with the rest at either
        end, no rows in front, behind or between, everything on one rank.

    Example:
        >>> split_cases(6, 2)["one row first"]
        (1, 5)
    """
    full, more = divmod(size, ranks)
    found = {"even": tuple(full + (rank < more) for rank in range(ranks))}
    if ranks > 1:
        weights = [2 + (3 * rank + 1) % 5 for rank in range(ranks)]
        found["uneven"] = _weighted(size, weights)
        found["none first"] = (0, *_weighted(size, weights[1:]))
        found["none last"] = (*_weighted(size, weights[:-1]), 0)
        found["all on one"] = tuple(size if rank == 1 else 0 for rank in range(ranks))
    if ranks > 2:
        found["none between"] = (*_weighted(size, weights[:1]), *[0] * (ranks - 1))
        if size > 1:
            found["none between"] = (size // 2, *[0] * (ranks - 2), size - size // 2)
    if ranks > 1 and size >= ranks:
        found["one row first"] = (*[1] * (ranks - 1), size - ranks + 1)
        found["one row last"] = (size - ranks + 1, *[1] * (ranks - 1))
    names: dict[Extents, str] = {}
    for name, extents in found.items():
        names.setdefault(extents, name)
    return {name: extents for extents, name in names.items()}


def grid(ranks: int, axes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Spreads `ranks` over named axes: 4 over (h, w) is 2 x 2, primes go to alternating axes."""
    sizes = dict.fromkeys(axes, 1)
    place, rest, factor = ranks, ranks, 2
    while rest > 1:
        if rest % factor:
            factor += 1
            continue
        sizes[axes[place % len(axes)]] *= factor
        rest //= factor
        place += 1
    return tuple(sizes.items())


def sweep(
    inputs: Sequence[torch.Tensor],
    splits: Sequence[Split],
    ranks: Sequence[int],
    sizes: Sequence[Extents | Mapping[str, Extents]] | None,
    dtypes: Sequence[torch.dtype],
    backend: str,
    subgroup: bool,
) -> Iterator[Case]:
    """All cases of one parity call, those of the first type first.

    Every split runs in the first type; the even and an uneven one also in the others, compiled
    and on the ranks [2, 3] of 4.
    """
    axes = _axes(splits)
    for count in ranks:
        mesh = grid(count, axes)
        for name, by_axis in _by_axis(inputs, splits, mesh, sizes).items():
            extents = tuple(
                _extents(tensor, split, by_axis, mesh)
                for tensor, split in zip(inputs, splits, strict=True)
            )
            cut = ", ".join(f"{axis}: {rows}" for axis, rows in by_axis.items())
            title = f"P={count} {name}" + (f" ({cut})" if cut else "")
            common = name in ("default", "uneven") or (sizes is not None and name == "given 0")
            for dtype in dtypes if common else dtypes[:1]:
                yield Case(f"{title} {_short(dtype)}", mesh, (), extents, dtype)
            if not common or count != 2:
                continue
            if subgroup and max(ranks) >= 4:
                yield Case(f"{title}, ranks [2, 3] of 4", mesh, (2, 3), extents, dtypes[0])
            if backend:
                yield Case(f"{title} {backend}", mesh, (), extents, dtypes[0], backend)


def _weighted(size: int, weights: Sequence[int]) -> Extents:
    total, points = sum(weights), [0]
    points += [size * weight // total for weight in accumulate(weights)]
    return tuple(b - a for a, b in pairwise(points))


def _axes(splits: Sequence[Split]) -> list[str]:
    """The axes that the splits name, in order."""
    found: dict[str, None] = {}
    for split in splits:
        found |= dict.fromkeys(split.values())
    return list(found) or ["domain"]


def _by_axis(
    inputs: Sequence[torch.Tensor],
    splits: Sequence[Split],
    mesh: tuple[tuple[str, int], ...],
    sizes: Sequence[Extents | Mapping[str, Extents]] | None,
) -> dict[str, dict[str, Extents]]:
    """Extents along each axis, by the name of the split; {} leaves the split to the library."""
    if sizes is not None:
        wanted = [item if isinstance(item, Mapping) else {mesh[0][0]: item} for item in sizes]
        fitting = [
            {axis: tuple(extents) for axis, extents in item.items()}
            for item in wanted
            if all(len(item[axis]) == size for axis, size in mesh if axis in item)
        ]
        return {f"given {index}": item for index, item in enumerate(fitting)} or {"default": {}}
    found: dict[str, dict[str, Extents]] = {"default": {}}
    for place, (axis, count) in enumerate(mesh):
        rows = _rows(inputs, splits, axis)
        if rows is None:
            continue
        cases = list(split_cases(rows, count).items())
        if rows % count == 0:
            cases = cases[1:]  # the default split is the even one
        for index, (name, _) in enumerate(cases):
            # Axes are shifted against each other, so that an empty row meets a full column.
            found.setdefault(name, {})[axis] = cases[(index + place) % len(cases)][1]
    return found


def _rows(inputs: Sequence[torch.Tensor], splits: Sequence[Split], axis: str) -> int | None:
    """Extent of the first dim that is split over `axis`."""
    for tensor, split in zip(inputs, splits, strict=True):
        for dim, over in split.items():
            if over == axis:
                return tensor.shape[dim]
    return None


def _extents(
    tensor: torch.Tensor,
    split: Split,
    by_axis: Mapping[str, Extents],
    mesh: tuple[tuple[str, int], ...],
) -> dict[str, Extents]:
    """Extents of a tensor by axis, scaled where its dim is a multiple or part of those rows."""
    found: dict[str, Extents] = {}
    for dim, axis in split.items():
        if axis not in by_axis:
            continue
        extents, size = by_axis[axis], tensor.shape[dim]
        rows = sum(extents)
        if rows and all(extent * size % rows == 0 for extent in extents):
            found[axis] = tuple(extent * size // rows for extent in extents)
        elif rows != size:
            count = dict(mesh)[axis]
            found[axis] = split_cases(size, count)["even"]
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
