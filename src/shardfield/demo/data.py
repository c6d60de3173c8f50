"""The volume that the demo trains on, and the cut that splits it over ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHAPE = (1, 1, 208, 240, 192)
NETWORK_STRIDE = 4  # input voxels per voxel of the U-Net's coarsest level: strides (2, 2)


@dataclass(frozen=True)
class Volume:
    """One MRI volume and what the network should make of it.

    Attributes:
        image: (1, 1, D, H, W) float32, T1 intensity; mean 0, deviation 1 in the head, 0 outside.
        target: (1, 1, D, H, W) float32, density of grey matter in [0, 1].
    """

    image: Tensor
    target: Tensor

    def to(self, device: str, dtype: torch.dtype = torch.float32) -> "Volume":
        """The same volume on a device, in a dtype."""
        return Volume(self.image.to(device, dtype), self.target.to(device, dtype))


def load_volume() -> Volume:
    """Loads the MNI152 template at its native 1 mm, padded so that the U-Net's levels divide it.

    Both maps ship inside the nilearn package (197 x 233 x 189 voxels); nothing is downloaded.

    Returns:
        The volume, plain tensors of shape `SHAPE` on the CPU.

    Source:
        Fonov et al., "Unbiased average age-appropriate atlases for pediatric studies",
        NeuroImage 54(1), 2011: the ICBM 2009a nonlinear symmetric template.
    """
    from monai.transforms.croppad.array import DivisiblePad
    from monai.transforms.intensity.array import NormalizeIntensity
    from nilearn.datasets import load_mni152_gm_template, load_mni152_template

    def voxels(template) -> Tensor:
        return torch.from_numpy(template.get_fdata(dtype=np.float32))[None]

    pad, normalize = DivisiblePad(k=16), NormalizeIntensity(nonzero=True)
    image = normalize(pad(voxels(load_mni152_template(resolution=1))))
    target = pad(voxels(load_mni152_gm_template(resolution=1)))
    return Volume(*(torch.as_tensor(np.asarray(x))[None] for x in (image, target)))


def awkward_sizes(extent: int, ranks: int, stride: int = NETWORK_STRIDE) -> list[int]:
    """Cuts `extent` rows into shards whose sizes are not multiples of `stride` where possible.

    An even cut of 208 rows over 2 ranks would suit every layer of the network. The demo does not
    ask for that: it takes 105 + 103, so that shards begin in the middle of a stride.

    Args:
        extent: rows of the dimension to be split.
        ranks: number of shards.
        stride: what no shard size should be a multiple of.

    Returns:
        One size a rank; they sum to `extent`.
    """
    rows, longer = divmod(extent, ranks)
    sizes = [rows + (rank < longer) for rank in range(ranks)]
    aligned = [rank for rank, size in enumerate(sizes) if size and size % stride == 0]
    for giver, taker in zip(aligned[1::2], aligned[::2], strict=False):
        sizes[giver] -= 1
        sizes[taker] += 1
    return sizes
