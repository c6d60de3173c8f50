"""Random numbers in the layout of a tensor, or of a new one: see `shardfield.keyed`."""

from __future__ import annotations

from collections.abc import Callable
from math import log1p, pi

import torch
import torch.nn.functional as F

from shardfield.composite import body_of
from shardfield.distribute import layout_of
from shardfield.keyed import above, draw_key, exponential, integers, normal, uniform
from shardfield.layout import Layout
from shardfield.operands import blocks, written
from shardfield.registry import register, unsupported
from shardfield.tensor import ShardTensor, leaf, local_of, result, wrap

Tensor = _T = torch.Tensor


def _refuse_generator(op, generator) -> None:
    if generator is not None:
        raise unsupported(op, "only the default generator is known to agree on all ranks")


def _finished(local: Tensor, layout: Layout, requires_grad: bool) -> ShardTensor:
    return leaf(local, layout, True) if requires_grad else wrap(local, layout)


@register(torch.rand_like, torch.randn_like, torch.randint_like, uses=False)
def random_like(
    op,
    input: ShardTensor,
    *bounds,
    low=0,
    high=None,
    dtype=None,
    layout=None,
    device=None,
    requires_grad=False,
    memory_format=None,
    generator=None,
) -> ShardTensor:
    """Uniform or normal numbers, or integers in [low, high), as `input` is split. Comm: none."""
    _refuse_generator(op, generator)
    if device is not None and torch.device(device).type != input.device.type:
        raise unsupported(op, f"a tensor on {input.device} makes none on {device}")
    given = input.layout, draw_key(input.device), dtype or input.dtype
    if op is torch.randint_like:
        if bounds:
            low, high = bounds if len(bounds) == 2 else (low, bounds[0])
        local = _between(low, high, *given)
    else:
        local = (normal if op is torch.randn_like else uniform)(*given)
    return _finished(local, input.layout, requires_grad)


def _between(low, high, layout: Layout, key: Tensor, dtype: torch.dtype) -> Tensor:
    if high is None or high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got {low} >= {high}")
    return integers(layout, key, int(low), int(high), dtype)


@register(torch.bernoulli, _T.bernoulli, uses=False)
def bernoulli(op, input: ShardTensor, p=None, *, generator=None, out=None) -> ShardTensor:
    """0 or 1, with probability `p` or that of `input`. Comm: none."""
    _refuse_generator(op, generator)
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=(input,))
    chance = local_of(input).detach() if p is None else p
    layout = input.layout
    return wrap(_chances(chance, layout, draw_key(input.device), input.dtype), layout)


def _chances(p, layout: Layout, key: Tensor, dtype: torch.dtype) -> Tensor:
    """1 with probability `p` (a number or a local tensor), else 0."""
    if not isinstance(p, Tensor):
        if not 0 <= p <= 1:
            raise RuntimeError(f"bernoulli expects p to be in [0, 1], but got p={p}")
        return (~above(layout, key, p)).to(dtype)
    precise = torch.float64 if p.dtype == torch.float64 else torch.float32
    return (uniform(layout, key, precise) < p).to(dtype)


def _fill(*functions) -> Callable:
    """Registers in-place draws. Comm: none; the old value gets no gradient, as in torch.

    What is decorated takes the arguments of the function, then layout, key and dtype.
    """

    def decorate(values: Callable[..., Tensor]):
        @register(*functions, uses=False)
        def fill(op, input, *args, generator=None, **kwargs) -> ShardTensor:
            local = written(op, input)
            _refuse_generator(op, generator)
            arguments = [_in_layout(op, value, input) for value in args]
            named = {name: _in_layout(op, value, input) for name, value in kwargs.items()}
            drawn = {"layout": input.layout, "key": draw_key(input.device), "dtype": input.dtype}
            local.copy_(values(*arguments, **named, **drawn))
            return input

        return values

    return decorate


def _in_layout(op, value, input: ShardTensor):
    """A tensor argument as this rank's part beside `input`."""
    if not isinstance(value, Tensor):
        return value
    local = blocks(op, (input.detach(), value.detach()), {}, True)[0][1]
    return local.expand(input.layout.local_shape)


@_fill(_T.bernoulli_)
def bernoulli_(p=0.5, *, layout, key, dtype) -> Tensor:
    """`p` is a number or a tensor that broadcasts to this shape."""
    return _chances(p, layout, key, dtype)


@_fill(_T.normal_)
def normal_(mean=0.0, std=1.0, **drawn) -> Tensor:
    """Normal numbers."""
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    return normal(**drawn).mul_(std).add_(mean)


@_fill(_T.log_normal_)
def log_normal_(mean=1.0, std=2.0, **drawn) -> Tensor:
    """Numbers whose logarithm is normal."""
    return normal(**drawn).mul_(std).add_(mean).exp_()


@_fill(_T.uniform_)
def uniform_(*bounds, layout, key, dtype, **named) -> Tensor:
    """On [from, to)."""
    low, high = [*bounds, *(0.0, 1.0)[len(bounds) :]]
    low, high = named.get("from", low), named.get("to", high)
    if high < low:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but got {low} > {high}")
    return uniform(layout, key, dtype).mul_(high - low).add_(low)


@_fill(_T.exponential_)
def exponential_(lambd=1.0, **drawn) -> Tensor:
    """Of rate `lambd`; never zero."""
    return exponential(**drawn).div_(lambd)


@_fill(_T.cauchy_)
def cauchy_(median=0.0, sigma=1.0, **drawn) -> Tensor:
    """Ratios of two normal numbers."""
    return uniform(**drawn).sub_(0.5).mul_(pi).tan_().mul_(sigma).add_(median)


@_fill(_T.geometric_)
def geometric_(p, *, layout, key, dtype) -> Tensor:
    """How many trials of chance `p` the first success takes."""
    drawn = exponential(layout, key, torch.float64)
    return drawn.div_(-log1p(-p)).ceil_().clamp_min_(1).to(dtype)


@_fill(_T.random_)
def random_(*bounds, layout, key, dtype, **named) -> Tensor:
    """Integers on [from, to); by default from 0, and to all that the type holds exactly."""
    low, high = bounds if len(bounds) == 2 else (0, *bounds, None)[:2]
    low, high = named.get("from", low), named.get("to", high)
    if high is None:
        floats = dtype.is_floating_point
        high = round(2 / torch.finfo(dtype).eps) if floats else torch.iinfo(dtype).max
    return _between(low, high, layout, key, dtype)


@register(torch.normal, uses=False)
def normal_about(op, mean, std=1.0, *, generator=None, out=None) -> Tensor:
    """Normal numbers about means; no gradient, as in torch. Layout, Comm: as of `mean + std`."""
    _refuse_generator(op, generator)
    if out is not None:
        raise unsupported(op, "out= writes into a given tensor", "assign the result", args=(mean,))
    given = [value.detach() if isinstance(value, Tensor) else value for value in (mean, std)]
    (mean, std), _, layout = blocks(op, given, {})
    like = mean if isinstance(mean, Tensor) else std
    drawn = normal(layout, draw_key(like.device), like.dtype)
    return result(drawn.mul_(std).add_(mean), layout)


@register(F.gumbel_softmax, uses=False)
def gumbel_softmax(op, logits, tau=1, hard=False, eps=1e-10, dim=-1) -> Tensor:
    """As torch wrote it, but for the one-hot choice. Layout: the input's. Comm: that of softmax."""
    soft = _GUMBEL_SOFTMAX(logits, tau, False, eps, dim)
    if not hard:
        return soft
    shape = [1] * soft.dim()
    shape[dim] = -1
    places = torch.arange(soft.shape[dim], device=soft.device).view(shape)
    chosen = (places == soft.max(dim, keepdim=True)[1]).to(soft.dtype)
    return chosen - soft.detach() + soft


_GUMBEL_SOFTMAX = body_of(F.gumbel_softmax)


def _made(make, shape, mesh, placements, sizes, dtype, requires_grad) -> Tensor:
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    layout = layout_of(shape, mesh, placements, sizes)
    device = torch.device(mesh.device_type)
    local = make(layout, draw_key(device), dtype or torch.get_default_dtype())
    if not layout.split_axes:
        return local.requires_grad_(requires_grad)
    return _finished(local, layout, requires_grad)


def rand(*shape, mesh, placements, sizes=None, dtype=None, requires_grad=False) -> Tensor:
    """A sharded `torch.rand` of this global shape, the same whatever the split. Comm: none.

    Example:
        >>> mesh = shardfield.init_mesh(domain=1)
        >>> shardfield.rand(4, 6, mesh=mesh, placements=[Shard(0)]).shape
        torch.Size([4, 6])
    """
    return _made(uniform, shape, mesh, placements, sizes, dtype, requires_grad)


def randn(*shape, mesh, placements, sizes=None, dtype=None, requires_grad=False) -> Tensor:
    """A sharded `torch.randn` of this global shape, the same whatever the split. Comm: none."""
    return _made(normal, shape, mesh, placements, sizes, dtype, requires_grad)


__all__ = ["rand", "randn"]
