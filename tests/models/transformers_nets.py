"""Networks of transformers, untrained and small."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from models.entry import of
from torch import nn

transformers = of("transformers")


def untrained(name: str, **config: Any) -> Callable[[], Any]:
    """A model of this class and configuration, made when it is called."""

    def build():
        kind = getattr(import_module("transformers"), name)
        return kind(kind.config_class(**config))

    return build


def _logits(model, x):
    return model(x).logits


def _features(model, x):
    output = model(x)
    return [output.last_hidden_state, output.pooler_output]


def classifier(
    kind: str, shape: tuple[int, ...], call=_logits, notes: str = "", long: bool = False, **config
):
    """An entry of a model that classifies images into three classes."""
    name = f"{kind}ForImageClassification"
    return transformers(
        name=name,
        build=untrained(name, num_labels=3, **config),
        shape=shape,
        loss="cross entropy",
        call=call,
        notes=notes,
        long=long,
    )


def dac(**config: Any) -> nn.Module:
    """Encoder and decoder of the audio codec; its quantizer is a look-up."""
    model = untrained("DacModel", **config)()
    return nn.Sequential(model.encoder, model.decoder)


def upernet() -> nn.Module:
    """A segmentation head on ConvNeXt."""
    from transformers import ConvNextConfig

    backbone = ConvNextConfig(**CONVNEXT, out_features=["stage1", "stage2", "stage3"])
    return untrained(
        "UperNetForSemanticSegmentation",
        backbone_config=backbone,
        hidden_size=8,
        num_labels=3,
        auxiliary_in_channels=8,
        auxiliary_channels=4,
    )()


CONVNEXT: dict[str, Any] = {
    "hidden_sizes": [4, 6, 8],
    "depths": [1, 2, 1],
    "num_stages": 3,
    "drop_path_rate": 0.2,
}
IMAGE = (2, 3, 45, 32)

MODELS = [
    transformers(
        name="ConvNextModel",
        build=untrained("ConvNextModel", **CONVNEXT),
        shape=(2, 3, 52, 32),
        call=_features,
        notes="drop path",
    ),
    classifier("ConvNext", IMAGE, notes="drop path", **CONVNEXT),
    classifier("ConvNextV2", IMAGE, notes="drop path", **CONVNEXT),
    transformers(
        name="DINOv3ConvNextModel",
        build=untrained("DINOv3ConvNextModel", hidden_sizes=[4, 6, 8, 8], depths=[1] * 4),
        shape=(2, 3, 52, 32),
        call=_features,
    ),
    classifier("ResNet", (2, 3, 37, 24), embedding_size=4, hidden_sizes=[8, 12], depths=[1, 1]),
    classifier(
        "RegNet",
        (2, 3, 37, 24),
        embedding_size=4,
        hidden_sizes=[8, 12],
        depths=[1, 1],
        groups_width=4,
    ),
    classifier(
        "Bit",
        IMAGE,
        notes="standardised weights",
        embedding_size=4,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_groups=2,
    ),
    classifier(
        "MobileNetV1", IMAGE, notes="padding of TensorFlow", depth_multiplier=0.02, min_depth=4
    ),
    classifier(
        "MobileNetV2",
        IMAGE,
        notes="dilated to stride 8",
        depth_multiplier=0.1,
        depth_divisible_by=2,
        min_depth=2,
        output_stride=8,
    ),
    classifier(
        "EfficientNet",
        IMAGE,
        notes="drop connect",
        width_coefficient=0.1,
        depth_coefficient=0.1,
        depth_divisor=2,
        hidden_dim=128,
        dropout_rate=0.0,
        initializer_range=0.3,
    ),
    classifier(
        "PoolFormer",
        IMAGE,
        notes="drop path",
        hidden_sizes=[4, 6],
        depths=[1, 1],
        num_encoder_blocks=2,
        drop_path_rate=0.2,
    ),
    classifier(
        "HGNetV2",
        IMAGE,
        stem_channels=[3, 4, 6],
        stage_in_channels=[6, 8],
        stage_mid_channels=[4, 4],
        stage_out_channels=[8, 12],
        stage_num_blocks=[1, 1],
        stage_downsample=[False, True],
        stage_downsample_strides=[2, 2],
        stage_light_block=[False, True],
        stage_kernel_size=[3, 5],
        stage_numb_of_layers=[2, 2],
        hidden_sizes=[8, 12],
        depths=[1, 1],
    ),
    classifier(
        "PPLCNet",
        IMAGE,
        call=lambda model, x: model(x).last_hidden_state,
        notes="dropout",
        scale=0.25,
        divisor=4,
        class_expand=16,
    ),
    transformers(
        name="TextNetModel",
        build=untrained(
            "TextNetModel",
            stem_out_channels=4,
            hidden_sizes=[4, 6, 8, 8, 8],
            conv_layer_kernel_sizes=[[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]],
            conv_layer_strides=[[2], [2], [1], [1]],
        ),
        shape=IMAGE,
        call=_features,
    ),
    transformers(
        name="FocalNetModel",
        build=untrained(
            "FocalNetModel",
            embed_dim=4,
            hidden_sizes=[4, 8],
            depths=[1, 1],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
            image_size=32,
        ),
        shape=(2, 3, 44, 32),
        call=_features,
        notes="focal modulation",
    ),
    transformers(
        name="UperNetForSemanticSegmentation",
        build=upernet,
        shape=(2, 3, 52, 32),
        loss="cross entropy",
        call=_logits,
        unused=True,
        notes="on ConvNeXt",
    ),
    transformers(
        name="DacModel",
        build=lambda: dac(
            encoder_hidden_size=4,
            downsampling_ratios=[2, 4],
            upsampling_ratios=[4, 2],
            decoder_hidden_size=8,
            hidden_size=16,
            n_codebooks=1,
            codebook_size=8,
            codebook_dim=2,
        ),
        shape=(2, 1, 120),
        notes="audio; encoder and decoder",
    ),
    transformers(
        name="SpeechT5HifiGan",
        build=untrained(
            "SpeechT5HifiGan",
            model_in_dim=6,
            upsample_initial_channel=8,
            upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
            normalize_before=False,
        ),
        shape=(2, 25, 6),
        split=1,
        notes="vocoder, frames split",
    ),
    transformers(
        name="UnivNetModel",
        build=untrained(
            "UnivNetModel",
            model_in_channels=4,
            model_hidden_channels=4,
            num_mel_bins=6,
            resblock_kernel_sizes=[3],
            resblock_stride_sizes=[4],
            resblock_dilation_sizes=[[1, 3]],
            kernel_predictor_hidden_channels=4,
            kernel_predictor_num_blocks=1,
        ),
        shape=(2, 20, 6),
        split=1,
        call=lambda model, x: model(x, torch.ones(2, 20, 4)).waveforms,
        notes="vocoder with predicted kernels, frames split",
    ),
    classifier(
        "SwiftFormer",
        (2, 3, 77, 64),
        notes="additive attention",
        long=True,
        depths=[1] * 4,
        embed_dims=[4, 4, 8, 8],
    ),
    classifier(
        "MobileViTV2",
        (2, 3, 96, 64),
        notes="separable attention",
        long=True,
        width_multiplier=0.1,
        mlp_ratio=1,
        base_attn_unit_dims=[8] * 3,
        n_attn_blocks=[1] * 3,
    ),
]
