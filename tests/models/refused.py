"""Models that do not run yet, and the operation that each asks for first."""

from __future__ import annotations

from models.entry import Model, made, of

diffusers, monai = of("diffusers"), of("monai")

_ATTENTION = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}

REFUSED: dict[str, tuple[Model, str]] = {
    model.key: (model, operation)
    for operation, model in [
        (
            "scaled_dot_product_attention",
            diffusers(
                name="UNet2DModel",
                build=made(
                    "diffusers.UNet2DModel",
                    in_channels=2,
                    out_channels=2,
                    block_out_channels=(4, 8),
                    norm_num_groups=2,
                    **_ATTENTION,
                ),
                shape=(2, 2, 18, 8),
                call=lambda model, x: model(x, 7).sample,
                notes="with attention",
            ),
        ),
        (
            "cdist",
            diffusers(
                name="VQModel",
                build=made(
                    "diffusers.VQModel",
                    norm_num_groups=2,
                    num_vq_embeddings=8,
                    block_out_channels=(4,),
                    mid_block_add_attention=False,
                ),
                shape=(2, 3, 18, 8),
            ),
        ),
        (
            "grid_sample",
            monai(
                name="VoxelMorph",
                build=made("monai.networks.nets.VoxelMorph"),
                shape=(1, 1, 16, 16, 16),
                call=lambda model, x: model(x, x),
            ),
        ),
    ]
}
