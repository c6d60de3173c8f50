"""Bytes kept for backward on N ranks against one process, network by network and mode by mode."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardfield as sf
from shardfield.tools.bench.networks import conv_norm_stack, conv_stack
from shardfield.tools.bench.packages import diffusion_unet, segresnet
from shardfield.tools.bench.slabs import SlabCounter
from shardfield.tools.memory import AllocatedBytes, kept_bytes

MODES = ("eager", "compiled", "checkpointed", "save_on_cpu")

# Of an even share: small tensors (statistics, contexts, bookkeeping) that every rank keeps whole.
SLACK = 0.02


@dataclass(frozen=True)
class Keeping:
    """One network in one mode: bytes of one process, and of the rank that has most.

    Attributes:
        network: Its name.
        mode: One of `MODES`.
        ranks: How many ranks share the sample.
        one: What plain torch in one process keeps after the forward.
        kept: What a rank keeps.
        one_peak: The most that one process held during the forward.
        peak: The most that a rank held.
        slabs: Halo bytes that a rank receives in a forward.
    """

    network: str
    mode: str
    ranks: int
    one: int
    kept: int
    one_peak: int
    peak: int
    slabs: int

    @property
    def bound(self) -> float:
        """What a rank may keep: an even share of one process, the slack, and its halos."""
        return (1 / self.ranks + SLACK) * self.one + self.slabs


@dataclass(frozen=True)
class Model:
    """A network and the global shape of its input, split over the ranks along dim 2.

    Attributes:
        name: What the table calls it.
        build: Makes it.
        shape: Global shape of its input.
        modes: Those it is measured in.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    modes: tuple[str, ...] = MODES

    def network(self) -> nn.Module:
        """The network with the same weights at every call and on every rank."""
        torch.manual_seed(0)
        return self.build()


class Checkpointed(nn.Module):
    """Runs the blocks of a sequential network each under (non-reentrant) checkpointing."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the shape the blocks make of it."""
        for block in self.blocks:
            x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
        return x


def models(scale: int = 1, layers: int = 8) -> list[Model]:
    """The measured networks, stacks of `layers`; `scale` divides every spatial extent."""
    plane = (1, 16, 256 // scale, 256 // scale)
    volume = (1, 1, 96 // scale, 112 // scale, 96 // scale)
    cube, image = (1, 1, *(96 // scale,) * 3), (1, 3, 256 // scale, 256 // scale)
    return [
        Model("conv-ReLU stack", lambda: conv_stack(layers, 16, 2), plane),
        Model("conv-GroupNorm-GELU stack", lambda: conv_norm_stack(layers, 16), plane),
        Model("MONAI UNet", monai_unet, volume),
        Model("MONAI SegResNet", segresnet, cube, ("eager", "save_on_cpu")),
        Model("diffusers UNet2DModel", diffusion_unet, image, ("eager", "save_on_cpu")),
    ]


def monai_unet() -> nn.Module:
    """The network of the demo, from its own package, as its outermost sequence of blocks."""
    try:
        from monai.networks.nets import UNet
    except ImportError as error:
        raise ImportError(
            "The memory table measures MONAI's UNet: pip install monai, or choose with --only."
        ) from error
    network = UNet(3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2))
    return network.model


def run(
    idle: object, names: list[str], modes: tuple[str, ...] = MODES, scale: int = 1
) -> list[dict[str, Any]]:
    """Measures the named networks on all ranks of the world; every rank returns the same rows."""
    mesh = sf.init_mesh()
    chosen = [m for m in models(scale) if m.name in names]
    return [asdict(measure(m, mode, mesh)) for m in chosen for mode in m.modes if mode in modes]


def measure(model: Model, mode: str, mesh: DeviceMesh) -> Keeping:
    """One row: one process on rank 0 first, then all ranks together.

    Comm: what three forwards and a backward of the network need, and two small collectives.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(model.shape, generator=torch.Generator().manual_seed(1))
    alone = torch.zeros(2, dtype=torch.int64)
    if rank == 0:
        alone += torch.tensor(_bytes_of(model.network(), mode, torch.compile, x))
    dist.broadcast(alone, src=0)

    sharded = sf.distribute_tensor(x, mesh["domain"], [Shard(2)], src_data_rank=None)
    network = model.network()
    with SlabCounter(network, ranks, dim=2) as slabs:
        network(sharded)
    most = torch.tensor(_bytes_of(network, mode, sf.compile, sharded))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    one, one_peak, kept, peak = (int(n) for n in (*alone, *most))
    return Keeping(model.name, mode, ranks, one, kept, one_peak, peak, max(slabs.bytes))


def _bytes_of(
    network: nn.Module, mode: str, compiler: Callable[..., Any], x: Tensor
) -> AllocatedBytes:
    forward = forward_in(mode, network, compiler)
    loss = forward(x).sum()  # compiles, plans, fills caches
    if mode != "compiled":  # the backward is compiled when first run, and nothing here runs it
        loss.backward()
    del loss
    network.zero_grad()
    return kept_bytes(partial(forward, x))


def forward_in(
    mode: str, network: nn.Module, compiler: Callable[..., Any]
) -> Callable[[Tensor], Tensor]:
    """The network's forward in one of `MODES`; `compiler` is torch's or shardfield's."""
    if mode == "eager":
        return network
    if mode == "compiled":
        torch._dynamo.reset()
        return compiler(network, fullgraph=True)
    if mode == "checkpointed":
        return Checkpointed(cast(nn.Sequential, network))

    def offloaded(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return network(x)

    return offloaded
