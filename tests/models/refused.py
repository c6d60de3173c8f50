"""Models that do not run yet, and the operation that each asks for first."""

from __future__ import annotations

from models.attention_nets import LLAMA, NEXT, TEXT, WORDED, WORDS, WORDS_HIDDEN, net
from models.entry import Model, made, of
from models.transformers_nets import untrained

monai, transformers = of("monai"), of("transformers")

BLOOM = {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 1, "n_head": 4}

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
    ("topk", net("MixtralForCausalLM", WORDED, NEXT, {**LLAMA, "num_local_experts": 4})),
    ("fft_fftn", net("FNetModel", WORDED, WORDS_HIDDEN, TEXT)),
    ("stride", net("LongformerModel", WORDED, WORDS_HIDDEN, {**TEXT, "attention_window": 4})),
    ("GeLUFunction", net("BloomForCausalLM", WORDED, NEXT, BLOOM)),
]

REFUSED: dict[str, tuple[Model, str]] = {
    model.key: (model, operation) for operation, model in _REFUSED
}
