"""Contractions on local blocks: operands enter as planned, partial results are added up.

An operand that had to move is not kept for backward. What lies on this rank is, and it moves again
when the gradient of the other operand asks for it: a rank then keeps what it would keep of whole
operands, divided by the number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from shardfield.comm._torch import DisableTorchDispatch, in_backward
from shardfield.comm.fetch import fetch, fetch_adjoint
from shardfield.comm.moments import accumulation_dtype
from shardfield.comm.move import move
from shardfield.comm.reduce import reduce_sum, use
from shardfield.constant import constant
from shardfield.contraction import Contraction, Entry, Operand, mesh_of
from shardfield.errors import LayoutError
from shardfield.layout import Layout
from shardfield.operands import part_of_plain
from shardfield.plan import Exchange, exchange, runs_of, wanted_runs
from shardfield.registry import current_operation, groups_of, name_of, used
from shardfield.tensor import ShardTensor, local_of, result

Tensor = torch.Tensor


def operand_of(value: Tensor) -> Operand:
    """What plans know of an operand."""
    return value._layout if isinstance(value, ShardTensor) else tuple(value.shape)


def check_shapes(op, call: Callable[..., object], *operands: Operand) -> None:
    """Runs the operation on tensors without data, of the global shapes.

    Raises:
        LayoutError: torch refuses them, or the operands lie on several meshes.
    """
    shown = " with ".join(
        f"ShardTensor {o}" if isinstance(o, Layout) else f"tensor {o}" for o in operands
    )
    mesh_of(name_of(op), *operands)
    shapes = [o.shape if isinstance(o, Layout) else o for o in operands]
    try:
        with DisableTorchDispatch():  # nobody counts this as computing
            call(*(torch.empty(shape, device="meta") for shape in shapes))
    except (RuntimeError, IndexError, ValueError) as error:
        raise LayoutError(
            f"{name_of(op)} of {shown}",
            "shapes are global and fit or broadcast as in torch, plain tensors are whole: "
            + str(error).strip().partition("\n")[0],
            "pass whole tensors, or ShardTensor.from_local(part, mesh, placements)",
            "matmul",
        ) from error


def contracted(
    plan: Contraction,
    operands: Sequence[Tensor],
    act: Callable[..., Tensor],
    bilinear: bool = True,
    lowered: bool = False,
) -> Tensor:
    """Runs `act` on this rank's blocks of the operands.

    Args:
        act: the torch operation; takes the operands in the plan's order.
        bilinear: `act` is the plan's einsum of two operands; they may then move again in backward.
        lowered: autocast runs the operation in its lower precision.

    Comm: per operand that is not `still`, what `move` and one fetch per dim to gather send; then
        one all-reduce of the result per axis of `plan.sums`, of halves in fp32, and one all-to-all
        of partial rows to their owners per dim of `plan.scattered`. Backward: the same
        moves, of the operands whose partner requires grad; their adjoints, of gradients; and an
        all-reduce of the gradient of an operand per axis on which it is whole and the computation
        split.
    """
    blocks = [_held(x, entry, plan) for x, entry in zip(operands, plan.entries, strict=True)]
    if not plan.moves and not plan.sums and not plan.scattered:
        return result(act(*blocks), plan.layout)
    operation = None if torch.compiler.is_dynamo_compiling() else current_operation()
    if not plan.moves:
        local = act(*blocks)
    else:
        again = bilinear and _is_saving(blocks)
        if again and lowered:
            blocks = [_lowered(block) for block in blocks]
        enter = _entering(plan)
        pairs = list(zip(blocks, plan.entries, strict=True))
        entered = [enter(block, entry, operation) for block, entry in pairs]
        if again:
            rest = [None if x is y else x for x, y in zip(blocks, entered, strict=True)]
            local = _Contract.apply(plan, act, operation, *entered, *rest)
        else:
            local = act(*entered)
    if plan.sums or plan.scattered:
        wide = local.to(accumulation_dtype(local.dtype))
        if plan.sums:
            wide = reduce_sum(wide, groups_of(plan.layout, plan.sums), operation)
        for d, way, group in _spreads(plan.layout, plan.summed, plan.scattered):
            wide = fetch_adjoint(wide, d, way, group, operation)
        local = wide.to(local.dtype)
    return result(local, plan.layout)


def _held(value: Tensor, entry: Entry, plan: Contraction) -> Tensor:
    """What this rank has of an operand before anything moves."""
    if isinstance(value, ShardTensor):
        local = local_of(value)
        return used(local, entry.before, entry.rest) if entry.before else local
    return part_of_plain(used(value, plan.axes, plan.layout), entry.target)


def _is_saving(blocks: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(block.requires_grad for block in blocks)


def _lowered(block: Tensor) -> Tensor:
    """Cast as autocast would: half as many bytes then travel."""
    kind = block.device.type
    if not torch.is_autocast_enabled(kind) or block.dtype == torch.float64:
        return block
    return block.to(torch.get_autocast_dtype(kind)) if block.is_floating_point() else block


@constant
def _spreads(
    source: Layout, target: Layout, dims: tuple[int, ...]
) -> tuple[tuple[int, Exchange, str], ...]:
    """Arguments of the fetches that join `dims` over the last of their axes, from `source`."""
    mesh, found = source.mesh, []
    for d in dims:
        kept = target.axes(d)
        axes = source.axes(d)[len(kept) :]
        ranks, row = mesh.size(axes), mesh.rank(kept)
        owned = runs_of(source.dims[d])[row * ranks : (row + 1) * ranks]
        wanted = (wanted_runs(target.dims[d])[row],) * ranks
        found.append((d, exchange(owned, wanted, mesh.rank(axes)), mesh.group(axes)))
    return tuple(found)


def _enter(local: Tensor, entry: Entry, operation: str | None) -> Tensor:
    """An operand's block inside the contraction, from its block at rest."""
    if entry.plain or entry.still:
        return local
    local = move(local, entry.rest, entry.middle, operation)
    for d, plan, group in _spreads(entry.middle, entry.target, entry.spread):
        local = fetch(local, d, plan, group, 0.0, operation)
    return use(local, groups_of(entry.rest, entry.after), operation)


def _entering(plan: Contraction) -> Callable[[Tensor, Entry, str | None], Tensor]:
    return _enter_once if plan.tokens and not torch.compiler.is_dynamo_compiling() else _enter


_slots: dict[bool, tuple[weakref.ref, tuple, Tensor]] = {}  # by whether a backward runs


def _enter_once(local: Tensor, entry: Entry, operation: str | None) -> Tensor:
    """`_enter`, of a block that the contractions before took too (queries, keys and values).

    Their gradients are then added up before they go back. The last block alone is remembered.
    """
    if entry.plain or entry.still:
        return local
    backward = in_backward()
    way = entry.rest, entry.middle, entry.target, entry.spread, entry.after
    mode = torch.is_grad_enabled(), local._version
    known = _slots.get(backward)
    if known is not None and known[0]() is local and known[1] == (way, mode):
        return known[2]
    entered = _enter(local, entry, operation)
    _slots[backward] = weakref.ref(local, _forget(backward)), (way, mode), entered
    return entered


def _forget(backward: bool) -> Callable[[weakref.ref], None]:
    def forget(gone: weakref.ref) -> None:
        if backward in _slots and _slots[backward][0] is gone:
            del _slots[backward]

    return forget


class _Contract(torch.autograd.Function):
    """A contraction of two operands that keeps them at rest. Differentiable any number of times.

    Args of forward: the operands inside, and at rest where that is another tensor.
    """

    @staticmethod
    def forward(ctx, plan, act, operation, first, second, first_rest, second_rest):
        ctx.plan, ctx.operation = plan, operation
        out = act(first, second)
        ctx.save_for_backward(
            first if first_rest is None else first_rest,
            second if second_rest is None else second_rest,
        )
        return out

    @staticmethod
    def backward(ctx, grad):
        rest = ctx.saved_tensors
        name = ctx.operation and f"backward of {ctx.operation}"
        enter = _entering(ctx.plan)
        grads: list[Tensor | None] = [None, None]
        for i, own in enumerate(rest):
            if ctx.needs_input_grad[3 + i]:
                partner = enter(rest[1 - i], ctx.plan.entries[1 - i], name)
                grads[i] = _gradient(ctx.plan, i, grad, partner).to(own.dtype)
        return None, None, None, *grads, None, None


def _gradient(plan: Contraction, i: int, grad: Tensor, partner: Tensor) -> Tensor:
    """Of operand `i` of two, inside the contraction."""
    entry = plan.entries[i]
    equation = f"{plan.output},{plan.inputs[1 - i]}->{entry.kept}"
    found = torch.einsum(equation, grad, partner.conj())
    return found.reshape(entry.ones).expand(entry.target.local_shape)
