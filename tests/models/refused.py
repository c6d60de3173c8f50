"""Models that do not run yet, and the operation that each asks for first."""

from __future__ import annotations

from models.entry import Model, made, of
from models.transformers_nets import untrained

monai, transformers = of("monai"), of("transformers")

_REFUSED = [
    (
        "grid_sample",
        monai(
            name="VoxelMorph",
            build=made("monai.networks.nets.VoxelMorph"),
            shape=(1, 1, 16, 16, 16),
            call=lambda model, x: model(x, x),
        ),
    ),
    (
        "nonzero",
        transformers(
            name="SuperPointForKeypointDetection",
            build=untrained("SuperPointForKeypointDetection"),
            shape=(1, 3, 64, 64),
        ),
    ),
]

REFUSED: dict[str, tuple[Model, str]] = {
    model.key: (model, operation) for operation, model in _REFUSED
}
