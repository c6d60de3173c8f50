"""What a sharded tensor costs where there is next to nothing to compute: one rank, tiny tensors."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

import shardfield as sf

BATCH, ROWS, FEATURES = 2, 8, 16
ROUNDS = 4
OPERATIONS = 6 * ROUNDS


@dataclass(frozen=True)
class Tiny:
    """Microseconds of processor time per operation, forward and backward together.

    One entry a pair. Nothing waits here, so processor time is what a clock shows on an idle
    machine, and it stays true on a busy one.
    """

    sharded: list[float]
    plain: list[float]


def block(x: Tensor, folded: Tensor, unfolded: Tensor, parameters: list[Tensor]) -> Tensor:
    """Four rounds of {add, mul, gelu, linear, layer_norm, view}.

    Args:
        x: (B, S, C).
        folded: (B * S, C), the second operand of every other round.
        unfolded: (B, S, C), that of the rest.
        parameters: weight (C, C), bias (C,), scale (C,), shift (C,); plain and replicated.

    Returns:
        (B, S, C), since the views fold the rows into the batch and unfold them again.
    """
    weight, bias, scale, shift = parameters
    for turn in range(ROUNDS):
        folds = turn % 2 == 0
        x = x + (unfolded if folds else folded)
        x = x * (unfolded if folds else folded)
        x = F.gelu(x)
        x = F.linear(x, weight, bias)
        x = F.layer_norm(x, (FEATURES,), scale, shift)
        x = x.view(BATCH * ROWS, FEATURES) if folds else x.view(BATCH, ROWS, FEATURES)
    return x


def run(idle: object, pairs: int, repeats: int = 100) -> dict[str, object]:
    """Times the block on a mesh of this one rank against plain torch.

    Layout: (B, S, C) with S on "domain", an axis of one rank. Comm: none.
    """
    mesh = sf.init_mesh(domain=1)
    generator = torch.Generator().manual_seed(0)
    x, operand, seed = (torch.randn(BATCH, ROWS, FEATURES, generator=generator) for _ in range(3))
    parameters = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((FEATURES, FEATURES), (FEATURES,), (FEATURES,), (FEATURES,))
    ]
    folded = operand.view(BATCH * ROWS, FEATURES)

    def shard(t: Tensor) -> Tensor:
        return sf.distribute_tensor(t, mesh["domain"], [Shard(1)])

    sharded_operand = shard(operand)
    plain = _step(x, folded, operand, seed, parameters)
    sharded = _step(
        shard(x),
        sharded_operand.view(BATCH * ROWS, FEATURES),
        sharded_operand,
        shard(seed),
        parameters,
    )
    _check_agreement(plain, sharded, parameters)
    for step in (plain, sharded):
        _microseconds(step, repeats)
    result = Tiny([], [])
    for pair in range(pairs):
        turns = [(sharded, result.sharded), (plain, result.plain)]
        for step, times in turns if pair % 2 else reversed(turns):
            times.append(_microseconds(step, repeats))
    return asdict(result)


def _step(
    x: Tensor, folded: Tensor, unfolded: Tensor, seed: Tensor, parameters: list[Tensor]
) -> Callable[[], None]:
    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        block(x, folded, unfolded, parameters).backward(seed)

    return step


def _check_agreement(
    plain: Callable[[], None], sharded: Callable[[], None], parameters: list[Tensor]
) -> None:
    plain()
    expected = [p.grad for p in parameters]
    sharded()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _microseconds(step: Callable[[], None], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats / OPERATIONS * 1e6
