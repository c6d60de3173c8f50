"""Mesh axes: what layouts know of a DeviceMesh, and the live meshes that pickles find again."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfield.errors import LayoutError

DATA = "data"
TENSOR = "tensor"


@dataclass(frozen=True, eq=False)
class MeshAxes:
    """What layouts need to know of a root mesh: names, sizes and this rank's place on it.

    Attributes:
        names: axis names, slowest first.
        sizes: ranks along each axis.
        coordinate: this rank's index along each axis.
        groups: name of this rank's process group along each axis.
        device_mesh: the mesh itself; None in tests that need no processes.
        timeout: how long a collective of a joint group may wait; None: torch's default.
        joint: process groups made for several axes.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[str, ...] = ()
    device_mesh: DeviceMesh | None = None
    timeout: timedelta | None = None
    joint: dict[tuple[str, ...], str] = field(default_factory=dict, repr=False)

    def size(self, axes: tuple[str, ...]) -> int:
        """Ranks in the product of `axes`."""
        return prod(self.sizes[self.names.index(axis)] for axis in axes)

    def rank(self, axes: tuple[str, ...]) -> int:
        """This rank's row-major index in the product of `axes`."""
        index = 0
        for axis in axes:
            place = self.names.index(axis)
            index = index * self.sizes[place] + self.coordinate[place]
        return index

    def group(self, axes: tuple[str, ...]) -> str:
        """Name of this rank's process group over the product of `axes`, for collectives.

        Comm: the first call for several axes makes the group, together with its members only; they
            all call, since layouts decide.
        """
        if len(axes) == 1:
            return self.groups[self.names.index(axes[0])]
        found = self.joint.get(axes)
        if found is None:
            ranks = self.ranks(axes)
            made = dist.new_group(
                ranks, self.timeout, use_local_synchronization=True, sort_ranks=False
            )
            assert isinstance(made, dist.ProcessGroup)
            found = self.joint[axes] = made.group_name
        return found

    def ranks(self, axes: tuple[str, ...]) -> list[int]:
        """Global ranks of this rank's part of the product of `axes`, row-major."""
        assert self.device_mesh is not None
        block = self.device_mesh.mesh
        place = zip(self.names, self.coordinate, strict=True)
        block = block[tuple(slice(None) if name in axes else at for name, at in place)]
        kept = [name for name in self.names if name in axes]
        return block.permute([kept.index(axis) for axis in axes]).flatten().tolist()

    def __reduce__(self):
        mesh = self.device_mesh
        ranks = tuple(mesh.mesh.flatten().tolist()) if mesh is not None else ()
        kind = mesh.device_type if mesh is not None else "cpu"
        return find_axes, (self.names, self.sizes, ranks, kind)

    def __deepcopy__(self, memo):
        return self


_known: dict[int, MeshAxes] = {}


def mesh_axes(mesh: DeviceMesh, timeout: timedelta | None = None) -> MeshAxes:
    """The `MeshAxes` of the root of `mesh`; the same object for the same root.

    Args:
        timeout: at the first call for a mesh, the limit of its joint groups.

    Raises:
        LayoutError: the mesh has no axis names, or this rank is not part of it.
    """
    root = mesh._get_root_mesh()
    found = _known.get(id(root))
    if found is not None:
        return found
    names = root.mesh_dim_names
    if names is None:
        raise LayoutError(
            f"a mesh of shape {tuple(root.mesh.shape)} without axis names",
            "layouts name the axes of their mesh",
            "pass mesh_dim_names=, or use shardfield.init_mesh(domain=...)",
            "mesh",
        )
    coordinate = root.get_coordinate()
    if coordinate is None:
        raise LayoutError(
            f"rank {dist.get_rank()} uses a mesh over ranks {root.mesh.flatten().tolist()}",
            "only ranks that belong to a mesh may hold shards on it",
            "let the other ranks skip this part of the program",
            "mesh",
        )
    groups = tuple(root.get_group(name).group_name for name in names)
    axes = MeshAxes(tuple(names), tuple(root.mesh.shape), tuple(coordinate), groups, root, timeout)
    _known[id(root)] = axes
    return axes


def find_axes(names, sizes, ranks, kind) -> MeshAxes:
    """Finds the live mesh a pickled layout names."""
    for axes in _known.values():
        mesh = axes.device_mesh
        if mesh is None or axes.names != names or axes.sizes != sizes or mesh.device_type != kind:
            continue
        if tuple(mesh.mesh.flatten().tolist()) == ranks and _is_alive(axes):
            return axes
    wanted = " x ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    raise LayoutError(
        f"loading a tensor sharded on the mesh {wanted} (ranks {list(ranks)}, {kind})",
        "a shard can only be loaded where a mesh of the same axes and ranks exists",
        "call shardfield.init_mesh with those axes first, or save x.full_tensor()",
        "mesh",
    )


def _is_alive(axes: MeshAxes) -> bool:
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    try:
        for group in axes.groups:
            _resolve_process_group(GroupName(group))
    except RuntimeError:
        return False
    return True
