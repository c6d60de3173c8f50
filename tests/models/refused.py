"""Models that do not run yet, and the operation that each asks for first."""

from __future__ import annotations

from models.entry import Model, made, of

monai = of("monai")

REFUSED: dict[str, tuple[Model, str]] = {
    model.key: (model, operation)
    for operation, model in [
        (
            "__getitem__",
            monai(
                name="MaskedAutoEncoderViT",
                build=made(
                    "monai.networks.nets.MaskedAutoEncoderViT",
                    *(1, (20, 8), (4, 4), 12, 16, 1, 3),
                    decoder_hidden_size=12,
                    decoder_mlp_dim=16,
                    decoder_num_layers=1,
                    decoder_num_heads=3,
                    spatial_dims=2,
                ),
                shape=(2, 1, 20, 8),
                call=lambda model, x: model(x)[0],
                notes="picks tokens at random",
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
