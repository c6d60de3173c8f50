"""Checks the claims of ADR 0001: a sharded tensor can be its local shard, retyped.

Run: ``python docs/adr/spikes/retyping.py`` (one process, under a minute). Prints one row a claim
and the price of an operation; exits 1 if a claim does not hold. Imports torch only.
"""

import copy
import gc
import io
import pickle
import statistics
import sys
import time
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
torch.manual_seed(0)


class Traced(torch.Tensor):
    """The local shard retyped, with the tag a layout would be; what Dynamo may see."""

    _local: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in LEAF_STATE:
            return on_leaf(func, *args, **(kwargs or {}))
        tags = []

        def plain(arg):
            if isinstance(arg, Traced):
                tags.append(arg._tag)
                return local_of(arg)
            return type(arg)(map(plain, arg)) if type(arg) in (list, tuple) else arg

        out = func(*map(plain, args), **(kwargs or {}))
        return retype(out, tags[0], cls) if isinstance(out, torch.Tensor) else out

    def __deepcopy__(self, memo):
        return retype(copy.deepcopy(local_of(self), memo), self._tag, type(self))

    def __reduce_ex__(self, protocol):
        return retype, (local_of(self).detach(), self._tag, type(self))


class Guarded(Traced):
    """The same with a tripwire under autograd: what reaches ATen unhandled is an error."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"tripwire: {func} met a sharded tensor outside a handler")


def retype(local: torch.Tensor, tag: str, cls: type[Traced] = Guarded) -> Traced:
    """The shard as a `cls`. In grad mode the plain tensor is kept, so operations meet it itself."""
    if torch.is_grad_enabled():
        out = local.as_subclass(cls)
        out._local = local
    else:
        out = torch.Tensor._make_subclass(cls, local)
    out._tag = tag
    return out


def local_of(x: Traced) -> torch.Tensor:
    """The plain tensor; an alias made afresh where none is kept (never stored: a cycle)."""
    if x._local is not None:
        return x._local
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return x.as_subclass(torch.Tensor)


LEAF_STATE = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}
LEAF_STATE |= {torch.Tensor.grad.__get__, torch.Tensor.grad.__set__}


def on_leaf(func, x: Traced, *args):
    """Leaf state: on the kept tensor, then link `x`; where nothing is kept, on `x` itself."""
    kept = x._local
    with torch._C.DisableTorchFunctionSubclass():
        out = func(x if kept is None else kept, *args)
        if kept is not None and kept.requires_grad:
            torch.autograd.graph.increment_version(kept)
            _ = x.grad_fn
    return x if out is kept else out


class PassThrough(torch.autograd.Function):
    """What FSDP2's RegisterPostBackwardFunction does: return the inputs."""

    @staticmethod
    def forward(ctx, *inputs):
        return inputs

    @staticmethod
    def backward(ctx, *grads):
        PassThrough.seen = True
        return grads


class Wrapper(torch.Tensor):
    """The rival: a `_make_wrapper_subclass` tensor that works in `__torch_dispatch__`."""

    @staticmethod
    def __new__(cls, local):
        return torch.Tensor._make_wrapper_subclass(
            cls, local.shape, dtype=local.dtype, requires_grad=local.requires_grad
        )

    def __init__(self, local):
        self.local = local

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(t):
            return t.local if isinstance(t, Wrapper) else t

        plain = [[inner(i) for i in a] if isinstance(a, list) else inner(a) for a in args]
        out = func(*plain, **(kwargs or {}))
        if isinstance(out, tuple):
            return tuple(Wrapper(o) if isinstance(o, torch.Tensor) else o for o in out)
        out = Wrapper(out) if isinstance(out, torch.Tensor) else out
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


def leaf() -> torch.Tensor:
    return torch.randn(4, requires_grad=True)


def grad_mode_keeps_the_graph() -> bool:
    w = leaf()
    y = (retype(w * 2, "L") * 3).sum()
    local_of(y).backward()
    return isinstance(y, Guarded) and y._tag == "L" and torch.equal(w.grad, torch.full((4,), 6.0))


def no_grad_keeps_nothing() -> bool:
    with torch.no_grad():
        y = retype(leaf() * 2, "L") + 1
        aliased = local_of(y)
    return (
        isinstance(y, Guarded)
        and y._local is None
        and aliased.data_ptr() == y.data_ptr()
        and not aliased.requires_grad
    )


def inference_mode_too() -> bool:
    with torch.inference_mode():
        return isinstance(retype(torch.ones(2), "L") * 2, Guarded)


def requires_grad_after_retyping() -> bool:
    t = torch.randn(4)
    x = retype(t, "L").requires_grad_()
    (out,) = PassThrough.apply(x)
    local_of(out * 2).sum().backward()
    with torch.no_grad():
        fresh = retype(torch.randn(4), "L").requires_grad_()
    local_of(fresh * 2).sum().backward()
    return torch.equal(x.grad, torch.full((4,), 2.0)) and torch.equal(x.grad, fresh.grad)


def unlinked_loses_the_gradient() -> bool:
    t = torch.randn(4)
    x = retype(t, "L")
    t.requires_grad_()
    (out,) = PassThrough.apply(x)
    local_of(out * 2).sum().backward()
    return t.grad is None


def function_apply() -> bool:
    w, PassThrough.seen = leaf(), False
    (out,) = PassThrough.apply(retype(w * 2, "L"))
    local_of(out * 3).sum().backward()
    return type(out) is Guarded and PassThrough.seen and torch.equal(w.grad, torch.full((4,), 6.0))


def checkpointing(use_reentrant: bool) -> bool:
    w = leaf()
    x = retype(w * 2, "L")
    y = checkpoint(lambda a: F.gelu(a) * a, x, use_reentrant=use_reentrant)
    local_of(y).sum().backward()
    v = w.detach().requires_grad_()
    (F.gelu(v * 2) * (v * 2)).sum().backward()
    return isinstance(y, Guarded) and torch.allclose(w.grad, v.grad)


def double_backward() -> bool:
    w = leaf()
    y = local_of(retype(w * 2, "L") ** 3).sum()
    (first,) = torch.autograd.grad(y, w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    return torch.allclose(second, 48 * w)


def freed_without_the_collector() -> bool:
    gc.collect()
    gc.disable()
    try:
        w = leaf()
        inner = w * 2
        x = retype(inner, "L")
        y = x * 3
        alive = [weakref.ref(x), weakref.ref(y), weakref.ref(inner)]
        local_of(y).sum().backward()
        del x, y, inner
        with torch.no_grad():
            z = retype(torch.ones(2), "L")
            alive += [weakref.ref(z), weakref.ref(local_of(z))]
            del z
        return all(ref() is None for ref in alive)
    finally:
        gc.enable()


def stored_alias_of_itself_leaks() -> bool:
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            x = retype(torch.ones(2), "L")
        x._local = local_of(x)
        ref = weakref.ref(x)
        del x
        leaked = ref() is not None
    finally:
        gc.enable()
    gc.collect()
    return leaked and ref() is not None


def tripwire_fires() -> tuple[bool, str]:
    x = retype(torch.ones(2), "L")
    try:
        with torch._C.DisableTorchFunctionSubclass():
            torch.add(x, 1)
    except RuntimeError as error:
        return "tripwire" in str(error), str(error)
    return False, "a local result"


def copies() -> bool:
    x = retype(torch.arange(3.0), "L")
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    twins = copy.deepcopy(x), pickle.loads(pickle.dumps(x)), loaded
    return all(
        type(t) is Guarded and t._tag == "L" and torch.equal(local_of(t), local_of(x))
        for t in twins
    )


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """20 tiny operations: four rounds of add, mul, gelu, linear, layer_norm."""
    for _ in range(4):
        x = F.layer_norm(F.linear(F.gelu((x + 1.0) * 0.5), w, b), (8,))
    return x


def traces(cls: type[Traced]) -> tuple[bool, str]:
    """The block traced whole, in and out retyped at the boundary as `shardfield.compile` does."""
    torch._dynamo.reset()
    w, b = torch.randn(8, 8, requires_grad=True), torch.zeros(8)

    def step(t):
        return local_of(block(retype(t, "L", cls), w, b))

    data = torch.randn(4, 8)
    try:
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(data)
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:70]}"
    (grad,) = torch.autograd.grad(got.sum() + got.square().sum(), w)
    want = block(data, w, b)
    (want_grad,) = torch.autograd.grad(want.sum() + want.square().sum(), w)
    return torch.allclose(got, want) and torch.allclose(grad, want_grad, atol=1e-5), "equal"


def rejected() -> tuple[bool, str]:
    ok, why = traces(Guarded)
    return not ok, why


def price() -> str:
    """Median microseconds per operation, forward and backward, the kinds interleaved."""
    w, b = torch.randn(8, 8), torch.zeros(8)
    kinds: dict[str, Callable] = {
        "plain": lambda t: t,
        "retyped": lambda t: retype(t, "L"),
        "dispatch wrapper": Wrapper,
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(60):
        for name, wrap in kinds.items():
            x = wrap(torch.randn(4, 8, requires_grad=True))
            begin = time.perf_counter()
            out = block(x, w, b).sum()
            (local_of(out) if isinstance(out, Traced) else out).backward()
            if turn >= 10:
                times[name].append((time.perf_counter() - begin) / 21 * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["plain"]
    return ", ".join(f"{name} {t:.0f} ({t / base:.2f}x)" for name, t in medians.items())


CLAIMS: dict[str, Callable] = {
    "grad mode: as_subclass and the kept tensor carry the gradient": grad_mode_keeps_the_graph,
    "no_grad: _make_subclass, nothing kept, alias afresh": no_grad_keeps_nothing,
    "inference_mode": inference_mode_too,
    "requires_grad_ after retyping: on the kept tensor, then link": requires_grad_after_retyping,
    "... without linking Function.apply loses the gradient": unlinked_loses_the_gradient,
    "Function.apply that returns its inputs (FSDP2)": function_apply,
    "checkpoint, reentrant": lambda: checkpointing(True),
    "checkpoint, non-reentrant": lambda: checkpointing(False),
    "double backward": double_backward,
    "freed by reference counts alone": freed_without_the_collector,
    "... an alias of x stored on x is never freed": stored_alias_of_itself_leaks,
    "tripwire: unhandled ATen calls raise": tripwire_fires,
    "deepcopy, pickle, torch.save keep type and layout": copies,
    "Dynamo fullgraph aot_eager, class without tripwire": lambda: traces(Traced),
    "... rejects the class with the tripwire": rejected,
}


def main() -> int:
    print(f"torch {torch.__version__}")
    held = True
    for claim, check in CLAIMS.items():
        verdict = check()
        ok, note = verdict if isinstance(verdict, tuple) else (verdict, "")
        held &= ok
        print(f"{'holds' if ok else 'FAILS':6} {claim}{'  [' + note + ']' if note else ''}")
    print(f"us per operation, forward + backward, tiny tensors: {price()}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
