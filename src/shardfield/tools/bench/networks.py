"""The networks that are timed: plain `nn.Module`s that know nothing of sharding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardfield.tools.bench.packages import diffusion_unet, segresnet


@dataclass(frozen=True)
class Workload:
    """One network and its sample, split over the ranks along one dim.

    Attributes:
        name: What the table calls it.
        build: Makes the network; seeded alike, every call makes the same one.
        input_shape: Global shape of the input, batch and channels first.
        target_shape: Global shape of the output.
        rivals: Names of the hand-written ones.
        split: The dim of the sample that is split; None: the weights are, over tensor ranks.
        params: Where the library keeps the parameters.
        rounding: What the gradients of two correct programs of this type that add in another order
            may differ by, of their norm: far less than one lost halo row, or key, costs.
        dtype: Of weights, samples and gradients.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    rivals: tuple[str, ...] = ("by hand",)
    split: int | None = 2
    params: str = "replicate"
    rounding: float = 2e-5
    dtype: torch.dtype = torch.float32

    @property
    def kinds(self) -> tuple[str, ...]:
        """The contestants."""
        return ("shardfield", *self.rivals, "one process")

    def network(self) -> nn.Module:
        """The network with the same weights at every call and on every rank."""
        torch.manual_seed(0)
        return self.build().to(self.dtype)

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole input and target, global shapes, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        make = lambda shape: torch.randn(shape, generator=generator).to(self.dtype)  # noqa: E731
        return make(self.input_shape), make(self.target_shape)


def conv_stack(layers: int, channels: int, dims: int) -> nn.Sequential:
    """`layers` times a 3-wide convolution and a ReLU, `channels` wide throughout."""
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return nn.Sequential(
        *(nn.Sequential(conv(channels, channels, 3, padding=1), nn.ReLU()) for _ in range(layers))
    )


def conv_norm_stack(layers: int, channels: int) -> nn.Sequential:
    """`layers` times a 3x3 convolution, a group norm and a GELU."""
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.GroupNorm(channels // 4, channels),
                nn.GELU(),
            )
            for _ in range(layers)
        )
    )


class ConvBlock(nn.Sequential):
    """Two convolutions, each with group norm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Two levels: strided convolution down, transposed convolution up, one skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.encode = ConvBlock(channels, channels)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle = ConvBlock(2 * channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.decode = ConvBlock(2 * channels, channels)
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) to (B, 1, H, W)."""
        skip = self.encode(x)
        deep = self.up(self.middle(self.down(skip)))
        return self.head(self.decode(torch.cat([skip, deep], dim=1)))


class Attention(nn.Module):
    """Attention alone: queries, keys and values are parts of the input, weighted by channel."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.ones(3 * heads * width))

    def forward(
        self, x: torch.Tensor, attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    ) -> torch.Tensor:
        """(B, N, 3*H*D) to (B, N, H*D)."""
        return attended(x * self.weight, self.heads, attend)


class VisionBlock(nn.Module):
    """Attention and a two-layer perceptron, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """(B, N, C) to the same."""
        x = x + self.out(attended(self.qkv(self.first(x)), self.heads, attend))
        return x + self.back(F.gelu(self.wide(self.second(x))))


class VisionBlocks(nn.Module):
    """Blocks of a vision transformer, on tokens."""

    def __init__(self, count: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(VisionBlock(width, heads) for _ in range(count))

    def forward(
        self, x: torch.Tensor, attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    ) -> torch.Tensor:
        """(B, N, C) to the same."""
        for block in self.blocks:
            x = block(x, attend)
        return x


class TensorBlock(nn.Module):
    """Attention of separate projections and a two-layer perceptron; any number of local heads."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) to the same."""
        y = self.first(x)
        q, k, v = (
            part(y).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.back(F.gelu(self.wide(self.second(x))))


def attended(qkv: torch.Tensor, heads: int, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """(B, N, 3*H*D) to (B, N, H*D)."""
    q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, 2))
    return attend(q, k, v).transpose(1, 2).flatten(2)


def workloads(scale: int = 1) -> list[Workload]:
    """The timed workloads; `scale` divides every spatial extent (for quick looks and tests)."""
    wide, cube, square = 512 // scale, 64 // scale, 256 // scale
    conv_shape, cube_shape = (1, 32, wide, wide), (1, 16, cube, cube, cube)
    image = (1, 3, 384 // scale, 384 // scale)
    # Two samples: of one, torch convolves small volumes in another, slower way.
    volume = (256 // scale, *(max(8, 32 // scale),) * 2)
    return [
        *_attention(scale, torch.float32, "", 2e-5),
        *_attention(scale, torch.bfloat16, ", bf16", 3e-2),
        Workload("conv stack", lambda: conv_stack(8, 32, 2), conv_shape, conv_shape),
        Workload(
            "conv stack, FSDP2",
            lambda: conv_stack(8, 32, 2),
            conv_shape,
            conv_shape,
            ("FSDP2 by hand",),
            params="shard",
        ),
        Workload("conv3d stack", lambda: conv_stack(4, 16, 3), cube_shape, cube_shape),
        Workload("U-Net", lambda: UNet(32), (1, 32, square, square), (1, 1, square, square)),
        # Plain torch's own float32 gradient is 8e-5 from the one in float64.
        Workload("SegResNet", segresnet, (2, 1, *volume), (2, 2, *volume), rounding=2e-4),
        Workload("UNet2DModel", diffusion_unet, image, image),
        Workload(
            "tensor blocks",
            lambda: nn.Sequential(*(TensorBlock(384, 64) for _ in range(2))),
            (1, 1024 // scale, 384),
            (1, 1024 // scale, 384),
            ("parallelize_module",),
            None,
        ),
    ]


def _attention(scale: int, dtype: torch.dtype, suffix: str, rounding: float) -> list[Workload]:
    """Attention alone over sequences of two lengths, and blocks of a vision transformer."""

    def over(name: str, build: Callable[[], nn.Module], n: int, width: int) -> Workload:
        rivals = ("ring by hand", "all-to-all by hand")
        shapes = (1, n, width), (1, n, 192)
        return Workload(
            name + suffix, build, *shapes, rivals, split=1, rounding=rounding, dtype=dtype
        )

    return [
        *(over(f"attention {n}", lambda: Attention(6, 32), n // scale, 576) for n in (4096, 16384)),
        over("ViT blocks", lambda: VisionBlocks(4, 192, 6), 4096 // scale, 192),
    ]
