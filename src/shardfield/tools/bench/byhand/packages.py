"""Networks of other packages by hand: their modules, of which some get a local forward."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardfield.tools.bench.byhand.group_norm import GroupNorm
from shardfield.tools.bench.byhand.halo import WithHalo


def localised(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The network on local blocks: 3-wide convolutions, group norms and resizing see neighbours.

    For networks of nothing else that mixes rows, with equal shards that stay even at every level.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and module.kernel_size[0] == 3:
            local = partial(conv, module)
        elif isinstance(module, nn.GroupNorm):
            local = partial(group_norm, module)
        elif isinstance(module, nn.Upsample):
            local = partial(twice, module)
        else:
            continue
        cast(Any, module).forward = local
    return network


def conv(layer: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """A 3-wide convolution with padding 1; the shard starts at a multiple of the stride."""
    op = F.conv2d if isinstance(layer, nn.Conv2d) else F.conv3d
    # The last window of an aligned shard ends at its last row when the stride is 2.
    after = 1 if layer.stride[0] == 1 else 0
    padding = (0, *cast("tuple[int, ...]", layer.padding)[1:])
    return op(WithHalo.apply(x, 1, after), layer.weight, layer.bias, layer.stride, padding)


def group_norm(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    """Statistics over all ranks."""
    return GroupNorm.apply(x, layer.num_groups, layer.weight, layer.bias, layer.eps)


def twice(layer: nn.Upsample, x: Tensor) -> Tensor:
    """Linear resizing by two: one row of each neighbour, the own row again beyond the border."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = WithHalo.apply(x, 1, 1)
    rows = x.split([1, x.shape[2] - 2, 1], dim=2)
    first = rows[1][:, :, :1] if rank == 0 else rows[0]
    last = rows[1][:, :, -1:] if rank == ranks - 1 else rows[2]
    x = torch.cat([first, rows[1], last], dim=2)
    return nn.Upsample.forward(layer, x).narrow(2, 2, 2 * rows[1].shape[2])
