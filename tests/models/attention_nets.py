"""Transformers of transformers, untrained and small: images by rows, sequences by tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models.entry import Model, of
from models.transformers_nets import untrained
from torch import Tensor, nn

transformers = of("transformers")

Options = dict[str, Any]
WORDS = 29
SMALL: Options = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VIT: Options = {**SMALL, "image_size": (40, 24), "patch_size": 8}
DINO: Options = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}
SWIN: Options = {
    "image_size": (44, 36),
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
PYRAMID: Options = {
    "num_encoder_blocks": 2,
    "depths": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
PVT: Options = {
    **PYRAMID,
    "image_size": 48,
    "depths": [1, 1],
    "patch_sizes": [4, 2],
    "sequence_reduction_ratios": [4, 1],
}
SEGFORMER: Options = {**PYRAMID, "sr_ratios": [4, 2], "decoder_hidden_size": 8}
TEXT: Options = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 64}
LLAMA: Options = {**TEXT, "num_key_value_heads": 2}
GPT2: Options = {
    "vocab_size": WORDS,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT2_STILL: Options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TEXT_STILL: Options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ESM: Options = {
    **TEXT,
    "pad_token_id": 1,
    "mask_token_id": 2,
    "position_embedding_type": "rotary",
}
MISTRAL: Options = {**LLAMA, "sliding_window": 5}
DEBERTA: Options = {
    **TEXT,
    **TEXT_STILL,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "max_relative_positions": 16,
}
T5: Options = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
MAE: Options = {**VIT, "image_size": 40}
WAV2VEC2: Options = {
    **SMALL,
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("feat_proj_dropout", "layerdrop"), 0.0),
}
EAGER: Options = {"attn_implementation": "eager"}


def next_token(model: nn.Module, ids: Tensor, **options: Tensor) -> Tensor:
    """The loss of a causal language model.

    Its own loss, for `labels=`, is the same in float32 whatever the type of the model.
    """
    logits = model(input_ids=ids, **options).logits
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def padded(model: nn.Module, ids: Tensor) -> Tensor:
    """As `next_token`, of sequences that end before the batch does."""
    return next_token(model, ids, attention_mask=_lengths(ids))


def _lengths(ids: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1]).expand(*ids.shape)
    return torch.where(position < torch.tensor([[ids.shape[1]], [13]]), 1, 0 * ids)


def labelled(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a masked language model, its own."""
    return model(input_ids=ids, labels=ids).loss


def captions(model: nn.Module, images: Tensor) -> Tensor:
    """The logits of images beside captions, which are split as the images' rows are."""
    ids = (images[:, 0, :, 0] * 1000).long() % (WORDS - 4) + 3
    ids = torch.where(torch.arange(ids.shape[1]) >= torch.tensor([[9], [31]]), WORDS - 1, ids)
    return model(input_ids=ids, pixel_values=images).logits_per_image


def _floating(output: Any) -> list[Tensor]:
    return [value for value in output.values() if value.is_floating_point() and value.requires_grad]


def clip(**tower: Any) -> nn.Module:
    """Towers of images and of text."""
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": WORDS, "max_position_embeddings": 64, "eos_token_id": WORDS - 1}
    vision = {"image_size": 40, "patch_size": 8}
    special = {"bos_token_id": 0, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**tower, **text, **special},
        vision_config={**tower, **vision},
        projection_dim=8,
    )
    return CLIPModel(config)


CLASSES: Options = {"call": lambda model, x: model(x).logits, "loss": "cross entropy"}
HIDDEN: Options = {"call": lambda model, x: _floating(model(x))}
NEXT: Options = {"call": next_token, "loss": "own", "words": WORDS, "split": 1}
PADDED: Options = {**NEXT, "call": padded}
WORDS_HIDDEN: Options = {**HIDDEN, "words": WORDS, "split": 1}
LABELLED: Options = {**NEXT, "call": labelled, "unused": True}


def net(kind: str, shape: tuple[int, ...], how: Options, config: Options, **fields: Any) -> Model:
    """An entry; `how` it is called, and further fields of it."""
    build = untrained(kind, num_labels=3, **config) if how is CLASSES else untrained(kind, **config)
    return transformers(name=kind, build=build, shape=shape, **{**how, **fields})


def defaults(kind: str, shape: tuple[int, ...], how: Options, config: Options, **fields: Any):
    """An entry with the dropout that its configuration has by default."""
    return net(kind, shape, how, config, notes="default dropout", drawn=True, **fields)


TALL, LARGE, SQUARE = (2, 3, 40, 24), (2, 3, 44, 36), (2, 3, 48, 48)
WORDED = (2, 19)
STILL: Options = {"drop_path_rate": 0.0}
BEIT: Options = {**VIT, "use_mean_pooling": True}
LONG: Options = {"long": True}

MODELS = [
    net("ViTForImageClassification", TALL, CLASSES, VIT),
    net("ViTForImageClassification", TALL, CLASSES, {**VIT, **EAGER}, notes="eager", **LONG),
    net("ViTModel", (2, 3, 45, 24), HIDDEN, VIT | {"image_size": (45, 24)}, unused=True, **LONG),
    net("Dinov2ForImageClassification", (2, 3, 24, 24), CLASSES, DINO, unused=True),
    net("Dinov2WithRegistersModel", (2, 3, 46, 32), HIDDEN, DINO, unused=True, **LONG),
    net(
        "BeitForImageClassification",
        TALL,
        CLASSES,
        {**BEIT, **STILL, "use_relative_position_bias": True},
        notes="relative position bias",
    ),
    net(
        "BeitModel",
        (2, 3, 40, 40),
        HIDDEN,
        {**VIT, **STILL, **EAGER, "image_size": 40, "use_shared_relative_position_bias": True},
        unused=True,
        notes="shared bias, eager",
        **LONG,
    ),
    net("SwinForImageClassification", LARGE, CLASSES, {**SWIN, **STILL}, notes="shifted windows"),
    net(
        "SwinModel",
        (2, 3, 50, 38),
        HIDDEN,
        {**SWIN, **STILL},
        unused=True,
        notes="padded windows",
        **LONG,
    ),
    net("Swinv2ForImageClassification", LARGE, CLASSES, {**SWIN, **STILL}, **LONG),
    net(
        "SegformerForSemanticSegmentation",
        LARGE,
        CLASSES,
        {**SEGFORMER, **STILL, "classifier_dropout_prob": 0.0},
        whole=False,  # enters a lock of its package
    ),
    net("PvtForImageClassification", SQUARE, CLASSES, PVT),
    net("PvtV2ForImageClassification", LARGE, CLASSES, {**PYRAMID, "sr_ratios": [4, 2]}, **LONG),
    net("GPT2LMHeadModel", WORDED, NEXT, {**GPT2, **GPT2_STILL}),
    net("GPT2LMHeadModel", WORDED, PADDED, {**GPT2, **GPT2_STILL}, notes="padding mask", **LONG),
    net("GPT2LMHeadModel", WORDED, NEXT, {**GPT2, **GPT2_STILL, **EAGER}, notes="eager", **LONG),
    net("LlamaForCausalLM", WORDED, NEXT, LLAMA, notes="grouped queries"),
    net("LlamaForCausalLM", WORDED, PADDED, LLAMA, notes="padding mask", **LONG),
    net("LlamaForCausalLM", WORDED, NEXT, {**LLAMA, **EAGER}, notes="eager", **LONG),
    net("EsmForMaskedLM", WORDED, LABELLED, {**ESM, **TEXT_STILL}, notes="rotary"),
    net("EsmForMaskedLM", WORDED, LABELLED, {**ESM, **TEXT_STILL, **EAGER}, notes="eager", **LONG),
    net("BertForMaskedLM", WORDED, LABELLED, {**TEXT, **TEXT_STILL}, **LONG),
    net(
        "BertForMaskedLM", WORDED, LABELLED, {**TEXT, **TEXT_STILL, **EAGER}, notes="eager", **LONG
    ),
    transformers(
        name="CLIPModel",
        build=lambda: clip(**SMALL),
        shape=(2, 3, 40, 40),
        call=captions,
        notes="captions split too",
    ),
    net("DINOv3ViTModel", TALL, HIDDEN, {**VIT, "num_register_tokens": 2}, unused=True, **LONG),
    net("ViTMAEModel", (2, 3, 40, 40), HIDDEN, MAE, notes="random masking", **LONG),
    net(
        "VideoMAEModel",
        (1, 4, 3, 40, 24),
        HIDDEN,
        {**VIT, "num_frames": 4},
        split=3,
        notes="frames first",
        **LONG,
    ),
    net("Wav2Vec2Model", (2, 401), HIDDEN, WAV2VEC2, split=1, notes="audio", **LONG),
    net("MistralForCausalLM", WORDED, NEXT, MISTRAL, notes="sliding window", **LONG),
    net("RobertaForMaskedLM", WORDED, LABELLED, {**TEXT, **TEXT_STILL}, **LONG),
    net("DebertaV2Model", WORDED, WORDS_HIDDEN, DEBERTA, notes="disentangled", **LONG),
    net("T5EncoderModel", WORDED, WORDS_HIDDEN, T5, notes="relative buckets", **LONG),
    defaults("BeitForImageClassification", TALL, CLASSES, BEIT, **LONG),
    defaults("SwinForImageClassification", LARGE, CLASSES, SWIN),
    defaults("Swinv2ForImageClassification", LARGE, CLASSES, SWIN, **LONG),
    defaults("SegformerForSemanticSegmentation", LARGE, CLASSES, SEGFORMER, **LONG),
    defaults("GPT2LMHeadModel", WORDED, NEXT, GPT2),
    defaults("EsmForMaskedLM", WORDED, LABELLED, ESM, **LONG),
    defaults("BertForMaskedLM", WORDED, LABELLED, {**TEXT, **EAGER}, **LONG),
]
