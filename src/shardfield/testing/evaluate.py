"""One run of a function with its gradients, and the comparison of two such runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

# A float32 result may err this many times as much as plain torch does ...
_SLACK = 10.0
# ... which is taken to err by at least this many units in the last place of the largest value.
_FLOOR = 4.0


@dataclass
class Results:
    """What a run produced; every list is in a fixed order.

    Attributes:
        structure: The pytree of the outputs.
        outputs: Leaves of the outputs, tensors or not.
        gradients: By name: of inputs, parameters, and in a double backward again.
        buffers: By name: what the run left in the module's buffers.
    """

    structure: str
    outputs: list[Any]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        """Everything there is to compare."""
        outputs = {f"output {index}": leaf for index, leaf in enumerate(self.outputs)}
        return outputs | self.gradients | self.buffers


def evaluate(
    function: Callable[..., Any],
    module: nn.Module | None,
    inputs: Sequence[Any],
    params: Mapping[str, torch.Tensor],
    double: bool,
    around: AbstractContextManager[Any] | None = None,
) -> Results:
    """Runs a function forward and backward, for cotangents that depend on the outputs' shapes only.

    Args:
        function: What to call.
        module: The module it is or was compiled from, whose parameters and buffers count.
        inputs: Its positional arguments, pytrees of tensors (global or sharded) and others.
        params: Its tensor keyword arguments.
        double: Also differentiate the gradients.
        around: Entered for the forward pass only.

    Returns:
        Outputs and gradients, as the function made them: sharded where they are.
    """
    leaves = {
        f"gradient of input {index}": leaf
        for index, leaf in enumerate(_tensors(inputs))
        if leaf.requires_grad
    }
    leaves |= {f"gradient of {name}": value for name, value in params.items()}
    if module is not None:
        leaves |= {f"gradient of {name}": value for name, value in module.named_parameters()}
    with around or nullcontext():
        output = function(*inputs, **params)
    outputs, structure = tree_flatten(output)
    roots, cotangents = _seeded(outputs, 1)
    gradients: dict[str, torch.Tensor | None] = {}
    if roots and double:
        wanted = list(leaves.values())
        first = torch.autograd.grad(roots, wanted, cotangents, create_graph=True, allow_unused=True)
        gradients |= zip(leaves, first, strict=True)
        roots, cotangents = _seeded(first, 2)
        if roots:
            again = torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)
            names = [name.replace("gradient", "second gradient") for name in leaves]
            gradients |= zip(names, again, strict=True)
    elif roots:
        torch.autograd.backward(roots, cotangents)
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
    buffers = {}
    if module is not None:
        buffers = {f"buffer {name}": value for name, value in module.named_buffers()}
    return Results(str(structure), outputs, gradients, buffers)


def cotangent(like: torch.Tensor, seed: int) -> torch.Tensor:
    """A plain global tensor of the (global) shape of `like`, the same wherever it is drawn."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(like.shape), generator=generator)
    return drawn.to(like.dtype).to(like.device)


def tolerance(
    exact: torch.Tensor, plain: torch.Tensor | None, dtype: torch.dtype, atol: float
) -> float:
    """How far a result may be from the float64 reference.

    Args:
        exact: The reference in float64.
        plain: What plain torch gives in `dtype`; None in float64.
        dtype: Type of the run.
        atol: Bound in float64, for values up to 1; it grows with the largest value.

    Returns:
        The largest absolute error allowed.
    """
    finite = exact[exact.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if plain is None:
        return atol * max(1.0, scale)
    floor = _FLOOR * torch.finfo(dtype).eps * scale
    return _SLACK * max(floor, _largest_difference(exact, plain))


def difference(found: Any, expected: Any, allowed: float) -> str | None:
    """Says how a whole result differs from the reference; None where it does not.

    Args:
        found: A plain tensor or another value.
        expected: The reference; a float tensor in float64.
        allowed: The largest absolute error.
    """
    if not isinstance(expected, torch.Tensor):
        return None if found == expected else f"is {found!r}, not {expected!r}"
    if not isinstance(found, torch.Tensor):
        return f"is {type(found).__name__}, not a tensor"
    if found.shape != expected.shape:
        return f"has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    found = found.detach().to(expected.device)
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        wrong = int((found != expected).sum())
        return f"differs in {wrong} of {expected.numel()} elements" if wrong else None
    if not torch.equal(found.isnan(), expected.isnan()):
        return f"has {int(found.isnan().sum())} NaNs, not {int(expected.isnan().sum())}"
    error = _largest_difference(expected, found)
    if error <= allowed:
        return None
    gap = (found.to(expected.dtype) - expected).abs().nan_to_num(nan=0.0)
    where = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    wrong = int((gap > allowed).sum())
    return (
        f"is off by {error:.3g} at {where} ({float(found[where]):.6g}, not "
        f"{float(expected[where]):.6g}); allowed {allowed:.3g}; {wrong} of {gap.numel()} are off"
    )


def _largest_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Largest absolute error; equal infinities are equal, NaNs are compared elsewhere."""
    if expected.numel() == 0:
        return 0.0
    gap = (found.to(expected.dtype) - expected).abs()
    gap = torch.where(found.to(expected.dtype) == expected, torch.zeros_like(gap), gap)
    return float(torch.where(expected.isnan(), torch.zeros_like(gap), gap).max())


def _seeded(tensors: Sequence[Any], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that have a gradient, and for each a random cotangent that lies as it does."""
    roots, cotangents = [], []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            roots.append(tensor)
            drawn = cotangent(tensor, 1000 * seed + index)
            cotangents.append(torch.zeros_like(tensor.detach()) + drawn)
    return roots, cotangents


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
