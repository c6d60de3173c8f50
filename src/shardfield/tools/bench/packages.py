"""Networks of other packages that are measured: SegResNet of MONAI, UNet2DModel of diffusers."""

from importlib import import_module
from typing import Any

from torch import Tensor, nn


def segresnet() -> nn.Module:
    """MONAI's SegResNet in 3-D: 8 filters, four levels, one channel to two classes."""
    return _imported("monai.networks.nets", "SegResNet")(3, 8, 1, 2)


def diffusion_unet() -> nn.Module:
    """The UNet2DModel of diffusers without attention: three levels, at one time step."""
    network = _imported("diffusers", "UNet2DModel")(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        norm_num_groups=8,
        add_attention=False,
    )
    return AtTime(network, 7)


class AtTime(nn.Module):
    """A diffusion network as a function of the sample alone."""

    def __init__(self, network: nn.Module, time: int) -> None:
        super().__init__()
        self.network = network
        self.time = time

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same."""
        return self.network(x, self.time, return_dict=False)[0]


def _imported(package: str, name: str) -> Any:
    try:
        return getattr(import_module(package), name)
    except ImportError as error:
        root = package.partition(".")[0]
        raise ImportError(
            f"The benchmark measures {name} of {root}: pip install {root}, or choose with --only."
        ) from error
