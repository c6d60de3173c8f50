"""Forward passes on local blocks, with the parameters of the plain networks."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfield.tools.bench.byhand.attention import over_heads, ring
from shardfield.tools.bench.byhand.packages import conv, group_norm, localised
from shardfield.tools.bench.networks import Attention, ConvBlock, UNet, VisionBlocks


def local_forward(network: nn.Module, rival: str) -> Callable[[Tensor], Tensor]:
    """The hand-written forward of a network of `bench.networks`, local input to local output."""
    if isinstance(network, Attention | VisionBlocks):
        attend = ring if rival == "ring by hand" else over_heads
        return lambda x: network(x, attend)
    if isinstance(network, UNet):
        return lambda x: unet(network, x)
    if isinstance(network, nn.Sequential):
        return lambda x: conv_stack(network, x)
    return localised(network)


def conv_stack(network: nn.Sequential, x: Tensor) -> Tensor:
    """(B, C, H, ...) local to the same."""
    for convolution, _ in cast("list[nn.Sequential]", network):
        x = F.relu(conv(cast(nn.Conv2d, convolution), x))
    return x


def with_halos(network: nn.Module) -> nn.Module:
    """A convolution stack whose layers, called as modules, take and give local blocks."""
    for layer in network.children():
        convolution = cast(nn.Conv2d, next(layer.children()))
        layer.forward = lambda x, convolution=convolution: F.relu(conv(convolution, x))
    return network


def unet(network: UNet, x: Tensor) -> Tensor:
    """(B, C, H, W) local to (B, 1, H, W) local; H even on every rank."""
    skip = conv_block(network.encode, x)
    deep = network.up(conv_block(network.middle, conv(network.down, skip)))
    return network.head(conv_block(network.decode, torch.cat([skip, deep], dim=1)))


def conv_block(block: ConvBlock, x: Tensor) -> Tensor:
    """(B, C, H, W) local to (B, C', H, W) local."""
    for convolution, norm in ((block[0], block[1]), (block[3], block[4])):
        x = conv(cast(nn.Conv2d, convolution), x)
        x = F.relu(group_norm(cast(nn.GroupNorm, norm), x))
    return x
