"""Mesh axes: what layouts know of a DeviceMesh, and the live meshes that pickles find again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfield.errors import LayoutError

PIPE = "pipe"
DATA = "data"
TENSOR = "tensor"


@dataclass(frozen=True, eq=False)
class MeshAxes:
    """What layouts need to know of a root mesh: names, sizes and this rank's place on it.

    The axis `pipe` is not among them: its ranks hold other stages of a model, hence other tensors,
    and nothing is split or summed over it. A layout means the same in every stage.

    Attributes:
        names: axis names, slowest first.
        sizes: ranks along each axis.
        coordinate: this rank's index along each axis.
        groups: name of this rank's process group along each axis.
        device_mesh: the mesh itself; None in tests that need no processes.
        timeout: how long a collective of a joint group may wait; None: torch's default.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[str, ...] = ()
    device_mesh: DeviceMesh | None = None
    timeout: timedelta | None = None

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

        Comm: none for one axis; the first call for several makes the group (see `join_axes`).

        Raises:
            LayoutError: nobody joined them, and not all ranks of the world are here to do so: the
                mesh is over part of it, or other ranks are in another stage.
        """
        if len(axes) == 1:
            return self.groups[self.names.index(axes[0])]
        mesh = self.device_mesh
        assert mesh is not None
        found = _joint.get((id(mesh), axes))
        if found is not None:
            return found
        here = prod(self.sizes)
        if here != dist.get_world_size():
            raise LayoutError(
                f"one group over the axes {axes} of a mesh over {here} of "
                f"{dist.get_world_size()} ranks",
                "the ranks of the whole world make a process group together",
                f"call shardfield.axes.join_axes(mesh, {axes}) on every rank of the world first",
                "mesh",
            )
        return join_axes(mesh, axes, self.timeout)

    def __reduce__(self):
        mesh = self.device_mesh
        ranks = tuple(mesh.mesh.flatten().tolist()) if mesh is not None else ()
        kind = mesh.device_type if mesh is not None else "cpu"
        return find_axes, (self.names, self.sizes, ranks, kind)

    def __deepcopy__(self, memo):
        return self


_known: dict[int, MeshAxes] = {}
_joint: dict[tuple[int, tuple[str, ...]], str] = {}


def join_axes(mesh: DeviceMesh, axes: tuple[str, ...], timeout: timedelta | None = None) -> str:
    """Makes the process groups over the product of several axes of a root mesh.

    All ranks of the world call it together, those outside the mesh too: torch names groups by
    counting.

    Args:
        axes: slowest first; the ranks of a group are in their row-major order.

    Returns:
        The name of this rank's group; empty on a rank outside the mesh.
    """
    names = mesh.mesh_dim_names or ()
    order = [names.index(axis) for axis in axes]
    others = [place for place in range(len(names)) if place not in order]
    width = prod(mesh.mesh.shape[place] for place in order)
    blocks = mesh.mesh.permute(others + order).reshape(-1, width).tolist()
    mine = ""
    for block in blocks:
        made = dist.new_group(block, timeout, sort_ranks=False)
        if dist.get_rank() in block:
            assert isinstance(made, dist.ProcessGroup)
            mine = made.group_name
    _joint[id(mesh), axes] = mine
    return mine


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
    kept = [place for place, name in enumerate(names) if name != PIPE]
    names = tuple(names[place] for place in kept)
    sizes = tuple(root.mesh.shape[place] for place in kept)
    groups = tuple(root.get_group(name).group_name for name in names)
    axes = MeshAxes(names, sizes, tuple(coordinate[place] for place in kept), groups, root, timeout)
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
