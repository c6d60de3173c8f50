"""The networks of the parity matrix: unmodified ones, and a Transolver written plainly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from monai.networks.nets import UNet
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

SAMPLES, TOKENS, VOCABULARY = 4, 11, 23

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Net:
    """One network, its samples and its loss.

    Attributes:
        build: makes it, in float64; seeded alike, every call makes the same one.
        batch: input and target of a step, global, batch first.
        split: the dim of input (and target) that each domain axis splits.
        dense: the target is split as the input is.
        tokens: its split weights act on rows of tokens.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    split: dict[str, int]
    dense: bool = True
    tokens: bool = True

    def network(self) -> nn.Module:
        """The network with the same weights at every call and on every rank."""
        torch.manual_seed(0)
        return self.build().double()

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Of classes where the target holds such, else the mean square."""
        output = getattr(output, "logits", output)
        if target.is_floating_point():
            return F.mse_loss(output, target)
        return F.cross_entropy(output.transpose(1, 2) if target.dim() == 2 else output, target)


class PhysicsAttention(nn.Module):
    """Attention between soft slices of the points (Wu et al., 2024, Transolver)."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads = heads
        self.points, self.features = nn.Linear(width, width), nn.Linear(width, width)
        self.slices = nn.Linear(width // heads, slices)
        self.temperature = nn.Parameter(torch.full((1, heads, 1, 1), 0.5))
        self.qkv = nn.Linear(width // heads, 3 * (width // heads), bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) to the same."""
        b, n, _ = x.shape
        points, features = (
            part(x).view(b, n, self.heads, -1).transpose(1, 2)
            for part in (self.points, self.features)
        )
        weights = F.softmax(self.slices(points) / self.temperature, dim=-1)
        tokens = torch.einsum("bhnc,bhng->bhgc", features, weights)
        tokens = tokens / (weights.sum(2).unsqueeze(-1) + 1e-5)
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        tokens = F.scaled_dot_product_attention(q, k, v)
        y = torch.einsum("bhgc,bhng->bhnc", tokens, weights)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class TransolverBlock(nn.Module):
    """Physics attention and a perceptron, normalised first."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PhysicsAttention(width, heads, slices)
        self.mlp = nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Linear(20, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) to the same."""
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transolver(nn.Module):
    """Points with features in, fields at the points out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, 24), nn.GELU(), nn.Linear(24, 12))
        self.blocks = nn.ModuleList(TransolverBlock(12, 3, 4) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, 3) to (B, N, 2)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
            image_size=12, patch_size=3, num_channels=2, num_labels=5,
        )
    )  # fmt: skip


def _unet() -> nn.Module:
    return UNet(
        2, in_channels=2, out_channels=2, channels=(4, 6), strides=(2,), num_res_units=2,
        norm=("group", {"num_groups": 2}),
    )  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=TOKENS,
            use_cache=False,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=12, n_layer=2, n_head=3,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _normal(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator(step))


def _ids(step: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_generator(step))


def _text(step: int) -> Batch:
    ids = _ids(step, VOCABULARY, SAMPLES, TOKENS + 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


NETS = {
    "ViT": Net(
        _vit,
        lambda step: (_normal(step, SAMPLES, 2, 12, 12), _ids(step, 5, SAMPLES)),
        {"domain": 2, "h": 2, "w": 3},
        dense=False,
    ),
    "U-Net": Net(
        _unet,
        lambda step: (_normal(step, SAMPLES, 2, 10, 8), _normal(step + 99, SAMPLES, 2, 10, 8)),
        {"domain": 2, "h": 2, "w": 3},
        tokens=False,
    ),
    "Transolver": Net(
        Transolver,
        lambda step: (_normal(step, SAMPLES, 13, 3), _normal(step + 99, SAMPLES, 13, 2)),
        {"domain": 1},
    ),
    "LLaMA": Net(_llama, _text, {"domain": 1}),
    "GPT-2 (tied)": Net(_gpt2, _text, {"domain": 1}),
}
