"""Networks written out in plain torch: kinds that the packages above do not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models.entry import of
from torch import Tensor, nn


class DeepLab(nn.Module):
    """DeepLabV3: strided stem, dilated stage, atrous spatial pyramid, resized to the input."""

    def __init__(self, channels: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(channels, channels, 3, padding=2, dilation=2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3 if rate else 1, 1, rate, rate or 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
            )
            for rate in (0, 3, 6, 9)
        )
        self.pooled = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Sequential(
            nn.Conv2d(5 * channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Conv2d(channels, classes, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        size, x = x.shape[-2:], self.stem(x)
        everywhere = F.interpolate(self.pooled(x), x.shape[-2:], mode="bilinear")
        x = self.head(torch.cat([*(branch(x) for branch in self.branches), everywhere], dim=1))
        return F.interpolate(x, size, mode="bilinear", align_corners=False)


class MaskedConv2d(nn.Conv2d):
    """PixelCNN's convolution: sees pixels above and to the left, of kind B itself too."""

    mask: Tensor

    def __init__(self, kind: str, *args, **options) -> None:
        super().__init__(*args, **options)
        mask = torch.ones_like(self.weight)
        height, width = self.kernel_size
        mask[:, :, height // 2, width // 2 + (kind == "B") :] = 0
        mask[:, :, height // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class PixelCNN(nn.Module):
    """Gated residual blocks of masked convolutions."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.first = MaskedConv2d("A", 1, channels, 7, padding=3)
        self.blocks = nn.ModuleList(
            MaskedConv2d("B", channels, 2 * channels, 3, padding=1) for _ in range(3)
        )
        self.last = nn.Conv2d(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            value, gate = block(F.elu(x)).chunk(2, dim=1)
            x = x + torch.tanh(value) * torch.sigmoid(gate)
        return self.last(F.relu(x))


class Generator(nn.Module):
    """DCGAN's generator from a map of noise, spectrally normalised."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(3, 2 * channels, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * channels, channels, 3, 2, 1, output_padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.2, True),
            nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(channels, 1, 5, 3, 2)),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NAFBlock(nn.Module):
    """Of NAFNet: channel norm, depthwise convolution, simple gate, channel attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.widen = nn.Conv2d(channels, 2 * channels, 1)
        self.depthwise = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.attention = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1))
        self.project = nn.Conv2d(channels, channels, 1)
        self.mlp = nn.ModuleList(
            [nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(channels, channels, 1)]
        )
        self.beta = nn.Parameter(torch.full((1, channels, 1, 1), 0.1))
        self.gamma = nn.Parameter(torch.full((1, channels, 1, 1), 0.1))

    def _norm(self, index: int, x: Tensor) -> Tensor:
        return self.norms[index](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.depthwise(self.widen(self._norm(0, x))).chunk(2, dim=1)
        gated = left * right
        x = x + self.project(gated * self.attention(gated)) * self.beta
        left, right = self.mlp[0](self._norm(1, x)).chunk(2, dim=1)
        return x + self.mlp[1](left * right) * self.gamma


class NAFNet(nn.Module):
    """A U of NAF blocks: strided convolutions down, pixel shuffle up."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.intro = nn.Conv2d(3, channels, 3, padding=1)
        self.outer = NAFBlock(channels)
        self.down = nn.Conv2d(channels, 2 * channels, 2, 2)
        self.inner = NAFBlock(2 * channels)
        self.up = nn.Sequential(
            nn.Conv2d(2 * channels, 4 * channels, 1, bias=False), nn.PixelShuffle(2)
        )
        self.ending = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, -width % 2, 0, -height % 2))
        skip = self.outer(self.intro(padded))
        inner = self.up(self.inner(self.down(skip)))
        return (self.ending(skip + inner) + padded)[:, :, :height, :width]


class ShuffleUnit(nn.Module):
    """Of ShuffleNetV2: half of the channels pass, the others are convolved, then all shuffled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(half),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, worked = x.chunk(2, dim=1)
        x = torch.cat((kept, self.branch(worked)), dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return x.view(batch, -1, height, width)


class WaveNet(nn.Module):
    """Causal dilated convolutions, gated, with skips: 1-D."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.dilations = (1, 2, 4, 8)
        self.start = nn.Conv1d(1, channels, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 2, dilation=dilation) for dilation in self.dilations
        )
        self.skips = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in self.dilations)
        self.end = nn.Conv1d(channels, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.start(x), 0
        for dilation, gate, skip in zip(self.dilations, self.gates, self.skips, strict=True):
            y = F.glu(gate(F.pad(x, (dilation, 0))), dim=1)
            total = total + skip(y)
            x = x + y
        return self.end(F.relu(total))


class Pyramid(nn.Module):
    """A feature pyramid over a residual trunk with stochastic depth; three outputs."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(1 if n == 0 else channels, channels, 3, 2, 1),
                nn.GroupNorm(2, channels),
                nn.SiLU(),
            )
            for n in range(3)
        )
        self.lateral = nn.ModuleList(nn.Conv3d(channels, channels, 1) for _ in range(3))
        self.heads = nn.ModuleList(nn.Conv3d(channels, 2, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = []
        for stage in self.trunk:
            x = stage(x)
            levels.append(x)
        found, above = [], None
        for level, lateral, head in zip(levels[::-1], self.lateral, self.heads, strict=True):
            y = lateral(level)
            if above is not None:
                y = y + F.interpolate(above, y.shape[2:], mode="nearest")
            above = y
            found.append(head(y))
        return found


class ConvGRU(nn.Module):
    """A convolutional recurrent cell, unrolled over the frames of dim 1."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.gates = nn.Conv2d(1 + channels, 2 * channels, 3, padding=1)
        self.candidate = nn.Conv2d(1 + channels, channels, 3, padding=1)
        self.read = nn.Conv2d(channels, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        state = frames.new_zeros(frames.shape[0], self.channels, *frames.shape[2:])
        for frame in frames.unbind(1):
            frame = frame.unsqueeze(1)
            reset, update = torch.sigmoid(self.gates(torch.cat([frame, state], 1))).chunk(2, 1)
            fresh = torch.tanh(self.candidate(torch.cat([frame, reset * state], 1)))
            state = (1 - update) * state + update * fresh
        return self.read(state)


plain = of("torch")

MODELS = [
    plain(
        name="DeepLabV3",
        build=DeepLab,
        shape=(2, 3, 43, 32),
        loss="cross entropy",
        notes="dilations wider than a shard",
    ),
    plain(name="PixelCNN", build=PixelCNN, shape=(2, 1, 15, 9), loss="cross entropy"),
    plain(name="Generator", build=Generator, shape=(2, 3, 9, 5)),
    plain(name="NAFNet", build=NAFNet, shape=(2, 3, 17, 10)),
    plain(
        name="ShuffleNet",
        build=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            ShuffleUnit(8),
            ShuffleUnit(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        shape=(2, 3, 21, 10),
        loss="cross entropy",
    ),
    plain(name="WaveNet", build=WaveNet, shape=(2, 1, 50), loss="cross entropy"),
    plain(name="Feature pyramid", build=Pyramid, shape=(1, 1, 21, 12, 10)),
    plain(name="ConvGRU", build=ConvGRU, shape=(2, 3, 15, 8)),
]
