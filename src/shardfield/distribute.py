"""Into layouts and out of them: distribute, gather, redistribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardfield.axes import DATA, PIPE, MeshAxes, mesh_axes
from shardfield.comm._torch import resolve_group
from shardfield.comm.collectives import all_to_all
from shardfield.comm.fetch import fetch
from shardfield.comm.move import move
from shardfield.errors import LayoutError
from shardfield.layout import Dim, Factor, Layout, even_extents, replica_axes
from shardfield.plan import Segment, exchange, runs_of
from shardfield.tensor import ShardTensor, describe, leaf, local_of, result

Sizes = Sequence[int] | Mapping[str, Sequence[int]]


def layout_of(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sizes: Sizes | None = None,
) -> Layout:
    """The layout that DTensor's arguments describe; sizes default to those of `torch.chunk`.

    Args:
        shape: global shape.
        mesh: a root mesh or a part of one, with one placement per axis.
        sizes: rows of every rank along the axis, or a dict of them by axis name.

    Raises:
        LayoutError: placements or sizes do not fit.
    """
    axes = mesh_axes(mesh)
    names = _names(mesh)
    if len(placements) != len(names):
        raise LayoutError(
            f"{len(placements)} placement(s) for the mesh axes {names}",
            "one placement per axis of the mesh that is passed",
            "pass a part of the mesh (mesh['domain']), or one placement per axis",
            "layout",
        )
    return _layout(tuple(shape), axes, dict(zip(names, placements, strict=True)), sizes)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes that placements are for."""
    names = tuple(mesh.mesh_dim_names or ())
    if PIPE in names:
        rest = ", ".join(repr(name) for name in names if name != PIPE) or "'domain'"
        raise LayoutError(
            f"placements for the mesh axes {names}",
            "the ranks along 'pipe' hold other stages of a model, and no part of the same tensor",
            f"pass mesh[{rest}], with one placement per axis",
            "pipeline",
        )
    return names


def _layout(
    shape: tuple[int, ...],
    mesh: MeshAxes,
    placements: Mapping[str, Placement],
    sizes: Sizes | None,
) -> Layout:
    dims: list[Dim] = [(Factor(size),) for size in shape]
    asked = f"placements {dict(placements)} for shape {shape}"
    given = _sizes_by_axis(sizes, [n for n, p in placements.items() if isinstance(p, Shard)])
    for name, placement in placements.items():
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise LayoutError(
                asked,
                "placements are Shard(dim) or Replicate()",
                "partial sums never reach the user; use Shard or Replicate",
                "layout",
            )
        if name == DATA:
            raise LayoutError(
                asked,
                "the axis 'data' holds independent samples; it splits no tensor",
                "give every data replica its own samples, and shard over the other axes",
                "layout",
            )
        dim = placement.dim if placement.dim >= 0 else placement.dim + len(shape)
        if not 0 <= dim < len(shape):
            raise LayoutError(
                asked,
                f"Shard({placement.dim}) names no dim of {shape}",
                f"name one of the {len(shape)} dims",
                "layout",
            )
        if dims[dim][0].axes:
            raise LayoutError(
                asked,
                "one dim is split over one axis",
                "split another dim over the second axis",
                "layout",
            )
        ranks = mesh.size((name,))
        extents = tuple(int(n) for n in given.get(name, even_extents(shape[dim], ranks)))
        dims[dim] = (Factor(shape[dim], (name,), extents),)
    return Layout(mesh, dims)


def _sizes_by_axis(sizes: Sizes | None, split: list[str]) -> dict[str, Sequence[int]]:
    if sizes is None:
        return {}
    if isinstance(sizes, Mapping):
        unknown = set(sizes) - set(split)
        if unknown:
            raise LayoutError(
                f"sizes for {sorted(unknown)}",
                f"sizes are for split axes: {split}",
                "name those",
                "layout",
            )
        return dict(sizes)
    if len(split) != 1:
        raise LayoutError(
            f"sizes {list(sizes)} for the split axes {split}",
            "a plain list of sizes belongs to exactly one split axis",
            "pass a dict: sizes={'h': [...], 'w': [...]}",
            "layout",
        )
    return {split[0]: sizes}


def local_slices(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sizes: Sizes | None = None,
) -> tuple[slice, ...]:
    """The part of a global array that this rank holds: what it should read.

    Example:
        >>> mesh = shardfield.init_mesh(domain=1)
        >>> shardfield.local_slices((8, 5), mesh, [Shard(0)])
        (slice(0, 8, None), slice(0, 5, None))
    """
    layout = layout_of(shape, mesh, placements, sizes)
    offsets = [layout.offset(dim) for dim in range(len(layout.dims))]
    return tuple(slice(at, at + rows) for at, rows in zip(offsets, layout.local_shape, strict=True))


def distribute_tensor(
    tensor: torch.Tensor | None,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    src_data_rank: int | None = 0,
    sizes: Sizes | None = None,
) -> torch.Tensor:
    """Splits a global tensor over the ranks of a mesh.

    Args:
        tensor: the global tensor; only the source's is read (others may pass None), or every
            rank's own with `src_data_rank=None`.
        mesh: a root mesh or a part of it (`mesh["domain"]`).
        placements: `Shard(dim)` or `Replicate()` for every axis of `mesh`.
        src_data_rank: rank within `mesh` (row-major) that has the data; None: every rank has.
        sizes: rows of every rank, uneven and empty ones included; see `layout_of`.

    Returns:
        A leaf ShardTensor; a plain tensor if every placement is Replicate.

    Comm: shape, dtype and device kind are broadcast; then one all-to-all in which the source sends
        each rank its shard and nothing else. None at all with `src_data_rank=None`.

    Raises:
        LayoutError: on every rank, if placements or sizes do not fit.
    """
    _refuse_distributed(tensor, "distribute_tensor")
    axes = mesh_axes(mesh)
    names = _names(mesh)
    group = axes.group(names)
    ranks, rank = axes.size(names), axes.rank(names)
    if src_data_rank is None or ranks == 1:
        if tensor is None:
            raise LayoutError(
                "distribute_tensor(None, ...)",
                "without a source, every rank's own tensor is read",
                "pass the tensor on every rank, or the rank that has it as src_data_rank",
                "layout",
            )
        layout = layout_of(tensor.shape, mesh, placements, sizes)
        offsets = [layout.offset(dim) for dim in range(len(layout.dims))]
        local = _part(tensor.detach(), offsets, layout.local_shape).to(device_of(mesh))
        return finished(local, layout, tensor.requires_grad)
    if not 0 <= src_data_rank < ranks:
        raise LayoutError(
            f"src_data_rank={src_data_rank}",
            f"the mesh has {ranks} ranks",
            "name a rank within the mesh (row-major), not a global rank",
            "layout",
        )
    meta: list = [None]
    if rank == src_data_rank and tensor is not None:
        meta = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)]
    process_group = resolve_group(group)
    dist.broadcast_object_list(meta, group=process_group, group_src=src_data_rank)
    if meta[0] is None:
        raise LayoutError(
            f"distribute_tensor(None, ...) on rank {src_data_rank}",
            "the source has the tensor",
            "pass the tensor there, or the rank that has it as src_data_rank",
            "layout",
        )
    shape, dtype, requires_grad = meta[0]
    layout = layout_of(shape, mesh, placements, sizes)
    parts, sends = [], [0] * ranks
    if rank == src_data_rank:
        assert tensor is not None
        for other in range(ranks):
            coordinate = _coordinate(axes, names, other)
            offsets, local_shape = _range_at(layout, coordinate)
            if other == rank:
                mine = _part(tensor.detach(), offsets, local_shape).to(device_of(mesh))
            else:
                part = tensor.detach()
                for dim, (at, rows) in enumerate(zip(offsets, local_shape, strict=True)):
                    part = part.narrow(dim, at, rows)
                parts.append(part.to(device_of(mesh)).reshape(-1))
                sends[other] = part.numel()
    rows = torch.Size(layout.local_shape).numel()
    receives = [0] * ranks
    if rank != src_data_rank:
        receives[src_data_rank] = rows
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device_of(mesh))
    arrived = all_to_all(flat, receives, sends, group, "distribute_tensor")
    local = mine if rank == src_data_rank else arrived.view(layout.local_shape)
    return finished(local, layout, requires_grad)


def _refuse_distributed(tensor: torch.Tensor | None, asked: str) -> None:
    if isinstance(tensor, (ShardTensor, DTensor)):
        raise LayoutError(
            f"{asked} of {type(tensor).__name__} {tuple(tensor.shape)}",
            "it is spread over ranks already",
            "x.redistribute(...), or x.full_tensor() first",
            "layout",
        )


def finished(local: torch.Tensor, layout: Layout, requires_grad: bool) -> torch.Tensor:
    """A leaf of this rank's new rows; the plain tensor itself where nothing is split."""
    if not layout.split_axes:
        return local.requires_grad_(requires_grad)
    return leaf(local, layout, requires_grad)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank makes tensors for a mesh."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _part(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A copy of one block, so that nothing of the whole stays alive."""
    for dim, (at, rows) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dim, at, rows)
    return tensor.clone(memory_format=torch.contiguous_format)


def _coordinate(mesh: MeshAxes, names: tuple[str, ...], rank: int) -> dict[str, int]:
    place = dict(zip(mesh.names, mesh.coordinate, strict=True))
    for name in reversed(names):
        rank, place[name] = divmod(rank, mesh.size((name,)))
    return place


def _range_at(layout: Layout, place: dict[str, int]) -> tuple[list[int], list[int]]:
    offsets, rows = [], []
    for dim in range(len(layout.dims)):
        factor = layout.contiguous(dim)
        assert factor is not None
        if factor.axes:
            index = place[factor.axes[0]]
            offsets.append(sum(factor.extents[:index]))
            rows.append(factor.extents[index])
        else:
            offsets.append(0)
            rows.append(factor.size)
    return offsets, rows


def from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """Joins the ranks' shards, of any sizes, to one global tensor.

    Args:
        local: this rank's shard; gradients flow to it.
        placements: which dim is split over which axis of `mesh`.

    Comm: one exchange of the shapes.

    Raises:
        LayoutError: on every rank, if dims that are not split differ between ranks.
    """
    _refuse_distributed(local, "from_local")
    axes = mesh_axes(mesh)
    names = _names(mesh)
    ranks = axes.size(names)
    shapes: list = [tuple(local.shape)]
    if ranks > 1:
        shapes = [None] * ranks
        process_group = resolve_group(axes.group(names))
        mine = (tuple(local.shape), local.dtype)
        dist.all_gather_object(shapes, mine, group=process_group)
        if len({dtype for _, dtype in shapes}) > 1 or len({len(s) for s, _ in shapes}) > 1:
            raise LayoutError(
                f"from_local of {shapes}",
                "shards have one dtype and one number of dims",
                "cast or reshape what each rank read",
                "layout",
            )
        shapes = [shape for shape, _ in shapes]
    # From what all ranks know, so that all of them raise the same.
    shape, sizes = list(shapes[0]), {}
    for name, placement in zip(names, placements, strict=False):
        if isinstance(placement, Shard) and -len(shape) <= placement.dim < len(shape):
            dim = placement.dim % len(shape)
            extents = [0] * axes.size((name,))
            for rank, held in enumerate(shapes):
                extents[_coordinate(axes, names, rank)[name]] = held[dim]
            shape[dim] = sum(extents)
            sizes[name] = extents
    layout = layout_of(shape, mesh, placements, sizes)
    for rank, held in enumerate(shapes):
        _, expected = _range_at(layout, _coordinate(axes, names, rank))
        if list(held) != expected:
            raise LayoutError(
                f"from_local with the local shapes {shapes}",
                f"dims that are not split agree over ranks; rank {rank} should hold {expected}",
                "check what each rank read, or split the dim that differs",
                "layout",
            )
    return result(local, layout) if local.requires_grad else finished(local, layout, False)


ShardTensor.from_local = staticmethod(from_local)  # type: ignore[attr-defined]


def full_tensor(x: ShardTensor, dst: int | None = None) -> torch.Tensor | None:
    """See `ShardTensor.full_tensor`."""
    layout = x.layout
    plain = Layout(layout.mesh, [(Factor(size),) for size in layout.shape])
    if dst is None:
        return move(local_of(x), layout, plain, "full_tensor")
    local = local_of(x).detach()
    mesh, reached = layout.mesh, True
    place = dict(zip(layout.split_axes, _unravel(dst, mesh, layout.split_axes), strict=True))
    for dim in range(len(layout.dims)):
        axes = layout.axes(dim)
        if not axes:
            continue
        owned = runs_of(layout.dims[dim])
        target = 0
        for axis in axes:
            target = target * mesh.size((axis,)) + place[axis]
        everything = (Segment(0, layout.shape[dim]),)
        wanted = tuple(everything if rank == target else () for rank in range(len(owned)))
        rank = mesh.rank(axes)
        reached = reached and rank == target
        plan = exchange(owned, wanted, rank)
        local = fetch(local, dim, plan, mesh.group(axes), 0.0, "full_tensor")
    return local if reached else None


def _unravel(index: int, mesh: MeshAxes, axes: tuple[str, ...]) -> list[int]:
    if not 0 <= index < mesh.size(axes):
        raise LayoutError(
            f"full_tensor(dst={index})",
            f"the tensor is split over {mesh.size(axes)} ranks",
            "name a rank along the axes the tensor is split over (row-major)",
            "layout",
        )
    place = []
    for axis in reversed(axes):
        index, at = divmod(index, mesh.size((axis,)))
        place.append(at)
    return place[::-1]


def redistribute(
    x: torch.Tensor, placements: Sequence[Placement] | None = None, sizes: Sizes | None = None
) -> torch.Tensor:
    """See `ShardTensor.redistribute`."""
    if not isinstance(x, ShardTensor):
        raise LayoutError(
            f"redistribute of {describe(x)}",
            "a plain tensor has no layout",
            "use distribute_tensor",
            "layout",
        )
    layout = x.layout
    mesh = layout.mesh
    if placements is None:
        placements = x.placements
    names = mesh.names if len(placements) == len(mesh.names) else replica_axes(mesh)
    if len(placements) != len(names):
        raise LayoutError(
            f"redistribute to {list(placements)}",
            f"one placement per mesh axis {mesh.names}, or per axis other than 'data'",
            "pass as many placements as x.placements has",
            "layout",
        )
    target = _layout(layout.shape, mesh, dict(zip(names, placements, strict=True)), sizes)
    if target is layout:
        return x
    return result(move(local_of(x), layout, target, "redistribute"), target)


__all__ = [
    "device_of",
    "distribute_tensor",
    "finished",
    "from_local",
    "full_tensor",
    "layout_of",
    "local_slices",
    "redistribute",
]
