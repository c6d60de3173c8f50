"""Networks of MONAI, small."""

from __future__ import annotations

import torch
from models.entry import made, normal, of

monai = of("monai")
NETS = "monai.networks.nets"

BLOCKS = ["r1_k3_s11_e1_i32_o16_se0.25", "r2_k5_s22_e3_i16_o24_se0.25"]
DIFFUSION = {
    "spatial_dims": 2,
    "in_channels": 1,
    "out_channels": 1,
    "num_res_blocks": (1, 1),
    "channels": (4, 8),
    "attention_levels": (False, True),
    "norm_num_groups": 2,
    "num_head_channels": 4,
}
WITHOUT_ATTENTION = {
    "attention_levels": (False, False),
    "with_encoder_nonlocal_attn": False,
    "with_decoder_nonlocal_attn": False,
    "channels": (4, 8),
    "num_res_blocks": (1, 1),
    "norm_num_groups": 2,
    "latent_channels": 2,
}

MODELS = [
    monai(
        name="UNet",
        build=made(f"{NETS}.UNet", 3, 1, 2, channels=(2, 4, 8), strides=(2, 2), num_res_units=1),
        shape=(2, 1, 20, 8, 8),
        loss="cross entropy",
        notes="instance norm",
    ),
    monai(
        name="UNet",
        build=made(
            f"{NETS}.UNet", 2, 1, 2, (4, 8), (2,), num_res_units=2, norm="batch", dropout=0.2
        ),
        shape=(2, 1, 22, 12),
        loss="cross entropy",
        notes="batch norm, dropout",
    ),
    monai(
        name="BasicUNet",
        build=made(f"{NETS}.BasicUNet", 3, 1, 2, features=(2, 2, 4, 4, 4, 2)),
        shape=(1, 1, 37, 16, 16),
        loss="cross entropy",
        notes="37 rows, so that odd levels are padded",
        whole=False,  # torch.jit.isinstance
    ),
    monai(
        name="BasicUNetPlusPlus",
        build=made(
            f"{NETS}.BasicUNetPlusPlus",
            2,
            in_channels=1,
            features=(4, 4, 4, 8, 8, 4),
            deep_supervision=True,
        ),
        shape=(2, 1, 48, 32),
        notes="U-Net++ with deep supervision",
        whole=False,  # torch.jit.isinstance
    ),
    monai(
        name="AttentionUnet",
        build=made(f"{NETS}.AttentionUnet", 3, 1, 2, channels=(4, 8, 16), strides=(2, 2)),
        shape=(2, 1, 20, 8, 8),
        loss="cross entropy",
    ),
    monai(
        name="SegResNet",
        build=made(f"{NETS}.SegResNet", 3, 8, 1, 2, 0.2, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        shape=(1, 1, 20, 8, 8),
        loss="cross entropy",
        notes="dropout",
    ),
    monai(
        name="SegResNetVAE",
        build=made(
            f"{NETS}.SegResNetVAE", (16, 8, 8), blocks_down=(1, 1, 1), blocks_up=(1, 1), vae_nz=8
        ),
        shape=(1, 1, 16, 8, 8),
        unused=True,
    ),
    monai(
        name="SegResNetDS",
        build=made(
            f"{NETS}.SegResNetDS",
            3,
            4,
            norm="instance",
            blocks_down=(1, 1, 1),
            dsdepth=2,
        ),
        shape=(2, 1, 20, 8, 8),
        notes="deep supervision",
    ),
    monai(
        name="DynUNet",
        build=made(
            f"{NETS}.DynUNet", 3, 1, 2, (3,) * 3, (1, 2, 2), (2,) * 2, (4, 6, 8), res_block=True
        ),
        shape=(2, 1, 20, 8, 8),
        loss="cross entropy",
    ),
    monai(
        name="DynUNet",
        build=made(
            f"{NETS}.DynUNet",
            2,
            1,
            2,
            (3,) * 4,
            (1, 2, 2, 2),
            (2,) * 3,
            (4, 6, 8, 8),
            deep_supervision=True,
            deep_supr_num=2,
        ),
        shape=(2, 1, 40, 16),
        notes="deep supervision",
    ),
    monai(
        name="VNet",
        build=made(f"{NETS}.VNet", 2, dropout_dim=2),
        shape=(2, 1, 48, 16),
        loss="cross entropy",
        long=True,
        notes="2-D, dropout",
    ),
    monai(
        name="VNet",
        build=made(f"{NETS}.VNet"),
        shape=(1, 1, 48, 16, 16),
        loss="cross entropy",
        long=True,
        notes="3-D, dropout",
    ),
    monai(
        name="HighResNet",
        build=made(f"{NETS}.HighResNet", dropout_prob=0.1),
        shape=(1, 1, 13, 6, 6),
        loss="cross entropy",
        notes="dilation up to 4, dropout",
    ),
    monai(
        name="ResNet",
        build=made(
            f"{NETS}.ResNet",
            "bottleneck",
            [1, 1, 1, 1],
            [2, 4, 8, 8],
            n_input_channels=1,
            num_classes=3,
        ),
        shape=(2, 1, 33, 16, 16),
        loss="cross entropy",
    ),
    monai(
        name="DenseNet",
        build=made(
            f"{NETS}.DenseNet",
            3,
            1,
            3,
            init_features=8,
            growth_rate=4,
            block_config=(2, 2),
            dropout_prob=0.1,
        ),
        shape=(2, 1, 26, 16, 16),
        loss="cross entropy",
        notes="dropout",
    ),
    monai(
        name="EfficientNet",
        build=made(f"{NETS}.EfficientNet", BLOCKS, 2, 1, 3, 0.25, image_size=24, depth_divisor=4),
        shape=(2, 1, 29, 24),
        loss="cross entropy",
        notes="dropout and drop connect",
    ),
    monai(
        name="FlexUNet",
        build=made(f"{NETS}.FlexUNet", 1, 2, "efficientnet-b0", decoder_channels=(16, 8, 8, 8, 4)),
        shape=(2, 1, 64, 32),
        loss="cross entropy",
        unused=True,
        notes="on EfficientNet-B0",
        whole=False,  # torch.jit.isinstance
    ),
    monai(
        name="AutoEncoder",
        build=made(f"{NETS}.AutoEncoder", 3, 1, 2, (4, 8), (2, 2), num_res_units=1),
        shape=(2, 1, 20, 8, 8),
        loss="cross entropy",
    ),
    monai(
        name="AutoencoderKL",
        build=made(f"{NETS}.AutoencoderKL", 3, **WITHOUT_ATTENTION),
        shape=(1, 1, 18, 8, 8),
        notes="without attention; the posterior is sampled",
    ),
    monai(
        name="SPADEAutoencoderKL",
        build=made(
            f"{NETS}.SPADEAutoencoderKL", 2, 2, spade_intermediate_channels=4, **WITHOUT_ATTENTION
        ),
        shape=(1, 1, 18, 8),
        call=lambda model, x: model(x, torch.cat([x, -x], 1)),
        notes="without attention; the posterior is sampled",
    ),
    monai(
        name="PatchDiscriminator",
        build=made(f"{NETS}.PatchDiscriminator", 3, 4, 1, num_layers_d=2),
        shape=(2, 1, 29, 16, 16),
    ),
    monai(
        name="MultiScalePatchDiscriminator",
        build=made(f"{NETS}.MultiScalePatchDiscriminator", 2, 2, 2, 4, 1, minimum_size_im=32),
        shape=(2, 1, 45, 32),
    ),
    monai(
        name="MedNeXt",
        build=made(
            f"{NETS}.MedNeXt",
            2,
            4,
            encoder_expansion_ratio=2,
            decoder_expansion_ratio=2,
            blocks_down=(1, 1),
            blocks_bottleneck=1,
            blocks_up=(1, 1),
            deep_supervision=True,
        ),
        shape=(2, 1, 36, 16),
        notes="deep supervision",
    ),
    monai(
        name="RegUNet",
        build=made(f"{NETS}.RegUNet", 3, 1, 4, 2, concat_skip=True),
        shape=(2, 1, 20, 8, 8),
    ),
    monai(
        name="LocalNet",
        build=made(f"{NETS}.LocalNet", 3, 1, 4, (0, 2), use_additive_sampling=False),
        shape=(2, 1, 20, 8, 8),
    ),
    monai(
        name="VoxelMorphUNet",
        build=made(f"{NETS}.VoxelMorphUNet", 3, 2, 3, (4, 8, 8, 4), (4,)),
        shape=(1, 2, 20, 8, 8),
    ),
    monai(
        name="Restormer",
        build=made(
            f"{NETS}.restormer.Restormer", 2, 1, 1, 4, (1, 1), (1, 1), num_refinement_blocks=1
        ),
        shape=(1, 1, 20, 16),
        notes="attention over channels",
    ),
    monai(
        name="SENet",
        build=made(
            f"{NETS}.SENet",
            2,
            1,
            "se_resnet_bottleneck",
            [1, 1, 1, 1],
            1,
            16,
            None,
            num_classes=3,
        ),
        shape=(2, 1, 77, 48),
        loss="cross entropy",
        long=True,
    ),
    monai(
        name="ViT",
        build=made(
            f"{NETS}.ViT",
            *(1, (18, 8), (3, 4), 12, 16, 2, 3),
            classification=True,
            num_classes=3,
            dropout_rate=0.1,
            spatial_dims=2,
            qkv_bias=True,
        ),
        shape=(2, 1, 18, 8),
        call=lambda model, x: model(x)[0],
        unused=True,
        notes="class token, dropout; patches of 3 rows",
    ),
    monai(
        name="ViT",
        build=made(
            f"{NETS}.ViT",
            *(1, (20, 8, 8), (4, 4, 4), 12, 16, 2, 3, "perceptron", "sincos"),
            dropout_rate=0.1,
        ),
        shape=(2, 1, 20, 8, 8),
        call=lambda model, x: model(x)[0],
        unused=True,
        notes="patches by a view, dropout",
    ),
    monai(
        name="UNETR",
        build=made(f"{NETS}.UNETR", 1, 2, (48, 16, 16), 4, 12, 16, 3, dropout_rate=0.1),
        shape=(2, 1, 48, 16, 16),
        loss="cross entropy",
        unused=True,
        notes="patches of 16 rows, dropout",
    ),
    monai(
        name="SwinUNETR",
        build=made(
            f"{NETS}.SwinUNETR",
            *(1, 2, 2, (2, 1, 1, 1), (1, 2, 2, 2), 3),
            feature_size=12,
            drop_rate=0.1,
            attn_drop_rate=0.1,
            dropout_path_rate=0.1,
            spatial_dims=2,
        ),
        shape=(2, 1, 64, 32),
        loss="cross entropy",
        notes="shifted windows of 3, padded; dropout, drop path",
        whole=False,  # branches on an array of NumPy
    ),
    monai(
        name="SwinUNETR",
        build=made(
            f"{NETS}.SwinUNETR",
            *(1, 2, 2, (2, 1, 1, 1), (1, 2, 2, 2), (5, 3, 2)),
            feature_size=12,
            use_v2=True,
            downsample="mergingv2",
        ),
        shape=(1, 1, 64, 32, 32),
        loss="cross entropy",
        long=True,
        notes="3-D, shifted windows of 5 x 3 x 2, version 2",
        whole=False,  # branches on an array of NumPy
    ),
    monai(
        name="ViTAutoEnc",
        build=made(
            f"{NETS}.ViTAutoEnc",
            *(1, (32, 16, 16), (4, 4, 4)),
            hidden_size=12,
            mlp_dim=16,
            num_layers=2,
            num_heads=3,
            deconv_chns=4,
            dropout_rate=0.1,
        ),
        shape=(2, 1, 32, 16, 16),
        call=lambda model, x: model(x)[0],
        unused=True,
        long=True,
        notes="dropout",
    ),
    monai(
        name="AutoencoderKL",
        build=made(
            f"{NETS}.AutoencoderKL",
            *(3, 1, 1, (1, 1), (4, 8), (False, True), 2, 2),
            use_flash_attention=True,
        ),
        shape=(1, 1, 20, 8, 8),
        long=True,
        notes="fused attention; the posterior is sampled",
    ),
    monai(
        name="DiffusionModelUNet",
        build=made(f"{NETS}.DiffusionModelUNet", **DIFFUSION),
        shape=(2, 1, 18, 8),
        call=lambda model, x: model(x, torch.tensor([3, 7])),
        long=True,
        notes="attention",
    ),
    monai(
        name="DiffusionModelUNet",
        build=made(
            f"{NETS}.DiffusionModelUNet",
            **DIFFUSION,
            with_conditioning=True,
            cross_attention_dim=6,
            dropout_cattn=0.1,
            use_flash_attention=True,
        ),
        shape=(2, 1, 18, 8),
        call=lambda model, x: model(x, torch.tensor([3, 7]), normal(2, 3, 6)),
        notes="fused attention to itself and to a text, dropout",
    ),
    monai(
        name="SPADEDiffusionModelUNet",
        build=made(f"{NETS}.SPADEDiffusionModelUNet", label_nc=1, **DIFFUSION),
        shape=(2, 1, 18, 8),
        call=lambda model, x: model(x, torch.tensor([3, 7]), x),
        long=True,
        notes="attention",
    ),
    monai(
        name="ControlNet",
        build=made(
            f"{NETS}.ControlNet",
            **{name: value for name, value in DIFFUSION.items() if name != "out_channels"},
            conditioning_embedding_num_channels=(4,),
        ),
        shape=(2, 1, 18, 8),
        call=lambda model, x: model(x, torch.tensor([3, 7]), x),
        long=True,
        notes="attention",
    ),
]
