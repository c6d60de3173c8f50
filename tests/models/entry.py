"""What a table says of one model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn


def made(path: str, *args: Any, **options: Any) -> Callable[[], Any]:
    """Calls `package.module.Name(*args, **options)` when a rank builds the model, not before."""
    module, _, name = path.rpartition(".")
    return lambda: getattr(import_module(module), name)(*args, **options)


def normal(*shape: int) -> Tensor:
    """Numbers for what a model is given beside its input, always the same."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Model:
    """A model of some package, its sample, and how it trains.

    Attributes:
        name: What its package calls it.
        package: Where it comes from.
        build: Makes it, untrained.
        shape: Global shape of its input, batch and channels first.
        loss: One of `training.LOSSES`.
        call: The forward: what to compute from the model and its input.
        split: The dim of the input that is split.
        words: The input is a sequence of tokens, of so many kinds.
        drawn: It draws numbers where plain torch cannot be given the same ones: the reference is
            this program on one rank.
        unused: Some parameters take no part, so that DDP has to look for them.
        long: Too long for the suite; runs in the conformance run.
        whole: Dynamo can trace it whole; where not, it cannot with plain tensors either.
        notes: For the documentation.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: str = "mse"
    call: Callable[[nn.Module, Tensor], Any] = lambda model, x: model(x)
    split: int = 2
    words: int = 0
    drawn: bool = False
    unused: bool = False
    long: bool = False
    whole: bool = True
    notes: str = ""

    @property
    def key(self) -> str:
        """Its name among all models."""
        return f"{self.package}: {self.name}" + (f" ({self.notes})" if self.notes else "")

    def network(self) -> nn.Module:
        """The model in float64, with the same weights at every call."""
        torch.manual_seed(1)
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            # MONAI's U-Nets print their widths; diffusers builds on deprecated torch functions.
            warnings.simplefilter("ignore")
            return self.build().double().train()

    def sample(self, step: int) -> Tensor:
        """The whole input of a training step."""
        generator = torch.Generator().manual_seed(step)
        if self.words:
            return torch.randint(3, self.words, self.shape, generator=generator)
        return torch.randn(self.shape, dtype=torch.float64, generator=generator)

    def extents(self, ranks: int) -> tuple[int, ...]:
        """Rows of each rank: uneven, and cut at odd rows, which no stride divides."""
        rows = self.shape[self.split]
        weights = {1: (1,), 2: (3, 2), 3: (4, 2, 3)}[ranks]
        points = [sum(weights[:n]) * rows // sum(weights) | 1 for n in range(1, ranks)]
        return tuple(b - a for a, b in zip([0, *points], [*points, rows], strict=True))


def of(package: str) -> Callable[..., Model]:
    """`Model` with its package filled in."""
    return partial(Model, package=package)
