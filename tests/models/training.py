"""Two steps of training and an inference, in one process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import table
from models.entry import Model
from models.refused import REFUSED
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import shardfield as sf
from shardfield.parallel.partition import quick_cuts
from shardfield.testing import Rank

Values = dict[str, Tensor]
"""What a run computed, whole and plain, by name: losses, outputs, parameters and buffers."""


def alone(rank: Rank, key: str) -> Values:
    """Plain torch in one process, but for its random numbers: those that the ranks draw."""
    model = table.MODELS[key]
    mesh = rank.mesh(domain=1)
    with _float64():
        with Draws() as draws:
            model.call(
                model.network(), sf.distribute_tensor(model.sample(0), mesh, [Shard(model.split)])
            )
        with SameDraws(mesh, draws.noted):
            return _trained(model, model.network(), lambda x: x)


def on_ranks(rank: Rank, key: str, backend: str = "") -> tuple[Values | None, bool]:
    """The same, split over all ranks of the world, and whether all have the same result.

    The values are rank 0's; the others return None.
    """
    model = table.MODELS[key]
    mesh = rank.mesh(domain=rank.world_size)
    extents = model.extents(rank.world_size)

    def split(x: Tensor) -> Tensor:
        return sf.distribute_tensor(x, mesh, [Shard(model.split)], sizes=extents)

    with _float64():
        network: Any = model.network()
        if backend:
            torch._dynamo.reset()
            network = sf.compile(network, backend=backend)
        network = sf.parallelize(network, mesh, find_unused_parameters=model.unused)
        with quick_cuts():
            values = _trained(model, network, split)
    flat = torch.cat([value.reshape(-1).double() for value in values.values()])
    first = flat.clone()
    dist.broadcast(first, src=0)
    return values if rank.rank == 0 else None, torch.equal(flat, first)


def refused(rank: Rank, key: str) -> None:
    """Runs the forward of a model that does not run."""
    model, _ = REFUSED[key]
    mesh, extents = rank.mesh(domain=rank.world_size), model.extents(rank.world_size)
    x = sf.distribute_tensor(model.sample(0), mesh, [Shard(model.split)], sizes=extents)
    with _float64():
        model.call(model.network(), x)


class _float64:
    """Constants that a model makes on the way are float64 too."""

    def __enter__(self) -> None:
        self.outer = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.outer)


def _trained(model: Model, network: nn.Module, split: Callable[[Tensor], Tensor]) -> Values:
    # Where a gradient is zero but for rounding (a bias before a norm), Adam divides rounding by
    # `eps`: with torch's 1e-8 it would take steps of visible, arbitrary size.
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, eps=1e-4)
    values: Values = {}
    torch.manual_seed(2)
    for step in range(2):
        output = model.call(network, split(model.sample(step)))
        loss = LOSSES[model.loss](output, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values[f"loss {step}"] = loss.detach()
        values |= _whole(f"output {step}", output)
    network.eval()
    with torch.inference_mode():
        values |= _whole("inference", model.call(network, split(model.sample(2))))
    for kind in (network.named_parameters(), network.named_buffers()):
        # DDP and the compiled module each put their own name in front.
        values |= {name.replace("module.", ""): value.detach() for name, value in kind}
    return values


def _whole(name: str, output: Any) -> Values:
    found = {}
    for index, leaf in enumerate(_tensors(output)):
        whole = leaf.full_tensor() if isinstance(leaf, sf.ShardTensor) else leaf
        found[f"{name}, {index}"] = whole.detach().clone()
    return found


def _tensors(output: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _squares(output: Any, step: int) -> Tensor:
    """The error of all outputs against noise, which every rank holds whole."""
    generator = torch.Generator().manual_seed(100 + step)
    losses = []
    for leaf in _tensors(output):
        target = torch.randn(tuple(leaf.shape), dtype=leaf.dtype, generator=generator)
        losses.append(F.mse_loss(leaf, target))
    return torch.stack(losses).sum()


def _classes(output: Tensor, step: int) -> Tensor:
    """Cross entropy with a class for every sample, or for every one of its voxels."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (output.shape[0], *output.shape[2:])
    return F.cross_entropy(output, torch.randint(output.shape[1], shape, generator=generator))


LOSSES = {"mse": _squares, "cross entropy": _classes, "own": lambda output, step: output}

_DRAWS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.scaled_dot_product_attention,
    torch.rand_like,
    torch.randn_like,
}


class Draws(TorchFunctionMode):
    """Notes, of every call that draws numbers, whether it draws them for a sharded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _DRAWS:
            self.noted.append((func, _sharded(args, kwargs)))
        return func(*args, **(kwargs or {}))


def _sharded(args: tuple, kwargs: dict[str, Any] | None) -> bool:
    return any(isinstance(value, sf.ShardTensor) for value in (*args, *(kwargs or {}).values()))


class SameDraws(TorchFunctionMode):
    """Has plain torch draw what a sharded run draws: numbers that follow the global index.

    What is plain in the sharded run too is drawn by torch itself.

    Args:
        mesh: of one rank.
        noted: by `Draws`, of one forward; all forwards are taken to be alike.
    """

    def __init__(self, mesh: DeviceMesh, noted: list[tuple[Any, bool]]) -> None:
        super().__init__()
        self.mesh, self.noted = mesh, cycle(noted)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _DRAWS or _sharded(args, kwargs):
            return func(*args, **kwargs)
        noted, sharded = next(self.noted)
        assert noted is func, "a forward draws other numbers than the one that was noted"
        if not sharded:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return self._keyed(func, *args, **kwargs)

    def _keyed(self, func, x, *args, **kwargs):
        return func(sf.from_local(x, self.mesh, [Shard(0)]), *args, **kwargs).to_local()

    def _attention(self, query, key, value, attn_mask=None, dropout_p=0.0, **options):
        """Written out where it drops weights, so that these are the sharded run's."""
        if not dropout_p:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
        assert attn_mask is None and not options.get("is_causal")
        scale = options.get("scale") or query.shape[-1] ** -0.5
        weights = (query @ key.mT * scale).softmax(-1)
        return self._keyed(F.dropout, weights, dropout_p) @ value
