"""Networks of diffusers, untrained and small."""

from __future__ import annotations

import torch
from models.entry import made, of

diffusers = of("diffusers")


def _sample(model, x):
    return model(x).sample


def _sample_and_loss(model, x):
    output = model(x)
    return [output.sample, output.commit_loss]


MODELS = [
    diffusers(
        name="AutoencoderKL",
        build=made(
            "diffusers.AutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(4, 8),
            norm_num_groups=2,
            mid_block_add_attention=False,
        ),
        shape=(2, 3, 18, 8),
        call=lambda model, x: model(x, sample_posterior=True).sample,
        notes="without attention; the posterior is sampled",
    ),
    diffusers(
        name="UNet2DModel",
        build=made(
            "diffusers.UNet2DModel",
            in_channels=2,
            out_channels=2,
            down_block_types=("DownBlock2D",) * 2,
            up_block_types=("UpBlock2D",) * 2,
            block_out_channels=(4, 8),
            norm_num_groups=2,
            add_attention=False,
        ),
        shape=(2, 2, 18, 8),
        call=lambda model, x: model(x, 7).sample,
        notes="without attention",
    ),
    diffusers(
        name="UNet2DModel",
        build=made(
            "diffusers.UNet2DModel",
            in_channels=2,
            out_channels=2,
            layers_per_block=1,
            down_block_types=("ResnetDownsampleBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "ResnetUpsampleBlock2D"),
            block_out_channels=(4, 8),
            norm_num_groups=2,
            add_attention=False,
            resnet_time_scale_shift="scale_shift",
            dropout=0.1,
        ),
        shape=(2, 2, 18, 8),
        call=lambda model, x: model(x, 7).sample,
        notes="residual resampling, scale and shift, dropout",
    ),
    diffusers(
        name="AutoencoderTiny",
        build=made(
            "diffusers.AutoencoderTiny",
            encoder_block_out_channels=(4, 4),
            decoder_block_out_channels=(4, 4),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        shape=(2, 3, 18, 8),
        call=_sample,
        unused=True,
        notes="its 8-bit latent passes no gradient",
    ),
    diffusers(
        name="AutoencoderOobleck",
        build=made(
            "diffusers.AutoencoderOobleck",
            encoder_hidden_size=4,
            decoder_channels=4,
            decoder_input_channels=2,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
        ),
        shape=(2, 2, 120),
        call=_sample,
        notes="audio, weight norm",
    ),
    diffusers(
        name="AutoencoderKLCogVideoX",
        build=made(
            "diffusers.AutoencoderKLCogVideoX",
            down_block_types=("CogVideoXDownBlock3D",) * 2,
            up_block_types=("CogVideoXUpBlock3D",) * 2,
            block_out_channels=(4, 8),
            latent_channels=2,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=2,
        ),
        shape=(1, 3, 5, 10, 8),
        split=3,
        call=_sample,
        notes="video, rows split",
    ),
    diffusers(
        name="AutoencoderKLCogVideoX",
        build=made(
            "diffusers.AutoencoderKLCogVideoX",
            down_block_types=("CogVideoXDownBlock3D",) * 2,
            up_block_types=("CogVideoXUpBlock3D",) * 2,
            block_out_channels=(4, 8),
            latent_channels=2,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=2,
        ),
        shape=(1, 3, 5, 8, 8),
        call=_sample,
        notes="video, frames split",
    ),
    diffusers(
        name="AutoencoderKLMagvit",
        build=made(
            "diffusers.AutoencoderKLMagvit",
            block_out_channels=(4, 8),
            down_block_types=["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
            up_block_types=["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"],
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=2,
        ),
        shape=(1, 3, 5, 10, 8),
        split=3,
        call=_sample,
        notes="video, rows split",
    ),
    diffusers(
        name="AutoencoderKLWan",
        build=made(
            "diffusers.AutoencoderKLWan",
            base_dim=4,
            z_dim=2,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[True],
        ),
        shape=(1, 3, 5, 10, 8),
        split=3,
        call=_sample,
        notes="video, rows split",
    ),
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
        call=_sample_and_loss,
    ),
    diffusers(
        name="UNet2DModel",
        build=made(
            "diffusers.UNet2DModel",
            in_channels=2,
            out_channels=2,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(4, 8),
            norm_num_groups=2,
            attention_head_dim=4,
        ),
        shape=(2, 2, 18, 8),
        call=lambda model, x: model(x, 7).sample,
        notes="with attention",
    ),
    diffusers(
        name="UNet2DConditionModel",
        build=made(
            "diffusers.UNet2DConditionModel",
            in_channels=2,
            out_channels=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            block_out_channels=(4, 8),
            layers_per_block=1,
            norm_num_groups=2,
            cross_attention_dim=6,
            attention_head_dim=2,
        ),
        shape=(2, 2, 18, 8),
        call=lambda model, x: model(x, 7, torch.ones(2, 3, 6)).sample,
        long=True,
        notes="self- and cross-attention",
    ),
    diffusers(
        name="AsymmetricAutoencoderKL",
        build=made(
            "diffusers.AsymmetricAutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 2,
            down_block_out_channels=(4, 8),
            up_block_types=("UpDecoderBlock2D",) * 2,
            up_block_out_channels=(4, 8),
            norm_num_groups=2,
        ),
        shape=(2, 3, 18, 8),
        call=_sample,
        unused=True,
        long=True,
        notes="with attention",
    ),
]
