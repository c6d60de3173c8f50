"""Device meshes: one call that sets up the process group, the device and the named axes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[str, ...] = ()
    device_mesh: DeviceMesh | None = None

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
        """Name of this rank's process group over the product of `axes`, for collectives."""
        if len(axes) == 1:
            return self.groups[self.names.index(axes[0])]
        assert self.device_mesh is not None
        flat = "_".join(axes)
        flattened = self.device_mesh[axes]._flatten(flat)
        return flattened.get_group().group_name

    def __reduce__(self):
        mesh = self.device_mesh
        ranks = tuple(mesh.mesh.flatten().tolist()) if mesh is not None else ()
        kind = mesh.device_type if mesh is not None else "cpu"
        return _find_axes, (self.names, self.sizes, ranks, kind)

    def __deepcopy__(self, memo):
        return self


_known: dict[int, MeshAxes] = {}


def mesh_axes(mesh: DeviceMesh) -> MeshAxes:
    """The `MeshAxes` of the root of `mesh`; the same object for the same root.

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
    axes = MeshAxes(tuple(names), tuple(root.mesh.shape), tuple(coordinate), groups, root)
    _known[id(root)] = axes
    return axes


def _find_axes(names, sizes, ranks, kind) -> MeshAxes:
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
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        for group in axes.groups:
            _resolve_process_group(group)
    except RuntimeError:
        return False
    return True


def init_mesh(
    data: int | None = None,
    tensor: int | None = None,
    *,
    device: str | None = None,
    timeout: timedelta | None = None,
    seed: int | None = None,
    **domain: int,
) -> DeviceMesh:
    """Sets up the process group, this rank's device and a mesh with named axes.

    Args:
        data: replicas that see different samples.
        tensor: ranks that share the weights of a layer; innermost, for the fastest links.
        device: "cuda" or "cpu"; by default CUDA where every local rank has a device.
        timeout: how long a collective may wait before it fails.
        seed: base of the random state; ranks of one domain group are seeded alike, data
            replicas differently. By default torch's initial seed of rank 0.
        **domain: one keyword per domain axis, of any name: `domain=4`, or `h=2, w=2`.

    Returns:
        The root DeviceMesh, axes in the order data, domain axes, tensor. With no axis given,
        one axis `domain` over all ranks.

    Comm: creates process groups; one broadcast of the seed.

    Raises:
        LayoutError: the sizes do not multiply to the number of ranks.

    Example:
        >>> mesh = shardfield.init_mesh(domain=1)
        >>> mesh.mesh_dim_names
        ('domain',)
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        world = dist.get_world_size()
    named = {DATA: data, **domain, TENSOR: tensor}
    axes = {name: size for name, size in named.items() if size is not None}
    if not axes:
        axes = {"domain": world}
    if any(size < 1 for size in axes.values()) or prod(axes.values()) != world:
        wanted = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise LayoutError(
            f"init_mesh({wanted}) on {world} rank(s)",
            "axis sizes are positive and multiply to the number of ranks",
            f"start {prod(axes.values())} ranks (torchrun --nproc-per-node), or change the sizes",
            "mesh",
        )
    kind = _pick_device(device)
    if not dist.is_initialized():
        _init_process_group(kind, timeout)
    mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    split = tuple(name for name in axes if name not in (DATA, TENSOR))
    if len(split) > 1:
        mesh[split]._flatten("_".join(split))
    _seed(mesh, seed)
    mesh_axes(mesh)
    return mesh


def _pick_device(device: str | None) -> str:
    if device is not None:
        return device
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world:
        return "cuda"
    return "cpu"


def _init_process_group(kind: str, timeout: timedelta | None) -> None:
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )


def _seed(mesh: DeviceMesh, seed: int | None) -> None:
    chosen = [torch.initial_seed() if seed is None else seed]
    if dist.get_world_size() > 1 and dist.get_backend() != "fake":
        dist.broadcast_object_list(chosen, src=int(mesh.mesh.flatten()[0]))
    replica = 0
    names = mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate()
    if DATA in names and coordinate is not None:
        replica = coordinate[names.index(DATA)]
    # torch keeps 64 bits of seed; the odd constant spreads neighbouring replicas apart.
    torch.manual_seed((chosen[0] + replica * 0x9E3779B97F4A7C15) % (1 << 63))
