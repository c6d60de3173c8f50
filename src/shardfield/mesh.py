"""Device meshes: one call that sets up the process group, the device and the named axes."""

from __future__ import annotations

import os
import socket
import warnings
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfield.axes import DATA, PIPE, TENSOR, join_axes, mesh_axes
from shardfield.comm import agreement
from shardfield.comm._torch import set_group_timeout
from shardfield.errors import LayoutError
from shardfield.topology import placement_warnings


def init_mesh(
    data: int | None = None,
    tensor: int | None = None,
    *,
    pipe: int | None = None,
    device: str | None = None,
    timeout: timedelta | None = None,
    seed: int | None = None,
    **domain: int,
) -> DeviceMesh:
    """Sets up the process group, this rank's device and a mesh with named axes.

    Args:
        data: replicas that see different samples.
        tensor: ranks that share the weights of a layer; innermost, for the fastest links.
        pipe: ranks that hold stages of a pipeline (see `shardfield.pipeline_stages`); outermost,
            since stages send least.
        device: "cuda" or "cpu"; by default CUDA where every local rank has a device.
        timeout: how long a collective may wait before it fails.
        seed: base of the random state; ranks of one domain group are seeded alike, data
            replicas and stages differently. By default torch's initial seed of rank 0.
        **domain: one keyword per domain axis, of any name: `domain=4`, or `h=2, w=2`.

    Returns:
        The root DeviceMesh, axes in the order pipe, data, domain axes, tensor. With no axis given,
        or none but `pipe`, one axis `domain` over all ranks of a stage.

    Comm: creates process groups; one broadcast of the seed, one all-gather of host names.

    Warns:
        UserWarning: on rank 0, where the ranks' hosts do not suit the axes: an inner axis crosses
            hosts and need not. `SHARDFIELD_HOST` names the machine in place of its host name, for
            containers that have names of their own.

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
    named = {PIPE: pipe, DATA: data, **domain, TENSOR: tensor}
    axes = {name: size for name, size in named.items() if size is not None}
    if not axes.keys() - {PIPE}:
        axes["domain"] = max(world // axes.get(PIPE, 1), 1)
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
    if timeout is not None:
        # Groups that DeviceMesh makes do not inherit the limit of the default group.
        for name in axes:
            set_group_timeout(timeout, mesh.get_group(name))
    agreement.enable_from_environment()
    _seed(mesh, seed)
    mesh_axes(mesh, timeout)
    for product in _products(axes):
        join_axes(mesh, product, timeout)
    _warn_of_placement(axes)
    return mesh


def _products(axes: dict[str, int]) -> list[tuple[str, ...]]:
    """Products of axes whose groups are made at once, while all ranks are here."""
    split = tuple(name for name in axes if name not in (PIPE, DATA, TENSOR))
    products = [split]
    if axes.get(PIPE, 1) > 1:
        # Later, the ranks of one stage would wait for those of the others.
        for more in ((DATA, *split), (*split, TENSOR)):
            products.append(tuple(name for name in more if name in axes))
    return [product for product in dict.fromkeys(products) if len(product) > 1]


def _warn_of_placement(axes: dict[str, int]) -> None:
    """Compares the mesh with the machines its ranks run on."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, os.environ.get("SHARDFIELD_HOST") or socket.gethostname())
    if dist.get_rank() == 0:
        for text in placement_warnings(tuple(axes), tuple(axes.values()), hosts):
            warnings.warn(text, stacklevel=3)


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
    coordinate = mesh.get_coordinate() or ()
    for name, size, place in zip(
        mesh.mesh_dim_names or (), mesh.mesh.shape, coordinate, strict=False
    ):
        if name in (PIPE, DATA):
            replica = replica * size + place
    # torch keeps 64 bits of seed; the odd constant spreads neighbouring replicas apart.
    torch.manual_seed((chosen[0] + replica * 0x9E3779B97F4A7C15) % (1 << 63))
