"""The packages that models come from are imported once, in the process that ranks fork from."""

from shardfield import testing

testing.preload(
    "models.training",
    "monai.networks.nets",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d",
    "transformers.modeling_utils",
)
