"""All models."""

from __future__ import annotations

from models import attention_nets, diffusers_nets, monai_nets, plain_nets, transformers_nets

_ALL = [
    *monai_nets.MODELS,
    *diffusers_nets.MODELS,
    *transformers_nets.MODELS,
    *attention_nets.MODELS,
    *plain_nets.MODELS,
]
MODELS = {model.key: model for model in _ALL}
assert len(MODELS) == len(_ALL), "two models have one name"
